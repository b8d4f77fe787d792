"""Paired measurement: two ways to do one thing, checked, interleaved in one run, and compared.

Each repetition sets up and times both sides, each in a fake world of its own, in turn first and
second. Only the statement itself is timed, after one run to warm it, without garbage collection.
The ratio reported is the median of the ratios of the repetitions, so what slows the machine for a
while slows both sides.

The clock is the thread's processor time. Nothing that is timed here waits, so on a quiet machine
it shows what a wall clock shows. On a busy one a wall clock would count the time of others, and
more so for the slower side: its one run is interrupted where many of the faster one are not.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
import timeit
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from worlds import fake_world

__all__ = ["Action", "Bound", "Comparison", "Result", "Side", "compare", "same_answer"]

# Statements that may be repeated are, for about this long: well above the clock's resolution.
_BATCH_NS = 2_000_000


@dataclass(frozen=True)
class Action:
    """Something set up and ready to be timed.

    Attributes:
        statement: what is timed, as Python source.
        names: what the statement's names stand for.
        answer: does the operation once, and gives its result as plain data.
        operations: how many operations one run of the statement is.
        repeatable: whether the statement does the same work when run again.
    """

    statement: str
    names: dict[str, Any]
    answer: Callable[[], Any]
    operations: int = 1
    repeatable: bool = False


@dataclass(frozen=True)
class Side:
    """One of the two ways, and the world it runs in.

    Attributes:
        label: how a report calls it.
        set_up: makes the action, within the world; not timed.
        world_size: ranks of the fake world.
        rank: the rank this process plays.
        warm_up: makes an action that runs the same code, where `set_up` is not to warm itself.
    """

    label: str
    set_up: Callable[[], Action]
    world_size: int
    rank: int
    warm_up: Callable[[], Action] | None = None


@dataclass(frozen=True)
class Bound:
    """What is to be reached.

    Attributes:
        at_least: so many times faster than the baseline; or
        at_most: so many times its time.
    """

    at_least: float | None = None
    at_most: float | None = None

    def __str__(self) -> str:
        if self.at_least is not None:
            return f"≥ {self.at_least:g}x faster"
        return f"≤ {self.at_most:g}x the time"

    def ratio(self, baseline: float, subject: float) -> float:
        """The figure that the bound is about."""
        return baseline / subject if self.at_least is not None else subject / baseline

    def is_met(self, ratio: float) -> bool:
        return (self.at_least or 0.0) <= ratio <= (self.at_most or math.inf)


def same_answer(baseline: Any, subject: Any) -> None:
    """The default check of a comparison: both sides give the same."""
    assert subject == baseline, f"{str(subject)[:500]} is not {str(baseline)[:500]}"


@dataclass(frozen=True)
class Comparison:
    """What is compared, and what is to be reached.

    Attributes:
        title: of the operation.
        baseline: what the subject is compared with.
        subject: what is judged.
        bound: on the ratio of the two.
        check: raises unless the two answers are right; called before anything is timed.
    """

    title: str
    baseline: Side
    subject: Side
    bound: Bound
    check: Callable[[Any, Any], None] = same_answer


@dataclass(frozen=True)
class Result:
    """Times of each repetition, in nanoseconds an operation."""

    comparison: Comparison
    baseline_ns: list[float] = field(default_factory=list)
    subject_ns: list[float] = field(default_factory=list)

    @property
    def ratios(self) -> list[float]:
        """The bound's ratio in each repetition."""
        pairs = zip(self.baseline_ns, self.subject_ns, strict=True)
        return [self.comparison.bound.ratio(*pair) for pair in pairs]

    @property
    def ratio(self) -> float:
        return statistics.median(self.ratios)

    @property
    def is_met(self) -> bool:
        return self.comparison.bound.is_met(self.ratio)


def compare(comparison: Comparison, repetitions: int) -> Result:
    """Check the answers of both sides, then time them in turn."""
    sides = (comparison.baseline, comparison.subject)
    comparison.check(*(_answer(side) for side in sides))
    loops = {side.label: _loops(side) for side in sides}
    result = Result(comparison)
    for repetition in range(repetitions):
        times = {}
        for side in sides if repetition % 2 == 0 else reversed(sides):
            times[side.label] = _time_ns(side, loops[side.label])
        result.baseline_ns.append(times[comparison.baseline.label])
        result.subject_ns.append(times[comparison.subject.label])
    return result


def _answer(side: Side) -> Any:
    with fake_world(side.world_size, side.rank):
        return side.set_up().answer()


def _loops(side: Side) -> int:
    """Runs of the statement in a batch."""
    with fake_world(side.world_size, side.rank):
        action = side.set_up()
        once_ns = min(_timer(action).repeat(3, 1)) if action.repeatable else _BATCH_NS
    return max(1, round(_BATCH_NS / once_ns))


def _time_ns(side: Side, loops: int) -> float:
    """Nanoseconds an operation takes. The world, with what the statement made, goes untimed."""
    gc.collect()
    with fake_world(side.world_size, side.rank):
        # A run of the same code brings it into the processor's caches: cold, a statement of
        # microseconds takes ten times as long, whatever it does.
        _timer((side.warm_up or side.set_up)()).timeit(1)
        action = side.set_up()
        return _timer(action).timeit(loops) / (loops * action.operations)


def _timer(action: Action) -> timeit.Timer:
    # timeit puts the statement into a loop of its own, with no call around it to measure too.
    return timeit.Timer(action.statement, timer=time.thread_time_ns, globals=action.names)
