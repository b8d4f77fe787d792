"""Meshes over disjoint parts of the world, each with its own shape."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from meshverse._core import Layout
from meshverse.layouts.user_input import fill_rest, has_rest, read_rank_map, read_shape
from meshverse.universe.universe import Universe, check_universe, ranks_outside
from meshverse.wording import did_you_mean
from meshverse.world import World

from .device_mesh import DeviceMesh
from .init_mesh import MeshPart, plan_mesh


class Partition(dict[str, DeviceMesh]):
    """Meshes by the name of their part; the error for an unknown name suggests the nearest one."""

    def __missing__(self, name: object) -> DeviceMesh:
        hint = did_you_mean(name, self)
        raise KeyError(f"There is no part {name!r}: the parts are {list(self)}.{hint}")


def init_mesh_partition(
    device_type: str, parts: Mapping[str, MeshPart], **common: Any
) -> dict[str, DeviceMesh]:
    """Create meshes over disjoint parts of the world, such as an actor and a reference model.

    Each part has its own shape, axes and root mesh. All ranks of the parts call this; other ranks
    can. A rank outside a part also gets that part's mesh, which it can keep, print and slice. All
    arguments are checked before the first group is created.

    Args:
        device_type: "cpu", "cuda", ... without an index.
        parts: the arguments of `init_device_mesh` for each part, by name of the part. Give `ranks`
            for all parts or for none; without `ranks`, each part takes the ranks that follow those
            of the part before it. Then one part may have a size of -1: it gets the ranks that the
            other parts leave.
        common: arguments of `init_device_mesh` for all parts. With `universe=mesh.universe`, the
            parts take ranks of that universe, and share process groups with `mesh`
            (`Universe.part`). Without it, each part has its own universe.

    Returns:
        The mesh of each part, by name of the part.

    Raises:
        TypeError: `parts` or a part is not a mapping, a part has no `mesh_shape`, or an
            argument is not one of `init_device_mesh`.
        ValueError: two parts have a rank in common; `ranks` is given for only some parts; a rank is
            not in the world or the universe; or `topology` is given.
        RuntimeError, ValueError, TypeError: an error of `init_device_mesh`.

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
    _check_known(common, "init_mesh_partition")
    if not isinstance(parts, Mapping):
        raise TypeError(f"parts={parts!r} of type {type(parts).__name__}: {_PARTS}.")
    for name, part in parts.items():
        if not isinstance(part, Mapping):
            raise TypeError(
                f"Part {name!r} of a partition is {part!r} of type {type(part).__name__}: {_PARTS}."
            )
        _check_known(part, f"Part {name!r} of a partition")
        if "mesh_shape" not in part:
            raise TypeError(
                f"Part {name!r} of a partition has no mesh_shape: give the sizes of its axes, such "
                'as {"mesh_shape": (2, 4), "mesh_dim_names": ("dp", "tp")}.'
            )
    if "topology" in common or any("topology" in part for part in parts.values()):
        raise ValueError(
            "init_mesh_partition takes no topology=, which orders all ranks of one mesh. Order the "
            "ranks of each part yourself: ranks=..."
        )
    check_universe(common.get("universe"))
    ranks = _ranks_of_parts(parts, common.get("universe"))
    _check_disjoint(ranks)
    _check_world(ranks)
    planned: dict[str, Callable[[], DeviceMesh]] = {}
    # In a comprehension, `plan_mesh` would blame the wrong line in its warnings until Python 3.12.
    for name, part in parts.items():
        arguments = {"device_type": device_type, **common, **part, "ranks": ranks[name]}
        planned[name] = plan_mesh(arguments)
    partition = Partition()
    try:
        for name, build in planned.items():
            partition[name] = build()
    except BaseException:
        for mesh in partition.values():
            if mesh.universe.meshes.root is mesh:  # its universe is new, too
                mesh.universe.groups.give_up()
        raise
    return partition


