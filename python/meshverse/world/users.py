"""How many universes use a process group, so that the last one ends it."""

from __future__ import annotations

import threading
from collections import Counter
from typing import NamedTuple

from meshverse._core import AxisLayout, GroupCache, OptionsKey

from .world import WorldState

__all__ = ["SharedAs", "Users"]


class SharedAs(NamedTuple):
    """Where several universes find a group.

    Attributes:
        groups: that they share.
        axis: the first half of its key there.
        key: the other half.
    """

    groups: GroupCache
    axis: AxisLayout
    key: OptionsKey


class Users(WorldState):
    """The users of the process groups that Meshverse made in one world.

    Attributes:
        shared: groups that universes of this world share, where all of them do.
    """

    def __init__(self) -> None:
        self.shared = GroupCache()
        self._n_users: Counter[str] = Counter()  # by c10d name of a group
        self._lock = threading.Lock()  # protects the above

    def add(self, group_name: str) -> None:
        """Note that one more universe uses a group."""
        with self._lock:
            self._n_users[group_name] = self._n_users.get(group_name, 0) + 1

    def add_to_shared(self, group_name: str) -> bool:
        """Note one more user of a shared group, unless its last user has given it up.

        Returns:
            Whether the group can be used.
        """
        with self._lock:
            if self._n_users[group_name] == 0:
                return False
            self._n_users[group_name] += 1
            return True

    def are_several(self, group_name: str) -> bool:
        """Whether several universes use a group."""
        with self._lock:
            return self._n_users[group_name] > 1

    def remove(self, group_name: str, shared_as: SharedAs | None) -> bool:
        """Note that a universe no longer uses a group.

        Args:
            group_name: c10d's.
            shared_as: where others find the group, from which the last user removes it.

        Returns:
            Whether that was the last user.
        """
        with self._lock:
            self._n_users[group_name] -= 1
            if self._n_users[group_name] > 0:
                return False
            del self._n_users[group_name]
            if shared_as is not None:
                self._take_out(group_name, shared_as)
            return True

    def unshare(self, group_name: str, shared_as: SharedAs) -> None:
        """Have nobody find a destroyed group, though other universes still count as users."""
        with self._lock:
            self._take_out(group_name, shared_as)

    def _take_out(self, group_name: str, shared_as: SharedAs) -> None:
        groups, axis, key = shared_as
        shared = groups.get(axis, key)
        if shared is not None and shared.name == group_name:  # a newer group may have its key
            groups.remove(axis, key)
