"""`init_device_mesh`: stock's, with what belongs to a universe beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, TypedDict

import torch
from typing_extensions import Required

from . import _torch_compat as compat
from ._core import Layout, RankMap
from .backend_override import BackendOverride, normalize_overrides, normalize_tags
from .derivation import MeshDescription
from .device_mesh import DeviceMesh
from .group_options import Defaults
from .mesh_input import check_axis_names, check_device_type, read_rank_map
from .universe import Universe

__all__ = ["MeshPart", "init_device_mesh", "init_mesh_partition"]


def init_device_mesh(
    device_type: str,
    mesh_shape: Sequence[int],
    *,
    mesh_dim_names: Sequence[str] | None = None,
    backend_override: BackendOverride | None = None,
    preserve_rank_order: bool = False,
    ranks: Sequence[int] | torch.Tensor | None = None,
    timeout: timedelta | None = None,
    options: compat.BackendOptions | None = None,
    isolate: str | Mapping[int | str, str] | None = None,
    lazy: bool = False,
    check_consistency: bool | None = None,
    universe: Universe | None = None,
) -> DeviceMesh:
    """A mesh of this shape over ranks 0, 1, 2, ..., the rightmost axis varying fastest.

    Starts the default process group if there is none, as stock does.

    Args:
        device_type: "cpu", "cuda", ... without an index.
        mesh_shape: size of each axis.
        mesh_dim_names: one name an axis, each once.
        backend_override: by axis name or index: a backend name, an options object, or both as a
            pair. Axes that are not named get the default group's backend.
        preserve_rank_order: group ranks follow the order of the axes instead of ascending ranks.
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
        universe: build the mesh in this universe, on its ranks and process groups.

    Raises:
        RuntimeError: names that repeat or do not match the shape; a device type with an index; an
            override for an axis that is not there; a mesh larger than the world; other ranks are
            building another mesh.
        ValueError: a size below 1, an unknown backend, another number of ranks than the universe
            or `ranks` has; or what belongs to a universe given beside one.
        TypeError: a timeout that is no timedelta, or options that are no options object.

    Example:
        >>> mesh = init_device_mesh("cuda", (2, 8), mesh_dim_names=("dp", "tp"))  # doctest: +SKIP
        >>> mesh["tp"] is mesh["tp"]  # doctest: +SKIP
        True
    """
    check_device_type(device_type)
    layout = Layout.from_shape(tuple(mesh_shape))
    names = check_axis_names(mesh_dim_names, len(layout))
    rank_map = _rank_map_for(layout, ranks, universe)
    settings = {
        "timeout": timeout,
        "options": options,
        "lazy": lazy or None,
        "check_consistency": check_consistency,
    }
    given: dict[str, Any] = {name: value for name, value in settings.items() if value is not None}
    if universe is not None and given:
        raise ValueError(
            f"init_device_mesh(universe=..., {', '.join(given)}): {', '.join(given)} belong to a "
            "universe. Give them when making it: the first mesh of it, or Universe(ranks, ...)."
        )
    Defaults.of(timeout, options)  # before the default process group is started
    mesh = object.__new__(DeviceMesh)
    mesh._build(
        MeshDescription(device_type, layout, names, preserve_rank_order),
        rank_map,
        overrides=normalize_overrides(backend_override, names, len(layout)),
        tags=normalize_tags(isolate, names, len(layout)),
        call="init_device_mesh",
        universe=universe,
        make_universe=partial(Universe, **given),
    )
    return mesh


class MeshPart(TypedDict, total=False):
    """One part of a partition: arguments of `init_device_mesh` that are its own."""

    mesh_shape: Required[Sequence[int]]
    mesh_dim_names: Sequence[str]
    ranks: Sequence[int]
    backend_override: BackendOverride
    preserve_rank_order: bool
    timeout: timedelta
    options: compat.BackendOptions


def init_mesh_partition(
    device_type: str, parts: Mapping[str, MeshPart], **common: Any
) -> dict[str, DeviceMesh]:
    """Meshes over disjoint parts of the world, such as an actor and a reference model.

    Each part has a shape and a universe of its own. All ranks call this, or only those of the
    parts; ranks outside a part get a mesh of it that they can hold, print and slice. Everything is
    checked before the first group is made.

    Args:
        device_type: "cpu", "cuda", ... without an index.
        parts: by name, the arguments of `init_device_mesh` for each. `ranks` are given for all
            parts, or for none: then each part takes the ranks that follow those of the one before.
        common: arguments of `init_device_mesh` for all parts.

    Raises:
        ValueError: two parts have a rank in common; `ranks` given for some parts only; and as
            `init_device_mesh`.

    Example:
        >>> meshes = init_mesh_partition(  # doctest: +SKIP
        ...     "cuda",
        ...     {
        ...         "actor": {"mesh_shape": (2, 4), "mesh_dim_names": ("dp", "tp")},
        ...         "reference": {"mesh_shape": (4,), "mesh_dim_names": ("tp",)},
        ...     },
        ... )
        >>> meshes["reference"].mesh.tolist()  # doctest: +SKIP
        [8, 9, 10, 11]
    """
    placed = [name for name, part in parts.items() if "ranks" in part]
    if placed and len(placed) < len(parts):
        raise ValueError(
            f"Parts {placed} of {list(parts)} give their `ranks`, the others do not: give them for "
            "all parts, or for none."
        )
    ranks: dict[str, Sequence[int]] = {}
    first = 0
    for name, part in parts.items():
        size = Layout.from_shape(tuple(part["mesh_shape"])).size
        ranks[name] = part.get("ranks", range(first, first + size))
        first += size
        _rank_map_for(Layout.from_shape(tuple(part["mesh_shape"])), ranks[name], None)
    _check_disjoint(ranks)
    return {
        name: init_device_mesh(device_type, **{**common, **part, "ranks": ranks[name]})
        for name, part in parts.items()
    }


def _check_disjoint(parts: Mapping[str, Sequence[int]]) -> None:
    owners: dict[int, str] = {}
    for name, ranks in parts.items():
        for rank in ranks:
            if owners.setdefault(rank, name) != name:
                common = sorted(set(parts[owners[rank]]) & set(ranks))
                raise ValueError(
                    f"Parts {owners[rank]!r} and {name!r} of a partition have ranks {common} in "
                    "common: a rank belongs to one part. Use separate calls of init_device_mesh "
                    "for meshes that overlap."
                )


def _rank_map_for(
    layout: Layout, ranks: Sequence[int] | torch.Tensor | None, universe: Universe | None
) -> RankMap:
    rank_map = RankMap.identity(layout.size) if ranks is None else read_rank_map(ranks)
    if rank_map.size != layout.size:
        raise ValueError(
            f"mesh_shape {layout.shape} has {layout.size} ranks, but `ranks` lists "
            f"{rank_map.size}: {rank_map}. The sizes must multiply out to it."
        )
    if universe is None:
        return rank_map
    if universe.size != layout.size:
        raise ValueError(
            f"mesh_shape {layout.shape} has {layout.size} ranks, but the universe to build it "
            f"in has {universe.size}: {universe.rank_map}. The sizes must multiply out to it."
        )
    return universe.rank_map if ranks is None else rank_map  # which are compared later
