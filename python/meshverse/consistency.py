"""Ranks that build different meshes are told so, instead of waiting for each other for ever.

Every call that makes process groups is compared through the store of the default process group,
one operation a rank and no barrier: the first rank to come writes down what it is about to make;
every other rank is given that back, and raises if it is about to make something else.

The ranks that are compared are those of one universe, in the order of its calls. Ranks that
disagree about *which ranks* a mesh has are in no common universe and so are not compared; nor are
calls from other threads than the main one, whose order means nothing.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Sequence

from ._core import RankMap
from .group_creation import GroupRequest
from .world import World

__all__ = ["CHECK_VARIABLE", "ConsistencyCheck", "check_by_default"]

CHECK_VARIABLE = "MESHVERSE_CHECK_CONSISTENCY"
"""Environment variable: "0" turns the comparison off where a mesh does not say otherwise."""


def check_by_default() -> bool:
    """Whether the environment leaves the comparison on.

    Raises:
        ValueError: the variable is neither "0" nor "1".
    """
    value = os.environ.get(CHECK_VARIABLE, "1")
    if value not in ("0", "1"):
        raise ValueError(
            f"{CHECK_VARIABLE}={value!r}: set it to 0 to turn the comparison of meshes between "
            "ranks off, or to 1 to leave it on."
        )
    return value == "1"


class ConsistencyCheck:
    """The calls of one universe, compared between its ranks.

    Args:
        rank_map: the universe's.
        world: the default group whose store is used.
    """

    def __init__(self, rank_map: RankMap, world: World) -> None:
        self._rank_map = rank_map
        self._world = world
        self._scope: str | None = None  # of the store's keys, chosen at the first call
        self._calls = 0
        self._keys_written: list[str] = []
        # Another thread may take a call that this one would have made, on some ranks and not on
        # others: the order of calls is no measure then.
        self._in_order = True

    def compare(self, call: str, requests: Sequence[GroupRequest]) -> None:
        """Compare a call that is about to make process groups with that of the other ranks.

        Args:
            call: what is called, such as "init_device_mesh".
            requests: one an axis.

        Raises:
            RuntimeError: another rank that came before is making something else.
        """
        store = self._world.store
        if store is None or not self._is_in_order():
            return
        if self._scope is None:
            ranks = self._rank_map.sorted().fingerprint
            self._scope = f"meshverse/check/{ranks}/{self._world.next_ordinal(f'check {ranks}')}"
        self._calls += 1
        key = f"{self._scope}/{self._calls}"
        mine = f"{self._world.rank} {self._digest(requests)} {self._text(call, requests)}"
        first = store.compare_set(key, "", mine).decode()
        if first == mine:
            self._keys_written.append(key)
        rank, digest, text = first.split(" ", 2)
        if digest != self._digest(requests):
            raise RuntimeError(
                f"Ranks are building different meshes (call {self._calls} over these ranks):\n"
                f"  rank {self._world.rank}: {self._text(call, requests)}\n"
                f"  rank {rank}, which came first: {text}\n"
                "All ranks of a mesh must make the same meshes with the same options in the same "
                f"order. (Set {CHECK_VARIABLE}=0 to turn this comparison off.)"
            )

    def forget(self) -> None:
        """Take what this rank wrote out of the store: its ranks are done with the universe."""
        while self._keys_written and self._world.store is not None:
            self._world.store.delete_key(self._keys_written.pop())

    def _is_in_order(self) -> bool:
        thread = threading.current_thread()
        if thread is not threading.main_thread() and thread.ident != self._world.thread_id:
            self._in_order = False
        return self._in_order

    def _digest(self, requests: Sequence[GroupRequest]) -> str:
        # 128 bits. The timeout is left out: c10d lets every rank choose its own.
        digest = hashlib.blake2b(self._rank_map.fingerprint.encode(), digest_size=16)
        for request in requests:
            digest.update(
                f"{request.axis_name}={request.axis} {request.options.name_key.digest}".encode()
            )
        return digest.hexdigest()

    def _text(self, call: str, requests: Sequence[GroupRequest]) -> str:
        sizes = ", ".join(f"{request.axis_name}={request.axis.size}" for request in requests)
        layouts = ", ".join(str(request.axis) for request in requests)
        options = " ".join(dict.fromkeys(str(request.options.key) for request in requests))
        return f"{call} ({sizes}) over {self._rank_map}, layout {layouts}, {options}"
