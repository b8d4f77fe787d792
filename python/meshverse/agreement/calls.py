"""Ranks compare what they are about to make. If they differ, all of them are told.

The first rank to come to a call writes what it is about to make. Every other rank gets that back
from its own attempt to write: one operation of the store per rank and call, and no rank waits.

A rank that is about to make something else writes, in place of the first rank's text, that the
ranks differ, and raises an error. Ranks that come later read that and raise too. Ranks that came
before and wait for other ranks look at the text once a second, and raise too. A rank that came
before and does not wait is told at its next call.

Example: rank 0 comes first and writes its rank, a digest, and for people "init_device_mesh (dp=2,
tp=2)". Rank 3 comes later with (dp=4, tp=1). It writes "!", the line of rank 0 and
its own line in its place.

After that the ranks can try again. A key has two numbers: how many calls succeeded on this rank,
and how many times the ranks differed. So the next attempt has a key of its own.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Iterable, Iterator

from .board import Board
from .claims import Claim, Statement, differences

__all__ = ["Call", "CallOrder", "RanksDifferError", "first_keys", "next_keys"]

_log = logging.getLogger(__name__)

_CURE = (
    "All ranks of a mesh must make the same meshes with the same options in the same order, and "
    "derive the same from them; a call that only some ranks made counts too. (Set "
    "MESHVERSE_CHECK_CONSISTENCY=0 to turn this comparison off.)"
)


_DIFFERENCE = "!"  # begins the text of a call in which the ranks differ
_EARLIER = "^"  # begins the text of a call, if the ranks differed in an earlier one


_MISSED = "the ranks differed in a call that had succeeded here"


class RanksDifferError(RuntimeError):
    """Ranks are building different meshes: every rank of the call gets this error."""

    __module__ = "meshverse"  # as tracebacks print it, and where users import it from


class CallOrder:
    """The calls that some ranks make together, in order, as this rank has made them.

    Args:
        scope: see below.
        roots: order of the calls that made root meshes, one of which these calls derive from.
        is_first: whether this rank is the first of these ranks, which warns for all of them.

    Attributes:
        scope: the same text on all ranks that are compared with each other.
        calls: how many calls succeeded here. All these ranks have the same number.
        differences: how many times these ranks differed, and were told.
    """

    def __init__(
        self, scope: str, roots: CallOrder | None = None, *, is_first: bool = True
    ) -> None:
        self.scope = scope
        self._level = logging.WARNING if is_first else logging.INFO
        self._roots = roots
        self.calls = 0
        self.differences = 0
        self._has_missed_one = False
        self._why_stopped = ""
        self._has_said_so = False
        self._lock = threading.Lock()  # protects `calls`

    def advance(self) -> tuple[int, str]:
        """Note that the next call has succeeded here; its number and its label."""
        with self._lock:
            number, label = self.calls, self.label
            self.calls += 1
        return number, label

    @property
    def label(self) -> str:
        """The next call's place in the order, the same on all ranks that are compared."""
        return f"{self.calls}.{self.differences}"

    def stop_comparing(self, why: str) -> None:
        """Compare no more calls of this scope."""
        self._why_stopped = self._why_stopped or why

    def note_missed(self, scope: str) -> None:
        """Note that the ranks differed in an earlier call of a scope, which succeeded here.

        The other ranks may try that call again, while this rank goes on to another one. So there is
        nothing to compare any more. The ranks may still make groups together: the number of a
        group's meeting contains `differences`, so this rank counts the difference as they do.
        """
        for order in (self, self._roots):
            if order is not None and order.scope == scope:
                order.differences += 1
                order._has_missed_one = True
        self.stop_comparing(_MISSED)

    def is_compared(self) -> bool:
        """Whether the next call is compared. The log says so once if not."""
        if self._has_missed_one or (self._roots is not None and self._roots._has_missed_one):
            self.stop_comparing(_MISSED)
        if self._why_stopped and not self._has_said_so:
            self._has_said_so = True
            _log.log(
                self._level,
                "Meshverse no longer compares some calls of this rank with those of other ranks: "
                "%s. If ranks build different meshes now, they may wait until their timeout.",
                self._why_stopped,
            )
        return not self._why_stopped