_PARTS = (
    "pass the arguments of init_device_mesh for each part, by its name, such as "
    '{"actor": {"mesh_shape": (2, 4), "mesh_dim_names": ("dp", "tp")}}'
)


def _check_known(arguments: Mapping[str, Any], of: str) -> None:
    known = list(MeshPart.__annotations__)
    for argument in arguments:
        if argument not in known:
            raise TypeError(
                f"{of} has {argument!r}, which is not an argument of init_device_mesh."
                f"{did_you_mean(argument, known)} Its arguments are {', '.join(known)}."
            )


def _ranks_of_parts(
    parts: Mapping[str, MeshPart], universe: Universe | None
) -> dict[str, Sequence[int]]:
    placed = [name for name, part in parts.items() if part.get("ranks") is not None]
    if placed and len(placed) < len(parts):
        raise ValueError(
            f"Parts {placed} of {list(parts)} have `ranks`, the others do not: give `ranks` for "
            "all parts, or for none."
        )
    ranks: dict[str, Sequence[int]] = {}
    first = 0
    shapes = _shapes_of_parts(parts, universe)
    for name, part in parts.items():
        size = Layout.from_shape(shapes[name]).size
        given: Any = part.get("ranks")
        if given is None:
            given = range(first, first + size)
            if universe is not None:
                if first + size > universe.size:
                    raise ValueError(
                        f"Part {name!r} of a partition takes {size} ranks after the {first} of the "
                        f"parts before it, but the universe has {universe.size}: "
                        f"{universe.rank_map}. Make the parts smaller, or the universe larger."
                    )
                given = [universe.rank_map.rank_at(position) for position in given]
        rank_map = read_rank_map(given)
        if universe is not None and (outside := ranks_outside(rank_map, universe.rank_map)):
            raise ValueError(
                f"Part {name!r} of a partition has ranks {outside}, which the universe of "
                f"{universe.rank_map} lacks: a part has only ranks of its universe."
            )
        ranks[name] = rank_map.ranks().tolist()  # a list, whatever type was given
        first += size
    return ranks


def _shapes_of_parts(
    parts: Mapping[str, MeshPart], universe: Universe | None
) -> dict[str, tuple[int, ...]]:
    """Return the shape of every part, with a size of -1 replaced by the ranks that are left."""
    shapes = {name: read_shape(part["mesh_shape"], _argument(name)) for name, part in parts.items()}
    for name, part in parts.items():
        if part.get("ranks") is not None:
            n_ranks = read_rank_map(part["ranks"]).size
            shapes[name] = fill_rest(shapes[name], n_ranks, _argument(name), "in its ranks=")
    open_parts = [name for name, shape in shapes.items() if has_rest(shape)]
    if not open_parts:
        return shapes
    if len(open_parts) > 1:
        raise ValueError(
            f"Parts {open_parts} of a partition have a size of -1: one part may, and gets the "
            "ranks that the others leave. Give the other sizes, or ranks= for all parts."
        )
    name = open_parts[0]
    world = World.current()
    if universe is None and world is None:
        raise ValueError(
            f"{_argument(name)}={shapes[name]} with a size of -1 needs the number of ranks, and "
            "there is no default process group yet. Call init_process_group() first, or give "
            "universe=."
        )
    total = universe.size if universe is not None else world.size  # type: ignore[union-attr]
    left = total - sum(math.prod(shape) for other, shape in shapes.items() if other != name)
    of_others = f"that the other parts leave of {total}"
    shapes[name] = fill_rest(shapes[name], left, _argument(name), of_others)
    return shapes


def _argument(part: str) -> str:
    return f"parts[{part!r}]['mesh_shape']"


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


def _check_world(parts: Mapping[str, Sequence[int]]) -> None:
    world = World.current()
    for name, ranks in parts.items():
        if world is not None and max(ranks) >= world.size:
            raise ValueError(
                f"Part {name!r} of a partition includes rank {max(ranks)}, but the default process "
                f"group has ranks 0 to {world.size - 1}. Make the parts smaller, or the job larger."
            )
