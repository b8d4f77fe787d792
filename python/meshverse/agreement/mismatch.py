"""Comparison of the calls in which ranks request process groups. A mismatch raises an error.

Compared calls are those that need other process groups than the default group: all ranks of a mesh
must make them in the same order. Each rank numbers its calls, separately for each set of ranks. The
first rank that makes call number n of a set stores its description under the key of that call.
Every other rank tries the same, and gets back the stored description. This takes one store
operation per rank and call, and no rank waits.

A call's key stays until all ranks of the set are past the call: a rank that arrives late finds it.
Every 32 calls, each rank counts itself as past them, with one more operation; the last rank to do
so removes their keys. So the store keeps the keys of at most 64 calls, plus those that the
slowest rank has yet to make. A set with a rank that compares no more calls keeps all keys.

If the stored description has another digest than a rank's own, these ranks disagree. The rank then
writes

- both descriptions, under the mismatch key of the set, and a mark under a key of all sets;
- a mark in place of this call's description: ranks that make the call later find it;
- the same mark under the key of the next call that no rank has made yet: ranks that are ahead find
  it there.

Ranks that wait for other ranks read the key of all sets about once a second, and the mismatch keys
of their own sets only if it has the mark. So a rank raises RanksDifferError within seconds if it
waits, and otherwise at the latest at the first call that no rank had made when the mismatch was
found. A mismatch is final: once a rank has raised it, each of its later calls for this set of ranks
raises it too.

Example: rank 0 is first, and stores "init_device_mesh (dp=2, tp=2)" with a digest. Rank 3 calls
init_device_mesh (dp=4, tp=1), finds the other description, stores both, and raises.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from meshverse.store import StoreKeys
from meshverse.world import World, WorldState

_log = logging.getLogger(__name__)

_VARIABLE = "MESHVERSE_CHECK_CONSISTENCY"
_CURE = (
    "All ranks of a mesh must create and derive the same meshes in the same order, with the same\n"
    "options. Either of these two ranks may be the wrong one, or be one call ahead; others were\n"
    "not asked. Ranks that create no more groups raise no error: end the job on all ranks, and\n"
    "fix the program.\n"
    f"({_VARIABLE}=0 turns this comparison off.)"
)
_REMOVED_TOGETHER = 32  # calls whose keys are removed at once
_DISAGREE = "!"  # the mark; stored in place of a call's description
_MISMATCHES_KEY = "calls/mismatches"  # has the mark if any set of ranks has a mismatch


def check_by_default() -> bool:
    """Return whether the environment leaves the comparison on.

    Raises:
        ValueError: the environment variable is set to neither "0" nor "1".
    """
    value = os.environ.get(_VARIABLE, "1")
    if value not in ("0", "1"):
        raise ValueError(
            f"{_VARIABLE}={value!r}: set it to 0 to turn the comparison of meshes between "
            "ranks off, or to 1 to leave it on."
        )
    return value == "1"


class RanksDifferError(RuntimeError):
    """Error of ranks that are building different meshes.

    The rank that finds the mismatch raises it at once. Another rank of the mesh raises it within
    seconds if it waits for the members of a group, otherwise at a later compared call. A rank that
    does neither does not raise it.
    """

    __module__ = "meshverse"  # as tracebacks print it, and where users import it from


class Description(NamedTuple):
    """A rank's description of a call that requests process groups.

    Attributes:
        rank: global rank.
        digest: the value that ranks compare; it stands for everything that must be the same.
        call: the function that the user called, such as "init_device_mesh".
        sizes: sizes of the new axes by name, in axis order.
        facts: other properties by name, such as the options, for the error.
        line: file and line of the call in the user's program.
    """

    rank: int
    digest: str
    call: str
    sizes: Mapping[str, int]
    facts: Mapping[str, str]
    line: str

    def __str__(self) -> str:
        facts = ", ".join(f"{name} {fact}" for name, fact in self.facts.items())
        return f"{self.call} {self._axes()} at {self.line}\n    {facts}"

    def _axes(self) -> str:
        return f"({', '.join(f'{name}={size}' for name, size in self.sizes.items())})"

    def compared(self) -> dict[str, str]:
        """Return what an error compares, by name: all but the rank, the digest and the line."""
        return {"call": self.call, "axes": self._axes(), **self.facts}


class _Calls:
    """This rank's compared calls for one set of ranks."""

    def __init__(self) -> None:
        self.n_compared = 0
        self.n_counted = 0  # of these, those that the store counts this rank as past
        self.mismatch = ""  # the error message, once these ranks disagree
        self.has_raised = False  # whether the program got that error
        self.why_stopped = ""  # the reason, once this rank compares no more calls
        self.has_logged_stop = False


