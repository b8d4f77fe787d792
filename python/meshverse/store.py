"""Keys in torch's stores: through them, ranks find out what the others do.

Each operation is one request that does not wait, so that whoever waits can say who is missing.

The default group's store can outlive a *run*, which is what all ranks do between
`init_process_group` and the end of that default group: torchrun keeps one store for all restarts of
a job, and a program can pass the same store to `init_process_group` twice. So keys there begin with
the number of the run. All ranks of a run compute the same number, without waiting for each other.

Example: a job of 4 ranks crashes and torchrun starts it again. What the first run left in the store
is under "meshverse/4/1/...". The ranks of the second run use "meshverse/4/2/...".
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Sequence
from typing import Any

from meshverse.locks import state_lock

# No key ever has this value. `compare_set` with it changes nothing and returns the key's value: a
# read in one operation that does not wait. (`get` waits until the key exists; `check` before it
# would be a second operation.)
_NEVER_WRITTEN = "?"

# Limit for all processes that wait, on average. A busy second may have half as many again, at most
# 20,000. A TCPStore serves some 40,000 operations a second on two cores
# (benchmarks/results/store.md).
_OPERATIONS_A_SECOND = 13_000

_FIRST_PAUSE_SECONDS = 0.002
_LONGEST_PAUSE_SECONDS = 0.5

# Not Python's global generator, which belongs to the user: pauses would advance it differently on
# each rank.
_random = random.Random()


class StoreKeys:
    """Keys of a store under one prefix, with strings as values.

    Each method but the pauses makes one operation. A process that waits pauses before each one.

    Create one when it is needed, and do not keep it longer than the store is needed: a TCPStore
    keeps its port open as long as it is referenced.

    Args:
        store: store of torch.distributed. Wrap one that a program has written in Python in a
            `PrefixStore`, which passes bytes to it.
        prefix: begins each key, followed by "/".
        n_processes: number of processes that may wait for keys of this store at the same time.
    """

    def __init__(self, store: Any, prefix: str, n_processes: int) -> None:
        self._store, self._prefix, self._n_processes = store, prefix, n_processes

    def read(self, key: str) -> str:
        """Return the value of a key, "" if it has none. Does not wait for a value."""
        text = self.replace(key, _NEVER_WRITTEN, _NEVER_WRITTEN)
        return "" if text == _NEVER_WRITTEN else text

    def replace(self, key: str, old: str, new: str) -> str:
        """Write a value if the key has `old`, "" for none; return the value that it has then."""
        found: bytes = self._store.compare_set(f"{self._prefix}/{key}", old, new)
        return found.decode()

    def put_first(self, key: str, text: str) -> str:
        """Write a value if the key has none; return the value that it has then."""
        return self.replace(key, "", text)

    def write(self, key: str, text: str) -> None:
        """Write a value, whether or not the key has one."""
        self._store.set(f"{self._prefix}/{key}", text)

    def append(self, key: str, text: str) -> None:
        """Append to the value of a key, which is "" at first."""
        self._store.append(f"{self._prefix}/{key}", text)

    def count(self, key: str, amount: int = 1) -> int:
        """Add to the number of a key, which is 0 at first; return the sum."""
        total: int = self._store.add(f"{self._prefix}/{key}", amount)
        return total

    def remove(self, key: str) -> None:
        """Remove a key, if it exists."""
        self._store.delete_key(f"{self._prefix}/{key}")

    def have_all(self, keys: Sequence[str]) -> bool:
        """Return whether all of these keys have values."""
        return bool(self._store.check([f"{self._prefix}/{key}" for key in keys]))

    def pause(self, at_least_seconds: float = 0.0) -> None:
        """Sleep before an operation of a process that waits.

        Pauses are so long that all processes together make at most 20,000 operations a second, even
        if all of them wait. They are random, so that the processes spread their operations.

        Args:
            at_least_seconds: shortest pause that the caller wants.
        """
        fair_share = self._n_processes / _OPERATIONS_A_SECOND
        time.sleep(max(at_least_seconds, fair_share * _random.uniform(0.5, 1.5)))

    def pause_between_looks(self, waited_seconds: float) -> None:
        """Sleep between two looks at a key, for about a quarter of the time waited so far.

        So a process learns of a change with a delay of at most about a quarter of its wait. The
        pause is from 0.002 to 0.5 seconds, a quarter more or less at random, or longer in large
        jobs, as in `pause`.
        """
        wanted = min(max(waited_seconds / 4, _FIRST_PAUSE_SECONDS), _LONGEST_PAUSE_SECONDS)
        self.pause(wanted * _random.uniform(0.75, 1.25))


class Run:
    """A run of the default process group, with its number among the runs on the same store.

    Each `World` has one; a revived world takes the new default group's.

    Every rank counts the runs that it has taken part in. A rank's count can be too low: in an
    earlier run, it may have crashed before it counted. So the store has the highest count of all
    ranks; each rank raises it to its own if that is higher, and uses the result. This fails only if
    the first rank to ask in a run has too low a count: it then uses a lower number than the others.
    With torchrun, the restart count prevents that.

    The counts stay in the store when all universes have been destroyed: ranks of which only some
    began at 1 again would not meet in the next run.

    Args:
        rank: this process's global rank.

    Attributes:
        world_size: number of ranks. Runs with another number of ranks are counted separately.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self.world_size = world_size
        self._mark = os.urandom(8).hex()  # distinguishes this run's count from an earlier run's
        self._number: int | None = None
        self._highest_key = f"meshverse/{world_size}/runs"
        self._own_key = f"{self._highest_key}/{rank}"

    def keys(self, store: Any) -> StoreKeys:
        """Return the keys of this run in the default group's store."""
        prefix = f"meshverse/{self.world_size}/{self.number(store)}"
        return StoreKeys(store, prefix, self.world_size)

    def number(self, store: Any) -> int:
        """Return the number of the run, from 1.

        The first call makes two operations on a new store, more on a used one; later calls none.
        """
        number = self._number
        if number is None:
            number = self._agree(store)  # several threads may: the run is counted once
            with state_lock.held:
                number = self._number = self._number or number
        return number

    def _agree(self, store: Any) -> int:
        mine = max(self._count(store), _restarts_on_this_store() + 1)
        highest = int(store.compare_set(self._highest_key, "", str(mine)))
        while highest < mine:
            store.compare_set(self._highest_key, str(highest), str(mine))
            highest = int(store.compare_set(self._highest_key, "", str(mine)))
        return highest

    def _count(self, store: Any) -> int:
        # Not `add`: it would count a run twice if this rank is interrupted and tries again.
        found = store.compare_set(self._own_key, "", f"1 {self._mark}").decode()
        number, mark = found.split(" ")
        if mark == self._mark:
            return int(number)
        mine = int(number) + 1
        store.compare_set(self._own_key, found, f"{mine} {self._mark}")
        return mine


def _is_kept_by_launcher() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _restarts_on_this_store() -> int:
    # Other launchers give every restart a new store. The count can differ between nodes.
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return int(restarts) if _is_kept_by_launcher() and restarts.isdecimal() else 0
