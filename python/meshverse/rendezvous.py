"""Members of a group meet before they make it, where making it would wait for all of them.

Groups made when they are first used can be wanted in different orders by different ranks. c10d
would then wait until its timeout, without a word on why. Here a rank writes down what it waits for,
and looks at what the ranks it waits for are waiting for.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

__all__ = ["meet"]

_FIRST_PAUSE_SECONDS = 0.001
_LONGEST_PAUSE_SECONDS = 0.1
_LOOK_AROUND_SECONDS = 1.0  # how often the others' waits are read; a circle must be seen twice


def meet(
    store: Any, group_name: str, label: str, ranks: Sequence[int], rank: int, timeout: timedelta
) -> None:
    """Wait until all members of a group have come, in a few store operations each.

    Args:
        store: the default group's.
        group_name: c10d's name of the group.
        label: what the group is, for messages.
        ranks: global ranks of the members.
        rank: mine.
        timeout: how long to wait.

    Raises:
        RuntimeError: members wait for one another in a circle, or some did not come in time.
    """
    if len(ranks) == 1:
        return
    Meeting(store, group_name, label, ranks, rank).hold(timeout)


class Meeting:
    """One rank's wait for the other members of a group. Arguments as of `meet`."""

    def __init__(
        self, store: Any, group_name: str, label: str, ranks: Sequence[int], rank: int
    ) -> None:
        self._store = store
        self._prefix = "meshverse/meet"
        self._here = f"{self._prefix}/{group_name}/here"
        self._complete = f"{self._prefix}/{group_name}/complete"
        self._name, self._label, self._ranks, self._rank = group_name, label, ranks, rank

    def hold(self, timeout: timedelta) -> None:
        """Come, wait for the others, and go; see `meet`."""
        self._store.set(self._told(self._rank), "")
        members = ",".join(map(str, self._ranks))
        self._store.set(self._wait_of(self._rank), f"{self._name} {members} {self._label}")
        if self._store.add(self._here, 1) == len(self._ranks):
            self._store.set(self._complete, "1")
        try:
            self._wait(timeout)
        except RuntimeError:
            self._store.add(self._here, -1)  # so that the group can be tried again
            raise
        finally:
            self._store.set(self._wait_of(self._rank), "")  # not deleted: others may be reading it

    def _wait(self, timeout: timedelta) -> None:
        start = looked = time.monotonic()
        pause, circle = _FIRST_PAUSE_SECONDS, None
        while not self._store.check([self._complete]):
            now = time.monotonic()
            if now - start > timeout.total_seconds():
                raise RuntimeError(self._what_is_missing(timeout))
            if now - looked > _LOOK_AROUND_SECONDS:
                looked, seen = now, self._circle()
                if seen is not None and seen == circle:
                    self._tell_all(seen)
                circle = seen
                if told := self._read(self._told(self._rank)):
                    raise RuntimeError(told)
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    def _wait_of(self, rank: int) -> str:
        return f"{self._prefix}/waits/{rank}"

    def _told(self, rank: int) -> str:
        return f"{self._prefix}/told/{rank}"

    def _read(self, key: str) -> str:
        return self._store.get(key).decode() if self._store.check([key]) else ""

    def _waiting_for(self, rank: int) -> tuple[str, list[int], str] | None:
        """What a rank waits for, if it does: group name, members, label."""
        text = self._read(self._wait_of(rank))
        if not text:
            return None
        name, members, label = text.split(" ", 2)
        return name, [int(member) for member in members.split(",")], label

    def _circle(self) -> list[int] | None:
        """Ranks that wait for one another, from me back to me; None if there are none."""
        return self._path_to_me([self._rank], {self._rank})

    def _path_to_me(self, path: list[int], visited: set[int]) -> list[int] | None:
        waits = self._waiting_for(path[-1])
        if waits is None:
            return None
        name, members, _ = waits
        for member in members:
            theirs = None if member == path[-1] else self._waiting_for(member)
            if theirs is None or theirs[0] == name:
                continue  # on its way, or there
            if member == self._rank:
                return path
            if member not in visited:
                visited.add(member)
                found = self._path_to_me([*path, member], visited)
                if found is not None:
                    return found
        return None

    def _what_is_missing(self, timeout: timedelta) -> str:
        waits = {rank: self._waiting_for(rank) for rank in self._ranks}
        missing = [rank for rank, wait in waits.items() if wait is None or wait[0] != self._name]
        elsewhere = [f"rank {rank} waits in {waits[rank][2]}" for rank in missing if waits[rank]]  # type: ignore[index]
        return (
            f"Rank {self._rank} waited {timeout} for ranks {missing} to make {self._label} with "
            f"ranks {list(self._ranks)}; {', '.join(elsewhere) or 'they never came'}. All members "
            "of a lazy group must use it; mesh.universe.warm_up() makes groups ahead of time."
        )

    def _tell_all(self, circle: list[int]) -> None:
        # Whoever sees the circle first leaves it, so the others would not see it any more.
        message = self._why_never(circle)
        for rank in circle:
            self._store.set(self._told(rank), message)

    def _why_never(self, circle: list[int]) -> str:
        waits = {rank: self._waiting_for(rank) for rank in circle}
        steps = [
            f"rank {rank} waits in {wait[2]} with ranks {wait[1]}"
            for rank, wait in waits.items()
            if wait is not None
        ]
        return (
            "Ranks first use lazy groups in different orders and wait for one another: "
            f"{', '.join(steps)}. Use the axes in the same order on all ranks, or make the groups "
            "ahead of time with mesh.universe.warm_up()."
        )
