"""Costs of meshes in a training job: the five views, wrapping a model, its steps.

The models have tensor parallelism (8 ranks) and hybrid sharding (8 ranks, replicated over the rest
of the world), on one rank with a backend that does nothing: what is timed is the work of the host.
Only the number of replicas grows with the world, so the model's own work does not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.distributed import device_mesh as stock

import meshverse
from crews import in_crew
from harness import (
    OURS,
    STOCK,
    Action,
    Check,
    Outcome,
    Run,
    Scenario,
    cold,
    play,
    same_answers,
)
from suites.floors import MakesGroups, named
from suites.trainer_model import play_large_model, play_small_model
from trainer_views import Degrees, answers, count_process_groups, five_views
from worlds import fake_world

__all__ = ["DEGREES", "METHOD", "SCALE", "TITLE", "run"]

TITLE = "A trainer: five views, wrapping, steps"
METHOD = (
    "one rank of a fake world, processor time of its thread; models in a process for each side "
    "and world, as torch caches plans by the value of a mesh and equal meshes of both sides would "
    "meet; the processes take turns, one at a time, step by step; the floor of the views is c10d "
    "making the distinct groups"
)
SCALE = "ranks"
_FLOOR = "floor"
_VIEWS = "five views of one world"
DEGREES = {
    8: Degrees(pp=2, dp_shard=2, tp=2, ep=2),
    64: Degrees(pp=2, dp_shard=8, tp=4, ep=8),
    1_024: Degrees(pp=4, dp_shard=32, tp=8, ep=16),
    10_240: Degrees(),
    102_400: Degrees(pp=16, dp_shard=800, tp=8, ep=64),
    1_048_576: Degrees(pp=32, dp_shard=4096, tp=8, ep=64),
}
# Repetitions: a run takes ten seconds at 102,400 ranks. At 1,048,576, where stock goes through
# five million groups of one rank each for the axes of size 1, it takes minutes.
_STOCK_VIEWS = {102_400: 1, 1_048_576: 0}
_SIZES = [64, 1_024, 10_240, 102_400]  # the models have 64 ranks, or more replicas
_COLD_SIZES = (64, 10_240)
_LAYERS_AT = 10_240
_LIMIT_S = 400
# Two measurements of the very same call differ by some percent on a shared machine.
_NOT_SLOWER = 1.05


def run(run: Run) -> Outcome:
    """Measure the views, then the models."""
    outcome = Outcome()
    sizes = run.choose(list(DEGREES), [8, 64, 10_240])
    model_sizes = run.choose(_SIZES, [64])
    repetitions, games = run.choose((5, 2), (3, 1))
    steps = repetitions * len(sizes) + 60 * games
    step = 0
    ranks: dict[int, set[Any]] = {}
    for repetition in range(repetitions):
        for size in sizes:
            run.tell(step, steps, f"five views of {size:,} ranks")
            step += 1
            _views(outcome, size, repetition, ranks)
    for game in range(games):
        run.tell(step, steps, "16 blocks, all sides in turn")
        step += 40
        _model(outcome, play_small_model, model_sizes, game, run.choose(24, 4))
        if not run.quick:
            run.tell(step, steps, f"80 layers, {_LAYERS_AT:,} ranks")
            step += 20
            _model(outcome, play_large_model, [_LAYERS_AT], game, 2)
    outcome.measurements.sort(key=lambda one: _ORDER.index(one.operation))
    outcome.checks = _checks(outcome, sizes, model_sizes)
    if not run.quick:
        outcome.notes.append(
            "A side that has taken eight seconds for an operation sits its other rounds out: "
            "stock, wrapping the model in a world of 102,400 ranks."
        )
        outcome.notes.append(
            "Stock builds the views of 102,400 ranks once, without warming up, in some ten "
            "seconds, and not those of 1,048,576, which would take minutes: it goes through a "
            "million groups of one rank for every axis of size 1."
        )
    return outcome


_GROUPS = "process groups after five views"
_STEPS = ["training step", "compiled training step", "compiled call"]
_ORDER = [
    _VIEWS,
    cold(_VIEWS),
    _GROUPS,
    "wrap 16 blocks",
    "wrap 80 layers",
    *_STEPS,
]


def _views(outcome: Outcome, size: int, repetition: int, ranks: dict[int, set[Any]]) -> None:
    """Time the views on all sides; the first time also compare them and note this rank's groups."""
    sides = [STOCK, OURS][:: 1 if repetition % 2 == 0 else -1]
    if repetition >= _STOCK_VIEWS.get(size, repetition + 1):
        sides.remove(STOCK)
    first, seen = repetition == 0, {}
    for side in sides:
        warm_ups = 0 if side == STOCK and size in _STOCK_VIEWS else 1
        with fake_world(size, 777 % size):
            times = warm_ups + (2 if size in _COLD_SIZES else 1)
            scenarios = [_scenario(side, size) for _ in range(times)]
            played = play(*scenarios, with_answers=first)
            groups = 1 + (count_process_groups() - 1) // len(scenarios)  # the default group is one
        seen[side] = played.answers
        for operation, elapsed in played.times_ns.items():
            outcome.of(operation, size).add(side, elapsed)
        outcome.of(_GROUPS, size).add(side, groups)
    if first:
        same_answers(seen)
        views = seen[OURS][_VIEWS].values()
        ranks[size] = {tuple(one) for view in views for one in view["axis ranks"]}
    with fake_world(size, 777 % size):
        new = sorted(one for one in ranks[size] if len(one) < size)  # not the default group
        floors = [_floor(new) for _ in range(3 if size in _COLD_SIZES else 2)]
        played = play(*floors, with_answers=False)
        for operation, elapsed in played.times_ns.items():
            outcome.of(operation, size).add(_FLOOR, elapsed)
    outcome.of(_VIEWS, size).figure = "views"
    outcome.of(_GROUPS, size).unit = "groups"


