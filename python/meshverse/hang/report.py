"""Verdicts on stuck groups, as text and as data."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from meshverse.wording import rank_ranges

from .records import Call, GroupSeen
from .verdicts import Cause, Missing, Stuck, shapes_in_words

Coordinates = Callable[[int], Mapping[str, int]]
"""Function of a global rank that returns its coordinates by axis name; {} if unknown."""

_SHOWN = 8  # lines of ranks that are missing or waiting, for one group
_DTYPES = {
    "Float": "float32",
    "Double": "float64",
    "Half": "float16",
    "BFloat16": "bfloat16",
    "Long": "int64",
    "Int": "int32",
    "Short": "int16",
    "Byte": "uint8",
    "Char": "int8",
    "Bool": "bool",
}


class NoRecord(enum.Enum):
    """Why a rank has no record."""

    NO_DUMP = enum.auto()  # its dump is missing
    NO_ANSWER = enum.auto()  # it has not answered the alarm
    NO_STORE = enum.auto()  # there is no store from which to read its record


class ReportFormatter(NamedTuple):
    """Formatter of verdicts on stuck groups.

    Args:
        coordinates: function that returns the coordinates of a rank.
        no_record: why a rank has no record.
    """

    coordinates: Coordinates = lambda _: {}
    no_record: NoRecord = NoRecord.NO_DUMP

    def text(self, stuck: Sequence[Stuck], about: Sequence[Stuck] | None = None) -> str:
        """Return one paragraph per stuck group.

        Args:
            stuck: all stuck groups.
            about: stuck groups to report; by default all.
        """
        by_name = {one.group: one for one in stuck}
        said: set[str] = set()
        paragraphs = []
        for one in stuck if about is None else about:
            is_said = one.cause is Cause.DEADLOCK and said.issuperset(one.cycle)
            if one.cause is Cause.DEADLOCK:
                said.update(one.cycle)
            paragraphs.append("\n".join(self._lines(one, by_name, is_said=is_said)))
        return "\n\n".join(paragraphs)

    def data(
        self, stuck: Sequence[Stuck], about: Sequence[Stuck] | None = None
    ) -> list[dict[str, Any]]:
        """Return the same as plain data, ready for JSON, with every rank and whole paths of files.

        Args:
            stuck: all stuck groups.
            about: stuck groups to report; by default all.
        """
        by_name = {one.group: one for one in stuck}
        return [
            {
                "group": one.group,
                "label": one.seen.label,
                "ranks": list(one.seen.ranks or ()),
                "operation": one.call.operation,
                "number": one.call.number,
                "seconds": one.seconds,
                "cause": one.cause.value,
                "verdict": self.verdict(one, by_name),
                "waiting": [{"rank": rank, **_data(call)} for rank, call in one.waiting.items()],
                "past": one.past,
                "missing": [
                    {
                        "rank": missing.rank,
                        "coordinates": dict(self.coordinates(missing.rank)),
                        "elsewhere": missing.elsewhere and _data(missing.elsewhere),
                        "last": missing.last and _data(missing.last),
                        "doing": missing.doing,
                        "is_recorded": missing.is_recorded,
                    }
                    for missing in one.missing
                ],
                "differing": one.differing,
                "cycle": one.cycle,
                "waits_on": one.waits_on,
            }
            for one in (stuck if about is None else about)
        ]

    # --- lines --------------------------------------------------------------------------------

    def _lines(
        self, one: Stuck, by_name: Mapping[str, Stuck], *, is_said: bool = False
    ) -> Iterator[str]:
        call = one.call
        tensors = " ".join(filter(None, (_dtype(call.dtype), shapes_in_words(call.shapes))))
        yield (
            f"Stuck: {self.call(call, one.seen)}"
            + (f", {tensors}" if tensors else "")
            + f", for {one.seconds:,.0f} s"
        )
        yield from self._rows("waiting there:", _by_line(one.waiting))
        if one.past:
            yield f"  past it:       {_ranks(one.past)}"
        rows = self._missing_rows(one, by_name)
        yield from self._rows("missing:", rows)
        verdict = "part of the deadlock above." if is_said else self.verdict(one, by_name)
        yield f"Verdict: {verdict}"

    @staticmethod
    def _rows(title: str, rows: Sequence[tuple[str, str]]) -> Iterator[str]:
        for index, (who, where) in enumerate(rows[:_SHOWN]):
            begin = title if index == 0 else ""
            yield f"  {begin:14} {who}{where}"
        if len(rows) > _SHOWN:
            yield f"  {'':14} and {len(rows) - _SHOWN} more lines like these"

    def _missing_rows(self, one: Stuck, by_name: Mapping[str, Stuck]) -> list[tuple[str, str]]:
        alike: dict[str, list[int]] = {}
        for missing in one.missing:
            alike.setdefault(self._where(missing, by_name), []).append(missing.rank)
        return [(self.ranks(ranks), f", {where}") for where, ranks in alike.items()]

    def _where(self, missing: Missing, by_name: Mapping[str, Stuck]) -> str:
        """Return where a missing rank is instead, for one line of the report."""
        if not missing.is_recorded:
            return _WITHOUT_RECORD[self.no_record]
        if not missing.was_read:
            return "whose records were not read"
        call = missing.elsewhere
        if call is not None:
            other = by_name.get(call.group)
            on = missing.label if other is None else self.group(other.seen)
            line = call.line or missing.doing
            return f"which waits in {_called(call)} on {on}{_at(line)}"
        parts = []
        if missing.doing:
            parts.append(f"which is at {_short(missing.doing)}")
        if missing.last is not None:
            parts.append(
                f"whose last call in this group was {_called(missing.last)}{_at(missing.last.line)}"
            )
        return ", and ".join(parts) or "which has made no call in this group"

    def call(self, call: Call, seen: GroupSeen) -> str:
        """Return a call and its group in words: "all_reduce number 4 on axis dp, ranks 0, 2"."""
        return f"{_called(call)} on {self.group(seen)}"

    def group(self, seen: GroupSeen) -> str:
        """Return the label of a group, its ranks, and the coordinates that they share."""
        ranks = seen.ranks or ()
        shared = dict(self.coordinates(ranks[0])) if ranks else {}
        # The first 64 ranks and the last are compared, to save time.
        for rank in (ranks[-1], *ranks[1:64]) if ranks else ():
            theirs = self.coordinates(rank)
            shared = {name: index for name, index in shared.items() if theirs.get(name) == index}
        return seen.label + (f", {_ranks(ranks)}{_coordinates(shared)}" if ranks else "")

    def ranks(self, ranks: Sequence[int]) -> str:
        """Return ranks in words; for a single rank, with its coordinates."""
        return _ranks(ranks) + (_coordinates(self.coordinates(ranks[0])) if len(ranks) == 1 else "")

    # --- verdicts -----------------------------------------------------------------------------

    def verdict(self, one: Stuck, by_name: Mapping[str, Stuck]) -> str:
        """Return the verdict on a stuck group, in one to three sentences.

        Args:
            one: the group.
            by_name: all stuck groups, by c10d's name.
        """
        if one.cause is Cause.DEADLOCK:
            return self._deadlock(one, by_name)
        if one.cause is Cause.MISMATCH:
            return self._mismatch(one)
        if one.cause is Cause.MISSING:
            return self._who_is_missing(one)
        if one.cause is Cause.PARTNER:
            other = "receive" if one.call.operation == "send" else "send"
            (partner,) = one.missing
            if not partner.is_recorded and self.no_record is NoRecord.NO_STORE:
                return self._why_no_record([partner.rank], f"the {other}")
            return (
                f"a {one.call.operation} without its {other}: "
                f"{self.ranks([partner.rank])} has not called it."
            )
        if one.cause is Cause.FOLLOWS:
            names = dict.fromkeys(
                self.group(by_name[name].seen) for name in one.waits_on if name in by_name
            )
            where = "; ".join([*names][:2]) or "a send or receive that is stuck"
            return f"caused by another hang: the missing ranks wait in {where}."
        if not one.is_whole:
            return (
                "all known ranks of this group have made the call. Gloo's dumps do not say which "
                "ranks a group has: pass --mesh FILE to find out which are missing."
            )
        return (
            "all ranks have made the call, and torch's records show no mismatch. So the backend or "
            "the network is stuck"
            + (
                "."
                if one.call.detail
                else "; or ranks disagree about what torch does not record, such as the root or "
                "split sizes."
            )
        )

    def _deadlock(self, one: Stuck, by_name: Mapping[str, Stuck]) -> str:
        steps = []
        for name in one.cycle[:4]:
            stuck = by_name[name]
            following = one.cycle[(one.cycle.index(name) + 1) % len(one.cycle)]
            for missing in stuck.missing:
                if missing.elsewhere is not None and missing.elsewhere.group == following:
                    others = [rank for rank in stuck.waiting if rank != missing.rank]
                    line = _line_of(stuck.waiting.values())
                    steps.append(
                        f"{_ranks(others)} wait{'s' * (len(others) == 1)} on {stuck.seen.label}"
                        f"{_at(line)} for rank {missing.rank}"
                    )
                    break
        chain = "; ".join(steps)
        return (
            f"a deadlock. {chain[:1].upper()}{chain[1:]}. All ranks must use these groups in the "
            "same order, and skip none."
        )

    def _mismatch(self, one: Stuck) -> str:
        lines = []
        for what, values in one.differing.items():
            said = "; ".join(
                f"{_dtype(value) if what == 'dtype' else value or 'none'} on {_ranks(ranks)}"
                for value, ranks in sorted(values.items(), key=lambda item: -len(item[1]))
            )
            lines.append(f"{what} {said}".strip())
        return (
            f"the ranks make different calls as number {one.call.number:,}: {', and '.join(lines)}"
            ". Either a rank skipped an earlier call, or its arguments are wrong."
        )

    def _who_is_missing(self, one: Stuck) -> str:
        gone = [missing.rank for missing in one.missing if not missing.is_recorded]
        late = [
            missing
            for missing in one.missing
            if missing.is_recorded
            and missing.was_read
            and (missing.elsewhere is None or missing.elsewhere.group not in one.waits_on)
        ]
        parts = []
        if gone:
            parts.append(self._why_no_record(gone, "it"))
        if late:
            where = late[0].elsewhere.line if late[0].elsewhere else late[0].doing
            parts.append(
                f"{self.ranks([missing.rank for missing in late])} "
                f"{'have' if len(late) > 1 else 'has'} not called it"
                + (f": look at {_short(where)}." if where else ".")
            )
        if not parts:
            unread = [missing.rank for missing in one.missing if not missing.was_read]
            parts.append(
                f"the records of {self.ranks(unread)} were not read. The other missing ranks wait "
                "in other groups."
            )
        return " ".join(parts)

    def _why_no_record(self, ranks: Sequence[int], call: str) -> str:
        """Return why missing ranks have no record, and what to do about it."""
        who, are_several = self.ranks(ranks), len(ranks) > 1
        if self.no_record is NoRecord.NO_ANSWER:
            return (
                f"{who} {'give' if are_several else 'gives'} no sign of life. Check on the host "
                "whether the process has died or was stopped."
            )
        if self.no_record is NoRecord.NO_STORE:
            they = "they" if are_several else "it"
            return f"the records of {who} could not be read: {they} may have called {call}."
        return (
            f"there is no dump of {who}: the process died without one, or it is not among these "
            "dumps."
        )


_WITHOUT_RECORD = {
    NoRecord.NO_DUMP: "without a dump",
    NoRecord.NO_ANSWER: "no sign of life: dead, stopped, in code that holds Python's global "
    "interpreter lock, or without meshverse.watch()",
    NoRecord.NO_STORE: "whose records could not be read",
}


def _data(call: Call) -> dict[str, Any]:
    return {**call._asdict(), "dtype": _dtype(call.dtype)}


def _called(call: Call) -> str:
    return f"{call.operation} number {call.number:,}" if call.number else call.operation


def _dtype(name: str) -> str:
    return _DTYPES.get(name, name)


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) != 1)} {rank_ranges(ranks)}"


def _coordinates(shared: Mapping[str, int]) -> str:
    return f" ({', '.join(f'{name}={i}' for name, i in shared.items())})" if shared else ""


def _short(line: str) -> str:
    """Return a line with the last two parts of the file's path. The data has the whole path."""
    file, colon, rest = line.partition(":")
    return "/".join(file.split("/")[-2:]) + colon + rest


def _at(line: str) -> str:
    return f" at {_short(line)}" if line else ""


def _line_of(calls: Iterable[Call]) -> str:
    return next((call.line for call in calls if call.line), "")


def _by_line(calls: Mapping[int, Call]) -> list[tuple[str, str]]:
    by_line: dict[str, list[int]] = {}
    for rank, call in calls.items():
        by_line.setdefault(call.line, []).append(rank)
    return [(_ranks(ranks), _at(line)) for line, ranks in by_line.items()]
