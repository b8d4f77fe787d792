"""Every mesh operation: stock torch, Meshverse and the floor, from 8 ranks to 1,048,576."""

from __future__ import annotations

from typing import Any

from torch.distributed import device_mesh as stock

import meshverse
from harness import (
    OURS,
    STOCK,
    Check,
    Outcome,
    Played,
    Run,
    Scenario,
    cold,
    play,
    ratio_of,
    same_answers,
)
from suites.floors import WHAT, floor_of
from suites.mesh_scenario import FIGURES, Axes, mesh_operations
from worlds import fake_world

__all__ = ["METHOD", "SCALE", "TITLE", "run"]

TITLE = "Mesh operations"
METHOD = (
    "one rank of a fake world, processor time of its thread; all operations in one world, each "
    "timed right after it was done once for the answer; cold: after 64 MB of other data went "
    "through the processor's caches; sides and world sizes in turn"
)
SCALE = "ranks"
_FLOOR = "floor"

_AXES: dict[int, Axes] = {
    8: {"pp": 2, "dp": 2, "cp": 2, "tp": 1},
    64: {"pp": 2, "dp": 4, "cp": 2, "tp": 4},
    1_024: {"pp": 4, "dp": 8, "cp": 4, "tp": 8},
    10_240: {"pp": 8, "dp": 8, "cp": 20, "tp": 8},
    102_400: {"pp": 16, "dp": 16, "cp": 50, "tp": 8},
    1_048_576: {"pp": 32, "dp": 32, "cp": 32, "tp": 32},
}
# A run of stock takes some 10 s at 102,400 ranks, a minute at 1,048,576.
_STOCK_REPETITIONS = {102_400: 3, 1_048_576: 1}

_COLD_SIZES = (64, 10_240)

# At 10,240 ranks, against stock.
_AT_LEAST_COLD = {
    "slice first": 20,
    "unflatten to known groups": 800,
    "flatten to a new group": 30,
}
_AT_LEAST = {
    "create 4-D mesh": 100,
    "slice first": 50,
    "slice again": 500,
    "unflatten to new groups": 100,
    "unflatten to known groups": 2000,
    "flatten to a new group": 30,
    "flatten to a known group": 30,
    "compare equal meshes": 150,
}
# The one goes through all ranks, once; up to 1,024 ranks both were done when the mesh was made.
_FIRST_HASHES = {"hash first in a world", "hash first of a mesh"}
# Two measurements of the very same thing differ by some percent on a shared machine.
_NOT_SLOWER = 1.05


def run(run: Run) -> Outcome:
    """Measure all operations at all scales."""
    sizes = run.choose(list(_AXES), [8, 64, 10_240])
    repetitions = run.choose(11, 3)
    outcome = Outcome()
    for size in sizes:
        for figure, operations in FIGURES.items():
            for operation in operations:
                outcome.of(operation, size).figure = figure
                if size in _COLD_SIZES:
                    outcome.of(cold(operation), size)
    step = 0
    for repetition in range(repetitions):
        for size in sizes:
            run.tell(step, repetitions * len(sizes), f"{size:,} ranks, repetition {repetition + 1}")
            step += 1
            sides = _sides(size, repetition)
            played = _play_all(size, sides, compare=repetition == 0)
            for side, times in played.items():
                for operation, elapsed in times.items():
                    outcome.of(operation, size).add(side, elapsed)
    outcome.checks = _checks(outcome, sizes)
    if not run.quick:
        outcome.notes.append(
            "Stock is measured three times at 102,400 ranks and once at 1,048,576, where one pass "
            "over the operations takes it some half a minute."
        )
    return outcome


def _sides(size: int, repetition: int) -> list[str]:
    sides = [STOCK, OURS, _FLOOR]
    if repetition >= _STOCK_REPETITIONS.get(size, repetition + 1):
        sides.remove(STOCK)
    return sides[:: 1 if repetition % 2 == 0 else -1]


