"""Making a group that has its name already: once, whichever threads ask for it together."""

from __future__ import annotations

from collections.abc import Callable

from meshverse._core import GroupCache
from meshverse.world.world import World, WorldState

from .request import Group

__all__ = ["make_once"]


class _BeingMade(WorldState):
    """The named groups of one world that threads are making now."""

    def __init__(self) -> None:
        self.groups = GroupCache()


def make_once(group: Group, world: World, make: Callable[[], bool]) -> bool:
    """Run `make` in one of the threads that call this for a group at the same time.

    The others wait until it has returned; if it raises, the next one runs its own. The core's cache
    sees to that, as it does for groups that are made at once (`GroupCache.get_or_create`).

    Args:
        group: that is to be made.
        world: that it is made in.
        make: makes it, and returns whether there was something to make: a thread may come when
            another one has just made the group.

    Returns:
        Whether this thread made it.
    """
    made_here = False

    def run() -> bool:
        nonlocal made_here
        made_here = make()
        return True

    request, groups = group.request, world.state(_BeingMade).groups
    key = request.options.key.with_tag(f"the group of name {group.name}")
    groups.get_or_create(request.axis, key, run)
    groups.remove(request.axis, key)
    return made_here