class ComparedCalls(WorldState):
    """This rank's compared calls in one world, for every set of ranks."""

    def __init__(self) -> None:
        self._by_fingerprint: dict[str, _Calls] = {}

    def on_revive(self, current: World) -> None:
        """Keep this world's counts, not those of `current`.

        Stop comparing calls for each set of ranks that disagreed: its ranks may have made different
        numbers of calls.
        """
        for calls in self._by_fingerprint.values():
            if calls.mismatch:
                calls.mismatch, calls.why_stopped = "", "the ranks disagreed before revive()"
                calls.has_raised = False

    def keep_counts(self, fingerprints: Collection[str]) -> None:
        """Keep the counts of these sets of ranks and drop the others.

        All ranks of a set must pass it.
        """
        self._by_fingerprint = {
            fingerprint: calls
            for fingerprint, calls in self._by_fingerprint.items()
            if fingerprint in fingerprints
        }

    def compare(
        self,
        store: StoreKeys,
        fingerprint: str,
        mine: Description,
        keys_written: list[str],
        *,
        n_ranks: int,
        warns: bool = True,
    ) -> None:
        """Compare a call with the same call of the other ranks.

        Args:
            store: store of the default group, with the keys of this run.
            fingerprint: fingerprint of the set of ranks that must make this call.
            n_ranks: number of these ranks.
            mine: description of this rank's call.
            keys_written: list to which a key is added if this rank writes one, to be removed later.
            warns: whether this rank logs a warning if it no longer compares calls; other ranks log
                at INFO.

        Raises:
            RanksDifferError: the ranks disagree, in this call or an earlier one.
        """
        calls = self._of(fingerprint)
        if calls.mismatch:
            calls.has_raised = True
            raise RanksDifferError(calls.mismatch)
        if calls.why_stopped:
            self._log_stop(calls, warns)
            return
        if calls.n_compared >= calls.n_counted + _REMOVED_TOGETHER:
            self._remove_past(store, fingerprint, calls, keys_written, n_ranks)
        key, own = _key(fingerprint, calls.n_compared), json.dumps(mine)
        found = store.put_first(key, own)
        if found == own:
            keys_written.append(key)
        elif found == _DISAGREE:
            raise self._error(fingerprint, store.read(_mismatch_key(fingerprint)))
        elif (first := Description(*json.loads(found))).digest != mine.digest:
            store.write(_MISMATCHES_KEY, _DISAGREE)  # first, in case this rank is interrupted
            both = store.put_first(_mismatch_key(fingerprint), json.dumps([first, mine]))
            store.write(key, _DISAGREE)
            for number in itertools.count(calls.n_compared + 1):
                if store.put_first(_key(fingerprint, number), _DISAGREE) == _DISAGREE:
                    break
            raise self._error(fingerprint, both)
        calls.n_compared += 1  # last: a rank that is interrupted compares the same call again

    def _remove_past(
        self,
        store: StoreKeys,
        fingerprint: str,
        calls: _Calls,
        keys_written: list[str],
        n_ranks: int,
    ) -> None:
        """Count this rank as past some calls. The last rank of the set removes their keys."""
        first = calls.n_counted
        # Before it counts: if this rank is interrupted, the keys stay. None goes too early.
        calls.n_counted += _REMOVED_TOGETHER
        key = _past_key(fingerprint, calls.n_counted)
        n_past = store.count(key)
        if n_past == n_ranks:
            for number in range(first, calls.n_counted):
                store.remove(_key(fingerprint, number))
            store.remove(key)
        elif n_past == 1:
            keys_written.append(key)

    def find_mismatch(self, store: StoreKeys) -> RanksDifferError | None:
        """Return the error of a mismatch that another rank has found, or None.

        If you raise it, call `note_raised`. Until then, each call returns it: a rank that goes on
        all the same, as all members of a group have joined, must not wait for the next group's
        members, which may have raised.

        One store operation; if some ranks of the job disagree, one more for each set of ranks with
        which this rank has compared a call.
        """
        has_any: str | None = None
        for fingerprint, calls in dict(self._by_fingerprint).items():
            if calls.n_compared == 0 or calls.has_raised:
                continue
            if calls.mismatch:
                return RanksDifferError(calls.mismatch)
            has_any = store.read(_MISMATCHES_KEY) if has_any is None else has_any
            if has_any and (both := store.read(_mismatch_key(fingerprint))):
                return self._error(fingerprint, both, is_raised=False)
        return None

    def raise_known(self, fingerprints: Collection[str]) -> None:
        """Raise RanksDifferError if this rank knows that one of these sets of ranks disagrees."""
        for fingerprint in fingerprints:
            calls = self._of(fingerprint)
            if calls.mismatch:
                calls.has_raised = True
                raise RanksDifferError(calls.mismatch)

    def note_raised(self, error: RanksDifferError) -> None:
        """Note that the program gets this error, which `find_mismatch` returned."""
        for calls in dict(self._by_fingerprint).values():
            calls.has_raised |= calls.mismatch == str(error)

    def stop(self, fingerprint: str, why: str) -> None:
        """Compare no more calls of a set of ranks: this rank's call numbers may differ from theirs.

        Args:
            fingerprint: fingerprint of the set.
            why: reason, which is logged at the next call.
        """
        calls = self._of(fingerprint)
        calls.why_stopped = calls.why_stopped or why

    def _log_stop(self, calls: _Calls, warns: bool) -> None:
        if not calls.has_logged_stop:
            calls.has_logged_stop = True
            _log.log(
                logging.WARNING if warns else logging.INFO,
                "Meshverse no longer compares some calls of this rank with those of other ranks: "
                "%s. If ranks build different meshes now, they may wait until their timeout.",
                calls.why_stopped,
            )

    def _of(self, fingerprint: str) -> _Calls:
        known = self._by_fingerprint.get(fingerprint)
        return known or self._by_fingerprint.setdefault(fingerprint, _Calls())

    def _error(self, fingerprint: str, both: str, *, is_raised: bool = True) -> RanksDifferError:
        descriptions = sorted(Description(*each) for each in json.loads(both))  # by rank
        lines = [f"  {line}" for line in _differences(descriptions)]
        who = [f"  rank {each.rank}: {each}" for each in descriptions]
        message = "\n".join(
            ["Ranks are building different meshes:", *lines, "Meshes by rank:", *who, _CURE]
        )
        calls = self._of(fingerprint)
        calls.mismatch, calls.has_raised = message, is_raised
        return RanksDifferError(message)


def _key(fingerprint: str, number: int) -> str:
    return f"calls/{fingerprint}/{number}"


def _past_key(fingerprint: str, number: int) -> str:
    return f"calls/{fingerprint}/past {number}"


def _mismatch_key(fingerprint: str) -> str:
    return f"calls/{fingerprint}/mismatch"


def _differences(descriptions: Sequence[Description]) -> list[str]:
    """Return the differences between two descriptions, one per line."""
    first, second = (each.compared() for each in descriptions)
    ranks = [f"on rank {each.rank}" for each in descriptions]
    lines = {}
    for name in dict.fromkeys([*first, *second]):
        values = [first.get(name, "none"), second.get(name, "none")]
        if values[0] != values[1]:
            lines[name] = f"{name}: {values[0]} {ranks[0]}, {values[1]} {ranks[1]}"
    if "axes" in lines:
        lines.pop("strides", None)  # which follow from them
    return list(lines.values())