def _play_all(size: int, sides: list[str], *, compare: bool) -> dict[str, dict[str, float]]:
    """Nanoseconds of each operation by side; if asked to, once all answers are seen to agree."""
    played = {side: _play(size, side, with_answers=compare) for side in sides}
    if compare:
        answers = {side: one.answers for side, one in played.items()}
        floor = answers.pop(_FLOOR)
        same_answers(answers)
        for operation, ranks in floor.items():
            if WHAT[operation].startswith("c10d"):  # the others look up what they were given
                assert ranks == answers[OURS][operation]["axis ranks"], operation
    return {side: one.times_ns for side, one in played.items()}


def _play(size: int, side: str, *, with_answers: bool) -> Played:
    with fake_world(size, _rank_in(size)):
        times = 3 if size in _COLD_SIZES else 2
        scenarios = [_scenario(side, size) for _ in range(times)]
        return play(*scenarios, with_answers=with_answers)


def _rank_in(size: int) -> int:
    return 777 % size


def _scenario(side: str, size: int) -> Scenario:
    axes = _AXES[size]
    if side == _FLOOR:
        return floor_of(axes, *_ranks_along(axes, _rank_in(size)))
    module: Any = meshverse if side == OURS else stock
    return mesh_operations(module.init_device_mesh, axes)


def _ranks_along(axes: Axes, rank: int) -> tuple[list[list[int]], list[int]]:
    """Return a rank's group along each axis, and along dp and cp together, by division."""
    strides, stride = {}, 1
    for name in reversed(axes):
        strides[name], stride = stride, stride * axes[name]

    def along(*names: str) -> list[int]:
        ranks = [rank - sum(rank // strides[one] % axes[one] * strides[one] for one in names)]
        for name in names:
            ranks = [one + index * strides[name] for one in ranks for index in range(axes[name])]
        return ranks

    return [along(name) for name in axes], along("dp", "cp")


def _checks(outcome: Outcome, sizes: list[int]) -> list[Check]:
    checks = []
    for operation, times in _AT_LEAST.items():
        samples = outcome.of(operation, 10_240).samples
        claim = f"{operation}, 10,240 ranks: faster than stock"
        checks.append(Check.faster(claim, times, samples[STOCK], samples[OURS]))
    for operation, times in _AT_LEAST_COLD.items():
        samples = outcome.of(cold(operation), 10_240).samples
        claim = f"{cold(operation)}, 10,240 ranks: faster than stock"
        checks.append(Check.faster(claim, times, samples[STOCK], samples[OURS]))
    samples = outcome.of(cold("create 4-D mesh"), 10_240).samples
    claim = f"{cold('create 4-D mesh')}, 10,240 ranks: of c10d's own time"
    checks.append(Check.within(claim, 1.6, samples[_FLOOR], samples[OURS]))
    for operation in (one for one, what in WHAT.items() if what.startswith("c10d")):
        samples = outcome.of(operation, 10_240).samples
        claim = f"{operation}, 10,240 ranks: of c10d's own time"
        checks.append(Check.within(claim, 2, samples[_FLOOR], samples[OURS]))
    for operation in WHAT:
        samples = outcome.of(operation, 64).samples
        claim = f"{operation}, 64 ranks: of stock's time"
        checks.append(Check.within(claim, _NOT_SLOWER, samples[STOCK], samples[OURS]))
    if 1_048_576 in sizes:
        checks += [
            _growth(outcome, operation) for operation in WHAT if operation not in _FIRST_HASHES
        ]
    return checks


def _growth(outcome: Outcome, operation: str) -> Check:
    """Return the check of how much more an operation takes in the larger world.

    What makes groups is judged beside its floor: the groups themselves have more ranks there.
    """
    small, large = (outcome.of(operation, size).samples for size in (1_024, 1_048_576))
    claim = f"{operation}, 1,048,576 ranks: of its time at 1,024"
    if not WHAT[operation].startswith("c10d"):
        return Check.within(claim, 1.5, small[OURS], large[OURS])
    beside = [ratio_of(side[OURS], side[_FLOOR]) for side in (large, small)]
    return Check(f"{claim}, both beside c10d's", beside[0] / beside[1], 1.5, at_least=False)
