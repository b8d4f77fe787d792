"""Ranks that build different meshes are told so, instead of waiting for each other for ever.

Every call that makes process groups is compared through the store of the default process group,
one operation a rank and no barrier: the first rank to come writes down what it is about to make;
every other rank is given that back, and raises if it is about to make something else.

The ranks that are compared are those of one universe, in the order of its calls. Ranks that
disagree about *which ranks* a mesh has are in no common universe; they find out when they meet to
make its groups, see `rendezvous`. Calls from other threads than the main one are not compared, as
their order means nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
from collections.abc import Iterator, Sequence

import torch.distributed as dist

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


class RootOrder:
    """The order in which meshes over one set of ranks are made, in one world, by the main thread.

    Attributes:
        next_root: number of the next universe that makes groups.
        holds: whether the order means something. Once another thread has taken part it does not:
            that thread may come sooner on one rank than on another. Nor does it once a call has
            failed, which other ranks may not know.
    """

    def __init__(self) -> None:
        self.next_root = 0
        self.holds = True


class ConsistencyCheck:
    """The calls of one universe, compared between its ranks.

    Args:
        rank_map: the universe's.
        world: the default group whose store is used.
        lazy: whether groups are made when they are first used.
    """

    def __init__(self, rank_map: RankMap, world: World, *, lazy: bool) -> None:
        self._rank_map = rank_map
        self._how = "lazy" if lazy else "at once"
        self._world = world
        ranks = rank_map.sorted().fingerprint
        self._order: RootOrder = world.root_orders.setdefault(ranks, RootOrder())
        self._prefix = f"meshverse/check/{world.life}/{ranks}"
        self._root: int | None = None
        self._calls = 0  # that were found equal
        self._keys_written: list[str] = []

    @contextlib.contextmanager
    def compared(self, call: str, requests: Sequence[GroupRequest]) -> Iterator[None]:
        """Compare a call that makes process groups with that of the other ranks, then let it.

        Args:
            call: what is called, such as "init_device_mesh".
            requests: one an axis.

        Raises:
            RuntimeError: another rank that came before is making something else.
        """
        key = self._compare(call, requests)
        with contextlib.ExitStack() as failed:
            if key is not None:
                failed.callback(self._give_up, key)
            yield
            failed.pop_all()

    def _compare(self, call: str, requests: Sequence[GroupRequest]) -> str | None:
        """The key under which the call was found equal; None where it is not compared."""
        store = self._world.store
        if not self._is_main_thread():
            self._order.holds = False
        if store is None or not self._order.holds:
            return None
        # Numbers go on only for what is equal, so that a call can be tried again.
        root = self._order.next_root if self._root is None else self._root
        key = f"{self._prefix}/{root}/{self._calls}"
        digest, text = self._digest(requests), self._text(call, requests)
        mine = f"{self._world.rank} {digest} {text}"
        first = store.compare_set(key, "", mine).decode()
        rank, first_digest, first_text = first.split(" ", 2)
        if first_digest != digest:
            raise RuntimeError(
                f"Ranks are building different meshes (call {self._calls + 1} of mesh {root + 1} "
                "over these ranks):\n"
                f"  rank {self._world.rank}: {text}\n"
                f"  rank {rank}, which came first: {first_text}\n"
                "All ranks of a mesh must make the same meshes with the same options in the same "
                "order, and derive the same from them; a call that only some ranks made counts "
                f"too. (Set {CHECK_VARIABLE}=0 to turn this comparison off.)"
            )
        if first == mine:
            self._keys_written.append(key)
        if self._root is None:
            self._root = root
            self._order.next_root += 1
        self._calls += 1
        return key

    def _give_up(self, key: str) -> None:
        # It may have succeeded on other ranks, and who tries it again, and how, nobody can know.
        self._order.holds = False
        if key in self._keys_written:
            self._keys_written.remove(key)
            with contextlib.suppress(RuntimeError):  # the store's, which would hide why it failed
                self._delete([key])

    def forget(self) -> None:
        """Take what this rank wrote out of the store: its ranks are done with the universe."""
        self._delete(self._keys_written)
        self._keys_written.clear()

    def _delete(self, keys: Sequence[str]) -> None:
        store = self._world.store
        if store is None:
            return
        with contextlib.suppress(dist.DistError):  # where the store's host is gone, so are the keys
            for key in keys:
                store.delete_key(key)

    def _is_main_thread(self) -> bool:
        thread = threading.current_thread()
        return thread is threading.main_thread() or thread.ident == self._world.thread_id

    def _digest(self, requests: Sequence[GroupRequest]) -> str:
        # 128 bits. A timeout that comes from the default group is left out: c10d lets every rank
        # choose its own there.
        begin = f"{self._how} {self._rank_map.fingerprint}"
        digest = hashlib.blake2b(begin.encode(), digest_size=16)
        for request in requests:
            options = request.options
            key = options.key if options.says_timeout else options.name_key
            digest.update(f"{request.axis_name}={request.axis} {key.digest}\n".encode())
        return digest.hexdigest()

    def _text(self, call: str, requests: Sequence[GroupRequest]) -> str:
        sizes = ", ".join(f"{request.axis_name}={request.axis.size}" for request in requests)
        layouts = ", ".join(str(request.axis) for request in requests)
        options = " ".join(dict.fromkeys(str(request.options.key) for request in requests))
        return f"{call} ({sizes}), {self._how}, over {self._rank_map}, layout {layouts}, {options}"
