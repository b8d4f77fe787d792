"""The search for a process group by c10d's name, as logs, traces and flight recorders have it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from .registry import universes_here

if TYPE_CHECKING:
    from .universe import Universe


class FoundGroup(NamedTuple):
    """A process group that meshes of this process use.

    Attributes:
        name: c10d's name of the group.
        axes: names of all axes that have requested it, the first one first.
        ranks: global ranks, in group-rank order.
        coordinate: this rank's coordinate in the universe's first mesh, by axis name; {} if it is
            not in that mesh.
        universe: universe whose axes these are: of several, the one that created groups first.
    """

    name: str
    axes: tuple[str, ...]
    ranks: tuple[int, ...]
    coordinate: dict[str, int]
    universe: Universe


def find_group(name: str) -> FoundGroup:
    """Find the process group of a name, as in NCCL's logs, profiler traces and flight recorders.

    Args:
        name: c10d's name of the group: `group.group_name`.

    Raises:
        KeyError: no mesh of this process uses a group of this name.
        TypeError: `name` is no string.

    Example:
        >>> import meshverse
        >>> meshverse.find_group(mesh["tp"].get_group().group_name).axes  # doctest: +SKIP
        ('tp', 'ep')
    """
    if not isinstance(name, str):
        raise TypeError(
            f"find_group() got {name!r} of type {type(name).__name__}: pass c10d's name of the "
            "group, which is group.group_name."
        )
    found = find_group_optional(name)
    if found is None:
        raise KeyError(
            f"No mesh of this rank uses a group named {name!r}. Names are those of "
            "mesh.universe.explain().groups, and may differ between ranks."
        )
    return found


def find_group_optional(name: str) -> FoundGroup | None:
    """Return the process group of a name; None if no mesh of this process uses it."""
    for universe in universes_here():
        ref = universe.groups.find(name)
        if ref is not None and ref.requests:
            ranks = tuple(ref.request.my_ranks())
            coordinate = root_coordinate(universe, ref.request.position)
            return FoundGroup(name, tuple(ref.requests), ranks, coordinate, universe)
    return None


def root_coordinate(universe: Universe, position: int | None) -> dict[str, int]:
    """Return the coordinate of a position in a universe's first mesh; {} if it is in none."""
    root = universe.root
    if position is None or root is None:
        return {}
    what = root._description
    return dict(zip(what.labels, what.layout.coordinate(position), strict=True))
