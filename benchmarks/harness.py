"""Timing, and what is kept of it: actions that say what they answered, measurements and checks.

The clock of what does not wait is the thread's processor time. On a quiet machine it shows what a
wall clock shows. On a busy one a wall clock would count the time of others, and more so for the
slower side: its one run is interrupted where many of the faster one are not.
"""

from __future__ import annotations

import gc
import itertools
import statistics
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

__all__ = [
    "OURS",
    "STOCK",
    "Action",
    "Check",
    "Measurement",
    "Outcome",
    "Played",
    "Run",
    "Scenario",
    "cold",
    "is_cold",
    "play",
    "ratio_of",
    "same_answers",
]

STOCK, OURS = "stock", "Meshverse"

# Operations that may be repeated are, for about this long: well above the clock's resolution.
_BATCH_NS = 1_000_000
_MOST_LOOPS = 20_000


@dataclass(frozen=True)
class Action:
    """One operation of a scenario.

    Attributes:
        operation: its name in tables and plots.
        expression: what is timed, as Python source.
        names: what the expression's names stand for.
        answer: its result as plain data, equal on all sides; called outside the clock.
        operations: how many operations one evaluation is.
        repeatable: whether evaluating it again does the same work.
        is_first: whether its first time in a process is what counts, as it does more than others.
    """

    operation: str
    expression: str
    names: dict[str, Any]
    answer: Callable[[Any], Any] = repr
    operations: int = 1
    repeatable: bool = False
    is_first: bool = False


Scenario = Generator[Action, Any, None]
"""Operations in the order in which a program calls them; each `yield` gives back its result."""


@dataclass
class Played:
    """Samples of scenarios played side by side, by operation.

    Attributes:
        times_ns: nanoseconds an operation; also of "..., cold", where that was timed.
        answers: plain data, of the first scenario.
    """

    times_ns: dict[str, float] = field(default_factory=dict)
    answers: dict[str, Any] = field(default_factory=dict)


def play(*scenarios: Scenario, with_answers: bool, with_cold: bool = False) -> Played:
    """Evaluate the actions of equal scenarios in turn.

    The first scenario warms up: its code, and what it reads, is then in the processor's caches. The
    second is timed. The third, if there is one, is timed cold: before each of its actions the
    caches are filled with other data, as a model's work between two mesh operations does. One
    scenario alone is timed as it comes.

    Args:
        scenarios: started, but not advanced.
        with_cold: with less than three scenarios, time actions that can be repeated cold as well.
        with_answers: also turn each result into plain data, which can take long.
    """
    played = Played()
    results: list[Any] = [None] * len(scenarios)
    with _without_collections():
        while True:
            try:
                actions = [one.send(last) for one, last in zip(scenarios, results, strict=True)]
            except StopIteration:
                return played
            loops = [_timed_loop(action) for action in actions]  # no compiling between them
            timed = [_time_ns(*pair) for pair in zip(actions[:2], loops[:2], strict=True)]
            operation = actions[0].operation
            played.times_ns[operation] = timed[0 if actions[0].is_first else -1][0]
            if len(scenarios) > 2 or (with_cold and actions[-1].repeatable):
                _fill_caches()
                elapsed, result = loops[-1](1)
                timed[2:] = [(elapsed / actions[-1].operations, result)]
                played.times_ns[cold(operation)] = timed[-1][0]
            results = [result for _, result in timed[: len(scenarios)]]
            if with_answers:
                played.answers[operation] = actions[0].answer(results[0])


def cold(operation: str) -> str:
    """Return the name of an operation that is timed with cold caches."""
    return f"{operation}, cold"


def is_cold(operation: str) -> bool:
    """Whether this is the name of an operation that is timed with cold caches."""
    return operation.endswith(", cold")


def _fill_caches() -> None:
    """Write 64 MB: more than a core's own caches hold (L1 and L2)."""
    _other_data.add_(1)


_other_data = torch.zeros(64_000_000, dtype=torch.uint8)


@contextmanager
def _without_collections() -> Iterator[None]:
    """Put off garbage collection to the end of the block, of what was made inside."""
    gc.collect()
    gc.freeze()  # what was there before is not walked through again
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


_Loop = Callable[[int], tuple[float, Any]]
"""Evaluates an expression so many times: nanoseconds of processor time, and the last result."""


