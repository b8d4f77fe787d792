"""Random pauses around what ranks do together: they show races that a quiet machine hides.

The environment variable `MESHVERSE_TEST_JITTER` switches them on; its value is the seed. Processes
of tests then pause before and after each operation of a store, each creation and end of a group,
each start of a collective, each fork and each signal that they send. Python also switches between
threads more often. With the same seed, a program pauses at the same places: at the n-th call of an
operation in a thread.

Not reached: what C++ code calls by itself, such as gloo's use of the store, collectives in
compiled graphs, and programs that a test starts by `subprocess`.
"""

from __future__ import annotations

import functools
import os
import re
import signal
import sys
import threading
import time
from collections import Counter
from hashlib import blake2b
from random import Random
from types import FunctionType
from typing import Any

import torch.distributed as dist

__all__ = ["BUDGET_SECONDS", "SWITCH", "Jitter", "begin", "current_test", "places", "seed"]

SWITCH = "MESHVERSE_TEST_JITTER"

_DENSITIES = (0.02, 0.1, 0.4)  # how many of the calls a program pauses at
_SHORT_SECONDS, _LONG_SECONDS = 0.1, 1.0
_LONG_ONES = 0.03  # of the pauses
BUDGET_SECONDS = 8.0  # of one process for one program; then it pauses no more
_SWITCH_INTERVALS_SECONDS = (0.005, 1e-4, 1e-6)  # the first is Python's own

_STORES = (dist.Store, dist.FileStore, dist.HashStore, dist.PrefixStore, dist.TCPStore)
_STORE_OPERATIONS = {
    "__init__", "add", "append", "check", "compare_set", "delete_key", "get", "multi_get",
    "multi_set", "num_keys", "set", "wait",
}  # fmt: skip
_COLLECTIVES = {
    "_allgather_base", "_reduce_scatter_base", "allgather", "allgather_coalesced",
    "allgather_into_tensor_coalesced", "allreduce", "allreduce_coalesced", "alltoall",
    "alltoall_base", "barrier", "broadcast", "gather", "monitored_barrier", "recv",
    "recv_anysource", "reduce", "reduce_scatter", "reduce_scatter_tensor_coalesced", "scatter",
    "send",
}  # fmt: skip
_ENDS = {"abort", "shutdown"}


class Jitter:
    """The pauses of one program in this process.

    Args:
        value: the seed.
        program: its name.
    """

    def __init__(self, value: str, program: str) -> None:
        self._key = f"{value} {program}"
        draw = Random(self._key)
        self._density = draw.choice(_DENSITIES)
        self.counts: Counter[tuple[str, str]] = Counter()
        self._left_seconds = BUDGET_SECONDS
        sys.setswitchinterval(draw.choice(_SWITCH_INTERVALS_SECONDS))

    def pause(self, place: str) -> None:
        """Pause, or not, as the seed says for this call of this thread."""
        thread = re.sub(r"\d+", "", threading.current_thread().name)
        self.counts[thread, place] += 1
        name = f"{self._key} {thread} {place} {self.counts[thread, place]}"
        draws = blake2b(name.encode(), digest_size=12).digest()
        whether, how_long, length = (
            int.from_bytes(draws[at : at + 4], "big") / 2**32 for at in (0, 4, 8)
        )
        if whether >= self._density or self._left_seconds <= 0:
            return
        seconds = _LONG_SECONDS if how_long < _LONG_ONES else length * _SHORT_SECONDS
        self._left_seconds -= seconds
        time.sleep(seconds)  # sleep: the pauses that this module is for


_current: Jitter | None = None


def seed() -> str | None:
    """Return the seed of the pauses; None if there are none."""
    return os.environ.get(SWITCH)


def current_test() -> str:
    """Return the name of the test that this process runs."""
    return os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" (")[0]


def places() -> list[str]:
    """Return the operations that this process's program has called, which it may pause around."""
    return [] if _current is None else [place for _, place in _current.counts]


def begin(program: str, value: str | None = None) -> None:
    """Begin the pauses of a program, if the switch is on.

    Args:
        program: its name; with the seed, it decides where to pause.
        value: the seed, where the environment is the program's own; by default the switch's.
    """
    global _current
    value = seed() if value is None else value
    if value is not None:
        _patch()
        _current = Jitter(value, program)


def _pause(place: str) -> None:
    if _current is not None:
        _current.pause(place)


@functools.cache
def _patch() -> None:
    # Methods of c10d's classes, as all code that has imported functions uses these.
    for store in _STORES:
        _around(store, _STORE_OPERATIONS)
    _around(dist.ProcessGroup, _COLLECTIVES, after=False)
    for group in (dist.ProcessGroup, dist.Backend, dist.ProcessGroupGloo):
        _around(group, _ENDS)
    _around(dist.ProcessGroupGloo, {"__init__"})
    _around(os, {"kill"})
    _around(signal, {"raise_signal"})
    os.register_at_fork(
        before=lambda: _pause("fork"),
        after_in_parent=lambda: _pause("forked"),
        after_in_child=lambda: _pause("fork's child"),
    )


def _around(owner: Any, names: set[str], *, after: bool = True) -> None:
    """Pause before these methods or functions, and after them."""
    for name in sorted(names & vars(owner).keys()):
        place = f"{owner.__name__}.{name}"
        setattr(owner, name, _pausing(place, getattr(owner, name), after=after))


def _pausing(place: str, call: Any, *, after: bool) -> Any:
    def pausing(*arguments: Any, **named: Any) -> Any:
        _pause(place)
        result = call(*arguments, **named)
        if after:
            _pause(f"after {place}")
        return result

    # In stacks, it is a part of torch: what looks for the line of the program passes over both.
    as_torchs = FunctionType(
        pausing.__code__.replace(co_filename=dist.__file__),
        globals() | {"__name__": f"{dist.__name__}.pauses"},
        closure=pausing.__closure__,
    )
    return functools.wraps(call)(as_torchs)
