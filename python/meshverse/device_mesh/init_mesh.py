"""`init_device_mesh`: stock's, with what belongs to a universe beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypedDict

import torch
from typing_extensions import Required

from meshverse import _torch_compat as compat
from meshverse._core import Layout, RankMap
from meshverse.layouts.derivation import MeshDescription
from meshverse.layouts.user_input import check_axis_names, check_device_type, read_rank_map
from meshverse.options.group_options import (
    BackendOverride,
    Defaults,
    Override,
    normalize_overrides,
)
from meshverse.options.isolation import current_tag, normalize_tags
from meshverse.topology import Topology
from meshverse.universe.universe import Universe

from .device_mesh import DeviceMesh

# Arguments that are those of the universe.
_OF_UNIVERSE = ("timeout", "options", "lazy", "check_consistency", "topology")


class MeshPart(TypedDict, total=False):
    """Arguments of `init_device_mesh`, but for the device type."""

    mesh_shape: Required[Sequence[int]]
    mesh_dim_names: Sequence[str] | None
    backend_override: BackendOverride | None
    preserve_rank_order: bool | None
    ranks: Sequence[int] | torch.Tensor | None
    timeout: timedelta | None
    options: compat.BackendOptions | None
    isolate: str | Mapping[int | str, str] | None
    lazy: bool
    check_consistency: bool | None
    universe: Universe | None
    topology: Topology | None
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
    options: compat.BackendOptions | None = None,
    isolate: str | Mapping[int | str, str] | None = None,
    lazy: bool = False,
    check_consistency: bool | None = None,
    universe: Universe | None = None,
    topology: Topology | None = None,
    traffic: Mapping[str, float] | None = None,
) -> DeviceMesh:
    """Create a mesh of this shape over ranks 0, 1, 2, ..., the rightmost axis varying fastest.

    Starts the default process group if there is none, as stock does.

    Args:
        device_type: "cpu", "cuda", ... without an index.
        mesh_shape: size of each axis.
        mesh_dim_names: one name an axis, each once.
        backend_override: by axis name or index: a backend name, an options object, or both as a
            pair. Axes that are not named get the default group's backend.
        preserve_rank_order: group ranks follow the order of the axes, by default. False has the
            ranks of each group ascend, as in torch: then DTensor gives out shards in another order
            than coordinates, by which checkpoints go.
        ranks: global ranks to place the mesh on, in row-major order, as many as it has; by default
            0, 1, 2, ... Ranks outside get a mesh that they can hold, print and slice.
        timeout: of every group's operations in this mesh's universe, also of groups derived later,
            unless an axis's own options say another; by default that of the default group.
        options: options object for the groups of the default group's backend in this mesh's
            universe, also those derived later, where an axis has none of its own.
        isolate: tags for groups of their own: one for all axes, or by axis index or name; see
            `meshverse.isolate`.
        lazy: make a group when it is first used, by its members, instead of now.
        check_consistency: compare with the other ranks what is about to be made; by default unless
            the environment says `MESHVERSE_CHECK_CONSISTENCY=0`.
        universe: build the mesh in this universe, on its ranks and process groups. With `ranks=`
            that are some of its ranks, in a part of it (`Universe.part`).
        topology: where each rank of the world is: places the mesh in the order of ranks that keeps
            axes with much traffic inside nodes, domains and switches (`Topology.order`), and has
            `explain()` show how many nodes a group is on. The same on all ranks.
        traffic: for a topology: by axis name, what a rank sends along it, relative to the others.
            By default each axis has 10 times that of the axis before it.

    Raises:
        RuntimeError: names that repeat or do not match the shape; a device type with an index; an
            override for an axis that is not there; a mesh larger than the world; other ranks are
            building another mesh.
        ValueError: a size below 1, an unknown backend, another number of ranks than the universe
            or `ranks` or `topology` has; a topology beside `ranks`, or traffic without one; or
            what belongs to a universe given beside one; `ranks` that it has not.
        TypeError: a timeout that is no timedelta, or options that are no options object; or a
            universe that is none.

    Example:
        >>> mesh = init_device_mesh("cuda", (2, 8), mesh_dim_names=("dp", "tp"))  # doctest: +SKIP
        >>> mesh["tp"] is mesh["tp"]  # doctest: +SKIP
        True
    """
    return plan_mesh(locals())()


def plan_mesh(arguments: Mapping[str, Any]) -> Callable[[], DeviceMesh]:
    """Return what builds a mesh, after all checks that need no other rank. Changes nothing.

    Args:
        arguments: of `init_device_mesh`, by name.
    """
    get = arguments.get
    device_type, universe = arguments["device_type"], get("universe")
    check_device_type(device_type)
    check_universe(universe)
    shape = tuple(arguments["mesh_shape"])
    layout = Layout.from_shape(shape)
    names = check_axis_names(get("mesh_dim_names"), len(shape))
    ranks, topology, traffic = get("ranks"), get("topology"), get("traffic")
    if topology is not None or traffic is not None:
        ranks = _ordered(layout, names, ranks, topology, traffic, universe)
    rank_map = _rank_map_for(layout, ranks, universe)
    settings: dict[str, Any] = {}
    timeout, options, lazy = get("timeout"), get("options"), get("lazy")
    if lazy or not (timeout is options is topology is get("check_consistency") is None):
        settings = {name: get(name) for name in _OF_UNIVERSE if get(name) is not None}
        if not lazy:
            settings.pop("lazy", None)
        # In a universe that is there they come too late, also in a part of one.
        if universe is not None and universe.known_part(rank_map) is not None:
            raise _belongs_to_universe(settings)
        # Here too, before the default process group is started.
        Defaults.of(timeout, options)
    keeps_order = get("preserve_rank_order")
    if keeps_order is None:
        keeps_order = not rank_map.is_sorted()
    description = MeshDescription(device_type, layout, names, keeps_order)
    if get("isolate") is not None or current_tag():
        description = description.with_tags(normalize_tags(get("isolate"), names, len(shape)))
    overrides: Sequence[Override] = ()
    if get("backend_override") is not None:
        overrides = normalize_overrides(get("backend_override"), names, len(shape))

    def build() -> DeviceMesh:
        mesh = object.__new__(DeviceMesh)
        mesh._build(
            *(description, rank_map),
            overrides=overrides,
            call="init_device_mesh",
            universe=universe,
            settings=settings,
        )
        return mesh

    return build


def check_universe(universe: object) -> None:
    """Raise TypeError for what is neither a universe nor None, such as a mesh."""
    if universe is not None and not isinstance(universe, Universe):
        raise TypeError(
            f"universe={universe!r} of type {type(universe).__name__}: give the universe of a "
            "mesh, mesh.universe, or a meshverse.Universe."
        )


def _belongs_to_universe(settings: Iterable[str]) -> ValueError:
    listed = ", ".join(settings)
    return ValueError(
        f"init_device_mesh(universe=..., {listed}): {listed} belong to a universe. Give them when "
        "making it: the first mesh of it, or Universe(ranks, ...)."
    )


def _ordered(
    layout: Layout,
    names: Sequence[str] | None,
    ranks: Sequence[int] | torch.Tensor | None,
    topology: Topology | None,
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
    if not isinstance(topology, Topology):
        raise TypeError(
            f"topology={topology!r} of type {type(topology).__name__}: give a meshverse.Topology, "
            "such as Topology.from_environment()."
        )
    if ranks is not None:
        raise ValueError(
            "init_device_mesh(ranks=..., topology=...): both say in which order ranks are placed. "
            "Leave one out: topology= gives ranks=topology.order(mesh_shape, mesh_dim_names)."
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
            f"{rank_map.size}: {rank_map}. The sizes must multiply out to it."
        )
    if universe is None or ranks is not None:
        return rank_map
    if universe.size != layout.size:
        raise ValueError(
            f"mesh_shape {layout.shape} has {layout.size} ranks, but the universe to build it "
            f"in has {universe.size}: {universe.rank_map}. The sizes must multiply out to it; for "
            "a mesh over some of its ranks, give ranks= too."
        )
    return universe.rank_map
