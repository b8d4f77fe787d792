"""Process groups that are named when they are asked for, and made when they are first used."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from .creation import Group, is_made, make_prepared
from .meetings import GroupMeetings
from .world import World

__all__ = ["make_pending", "postpone"]


@dataclass(eq=False)
class _Pending:
    group: Group
    lock: threading.Lock = field(default_factory=threading.Lock)  # held while the group is made


def postpone(group: Group, world: World) -> None:
    """Leave a group that `prepare_group` has named to be made by `make_pending`."""
    assert group.name is not None
    world.pending[group.name] = _Pending(group)


def make_pending(name: str, world: World, meetings: GroupMeetings) -> bool:
    """Make the group of this name now, if it is still to be made; its other members do so too.

    Args:
        name: c10d's.
        world: that it is made in.
        meetings: of the universe that uses it first, where its members wait for each other.

    Returns:
        Whether it was made here and now.

    Raises:
        RuntimeError: the world is over; or making it waits for its members, and they did not come
            in time, or wait for each other in other groups.
    """
    pending = world.pending.get(name)
    if pending is None:
        return False
    with pending.lock:
        if name not in world.pending:  # another thread made it meanwhile
            return False
        try:
            make_prepared(pending.group, world, meetings)
        finally:
            if is_made(name):  # also if this rank was interrupted right after that
                del world.pending[name]
        return True
