"""What ranks compare before they make process groups, and with whom.

A call is compared between the ranks of the mesh that it makes. Example: `init_device_mesh` over 8
ranks concerns all 8. In the pipeline stage of ranks 0 to 3, `stage.unflatten(...)` concerns these
4: the stage of ranks 4 to 7 may do something else. If all ranks must take part in making one of the
groups, the call concerns all ranks of the universe.

Ranks that disagree about *which ranks* a mesh has do not meet here. They find out when they wait
for each other, see `agreement`. Calls from other threads than the main one are not compared, as
their order means nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch.distributed as dist

from meshverse._core import AxisLayout, Layout, RankMap
from meshverse.agreement import (
    Call,
    CallOrder,
    RanksDifferError,
    Statement,
    first_keys,
    next_keys,
    users_line,
)
from meshverse.groups.creation import needs_all_ranks
from meshverse.groups.request import GroupRequest
from meshverse.world.world import World, WorldState

__all__ = ["ConsistencyCheck", "RootOrders", "check_by_default"]

_Made = TypeVar("_Made")

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


class RootOrders(WorldState):
    """The orders in which ranks of one world make root meshes together."""

    def __init__(self) -> None:
        self._orders: dict[str, CallOrder] = {}

    def of(self, ranks: str, *, is_first: bool) -> CallOrder:
        """The order of some ranks.

        Args:
            ranks: the same text on all these ranks, and on no others.
            is_first: whether this rank is the first of them.
        """
        order = self._orders.get(ranks)
        return order or self._orders.setdefault(ranks, CallOrder(ranks, is_first=is_first))


class ConsistencyCheck:
    """The calls of one universe, in an order that its ranks agree on.

    Args:
        rank_map: the universe's.
        position: this rank's, or None if it is outside.
        world: the default group whose store is used.
        user: of the board, which stands for this universe.
        lazy: whether groups are made when they are first used.
        compares: whether calls are compared; if not, only the first is counted.
        part_of: the check of the universe that this one is a part of, if it is.

    Attributes:
        ranks: the universe's, in any order: the same text for the same ranks.
        number: which one this is among the universes that its ranks made together: 0, 1, 2, ...
            None until its first call has succeeded.
    """

    def __init__(
        self,
        rank_map: RankMap,
        position: int | None,
        world: World,
        user: object,
        *,
        lazy: bool,
        compares: bool,
        part_of: ConsistencyCheck | None = None,
    ) -> None:
        self._rank_map, self._position = rank_map, position
        self._how = "lazy" if lazy else "at once"
        self._world = world
        self._compares = compares and position is not None
        in_order = rank_map.sorted()
        self.ranks = in_order.fingerprint
        self._part_of = None if part_of is None else part_of._in_words()
        self._fingerprint_of_whole = "" if part_of is None else part_of._rank_map.fingerprint
        # The first call of a universe is one of all universes of these ranks; it gives this one its
        # number. Later calls are counted within this universe, for each set of ranks by itself.
        is_first = in_order.rank_at(0) == world.rank
        self._roots = world.state(RootOrders).of(self.ranks, is_first=is_first)
        self._scope = ""  # begins the keys of the later calls: which universe they are of
        self._orders: dict[str, CallOrder] = {}  # of the later calls, by the ranks they concern
        self._keys_written: list[str] = []
        self._user = user
        self.number: int | None = None

    def run(
        self,
        make: Callable[[Call | None], _Made],
        name: str,
        requests: Sequence[GroupRequest],
        layout: Layout,
    ) -> _Made:
        """Compare a call that makes process groups with that of the other ranks, then let it.

        Args:
            make: makes the groups. It gets the call, for those who wait for other ranks in it, or
                None if this universe compares none.
            name: what is called, such as "init_device_mesh".
            requests: one an axis.
            layout: of the mesh that the call makes.

        Returns:
            What `make` gave.

        Raises:
            RanksDifferError: another rank is making something else.
            Whatever `make` raised.
        """
        is_first = self.number is None
        if not (is_first or self._compares):  # and so will no later call be
            return make(None)
        order = self._roots if is_first else self._order_of(requests, layout)
        call = self._begin(name, requests, order)
        if call is not None:
            later = [next_keys(order)]
            if is_first:
                later.append(first_keys(f"{order.scope}/{order.label}/all"))
            try:
                call.compare(later)
            finally:
                self._keys_written += call.keys_written
        try:
            made = make(call)
        except BaseException as error:
            if call is None or isinstance(error, RanksDifferError):
                raise
            cause = _why_it_failed(call, error)
            if cause is error:
                raise
            raise cause from error
        self._note_success(order, call)
        return made

    def _note_success(self, order: CallOrder, call: Call | None) -> None:
        number, label = order.advance()
        if self.number is None:
            self.number, self._scope = number, f"{order.scope}/{label}"
            # If not compared here, other ranks may count it under another number.
            self._compares = call is not None and call.is_compared

    def _order_of(self, requests: Sequence[GroupRequest], layout: Layout) -> CallOrder:
        part = "all"
        position = self._position
        is_whole = layout.size == self._rank_map.size
        if (
            position is not None
            and not is_whole
            and not any(needs_all_ranks(one, self._world) for one in requests)
        ):
            # The same text for all ranks of this copy of the mesh, and for no other rank. Example:
            # 8 ranks in pipeline stages of 4. The calls of ranks 4 to 7 are those of "4:1@4".
            first = layout.base(position)
            part = f"{layout.collapse().sorted()}@{first}"
        else:
            first = 0
        order = CallOrder(f"{self._scope}/{part}", self._roots, is_first=position == first)
        return self._orders.setdefault(part, order)

    def _begin(self, name: str, requests: Sequence[GroupRequest], order: CallOrder) -> Call | None:
        board = self._world.board if self._compares else None
        if board is None:
            return None
        if not self._is_main_thread():
            order.stop_comparing("a thread beside the main one made process groups")
        self._world.run.add_user(self._user)
        return Call(board, order, self._digest(requests), self._statement(name, requests))

    def remove_from_store(self) -> None:
        """Remove this rank's texts. Call it when all ranks of the universe are done with it."""
        board = self._world.board if self._keys_written else None
        if board is None:
            return
        while self._keys_written:
            board.remove(self._keys_written[-1])
            self._keys_written.pop()

    def _in_words(self) -> str:
        """Which universe this is, the same on all its ranks."""
        state = "without a mesh yet" if self.number is None else f"number {self.number}"
        return f"the universe of {self._rank_map}, {state}"

    def _is_main_thread(self) -> bool:
        thread = threading.current_thread()
        return thread is threading.main_thread() or thread.ident == self._world.thread_id

    def _digest(self, requests: Sequence[GroupRequest]) -> str:
        # 128 bits. A timeout that comes from the default group is left out: c10d lets every rank
        # choose its own there.
        begin = f"{self._how} {self._rank_map.fingerprint}"
        if self._part_of is not None:
            begin += f" {self._part_of} {self._fingerprint_of_whole}"
        digest = hashlib.blake2b(begin.encode(), digest_size=16)
        for request in requests:
            options = request.options
            what = options.digest if options.says_timeout else options.name_digest
            digest.update(f"{request.axis_name}={request.axis} {what}\n".encode())
        return digest.hexdigest()

    def _statement(self, call: str, requests: Sequence[GroupRequest]) -> Statement:
        facts = {
            "made": self._how,
            "over": str(self._rank_map),
            "strides": f"({', '.join(_stride(request.axis) for request in requests)})",
            "options": " and ".join(dict.fromkeys(one.options.in_words() for one in requests)),
        }
        if self._part_of is not None:
            facts["part of"] = self._part_of
        sizes = {request.axis_name: request.axis.size for request in requests}
        return Statement(call, sizes, facts, users_line())


def _stride(axis: AxisLayout) -> str:
    # As torch prints meshes; of an axis with several, the sizes too.
    if len(axis.strides) < 2:
        return str(axis.strides[0] if axis.strides else 0)
    return f"{axis.strides} of {axis.sizes}"


def _why_it_failed(call: Call, error: BaseException) -> BaseException:
    with contextlib.suppress(dist.DistError):  # of the store; the error itself says more
        cause = call.why_it_failed(error)
        return cause if isinstance(error, Exception) else error
    return error