def _scenario(side: str, size: int) -> Scenario:
    init = meshverse.init_device_mesh if side == OURS else stock.init_device_mesh
    names = {"five_views": five_views, "init": init, "degrees": DEGREES[size]}
    yield Action(
        _VIEWS,
        "five_views(init, degrees)",
        names,
        lambda views: {name: answers(view) for name, view in views.items()},
    )


def _floor(ranks: list[tuple[int, ...]]) -> Scenario:
    make = MakesGroups()
    groups = named([list(one) for one in ranks])
    yield Action(_VIEWS, "make(groups)", {"make": make, "groups": groups})


def _model(
    outcome: Outcome, play: Callable[..., Any], sizes: list[int], game: int, rounds: int
) -> None:
    players = [(side, size) for size in sizes for side in (STOCK, OURS)]
    players = players[:: 1 if game % 2 == 0 else -1]
    results = in_crew(len(players), play, players, rounds, limit_s=_LIMIT_S)
    placed = [where for where, _ in results]
    assert all(one == placed[0] for one in placed), "the models are wrapped unlike"
    for (side, size), (_, times) in zip(players, results, strict=True):
        for operation, samples in times.items():
            for sample in samples:
                outcome.of(operation, size).add(side, sample)
            outcome.of(operation, size).figure = "models"


def _checks(outcome: Outcome, sizes: list[int], model_sizes: list[int]) -> list[Check]:
    samples = outcome.of(_VIEWS, 10_240).samples
    checks = [
        Check.faster(
            f"{_VIEWS}, 10,240 ranks: faster than stock", 100, samples[STOCK], samples[OURS]
        )
    ]
    groups = outcome.of(_GROUPS, 10_240).median(OURS)
    checks.append(Check(f"{_GROUPS}, 10,240 ranks", groups, 7, at_least=False, unit="groups"))
    for operation in [_VIEWS, "wrap 16 blocks", *_STEPS]:
        samples = outcome.of(operation, 64).samples
        claim = f"{operation}, 64 ranks: of stock's time"
        checks.append(Check.within(claim, _NOT_SLOWER, samples[STOCK], samples[OURS]))
    if model_sizes != _SIZES:
        return checks
    for operation in ("wrap 16 blocks", "wrap 80 layers"):
        samples = outcome.of(operation, 10_240).samples
        claim = f"{operation}, 10,240 ranks: faster than stock"
        checks.append(Check.faster(claim, 2.5, samples[STOCK], samples[OURS]))
    for operation in ("wrap 16 blocks", *_STEPS):
        small, large = (outcome.of(operation, size).samples for size in (64, 102_400))
        claim = f"{operation}, 102,400 ranks: of its time at 64"
        checks.append(Check.within(claim, 1.15, small[OURS], large[OURS]))
    return checks
