"""The default group's store, as one run of the default process group uses it.

A store can outlive the group: torchrun keeps one for all restarts of a job, and a program can hand
the same store to `init_process_group` twice. So every key begins with the number of the run, on
which all ranks of the run agree without waiting for each other.

Example: a job of 4 ranks crashes and torchrun starts it again. What the first attempt left in the
store is under "meshverse/4/1/...". The ranks of the second attempt use "meshverse/4/2/...".
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Sequence
from typing import Any

# What all waiting ranks of a job ask of the store together, on average. In the busiest second it is
# half as much again, so at most 20,000. A TCPStore answers some 40,000 a second on two cores
# (benchmarks/results/store.md).
_OPERATIONS_A_SECOND = 13_000

# Of its own: Python's global one is the user's, and how often a rank pauses differs between ranks.
_random = random.Random()

# No key ever has this text. `compare_set` with it changes nothing and gives the text that the key
# has: a read in one operation that does not wait. (`get` waits until the key is there; `check`
# before it would be a second operation.)
_NEVER_WRITTEN = "?"


class Run:
    """The number of this run of the default process group, among those on the same store.

    Every rank counts the runs it has seen on the store. A rank may have missed some: it crashed
    before it came here. So each rank writes its count if it is higher than the one stored, and uses
    the higher of the two. A rank that has missed a run and comes first would still use a number
    that is too low; torchrun's own count of restarts keeps it from that.

    Attributes:
        rank: this rank, in the default group.
        world_size: number of ranks. Runs of another size are counted separately.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self._mark = os.urandom(8).hex()  # tells this run's own count from that of an earlier run
        self._number: int | None = None
        self._users: set[object] = set()  # who may have texts in the store
        self._lock = threading.RLock()  # protects the two above; a signal handler may make meshes

    def number(self, store: Any) -> int:
        """Return the number, from 1; two operations of a new store the first time, then none."""
        with self._lock:
            if self._number is None:
                self._number = self._agree(store)
            return self._number

    def _agree(self, store: Any) -> int:
        mine = max(self._count(store), _restarts_on_this_store() + 1)
        highest = int(store.compare_set(self._highest_key, "", str(mine)))
        while highest < mine:
            store.compare_set(self._highest_key, str(highest), str(mine))
            highest = int(store.compare_set(self._highest_key, "", str(mine)))
        return highest

    def _count(self, store: Any) -> int:
        # `add` would count a run twice, if this rank is interrupted and tries again.
        found = store.compare_set(self._own_key, "", f"1 {self._mark}").decode()
        number, mark = found.split(" ")
        if mark == self._mark:
            return int(number)
        mine = int(number) + 1
        store.compare_set(self._own_key, found, f"{mine} {self._mark}")
        return mine

    def add_user(self, user: object) -> None:
        """Note who is about to write texts, such as a universe."""
        with self._lock:
            self._users.add(user)

    def remove_user(self, user: object, store: Any) -> None:
        """Note that a user has removed its texts. The last one removes the counts of runs too.

        Nothing is done for one that has written none.

        The counts stay if an earlier run may have left texts in this store. Without the counts, a
        later run would begin at 1 again and find those texts.
        """
        with self._lock:
            if user not in self._users:
                return
            self._users.remove(user)
            if self._users or self._number != 1 or _is_kept_by_launcher():
                return
            self._number = None
        store.delete_key(self._own_key)
        store.delete_key(self._highest_key)

    @property
    def _own_key(self) -> str:
        return f"meshverse/{self.world_size}/runs/{self.rank}"

    @property
    def _highest_key(self) -> str:
        return f"meshverse/{self.world_size}/runs"


def _is_kept_by_launcher() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _restarts_on_this_store() -> int:
    # Other launchers give every restart a new store. Nodes can have different counts.
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return int(restarts) if _is_kept_by_launcher() and restarts.isdecimal() else 0


class RunStore:
    """Texts by key, of one run. One operation of the store each, unless said otherwise.

    Make one when it is needed, and do not keep it. It holds the store, and a TCPStore that somebody
    holds keeps its port open.

    Args:
        store: the default group's.
        run: of the default group.
    """

    def __init__(self, store: Any, run: Run) -> None:
        self._store = store
        self._run = run
        self._prefix = f"meshverse/{run.world_size}/{run.number(store)}"

    def read(self, key: str) -> str:
        """Return the text of a key; "" if there is none. Does not wait for one."""
        found: bytes = self._store.compare_set(self._key(key), _NEVER_WRITTEN, _NEVER_WRITTEN)
        text = found.decode()
        return "" if text == _NEVER_WRITTEN else text

    def read_all(self, keys: Sequence[str]) -> list[str]:
        """Return the texts of keys that are there; it waits for one that is not."""
        return [text.decode() for text in self._store.multi_get([self._key(key) for key in keys])]

    def put_first(self, key: str, text: str) -> str:
        """Write a text if the key has none; return the text that the key has then."""
        found: bytes = self._store.compare_set(self._key(key), "", text)
        return found.decode()

    def write(self, key: str, text: str) -> None:
        """Write a text, whatever the key has."""
        self._store.set(self._key(key), text)

    def count(self, key: str, amount: int = 1) -> int:
        """Add to the number of a key, 0 at first; return the sum."""
        total: int = self._store.add(self._key(key), amount)
        return total

    def append(self, key: str, text: str) -> None:
        """Add to the end of the text of a key, "" at first."""
        self._store.append(self._key(key), text)

    def remove(self, key: str) -> None:
        """Take a key out of the store, if it is there."""
        self._store.delete_key(self._key(key))

    def _key(self, key: str) -> str:
        return f"{self._prefix}/{key}"

    def pause(self, at_least_seconds: float = 0.0) -> None:
        """Sleep before an operation of a rank that waits.

        If all ranks of the job wait, they ask the store at most 20,000 times a second together,
        however many they are. Pauses are random, so that ranks do not ask at the same moment.

        Args:
            at_least_seconds: a longer pause, where the caller wants one.
        """
        fair_share = self._run.world_size / _OPERATIONS_A_SECOND
        time.sleep(max(at_least_seconds, fair_share * _random.uniform(0.5, 1.5)))