def _time_ns(action: Action, timed: _Loop) -> tuple[float, Any]:
    """Nanoseconds an operation takes, and its last result."""
    elapsed, result = timed(1)
    if action.repeatable:
        loops = 1
        while elapsed < _BATCH_NS and loops < _MOST_LOOPS:
            loops = min(_MOST_LOOPS, max(2 * loops, int(loops * _BATCH_NS / max(elapsed, 1)) + 1))
            elapsed, result = timed(loops)
        elapsed /= loops
    return elapsed / action.operations, result


_LOOP = """
def timed(loops, clock=clock):
    turns = range(loops)
    start = clock()
    for _ in turns:
        result = {expression}
    return clock() - start, result
"""


def _timed_loop(action: Action) -> _Loop:
    # As source, like timeit's: there is no call around the expression that would be timed too.
    names = {**action.names, "clock": time.thread_time_ns}
    exec(_LOOP.format(expression=action.expression), names)
    loop: _Loop = names["timed"]
    return loop


@dataclass
class Measurement:
    """Samples of one operation at one scale.

    Attributes:
        operation: its name.
        scale: of the world, mostly: ranks or processes.
        samples: of each side, in the unit. Those of one place were taken in one repetition.
        unit: "ns", "bytes" or what is counted.
        figure: the plot it is part of; "" for none.
    """

    operation: str
    scale: int
    samples: dict[str, list[float]] = field(default_factory=dict)
    unit: str = "ns"
    figure: str = ""

    def add(self, side: str, sample: float) -> None:
        self.samples.setdefault(side, []).append(sample)

    def median(self, side: str) -> float:
        return statistics.median(self.samples[side])


def ratio_of(over: Sequence[float], under: Sequence[float]) -> float:
    """Return how many times `under` is `over`: the median of the ratios of the repetitions.

    What slows the machine for a while slows both sides of a repetition.
    """
    pairs = zip(over, under, strict=False)  # the costlier side can have been repeated less
    return statistics.median(one / max(other, 1e-9) for one, other in pairs)


@dataclass(frozen=True)
class Check:
    """A measured figure and its target.

    Attributes:
        claim: in words.
        figure: what was measured.
        limit: the target.
        at_least: whether the target is at least the limit, or at most.
        unit: of both.
    """

    claim: str
    figure: float
    limit: float
    at_least: bool
    unit: str = "x"

    @property
    def is_met(self) -> bool:
        return self.figure >= self.limit if self.at_least else self.figure <= self.limit

    @classmethod
    def faster(cls, claim: str, by: float, baseline: list[float], subject: list[float]) -> Check:
        """The baseline takes at least so many times what the subject takes."""
        return cls(claim, ratio_of(baseline, subject), by, at_least=True)

    @classmethod
    def within(cls, claim: str, times: float, baseline: list[float], subject: list[float]) -> Check:
        """The subject takes at most so many times what the baseline takes."""
        return cls(claim, ratio_of(subject, baseline), times, at_least=False)


@dataclass
class Outcome:
    """The measurements of a suite.

    Attributes:
        measurements: in the order of the tables.
        checks: figures with a target.
        notes: what was left out and why, for the page.
    """

    measurements: list[Measurement] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def of(self, operation: str, scale: int) -> Measurement:
        """Return the measurement of this name and scale; made if new."""
        for one in self.measurements:
            if (one.operation, one.scale) == (operation, scale):
                return one
        self.measurements.append(Measurement(operation, scale))
        return self.measurements[-1]


def same_answers(answers: dict[str, dict[str, Any]]) -> None:
    """Raise AssertionError unless all sides gave the same answer to what they have in common.

    Args:
        answers: by side, then by operation.
    """
    for one, other in itertools.pairwise(answers):
        for operation in answers[one].keys() & answers[other].keys():
            mine, theirs = answers[one][operation], answers[other][operation]
            assert mine == theirs, (
                f"{operation}: {one} answers {str(mine)[:500]}, {other} {str(theirs)[:500]}"
            )


@dataclass
class Run:
    """Settings of a suite's run, and a callback for its progress.

    Attributes:
        quick: small scales and few repetitions, to see that everything works.
        tell: called with the number of steps done, of how many, and what comes next.
    """

    quick: bool
    tell: Callable[[int, int, str], None] = lambda done, total, now: None

    def choose(self, full: Any, quick: Any) -> Any:
        """One of two values, by whether the run is a quick one."""
        return quick if self.quick else full
