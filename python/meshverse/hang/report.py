"""Verdicts on stuck calls, as text and as data."""

from __future__ import annotations

import enum
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from meshverse.wording import rank_ranges

from .records import (
    CALLED_AT,
    CREATION,
    Call,
    GroupSeen,
    Progress,
    axes_of,
    group_in_words,
    short_line,
)
from .verdicts import Cause, Missing, OutOfStep, Skip, Stuck, shapes_in_words

Coordinates = Callable[[int], Mapping[str, int]]
"""Function of a global rank that returns its coordinates by axis name; {} if unknown."""

_SHOWN_STEPS = 4  # of the way to a cause
_SHOWN_LINES = 4  # from which ranks have not called equally often
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


_A_STEP_AHEAD = (
    " If one of these ranks is a whole step ahead of the others, earlier collectives may have "
    "mixed data of different steps."
)


class NoRecord(enum.Enum):
    """Why a rank has no record."""

    NO_DUMP = enum.auto()  # its dump is missing
    NO_ANSWER = enum.auto()  # it has not answered the alarm
    NO_STORE = enum.auto()  # there is no store from which to read its record


class ReportFormatter(NamedTuple):
    """Formatter of verdicts on stuck calls.

    Args:
        coordinates: function that returns the coordinates of a rank.
        no_record: why ranks have no record.
        why_no_dump: function that returns why there is no dump of a rank; "" if it is not known.
        shortest: time, in seconds, under which a pending call may well not be stuck.
        whose_ranks: what to do if the ranks of a group are not known; "" if that is not known.
    """

    coordinates: Coordinates = lambda _: {}
    no_record: NoRecord = NoRecord.NO_DUMP
    why_no_dump: Callable[[int], str] = lambda _: ""
    shortest: float = 0.0
    whose_ranks: str = ""

    def may_be_short(self, one: Stuck) -> bool:
        """Return whether a call is so young that it may not be stuck; a mismatch is at any age."""
        return one.seconds < self.shortest and one.cause is not Cause.MISMATCH

    def text(self, stuck: Sequence[Stuck], about: Sequence[Stuck] | None = None) -> str:
        """Return one paragraph per stuck call, and one on groups that several axes share.

        Args:
            stuck: all stuck calls.
            about: stuck calls to report; by default all.
        """
        by_name = _with_callers(stuck)
        reported = (
            list(by_name.values()) if about is None else [by_name[each.name] for each in about]
        )
        said: set[str] = set()
        paragraphs = []
        for one in reported:
            is_said = one.cause is Cause.DEADLOCK and said.issuperset(one.cycle)
            if one.cause is Cause.DEADLOCK:
                said.update(one.cycle)
            paragraphs.append("\n".join(self._lines(one, by_name, is_said=is_said)))
        return "\n\n".join([*paragraphs, *_doubts_on_results(reported, by_name)])

    def data(
        self, stuck: Sequence[Stuck], about: Sequence[Stuck] | None = None
    ) -> list[dict[str, Any]]:
        """Return the same as plain data, ready for JSON, with every rank and whole paths of files.

        Args:
            stuck: all stuck calls.
            about: stuck calls to report; by default all.
        """
        by_name = _with_callers(stuck)
        return [
            {
                "name": one.name,
                "group": one.group,
                "label": one.seen.label,
                "ranks": list(one.seen.ranks or ()),
                "operation": one.call.operation,
                "number": one.call.number,
                "seconds": one.seconds,
                "cause": one.cause.value,
                "doubts": self._doubts(by_name[one.name], by_name),
                "verdict": self.verdict(by_name[one.name], by_name),
                "waiting": [{"rank": rank, **_data(call)} for rank, call in one.waiting.items()],
                "past": one.past,
                "missing": [self._missing_data(missing) for missing in one.missing],
                "held": [self._missing_data(missing) for missing in one.held],
                "may_send": [self._missing_data(missing) for missing in one.may_send],
                "differing": one.differing,
                "skip": one.skip and _skip_data(one.skip),
                "out_of_step": one.out_of_step and _out_of_step_data(one.out_of_step),
                "cycle": one.cycle,
                "waits_on": one.waits_on,
                "root": self._root(one, by_name)[0].name,
            }
            for one in (stuck if about is None else about)
        ]

    def _missing_data(self, missing: Missing) -> dict[str, Any]:
        return {
            "rank": missing.rank,
            "coordinates": dict(self.coordinates(missing.rank)),
            "elsewhere": missing.elsewhere and _data(missing.elsewhere),
            "last": missing.last and _data(missing.last),
            "latest": missing.latest and _data(missing.latest),
            "doing": missing.doing,
            "is_recorded": missing.is_recorded,
        }

    # --- lines --------------------------------------------------------------------------------

    def _lines(
        self, one: Stuck, by_name: Mapping[str, Stuck], *, is_said: bool = False
    ) -> Iterator[str]:
        operations, call = one.differing.get("operation", ()), one.call
        tensors = " or ".join(
            dict.fromkeys(
                filter(None, map(_tensors, one.waiting.values() if operations else [call]))
            )
        )
        call = call._replace(operation=" or ".join(operations) or call.operation)
        yield (
            f"{'Pending' if self.may_be_short(one) else 'Stuck'}: {self.call(call, one.seen)}"
            + (f", {tensors}" if tensors else "")
            + f", for {_time(one.seconds)}"
        )
        held = {each.rank for each in one.held}
        there = {rank: call for rank, call in one.waiting.items() if rank not in held}
        yield from self._rows("waiting there:", _by_line(there))
        if one.past:
            yield f"  past it:       {_ranks(one.past)}"
        yield from self._rows("enqueued:", self._missing_rows(one.held, by_name))
        yield from self._rows("missing:", self._missing_rows(one.missing, by_name))
        yield from self._rows("may send:", self._missing_rows(one.may_send, by_name))
        verdict = "part of the deadlock above." if is_said else self.verdict(one, by_name)
        yield f"Verdict: {verdict}"

    @staticmethod
    def _rows(title: str, rows: Sequence[tuple[str, str]]) -> Iterator[str]:
        for index, (who, where) in enumerate(rows[:_SHOWN]):
            begin = title if index == 0 else ""
            yield f"  {begin:14} {who}{where}"
        if len(rows) > _SHOWN:
            yield f"  {'':14} and {len(rows) - _SHOWN} more lines like these"

    def _missing_rows(
        self, awaited: Iterable[Missing], by_name: Mapping[str, Stuck]
    ) -> list[tuple[str, str]]:
        alike: dict[str, list[Missing]] = {}
        for missing in awaited:
            alike.setdefault(self._where(missing, by_name), []).append(missing)
        return [
            (self.ranks([each.rank for each in some]), f", {where}")
            for where, some in alike.items()
        ]

    def _where(self, missing: Missing, by_name: Mapping[str, Stuck]) -> str:
        """Return where a missing rank is instead, and below it its last call in the group.

        Args:
            missing: the rank, or one of several for which the same is true.
            by_name: all stuck calls, by name.
        """
        if not missing.is_recorded:
            why = self.why_no_dump(missing.rank)
            return f"no dump ({why})" if why else _WITHOUT_RECORD[self.no_record]
        if not missing.was_read:
            return "flight recorder not read"
        call = missing.elsewhere
        if call is not None:
            other = by_name.get(missing.where)
            on = missing.label if other is None else self.group(other.seen)
            return f"waiting in {_called(call)} {_on(call)} {on}{_at(call.line or missing.doing)}"
        parts = [f"at {short_line(missing.doing)}"] if missing.doing else []
        if missing.last is not None:
            last = f"{_called(missing.last)}{_at(missing.last.line)}"
            parts.append(f"last call in this group: {last}")
        elif missing.is_cut:
            parts.append("last call in this group: no longer in its flight recorder")
        return f",\n  {'':14} ".join(parts) or "no call in this group yet"

    def call(self, call: Call, seen: GroupSeen) -> str:
        """Return a call and its group in words: "all_reduce number 4 on axis dp, ranks 0, 2"."""
        return f"{_called(call)} {_on(call)} {self.group(seen)}"

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
        """Return the verdict on a stuck call, in some sentences.

        Args:
            one: the call.
            by_name: all stuck calls, by name.
        """
        said = self._verdict(one, by_name)
        if not self.may_be_short(one):
            return said
        return (
            f"this call may not be stuck: it was {_time(one.seconds)} old when its ranks were "
            f"recorded. If it is: {said}"
        )

    def _verdict(self, one: Stuck, by_name: Mapping[str, Stuck]) -> str:
        if one.cause is Cause.DEADLOCK:
            return self._deadlock(one, by_name)
        if one.cause is Cause.MISMATCH:
            return self._mismatch(one)
        if one.cause is Cause.MISSING:
            return self._who_is_missing(one)
        if one.cause is Cause.PARTNER:
            return self._which_partner(one)
        if one.cause is Cause.FOLLOWS:
            return self._what_it_follows(one, by_name)
        if one.cause is Cause.LATE:
            return self._whose_gpu_is_late(one)
        if one.may_send:
            return (
                f"{self.ranks([*one.waiting])} receives from any rank, and none has sent to it. "
                "Which one should is not known: look at the ranks that may send."
            )
        if not one.is_whole:
            cure = f": {self.whose_ranks}" if self.whose_ranks else ""
            return (
                "all known ranks of this group have made the call. Which other ranks it has is "
                f"not recorded{cure}."
            )
        return self._what_is_unknown(one)

    def _which_partner(self, one: Stuck) -> str:
        other = "receive" if one.call.operation == "send" else "send"
        (partner,) = one.missing or one.held
        if not partner.is_recorded:
            return self._why_no_record([partner.rank], f"the {other}")
        if partner.is_older:
            return self._why_not_sure([partner.rank])
        if partner.may_have_sent:
            who = self.ranks([*one.waiting])
            is_late = one.call.progress is Progress.NOT_STARTED
            late = "has not started it" if is_late else "may not have reached it"
            return (
                f"a {one.call.operation} without its {other}, or a late GPU: that of {who} {late}, "
                f"and {self.ranks([partner.rank])} may have sent already: small sends end before "
                f"they are received{self._where_to_look(partner)}."
            )
        return (
            f"a {one.call.operation} without its {other}: {self.ranks([partner.rank])} has not "
            f"called it{self._where_to_look(partner)}."
        )

    def _root(self, one: Stuck, by_name: Mapping[str, Stuck]) -> tuple[Stuck, list[str]]:
        """Return the call whose cause is that of another one, and the way to it in words."""
        way = []
        while one.via is not None and one.via[1] in by_name:
            rank, name = one.via
            one = by_name[name]
            way.append(f"{self.ranks([rank])} waits in {self.call(one.call, one.seen)}")
        return one, way

    def _what_it_follows(self, one: Stuck, by_name: Mapping[str, Stuck]) -> str:
        root, way = self._root(one, by_name)
        if len(way) > _SHOWN_STEPS:
            way[_SHOWN_STEPS - 1 : -1] = [f"and so on, {len(way) - _SHOWN_STEPS} more"]
        there = f" There, {self.verdict(root, by_name)}" if root is not one else ""
        return f"caused by another hang: {'; '.join(way)}.{there}"

    def _whose_gpu_is_late(self, one: Stuck) -> str:
        late = [r for r, call in one.waiting.items() if call.progress is Progress.NOT_STARTED]
        who = f"the GPU{'s' * (len(late) > 1)} of {self.ranks(late)}"
        have = "have" if len(late) > 1 else "has"
        return (
            f"all ranks have enqueued the call, and {who} {have} not started it: what the program "
            f"enqueued there before it is not over. Look at the kernel that {who} "
            f"{'run' if len(late) > 1 else 'runs'}."
        )

    @staticmethod
    def _what_is_unknown(one: Stuck) -> str:
        is_enqueued = one.call.progress is not Progress.CALLED
        unseen = (
            ""
            if one.call.detail or one.call.is_p2p
            else " Compare roots, split sizes and reduce operations, too: torch does not record "
            "them."
        )
        if not any(call.is_recorded for call in one.waiting.values()):
            creating = (
                "With NCCL, a group's first batch of sends and receives waits for all its ranks."
                if one.call.is_p2p
                else "With NCCL, they are creating the group's communicator: look at what NCCL "
                "logs with NCCL_DEBUG=INFO."
            )
            compare = "Compare tags, and look" if one.call.is_p2p else "Look"
            return (
                f"all ranks are in the call, and torch has not recorded it. {compare} at the "
                f"network and at the ranks' stacks. {creating}"
            )
        if not is_enqueued:
            return (
                "all ranks have made the call, and torch's records show no mismatch. They cannot "
                f"tell why it does not end: look at the network and at the ranks' stacks.{unseen}"
            )
        has_started = all(call.progress is Progress.STARTED for call in one.waiting.values())
        state = (
            "their GPUs have started it" if has_started else "the GPUs' progress is not recorded"
        )
        timing = "" if has_started else "; TORCH_NCCL_ENABLE_TIMING=1 records which GPUs start it"
        return (
            f"all ranks have enqueued the call, {state}, and torch's records show no mismatch. "
            "They cannot tell why it does not end: look at the ranks' stacks (py-spy dump), at "
            f"what their GPUs run, and at the output of ncclras{timing}.{unseen}"
        )

    def _where_to_look(self, missing: Missing, *, are_several: bool = False) -> str:
        """Return where a missing rank that waits nowhere is, or was when it made its last call.

        Args:
            missing: the rank; of several, the first.
            are_several: whether other ranks are missing, too.
        """
        if missing.doing:
            return f": look at {short_line(missing.doing)}"
        latest = missing.latest
        if latest is None:
            return ""
        whose = f"Rank {missing.rank}'s" if are_several else "Its"
        return (
            f". {whose} last recorded call is {_called(latest)} on {missing.latest_label}"
            f"{_at(latest.line)}"
        )

    def _deadlock(self, one: Stuck, by_name: Mapping[str, Stuck]) -> str:
        steps: list[str] = []
        for name in one.cycle[:4]:
            stuck = by_name[name]
            following = one.cycle[(one.cycle.index(name) + 1) % len(one.cycle)]
            for missing in stuck.awaited:
                if missing.where == following:
                    others = [rank for rank in stuck.waiting if rank != missing.rank]
                    line = _line_of(stuck.waiting[rank] for rank in others)
                    behind = (
                        f", which has enqueued it behind its {_called(missing.elsewhere)} on "
                        f"{missing.label}"
                        if missing in stuck.held and missing.elsewhere is not None
                        else ""
                    )
                    steps.append(
                        f"{_ranks(others)} wait{'s' * (len(others) == 1)} in "
                        f"{stuck.call.operation} {_on(stuck.call)} {group_in_words(stuck.seen)}"
                        f"{_at(line)} for "
                        f"rank {missing.rank}{behind}"
                    )
                    break
        chain = "; ".join(steps)
        is_p2p = all(by_name[name].call.is_p2p for name in one.cycle)
        rule = (
            "One of these ranks must begin with the call that another one waits for, or each must "
            "use batch_isend_irecv."
            if is_p2p
            else "All ranks must use these groups in the same order, and skip none."
        )
        earlier = (by_name[name] for name in one.cycle if by_name[name].out_of_step is not None)
        why = (
            f"{self._skipped(one.skip)} {rule}"
            if one.skip is not None
            else next(map(_when_out_of_step, earlier), f"{rule}{'' if is_p2p else _A_STEP_AHEAD}")
        )
        text = f"a deadlock. {chain[:1].upper()}{chain[1:]}. {why}"
        doubts = self._doubts(one, by_name)
        return " ".join([f"this may be {text}", *doubts]) if doubts else text

    def _doubts(self, one: Stuck, by_name: Mapping[str, Stuck]) -> list[str]:
        """Return why what seems a deadlock may be none; [] of other causes."""
        waiting = (call for name in one.cycle for call in by_name[name].waiting.values())
        if any(call.progress is Progress.ENQUEUED for call in waiting):
            why = (
                "Starts on the GPUs are not recorded (TORCH_NCCL_ENABLE_TIMING=1): calls that "
                "overlap, as with async_op=True, do not wait for one another."
            )
            return [why]
        followed = zip(one.cycle, [*one.cycle[1:], *one.cycle[:1]], strict=True)
        doubts = []
        for name, following in followed:
            # One rank that surely waits there is enough.
            found = [self._doubt(m) for m in by_name[name].awaited if m.where == following]
            doubts += found[:1] if all(found) else []
        return doubts

    def _doubt(self, missing: Missing) -> str:
        """Return why a rank of a deadlock may not wait in its call; "" if it surely does."""
        call, who = missing.elsewhere, self.ranks([missing.rank])
        if call is None:
            return ""
        if missing.caller:
            return (
                f"But {who} waits there in one thread, and has another at "
                f"{short_line(missing.caller)}: if that one is to make the call that the others "
                "wait for, it is only late: look there."
            )
        # Callers are listed where several lines make one call.
        doing, line = (each.partition(CALLED_AT)[0] for each in (missing.doing, call.line))
        if call.progress is Progress.CALLED and doing not in ("", line) and line:
            return (
                f"But {who} is at {short_line(missing.doing)}: if that does not wait for its "
                f"{call.operation}, such as with async_op=True, look there."
            )
        if call.is_async:
            return f"But {who} may not wait for its {call.operation}, which may be asynchronous."
        return ""

    def _mismatch(self, one: Stuck) -> str:
        lines = []
        for what, values in one.differing.items():
            said = "; ".join(
                f"{_dtype(value) if what == 'dtype' else value or 'none'} on {_ranks(ranks)}"
                for value, ranks in sorted(values.items(), key=lambda item: -len(item[1]))
            )
            lines.append(f"{what} {said}".strip())
        number = "" if one.call.is_p2p else f" as number {one.call.number:,}"
        differ = f"the ranks make different calls{number}: {', and '.join(lines)}."
        if one.skip is not None:
            return f"{self._skipped(one.skip)} So {differ}"
        either = "Either a rank skipped or added an earlier call, or its arguments are wrong."
        return f"{differ} {either}{self._before(one)}"

    def _skipped(self, skip: Skip) -> str:
        who, call = self.ranks(skip.ranks), skip.call
        several = (
            "" if skip.n_skipped in (None, 1) else f"{skip.n_skipped} calls, the first of them "
        )
        how = (
            "In earlier repetitions of these calls, that one came before what "
            f"{_ranks(skip.ranks)} called instead"
            if skip.is_by_rounds
            else f"{'Their' if len(skip.ranks) > 1 else 'Its'} next calls are those which the "
            "other ranks made after it"
        )
        return (
            f"{who[:1].upper()}{who[1:]} skipped {several}{_called(call)} on "
            f"{group_in_words(skip.seen)}, which {_ranks(skip.others)} called at "
            f"{short_line(call.line)}: look at the condition around that line. {how}."
        )

    @staticmethod
    def _before(one: Stuck) -> str:
        """Return what ranks of each kind called before a mismatch, and how often lines called.

        These are the lines of the mismatch, and others from which ranks have not called equally
        often: one of these may have skipped a call there, or added one.
        """
        kinds = next(iter(one.differing.values()))
        shown = [ranks[0] for ranks in kinds.values() if ranks[0] in one.histories][:_SHOWN_STEPS]
        before = {
            rank: call
            for rank in shown
            for call in one.histories[rank]
            if call.number == one.call.number - 1
        }
        there = (call for rank in shown for call in one.histories[rank])
        lines = dict.fromkeys(c.line for c in there if c.number == one.call.number and c.line)
        counts = {
            rank: Counter(c.line for c in one.histories[rank] if c.number <= one.call.number)
            for rank in shown
        }
        of_all = dict.fromkeys(line for each in counts.values() for line in each if line)
        differing = [line for line in of_all if len({each[line] for each in counts.values()}) > 1]
        lines |= dict.fromkeys(differing[:_SHOWN_LINES])
        said = "; ".join(f"rank {r} called {_called(c)}{_at(c.line)}" for r, c in before.items())
        often = "; ".join(
            f"{short_line(line)} "
            f"({', '.join(f'rank {rank}: {counts[rank][line]}' for rank in shown)})"
            for line in lines
        )
        return (f" Before, {said}." if said else "") + (
            f" Number of recorded calls up to there by line: {often}." if often else ""
        )

    def _who_is_missing(self, one: Stuck) -> str:
        gone = [missing.rank for missing in one.missing if not missing.is_recorded]
        absent = [m for m in one.missing if m.is_recorded and m.was_read and not m.where]
        parts = []
        if gone:
            parts.append(self._why_no_record(gone, "it"))
        older = [missing.rank for missing in absent if missing.is_older]
        if older:
            parts.append(self._why_not_sure(older))
        absent = [missing for missing in absent if not missing.is_older]
        sure = [missing for missing in absent if missing.last is not None or not missing.is_cut]
        if sure:
            parts.append(
                f"{self.ranks([missing.rank for missing in sure])} "
                f"{'have' if len(sure) > 1 else 'has'} not "
                f"{'joined' if one.call.operation == CREATION else 'called'} it"
                f"{self._where_to_look(sure[0], are_several=len(sure) > 1)}."
            )
            if one.out_of_step is not None:
                parts.append(_when_out_of_step(one))
        elif absent:
            parts.append(
                f"the recorder of {self.ranks([missing.rank for missing in absent])} no longer has "
                "calls in this group: it may have called it, or not. Set TORCH_FR_BUFFER_SIZE to "
                "more than 2,000."
            )
        if not parts:
            unread = [missing.rank for missing in one.missing if not missing.was_read]
            parts.append(
                f"{self._recorders(unread)} not read. The other missing ranks wait in other groups."
            )
        return " ".join(parts)

    def _why_not_sure(self, ranks: Sequence[int]) -> str:
        of = f"{'dumps' if len(ranks) > 1 else 'dump'} of {self.ranks(ranks)}"
        have = "are" if len(ranks) > 1 else "is"
        they = "they" if len(ranks) > 1 else "it"
        return (
            f"the {of} {have} older than the call of the others: {they} may have called it since. "
            "Compare dumps of one moment."
        )

    def _recorders(self, ranks: Sequence[int]) -> str:
        """Return the subject of a sentence, with its verb."""
        of = f"of {self.ranks(ranks)}"
        return (
            f"the flight recorders {of} were" if len(ranks) > 1 else f"the flight recorder {of} was"
        )

    def _why_no_record(self, ranks: Sequence[int], call: str) -> str:
        """Return why missing ranks have no record, and what to do about it."""
        who, are_several = self.ranks(ranks), len(ranks) > 1
        if self.no_record is NoRecord.NO_ANSWER:
            return (
                f"{who} {'are' if are_several else 'is'} not responding. Check on the host whether "
                "the process has died, was stopped, or gets no CPU time."
            )
        if self.no_record is NoRecord.NO_STORE:
            they = "they" if are_several else "it"
            return f"{self._recorders(ranks)} unreadable: {they} may have called {call}."
        if not are_several and (why := self.why_no_dump(ranks[0])):
            return f"there is no dump of {who} ({why})."
        return (
            f"there is no dump of {who}: the process may have died without one, or its dump is not "
            "among these."
        )


