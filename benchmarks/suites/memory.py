"""Memory of meshes: one mesh object, and everything that a trainer's five views keep.

Python's share is what tracemalloc counts. All of it, with C++'s and torch's share, is how much
larger the process becomes, without tracemalloc, which takes memory itself. Every figure is taken
in a fresh process.
"""

from __future__ import annotations

import gc
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.distributed import device_mesh as stock

import meshverse
from crews import in_crew
from harness import OURS, STOCK, Check, Outcome, Run
from suites.trainer import DEGREES
from trainer_views import answers, five_views
from worlds import fake_world

__all__ = ["METHOD", "SCALE", "TITLE", "run"]

TITLE = "Memory of meshes"
METHOD = (
    "one rank of a fake world, each figure in a fresh process: bytes that tracemalloc counts, and "
    "growth of the resident memory without it; meshes are held as DTensor holds them, with their "
    "hash and their coordinate read"
)
SCALE = "ranks"
_STOCK_UP_TO = 10_240  # where tracemalloc looks on, views of more ranks take minutes
_LIMIT_S = 300
_SLICES = 200


def run(run: Run) -> Outcome:
    """Measure each kind of thing, both ways, at each scale."""
    outcome = Outcome()
    if sys.platform != "linux":
        outcome.notes.append("Skipped: resident memory is read in Linux's /proc.")
        return outcome
    sizes = run.choose(list(DEGREES), [64, 1_024])
    cases = [
        (size, how, side)
        for size in sizes
        for how in _MEASURES
        for side in (STOCK, OURS)
        if side == OURS or size <= _STOCK_UP_TO
    ]
    seen: dict[int, Any] = {}
    for step, (size, how, side) in enumerate(cases):
        run.tell(step, len(cases), f"{size:,} ranks, {how}, {side}")
        [(held, views)] = in_crew(1, _hold, _MEASURES[how], side, size, limit_s=_LIMIT_S)
        assert seen.setdefault(size, views) == views, "the sides' meshes differ"
        for what, amount in held.items():
            measurement = outcome.of(f"{what}, {how}", size)
            measurement.unit, measurement.figure = "bytes", "held"
            measurement.add(side, amount)
    outcome.measurements.sort(key=lambda one: one.operation)
    outcome.checks = _checks(outcome, sizes)
    if not run.quick:
        outcome.notes.append(
            f"Stock is measured up to {_STOCK_UP_TO:,} ranks: under tracemalloc more takes minutes."
        )
    return outcome


_Made = list[Any]
_Measure = Callable[[Callable[[], _Made]], tuple[float, _Made]]
"""Calls something, and gives the bytes held by what it made, and that."""


def _hold(
    _rank: int, _store: Any, measure: _Measure, side: str, size: int
) -> tuple[dict[str, float], Any]:
    """Bytes held by each kind of thing in one world, and what its meshes answer."""
    init = meshverse.init_device_mesh if side == OURS else stock.init_device_mesh
    degrees, copies = DEGREES[size], _copies(side, size)
    with fake_world(size, 777 % size):
        world = five_views(init, degrees)  # so that what is loaded or made once is not counted
        for name in ("tp", "fsdp"):
            _look_at([world["dense"][name]])
        slices, _ = measure(lambda: _look_at([world["dense"]["tp"] for _ in range(_SLICES)]))
        views, made = measure(
            lambda: [list(five_views(init, degrees).values()) for _ in range(copies)]
        )
        looked_at, _ = measure(lambda: [_look_at(meshes) for meshes in made])
        held = {
            "the same slice, once more": slices / _SLICES,
            "five views": views / copies,
            "five views, hashed": (views + looked_at) / copies,
        }
        small = [world["dense"]["tp"], world["experts"]["ep"]]
        return held, [answers(mesh) for mesh in small]


def _copies(side: str, size: int) -> int:
    """Return how many views to hold: resident memory grows in pages, and stock takes its time."""
    return 16 if side == OURS else max(1, min(8, 20_480 // size))


def _look_at(meshes: _Made) -> _Made:
    for mesh in meshes:
        hash(mesh)
        mesh.get_coordinate()
    return meshes


def _python_bytes(make: Callable[[], _Made]) -> tuple[float, _Made]:
    gc.collect()
    tracemalloc.start()
    made = make()
    gc.collect()
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return float(held), made


def _resident_bytes(make: Callable[[], _Made]) -> tuple[float, _Made]:
    gc.collect()
    before = _resident()
    made = make()
    gc.collect()
    return float(max(0, _resident() - before)), made


_MEASURES = {"Python": _python_bytes, "resident": _resident_bytes}


def _resident() -> int:
    status = Path("/proc/self/status").read_text().split()
    return 1024 * int(status[status.index("VmRSS:") + 1])


def _checks(outcome: Outcome, sizes: list[int]) -> list[Check]:
    checks = []
    for what in ("the same slice, once more", "five views", "five views, hashed"):
        for size in (one for one in (64, 10_240) if one in sizes):
            samples = outcome.of(f"{what}, Python", size).samples
            claim = f"{what}, Python, {size:,} ranks: of stock's"
            checks.append(Check.within(claim, 1, samples[STOCK], samples[OURS]))
    return checks
