"""The threads that called collectives in each process group, from torch's flight recorder."""

from __future__ import annotations

import threading
from collections import Counter
from functools import cached_property

from meshverse._torch_compat.flight_recorder import recorded_calls


class CallingThreads:
    """The threads of this process that called in each process group, among its last calls.

    torch's flight recorder, which is on by default, stores them. It is read once, at the first
    look-up, in some 20 ms. It stores no CUDA streams.

    Args:
        since_ns: time in nanoseconds since the epoch. Earlier calls do not count: an earlier world
            may have had groups of the same names.
    """

    def __init__(self, since_ns: int) -> None:
        self._since_ns = since_ns

    def of(self, group: str | None) -> dict[str, int]:
        """Return the number of calls in a group by thread; empty if nothing is recorded of it.

        A thread that Python knows has its name. Others, such as those of the autograd engine and
        those that have ended, have the operating system's name; a number keeps them apart.

        Args:
            group: c10d name of the group.
        """
        return dict(self._by_group.get(group, {}))

    @cached_property
    def _by_group(self) -> dict[str | None, Counter[str]]:
        in_python = {thread.ident: thread.name for thread in threading.enumerate()}
        known_as: dict[int, str] = {}
        found: dict[str | None, Counter[str]] = {}
        for call in recorded_calls():
            if call.time_ns < self._since_ns:
                continue
            if call.thread_id not in known_as:
                name = in_python.get(call.thread_id) or call.thread_name or "unnamed"
                taken = sum(other.partition(" #")[0] == name for other in known_as.values())
                known_as[call.thread_id] = f"{name} #{taken + 1}" if taken else name
            found.setdefault(call.group, Counter())[known_as[call.thread_id]] += 1
        return found