_WITHOUT_RECORD = {
    NoRecord.NO_DUMP: "no dump",
    NoRecord.NO_ANSWER: "not responding: dead, stopped, slow, in code that holds Python's global "
    "interpreter lock,\n                 or without meshverse.watch()",
    NoRecord.NO_STORE: "flight recorder unreadable",
}


def _when_out_of_step(one: Stuck) -> str:
    """Return where two ranks were first out of step in a group, in words."""
    assert one.out_of_step is not None
    number, calls = one.out_of_step
    who = " and ".join(
        f"{call.operation} at {short_line(call.line)} on rank {rank}"
        for rank, call in calls.items()
    )
    return (
        f"But ranks {rank_ranges(list(calls))} were out of step before: number {number:,} on "
        f"{group_in_words(one.seen)} was {who}. Unless both lines are branches of one call, one of "
        "these ranks skipped a call there, made an extra one, or called in another order: results "
        "since then may be wrong."
    )


def _doubts_on_results(reported: Iterable[Stuck], by_name: Mapping[str, Stuck]) -> Iterator[str]:
    """Yield which axes may have had wrong results before the hang, if a rank skipped a call.

    In a group of several axes, a later call of another axis takes the place of the skipped one, if
    operation, type and size are the same.
    """
    names = dict.fromkeys(
        name
        for one in reported
        if one.cause in (Cause.DEADLOCK, Cause.MISMATCH)
        or (one.cause is Cause.MISSING and any(each.is_recorded for each in one.missing))
        for name in (one.name, *one.cycle)
        # Or else the verdict says so.
        if by_name[name].out_of_step is None and not _skips_its_own(by_name[name])
    )
    shared = {name: axes for name in names if len(axes := axes_of(by_name[name].seen.label)) > 1}
    if shared:
        groups = " and ".join(dict.fromkeys("/".join(axes) for axes in shared.values()))
        only_missing = all(by_name[name].cause is Cause.MISSING for name in shared)
        slow = "If the missing ranks are only slow, nothing is wrong. " * only_missing
        since = (
            f"Since the skipped call, results on {groups} may be wrong"
            if any(by_name[name].skip is not None for name in shared)
            else f"It is not known whether a rank skipped a call on {groups}. If one did, results "
            "since then may be wrong"
        )
        yield (
            f"{slow}{since}: the axes joined by / share a process group, so a later call of "
            "another one took the place of the skipped one, unless its operation, dtype or size "
            "differs."
        )


