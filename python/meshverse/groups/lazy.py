"""Process groups that are named when they are asked for, and made when they are first used."""

from __future__ import annotations

from meshverse.world.world import World, WorldState

from .creation import is_made, make_prepared
from .meetings import GroupMeetings
from .once import make_once
from .request import Group

__all__ = ["LazyGroups"]


class LazyGroups(WorldState):
    """The groups of one world that are named, and still to be made.

    Attributes:
        pending: these groups, by c10d name.
    """

    def __init__(self) -> None:
        self.pending: dict[str, Group] = {}

    def postpone(self, group: Group) -> None:
        """Leave a group that `prepare_group` has named to be made by `make`."""
        assert group.name is not None
        self.pending[group.name] = group

    def make(self, name: str, world: World, meetings: GroupMeetings) -> bool:
        """Make the group of this name now, if it is still to be made; its other members do so too.

        Args:
            name: c10d's.
            world: that it is made in.
            meetings: of the universe that uses it first, where its members wait for each other.

        Returns:
            Whether it was made here and now.

        Raises:
            RuntimeError: the world is over; or making it waits for its members, and they did not
                come in time, or wait for each other in other groups.
        """
        group = self.pending.get(name)
        if group is None:
            return False

        def make() -> bool:
            if name not in self.pending:  # another thread made it meanwhile
                return False
            try:
                make_prepared(group, world, meetings)
            finally:
                if is_made(name):  # also if this rank was interrupted right after that
                    del self.pending[name]
            return True

        return make_once(group, world, make)
