"""The search for a process group by c10d's name, as logs, traces and flight recorders have it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from meshverse._torch_compat.private_names import ProcessGroup

from .world_universes import universes_here

if TYPE_CHECKING:
    from .universe import Universe


class FoundGroup(NamedTuple):
    """A process group that meshes of this process use.

    Attributes:
        name: c10d's name of the group.
        axes: names of the axes that have requested it, the first one first: those of `universe`,
            then of other universes that created groups.
        ranks: global ranks, in group-rank order.
        coordinate: this rank's coordinate, by axis name, in the universe's mesh over all its ranks
            with the most axes, of several the first; {} if it is not in that mesh.
        universe: a universe with such axes: of several, the one that created groups first, or if
            none did, the oldest.
    """

    name: str
    axes: tuple[str, ...]
    ranks: tuple[int, ...]
    coordinate: dict[str, int]
    universe: Universe


def find_group(name: str | ProcessGroup) -> FoundGroup:
    """Find the process group of a name, as in NCCL's logs, profiler traces and flight recorders.

    Args:
        name: c10d's name of the group, `group.group_name`; or the group.

    Raises:
        KeyError: no mesh of this process uses a group of this name.
        TypeError: `name` is neither a string nor a process group.

    Example:
        >>> import meshverse
        >>> meshverse.find_group(mesh["tp"].get_group().group_name).axes  # doctest: +SKIP
        ('tp', 'ep')
    """
    if isinstance(name, ProcessGroup):
        name = name.group_name
    if not isinstance(name, str):
        raise TypeError(
            f"find_group() got {name!r} of type {type(name).__name__}: pass c10d's name of the "
            "group, which is group.group_name, or the group."
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
    found = [
        (universe, ref)
        for universe in universes_here()
        if (ref := universe.groups.find(name)) is not None and ref.requests
    ]
    if not found:
        return None
    universe, first = found[0]
    # Other universes without own groups are left out: ranks may have different ones.
    refs = [ref for one, ref in found if one is universe or one.groups.had_own_groups]
    axes = dict.fromkeys(axis for ref in refs for axis in list(ref.requests))
    ranks = tuple(first.request.my_ranks())
    coordinate = finest_coordinate(universe, first.request.position)
    return FoundGroup(name, tuple(axes), ranks, coordinate, universe)


def finest_coordinate(universe: Universe, position: int | None) -> dict[str, int]:
    """Return the coordinate of a position in a universe's mesh with the most axes; {} if in none.

    It is a mesh over all ranks of the universe, the first if there are several. A root mesh of one
    axis says less than its views.
    """
    meshes = (mesh._description for mesh in universe.meshes)
    whole = [what for what in meshes if what.layout.size == universe.size]
    if position is None or not whole:
        return {}
    what = max(whole, key=lambda what: len(what.layout))
    return dict(zip(what.labels, what.layout.coordinate(position), strict=True))
