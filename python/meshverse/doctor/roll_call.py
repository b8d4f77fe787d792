"""Which ranks are there, and which one the others wait for: told through the store.

Every rank notes the step that it begins, and a thread of it counts up a number while it lives. When
a rank has waited too long, it reads what the others noted: it waited for those that are behind, or
whose numbers stand still.

Example: ranks 0, 1 and 3 note step 2, "axis dp". Rank 2 has noted step 1. The others wait in the
all-reduce until the timeout, read the notes, and say: rank 2 on host n1 is still in step 1.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Any, NoReturn

import torch.distributed as dist

__all__ = ["NotAllHereError", "RollCall", "open_store"]

_A_MOMENT = timedelta(seconds=1)
_BEATS_TO_WAIT = 3.0
_FAILED = "failed"
_SECONDS_TO_READ, _SECONDS_BETWEEN_LOOKS = 1.0, 0.02


class NotAllHereError(RuntimeError):
    """Some ranks did not answer in time. The message names them."""


# The server that rank 0 hosts, for as long as its process runs: others may already be in their
# next call, or in init_process_group, on the same server when rank 0 leaves the examination.
_hosted: list[dist.Store] = []


def open_store(rank: int, world_size: int, timeout: timedelta, call: int) -> dist.Store:
    """The store of a job that torchrun, or another launcher with its variables, has started.

    Does not wait for other ranks, unlike torch's own, which then could not say who is missing.

    Args:
        rank: this one.
        world_size: number of ranks.
        timeout: how long to wait for the store.
        call: how many examinations this process had before. Each has keys of its own.

    Raises:
        NotAllHereError: nobody answers at the address.
    """
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    is_hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # by torchrun itself
    try:
        store = dist.TCPStore(
            host,
            port,
            world_size,
            is_master=rank == 0 and not is_hosted,
            timeout=timeout,
            wait_for_workers=False,
            multi_tenant=True,
        )
    except dist.DistError as error:
        raise NotAllHereError(
            f"Rank {rank} found no store at MASTER_ADDR={host}, MASTER_PORT={port} within "
            f"{timeout.total_seconds():g} s. Rank 0, or torchrun, has to run there and be "
            f"reachable: {str(error).splitlines()[0]}"
        ) from None
    if rank == 0 and not is_hosted and not _hosted:
        _hosted.append(store)
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"meshverse doctor {restarts} {call}", store)


class RollCall:
    """What the ranks of a job note for each other.

    Args:
        store: that all of them reach.
        rank: this one.
        world_size: number of ranks.
        timeout: how long to wait for another rank.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> None:
        self._store, self._rank, self._size, self._timeout = store, rank, world_size, timeout
        self._step = 0
        # Of a large world the store is asked less often.
        self._beat_seconds = max(0.5, world_size / 2000)

    @contextlib.contextmanager
    def living(self) -> Iterator[None]:
        """Give signs of life meanwhile, from a thread with a connection of its own."""
        store: dist.Store = self._store.clone()  # type: ignore[attr-defined]  # its stub lacks it
        is_over = threading.Event()

        def beat() -> None:
            number = 0
            with contextlib.suppress(dist.DistError):  # when the store's host has ended
                while not is_over.wait(self._beat_seconds):
                    number += 1
                    store.set(f"life {self._rank}", str(number))

        thread = threading.Thread(target=beat, name="meshverse doctor", daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()

    def begin(self, step: str, host: str) -> None:
        """Note that this rank begins a step."""
        self._step += 1
        note = {"step": self._step, "what": step, "host": host}
        self._store.set(f"note {self._rank}", json.dumps(note))

    def gather(self, name: str, mine: Any) -> list[Any] | None:
        """Give rank 0 what all ranks have to say, in order of rank; None on the others.

        Raises:
            NotAllHereError: on rank 0, some rank did not say anything in time.
        """
        self._store.set(f"{name} {self._rank}", json.dumps(mine))
        if self._rank:
            return None
        keys = [f"{name} {rank}" for rank in range(self._size)]
        self._wait(keys, self._timeout)
        said = [json.loads(text) for text in self._store.multi_get(keys)]
        for key in keys:  # nobody else reads them, and the store may outlive the examination
            self._store.delete_key(key)
        return said

    def tell(self, name: str, what: Any = None) -> Any:
        """Tell all ranks what rank 0 says. Rank 0 does not wait for them.

        Raises:
            NotAllHereError: rank 0 says nothing in time.
        """
        if self._rank == 0:
            self._store.set(name, json.dumps(what))
            return what
        # Rank 0 may have waited for somebody as long as it can, and says so then.
        self._wait([name], 2 * self._timeout + _A_MOMENT)
        return json.loads(self._store.get(name))

    def who_is_behind(self, ranks: Iterable[int]) -> str:
        """The ranks among these that are not in the step that this one is in, or not alive.

        In words; empty if there is none. Takes seconds, in which ranks may give signs of life.
        """
        ranks = [rank for rank in ranks if rank != self._rank]
        signs = [self._read(f"life {rank}") for rank in ranks]
        time.sleep(_BEATS_TO_WAIT * self._beat_seconds)
        behind = []
        for rank, sign in zip(ranks, signs, strict=True):
            note = self._read(f"note {rank}")
            if note is None:
                behind.append(f"rank {rank} has not started")
                continue
            name = f"rank {rank} on {note['host']}"
            if note["step"] < self._step:
                behind.append(f"{name} is still in: {note['what']}")
            elif note["step"] == self._step and self._read(f"life {rank}") == sign:
                behind.append(f"{name} gives no sign of life in: {note['what']}")
        return "; ".join(behind)

    def _read(self, key: str) -> Any:
        return json.loads(self._store.get(key)) if self._store.check([key]) else None

    def tell_failure(self, message: str) -> None:
        """Have the ranks that wait for rank 0 know why it will not tell them anything."""
        self._store.set(_FAILED, message)
        time.sleep(_SECONDS_TO_READ)  # it may host the store, which ends with it

    def _wait(self, keys: list[str], timeout: timedelta) -> None:
        deadline = time.monotonic() + timeout.total_seconds()
        try:
            while not self._store.check(keys):
                if self._store.check([_FAILED]):
                    raise NotAllHereError(self._store.get(_FAILED).decode())
                if time.monotonic() > deadline:
                    self._give_up(range(self._size) if len(keys) > 1 else range(1), timeout)
                time.sleep(_SECONDS_BETWEEN_LOOKS)
        except dist.DistError as error:
            raise NotAllHereError(
                f"Rank {self._rank} lost the store, which ends with rank 0 or torchrun: "
                f"{str(error).splitlines()[0]}"
            ) from None

    def _give_up(self, ranks: Iterable[int], timeout: timedelta) -> NoReturn:
        who = self.who_is_behind(ranks) or "nobody is behind, but the store does not answer"
        raise NotAllHereError(
            f"Rank {self._rank} waited {timeout.total_seconds():g} s for others: {who}."
        )