def _skips_its_own(one: Stuck) -> bool:
    """Return whether the call that a rank skipped is the stuck one: no earlier call was shifted."""
    is_mismatch = one.cause is Cause.MISMATCH
    return is_mismatch and one.skip is not None and one.skip.call.number == one.call.number


def _data(call: Call) -> dict[str, Any]:
    return {**call._asdict(), "dtype": _dtype(call.dtype)}


def _skip_data(skip: Skip) -> dict[str, Any]:
    return {
        "ranks": skip.ranks,
        "others": skip.others,
        "call": _data(skip.call),
        "n_skipped": skip.n_skipped,
        "is_by_rounds": skip.is_by_rounds,
    }


def _out_of_step_data(one: OutOfStep) -> dict[str, Any]:
    return {
        "number": one.number,
        "calls": [{"rank": rank, **_data(call)} for rank, call in one.calls.items()],
    }


def _time(seconds: float) -> str:
    return f"{seconds:,.0f} s" if seconds >= 1 else f"{seconds * 1e3:.0f} ms"


def _tensors(call: Call) -> str:
    return " ".join(filter(None, (_dtype(call.dtype), shapes_in_words(call.shapes))))


def _called(call: Call) -> str:
    return f"{call.operation} number {call.number:,}" if call.number else call.operation


