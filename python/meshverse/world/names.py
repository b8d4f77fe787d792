"""The names of process groups: the same on all members of a group, whatever each did before."""

from __future__ import annotations

import threading

from .world import WorldState

__all__ = ["Names"]


class Names(WorldState):
    """The names that were given in one world.

    A name says what the group is, and how often this very group was made before. All members of the
    group, and nobody else, have exactly that in common. So they agree on the name, whatever other
    groups each of them made before.

    Example: rank 0 has made three groups, rank 1 only one. torch counts the groups of a process, so
    the two would call their next group by different numbers, and wait for each other for ever.
    """

    def __init__(self) -> None:
        self._times: dict[str, int] = {}  # by what a group is
        self._lock = threading.Lock()  # protects the above

    def new(self, identity: str) -> str:
        """The next name of a group: "meshverse-abc-0", then "meshverse-abc-1", ...

        Args:
            identity: what the group is.
        """
        with self._lock:
            times = self._times.get(identity, 0)
            self._times[identity] = times + 1
        return f"meshverse-{identity}-{times}"

    def take_back(self, name: str) -> None:
        """Have `new` give this name again: no member has made a group of it."""
        identity, _, times = name.removeprefix("meshverse-").rpartition("-")
        with self._lock:
            if self._times[identity] == int(times) + 1:
                self._times[identity] = int(times)
