"""Ranks compare the calls in which they make process groups. A mismatch is an error on all of them.

Compared are the calls for which torch makes process groups, which all ranks of a mesh therefore
make in one order. Each set of ranks counts its calls. The first rank to come to a call stores its
description; every other rank gets that back from its own attempt to store: one operation of the
store per rank and call, and no rank waits.

A rank whose description differs stores both descriptions under one key of these ranks, which means
that they disagree, and marks this call and the first one that nobody has come to yet. So ranks that
come later, and ranks that were ahead, find the mark at their next call. Ranks that wait for others
read the one key once a second. A mismatch is final: every later call of these ranks raises it.

Example: rank 0 comes first and stores "init_device_mesh (dp=2, tp=2)" with a digest. Rank 3 calls
init_device_mesh (dp=4, tp=1): it stores both descriptions, and all ranks raise RanksDifferError.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from meshverse.world.run_store import RunStore
from meshverse.world.world import WorldState

_log = logging.getLogger(__name__)

_VARIABLE = "MESHVERSE_CHECK_CONSISTENCY"
_CURE = (
    "All ranks of a mesh must make the same meshes with the same options in the same order, and "
    f"derive the same from them. Mend the program and start it again. ({_VARIABLE}=0 turns this "
    "comparison off.)"
)
_DISAGREE = "!"  # the text of a call at which ranks learn that they disagree


def check_by_default() -> bool:
    """Return whether the environment leaves the comparison on.

    Raises:
        ValueError: the variable is neither "0" nor "1".
    """
    value = os.environ.get(_VARIABLE, "1")
    if value not in ("0", "1"):
        raise ValueError(
            f"{_VARIABLE}={value!r}: set it to 0 to turn the comparison of meshes between "
            "ranks off, or to 1 to leave it on."
        )
    return value == "1"


class RanksDifferError(RuntimeError):
    """Ranks are building different meshes: every rank of the mesh gets this error."""

    __module__ = "meshverse"  # as tracebacks print it, and where users import it from


class Description(NamedTuple):
    """A rank's description of the groups that it is about to make.

    Attributes:
        rank: global rank.
        digest: equal if and only if the ranks agree.
        call: what the user called, such as "init_device_mesh".
        sizes: of the new axes, by name, in their order.
        facts: what else matters, by name.
        line: file and line of the user's program that called.
    """

    rank: int
    digest: str
    call: str
    sizes: Mapping[str, int]
    facts: Mapping[str, str]
    line: str

    def __str__(self) -> str:
        sizes = ", ".join(f"{name}={size}" for name, size in self.sizes.items())
        facts = ", ".join(f"{name} {fact}" for name, fact in self.facts.items())
        return f"{self.call} ({sizes}) at {self.line}: {facts}"

    def compared(self) -> dict[str, str]:
        """Return all of it by name, but for the line, which may differ."""
        axes = {f"axis {name}": str(size) for name, size in self.sizes.items()}
        order = {"order of axes": ", ".join(self.sizes)}
        return {"call": self.call, **axes, **order, **self.facts}


class _Calls:
    """The calls of one set of ranks, as this rank has made them."""

    def __init__(self) -> None:
        self.n_compared = 0
        self.n_universes = 0
        self.mismatch = ""  # the error, once these ranks disagree
        self.why_stopped = ""
        self.has_said_so = False


class ComparedCalls(WorldState):
    """The calls of this rank that make process groups in one world."""

    def __init__(self) -> None:
        self._by_ranks: dict[str, _Calls] = {}

    def begin_again(self) -> None:
        """Compare from the first call on; universes go on being numbered."""
        n_universes = {ranks: calls.n_universes for ranks, calls in self._by_ranks.items()}
        self._by_ranks.clear()
        for ranks, number in n_universes.items():
            self._of(ranks).n_universes = number

    def compare(
        self,
        store: RunStore,
        ranks: str,
        mine: Description,
        keys_written: list[str],
        *,
        is_first: bool = True,
    ) -> None:
        """Compare a call with that of the other ranks.

        Args:
            store: of the run.
            ranks: fingerprint of the ranks of the call.
            mine: describes this rank's call.
            keys_written: takes the key that this rank writes, to be removed later.
            is_first: whether this rank is the first of them, which warns for all.

        Raises:
            RanksDifferError: the ranks disagree, in this call or an earlier one.
        """
        calls = self._of(ranks)
        if calls.mismatch:
            raise RanksDifferError(calls.mismatch)
        if calls.why_stopped:
            self._say_so(calls, is_first)
            return
        key, text = _key(ranks, calls.n_compared), json.dumps(mine)
        found = store.put_first(key, text)
        if found == text:
            keys_written.append(key)
        elif found == _DISAGREE:
            raise self._error(ranks, store.read(_mismatch_key(ranks)))
        elif (first := Description(*json.loads(found))).digest != mine.digest:
            both = store.put_first(_mismatch_key(ranks), json.dumps([first, mine]))
            store.write(key, _DISAGREE)
            for number in itertools.count(calls.n_compared + 1):
                if store.put_first(_key(ranks, number), _DISAGREE) == _DISAGREE:
                    break
            raise self._error(ranks, both)
        calls.n_compared += 1  # not before: an interrupted rank compares the same call again

    def check(self, store: RunStore) -> None:
        """Raise RanksDifferError if others have found a mismatch that this rank does not know.

        One operation for each set of ranks whose calls this rank has made.
        """
        for ranks, calls in dict(self._by_ranks).items():
            if calls.n_compared == 0 or calls.mismatch:
                continue
            if both := store.read(_mismatch_key(ranks)):
                raise self._error(ranks, both)

    def stop(self, ranks: str, why: str) -> None:
        """Compare no more calls of these ranks: this rank may be out of step with the others.

        Args:
            ranks: their fingerprint.
            why: the reason, for the log, which says so at the next call.
        """
        calls = self._of(ranks)
        calls.why_stopped = calls.why_stopped or why

    def _say_so(self, calls: _Calls, is_first: bool) -> None:
        if not calls.has_said_so:
            calls.has_said_so = True
            _log.log(
                logging.WARNING if is_first else logging.INFO,
                "Meshverse no longer compares some calls of this rank with those of other ranks: "
                "%s. If ranks build different meshes now, they may wait until their timeout.",
                calls.why_stopped,
            )

    def number_universe(self, ranks: str) -> int:
        """Return the number of a new universe among those of these ranks, from 0."""
        calls = self._of(ranks)
        calls.n_universes += 1
        return calls.n_universes - 1

    def _of(self, ranks: str) -> _Calls:
        return self._by_ranks.get(ranks) or self._by_ranks.setdefault(ranks, _Calls())

    def _error(self, ranks: str, both: str) -> RanksDifferError:
        descriptions = sorted(Description(*each) for each in json.loads(both))  # by rank
        lines = [f"  {line}" for line in _differences(descriptions)]
        who = [f"  rank {each.rank}: {each}" for each in descriptions]
        text = "\n".join(
            ["Ranks are building different meshes:", *lines, "Who builds what:", *who, _CURE]
        )
        self._of(ranks).mismatch = text
        return RanksDifferError(text)


def _key(ranks: str, number: int) -> str:
    return f"calls/{ranks}/{number}"


def _mismatch_key(ranks: str) -> str:
    return f"calls/{ranks}/mismatch"


def _differences(descriptions: Sequence[Description]) -> list[str]:
    """Return the differences between two descriptions, a line each."""
    first, second = (each.compared() for each in descriptions)
    ranks = [f"on rank {each.rank}" for each in descriptions]
    lines = {}
    for name in dict.fromkeys([*first, *second]):
        values = [first.get(name, "none"), second.get(name, "none")]
        if values[0] != values[1]:
            lines[name] = f"{name}: {values[0]} {ranks[0]}, {values[1]} {ranks[1]}"
    if any(name.startswith("axis ") for name in lines):  # then these follow from them
        lines.pop("strides", None)
        if first.keys() == second.keys():
            lines.pop("order of axes", None)
    return list(lines.values())
