"""`init_device_mesh`: torch's function, with further arguments for the mesh's universe."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypedDict

import torch
from typing_extensions import Required

from meshverse._core import Layout, RankMap
from meshverse._torch_compat.private_names import BackendOptions
from meshverse.layouts.derivation import MeshDescription
from meshverse.layouts.user_input import (
    TopologyLike,
    check_axis_names,
    check_device_type,
    fill_rest,
    has_rest,
    read_rank_map,
    read_shape,
    warn_of_suspicious_input,
)
from meshverse.options.group_options import (
    BackendOverride,
    Defaults,
    Override,
    normalize_overrides,
)
from meshverse.options.isolation_tags import current_tag, normalize_tags
from meshverse.universe.universe import Universe, check_universe
from meshverse.world import World

from .device_mesh import DeviceMesh

# Arguments of `init_device_mesh` that are settings of a new universe.
_OF_UNIVERSE = ("timeout", "options", "lazy", "check_consistency", "topology")


class MeshPart(TypedDict, total=False):
    """Arguments of `init_device_mesh` without the device type."""

    mesh_shape: Required[Sequence[int]]
    mesh_dim_names: Sequence[str] | None
    backend_override: BackendOverride | None
    preserve_rank_order: bool | None
    ranks: Sequence[int] | torch.Tensor | None
    timeout: timedelta | None
    options: BackendOptions | None
    isolate: str | Mapping[int | str, str] | None
    lazy: bool
    check_consistency: bool | None
    universe: Universe | None
    topology: TopologyLike | None
    traffic: Mapping[str, float] | None


def init_device_mesh(
    device_type: str,
    mesh_shape: Sequence[int],
    *,
    mesh_dim_names: Sequence[str] | None = None,
    backend_override: BackendOverride | None = None,
    preserve_rank_order: bool | None = None,
    ranks: Sequence[int] | torch.Tensor | None = None,
    timeout: timedelta | None = None,
    options: BackendOptions | None = None,
    isolate: str | Mapping[int | str, str] | None = None,
    lazy: bool = False,
    check_consistency: bool | None = None,
    universe: Universe | None = None,
    topology: TopologyLike | None = None,
    traffic: Mapping[str, float] | None = None,
) -> DeviceMesh:
    """Create a mesh of this shape over ranks 0, 1, 2, ..., with the last axis varying fastest.

    The mesh is the root mesh of a new universe, or is in the universe that you pass. As in torch,
    this starts the default process group if there is none.

    Args:
        device_type: "cpu", "cuda", ... without an index.
        mesh_shape: size of each axis. One may be -1: it gets the ranks that the others leave of
            `ranks` or `universe`, or else of the default process group.
        mesh_dim_names: one name per axis, each at most once.
        backend_override: by axis name or index, a backend name, an options object or a pair of
            both. Other axes use the default group's backend.
        preserve_rank_order: whether the ranks of a group keep their order along the axis. False
            sorts them, as in torch. With a non-ascending order from `ranks` or `topology`,
            DTensor's shard order then differs from what checkpoints expect; so the default is True
            for such an order, else False.
        ranks: global ranks of the mesh in row-major order, as many as the shape has; by default 0,
            1, 2, ... A rank outside can call this too: it gets a mesh that it can print and slice.
        timeout: timeout for operations of all groups in this mesh's universe, also of groups
            derived later, except axes whose own options set one; by default the default group's.
        options: options object for all groups in this mesh's universe that use the default group's
            backend, also for groups derived later, except axes with options of their own.
        isolate: tags, for groups that are shared only with meshes under the same tag: one tag for
            all axes, or tags by axis index or name; see `meshverse.isolate`.
        lazy: whether the members of a group create it at its first use, instead of in this call.
        check_consistency: whether ranks compare their calls before they create groups, also in
            later calls in this universe. By default True, unless the environment has
            `MESHVERSE_CHECK_CONSISTENCY=0`.
        universe: existing universe to create the mesh in, on its ranks and process groups. If
            `ranks` are only some of its ranks, the mesh is in a part of it (`Universe.part`).
        topology: topology of the world, with each rank's node and switch; all ranks must pass an
            equal one. The mesh lists its ranks in an order that keeps axes with much traffic inside
            nodes, domains and switches (`Topology.order`); `explain()` shows how many nodes each
            group spans.
        traffic: only with `topology`: by axis name, the traffic of a rank along the axis, relative
            to the other axes. By default, each axis has 10 times the traffic of the one before it.

    Raises:
        RuntimeError: names repeat or do not match the shape; the device type has an index; an
            override is for an axis that does not exist; the mesh is larger than the world; or other
            ranks are creating another mesh (`RanksDifferError`).
        ValueError: a size is 0 or below -1, or is -1 while there are no `ranks`, no `universe` and
            no default process group; a backend is unknown; `ranks`, `universe` or `topology` has
            another number of ranks than the mesh; a rank of `ranks` is not in `universe`;
            `topology` comes with `ranks` or `universe`, or `traffic` without `topology`; or the
            universe or part over these ranks exists already, and a setting of it is passed
            (`timeout`, `options`, `lazy`, `check_consistency`).
        TypeError: `mesh_shape` is not a sequence of integers, `backend_override` is a backend's
            name, `timeout` is not a timedelta, `options` is not an options object, `universe` is
            not a `Universe`, or `topology` is not a `Topology`.

    Example:
        >>> mesh = init_device_mesh("cuda", (2, 8), mesh_dim_names=("dp", "tp"))  # doctest: +SKIP
        >>> mesh["tp"] is mesh["tp"]  # doctest: +SKIP
        True
    """
    return plan_mesh(locals())()


def plan_mesh(arguments: Mapping[str, Any]) -> Callable[[], DeviceMesh]:
    """Return a function that builds a mesh, after all checks that need no other rank.

    This creates no universe and no process group; the function does. So `init_mesh_partition`
    checks all its meshes before it builds the first one.

    Args:
        arguments: arguments of `init_device_mesh`, by name.
    """
    get = arguments.get
    device_type, universe = arguments["device_type"], get("universe")
    check_device_type(device_type)
    check_universe(universe)
    ranks, topology, traffic = get("ranks"), get("topology"), get("traffic")
    shape = read_shape(arguments["mesh_shape"])
    if has_rest(shape):
        shape = fill_rest(shape, *_rest_of(shape, ranks, universe))
    layout = Layout.from_shape(shape)
    names = check_axis_names(get("mesh_dim_names"), len(shape))
    warn_of_suspicious_input(device_type, get("mesh_dim_names"), len(shape), stacklevel=3)
    if topology is not None or traffic is not None:
        ranks = _ordered(layout, names, ranks, topology, traffic, universe)
    rank_map = _rank_map_for(layout, ranks, universe)
    settings = {name: get(name) for name in _OF_UNIVERSE if get(name) is not None}
    if not get("lazy"):
        settings.pop("lazy", None)
    if settings:
        # An existing universe or part keeps the settings that it was created with.
        if universe is not None and universe.known_part(rank_map) is not None:
            raise _belongs_to_universe(settings)
        # The universe checks these too, but only after the default process group was started.
        Defaults.of(get("timeout"), get("options"))
    preserve_rank_order = get("preserve_rank_order")
    if preserve_rank_order is None:
        preserve_rank_order = not rank_map.is_sorted()
    description = MeshDescription(device_type, layout, names, preserve_rank_order)
    if get("isolate") is not None or current_tag():
        description = description.with_tags(normalize_tags(get("isolate"), names, len(shape)))
    overrides: Sequence[Override] = ()
    if get("backend_override") is not None:
        overrides = normalize_overrides(get("backend_override"), names, len(shape))

    def build() -> DeviceMesh:
        mesh = object.__new__(DeviceMesh)
        mesh._build(
            description,
            rank_map,
            overrides=overrides,
            call="init_device_mesh",
            universe=universe,
            settings=settings,
        )
        return mesh

    return build


def _rest_of(
    shape: tuple[int, ...], ranks: Sequence[int] | torch.Tensor | None, universe: Universe | None
) -> tuple[int, str, str]:
    """Return the arguments of `fill_rest` after the sizes: the ranks of the mesh to build."""
    if ranks is not None:
        return read_rank_map(ranks).size, "mesh_shape", "in ranks="
    if universe is not None:
        return universe.size, "mesh_shape", "of the universe"
    world = World.current()
    if world is None:
        raise ValueError(
            f"mesh_shape={shape} with a size of -1 needs the number of ranks, and there is no "
            "default process group yet. Call init_process_group() first, or pass ranks= or "
            "universe=."
        )
    return world.size, "mesh_shape", "of the default process group"


def _belongs_to_universe(settings: Iterable[str]) -> ValueError:
    passed = [f"{name}=" for name in settings]
    many = len(passed) > 1
    return ValueError(
        f"init_device_mesh() got universe= together with {' and '.join(passed)}: "
        f"{'these are settings' if many else 'this is a setting'} of the universe, which exists "
        f"already and keeps its own. Leave {'them' if many else 'it'} out, or pass "
        f"{'them' if many else 'it'} when you create the universe: to its first mesh, or to "
        "Universe(ranks, ...)."
    )


def _ordered(
    layout: Layout,
    names: Sequence[str] | None,
    ranks: Sequence[int] | torch.Tensor | None,
    topology: TopologyLike | None,
    traffic: Mapping[str, float] | None,
    universe: Universe | None,
) -> torch.Tensor:
    if universe is not None and topology is not None:
        raise _belongs_to_universe(["topology"])
    if topology is None:
        raise ValueError(
            f"init_device_mesh(traffic={traffic}): traffic says which axes a topology keeps inside "
            "nodes. Give topology= too, such as Topology.detect()."
        )
    if not isinstance(topology, TopologyLike):
        raise TypeError(
            f"topology={topology!r} of type {type(topology).__name__}: give a meshverse.Topology, "
            "such as Topology.from_environment()."
        )
    if ranks is not None:
        raise ValueError(
            "init_device_mesh(ranks=..., topology=...): both set the order of the ranks. Leave one "
            "out: topology= alone uses ranks=topology.order(mesh_shape, mesh_dim_names)."
        )
    return topology.order(layout.shape, names, traffic)


def _rank_map_for(
    layout: Layout, ranks: Sequence[int] | torch.Tensor | None, universe: Universe | None
) -> RankMap:
    if ranks is None and universe is None:
        return RankMap.identity(layout.size)
    rank_map = RankMap.identity(layout.size) if ranks is None else read_rank_map(ranks)
    if rank_map.size != layout.size:
        raise ValueError(
            f"mesh_shape {layout.shape} has {layout.size} ranks, but `ranks` lists "
            f"{rank_map.size}: {rank_map}. The product of the sizes must be that number."
        )
    if universe is None or ranks is not None:
        return rank_map
    if universe.size != layout.size:
        raise ValueError(
            f"mesh_shape {layout.shape} has {layout.size} ranks, but the universe to build it "
            f"in has {universe.size}: {universe.rank_map}. The product of the sizes must be that "
            "number; for a mesh over only some of its ranks, give ranks= too."
        )
    return universe.rank_map