class Call:
    """One call that is compared, seen from one rank.

    Args:
        board: of the run.
        order: that the call is the next of.
        digest: of what this rank is about to make.
        statement: the same for people.

    Attributes:
        differences: how many times the ranks had differed before this call.
        is_compared: whether this call is compared with those of other ranks.
        keys_written: by this rank, to be removed later.
    """

    def __init__(self, board: Board, order: CallOrder, digest: str, statement: Statement) -> None:
        self._board, self._order = board, order
        self._mine = Claim(board.rank, digest, statement)
        self._key = f"calls/{order.scope}/{order.label}"
        self.differences, self.is_compared = order.differences, order.is_compared()
        self.keys_written: list[str] = []

    def compare(self, later: Iterable[Iterator[str]]) -> None:
        """Compare this call with that of the other ranks, if its order is compared.

        Args:
            later: keys of calls that follow this one, in order, one iterator for each order of
                calls. A rank that came before the difference and has left this call is told at a
                later one: the difference is written under the first key that is still free.

        Raises:
            RanksDifferError: the ranks differ.
        """
        if not self.is_compared:
            return
        mine, found = self._mine.to_line(), ""
        while not _is_difference(found):
            first_line = self._board.put_first(self._key, mine)
            if first_line == mine:
                self.keys_written.append(self._key)
                return
            found = first_line
            if not _is_difference(found):
                first = Claim.read(first_line)
                if first.digest == self._mine.digest:
                    return
                difference = f"{_DIFFERENCE}{first_line}\n{mine}"
                # If the first rank's call failed meanwhile, its text is gone: then compare anew.
                found = self._board.replace(self._key, first_line, difference)
                if found == difference:
                    self._tell_at(later, difference)
        raise self._difference(found)

    def _tell_at(self, later: Iterable[Iterator[str]], difference: str) -> None:
        told = f"{_EARLIER}{difference}\n{self._order.scope}"
        for keys in later:
            for key in keys:
                found = self._board.put_first(key, told)
                if found == told:
                    self.keys_written.append(key)
                if _is_difference(found):
                    break

    def check(self) -> None:
        """Raise RanksDifferError if another rank has found a difference since this rank came.

        One operation of the store.
        """
        found = self._board.read(self._key) if self.is_compared else ""
        if _is_difference(found):
            raise self._difference(found)

    def catch_up(self, differences: int) -> None:
        """Take over how many times other ranks differed, if this rank's calls are not compared."""
        if not self.is_compared and differences > self.differences:
            self.differences = self._order.differences = differences

    def why_it_failed(self, error: BaseException) -> BaseException:
        """The error to raise: RanksDifferError if another rank has found a difference since.

        Otherwise it is the error itself. The call may then have succeeded on other ranks, and this
        rank cannot know who tries it again, so it compares no more calls.
        """
        if not self.is_compared:
            return error
        found = self._board.read(self._key)
        if _is_difference(found):
            return self._difference(found)
        self._order.stop_comparing(
            f"one failed here with {type(error).__name__}, and may have succeeded on other ranks"
        )
        if self._key in self.keys_written:
            self.keys_written.remove(self._key)
            self._board.remove(self._key)
        return error

    def _difference(self, found: str) -> RanksDifferError:
        is_earlier = found.startswith(_EARLIER)
        claims = found.removeprefix(_EARLIER).removeprefix(_DIFFERENCE).split("\n")
        first, later = map(Claim.read, claims[:2])
        told = [] if is_earlier else [(self._mine, "")]
        for claim, came in ((first, ", which came first"), (later, ", which came later")):
            if is_earlier or claim.digest != self._mine.digest:
                told.append((claim, came))
        if is_earlier:
            self._order.note_missed(scope=claims[2])
            begin = "Ranks were building different meshes in an earlier call:"
        else:
            self._order.differences += 1
            begin = "Ranks are building different meshes:"
        differ = [f"  {line}" for line in differences([first, later])]
        who = [f"  rank {claim.rank}{came}: {claim.statement}" for claim, came in told]
        return RanksDifferError("\n".join([begin, *differ, "Who builds what:", *who, _CURE]))


def next_keys(order: CallOrder) -> Iterator[str]:
    """Keys of the calls that follow the next one of an order."""
    return (
        f"calls/{order.scope}/{calls}.{order.differences}"
        for calls in itertools.count(order.calls + 1)
    )


def first_keys(scope: str) -> Iterator[str]:
    """Keys of the calls of a scope, from the first one on."""
    return (f"calls/{scope}/{calls}.0" for calls in itertools.count())


def _is_difference(text: str) -> bool:
    return text.startswith((_DIFFERENCE, _EARLIER))