def _on(call: Call) -> str:
    return "of" if call.operation == CREATION else "on"


def _dtype(name: str) -> str:
    return _DTYPES.get(name, name)


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) != 1)} {rank_ranges(ranks)}"


def _coordinates(shared: Mapping[str, int]) -> str:
    return f" ({', '.join(f'{name}={i}' for name, i in shared.items())})" if shared else ""


def _with_callers(stuck: Sequence[Stuck]) -> dict[str, Stuck]:
    """Return stuck calls by name, for a text. Of a helper's line, they also have its caller's.

    If several of them wait at one line, which is called from several places, that line says little.
    So it gets the innermost of its callers that are not all the same.
    """
    chains: dict[str, set[tuple[str, ...]]] = {}
    for one in stuck:
        for call in one.waiting.values():
            chains.setdefault(call.line, set()).add(call.callers)
    levels: dict[str, int] = {}
    for line, those in chains.items():
        for level, callers in enumerate(itertools.zip_longest(*those)):
            if len(set(callers)) > 1:
                levels[line] = level
                break

    def with_caller(call: Call) -> Call:
        level = levels.get(call.line)
        if level is None or level >= len(call.callers):
            return call
        return call._replace(line=f"{call.line}{CALLED_AT}{call.callers[level]}")

    def elsewhere_with_caller(missing: Missing) -> Missing:
        elsewhere = missing.elsewhere and with_caller(missing.elsewhere)
        return missing._replace(elsewhere=elsewhere)

    return {
        one.name: replace(
            one,
            waiting={rank: with_caller(call) for rank, call in one.waiting.items()},
            missing=[elsewhere_with_caller(each) for each in one.missing],
            held=[elsewhere_with_caller(each) for each in one.held],
            may_send=[elsewhere_with_caller(each) for each in one.may_send],
        )
        for one in stuck
    }


def _at(line: str) -> str:
    return f" at {short_line(line)}" if line else ""


def _line_of(calls: Iterable[Call]) -> str:
    return next((call.line for call in calls if call.line), "")


def _by_line(calls: Mapping[int, Call]) -> list[tuple[str, str]]:
    by_line: dict[str, list[int]] = {}
    for rank, call in calls.items():
        by_line.setdefault(call.line, []).append(rank)
    return [(_ranks(ranks), _at(line)) for line, ranks in by_line.items()]
