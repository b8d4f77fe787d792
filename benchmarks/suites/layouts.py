"""The layout algebra: torch's Python layouts, Meshverse's compiled ones, and what is least."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed import _mesh_layout

from harness import OURS, STOCK, Action, Check, Outcome, Run, Scenario, is_cold, play, same_answers
from meshverse import _core

__all__ = ["METHOD", "SCALE", "TITLE", "run"]

TITLE = "Layout algebra"
METHOD = (
    "layouts of a world split into four axes, processor time; the floor of all groups is a copy of "
    "as many bytes by torch on one thread, that of the others one look at a compiled object"
)
SCALE = "ranks"
_FLOOR = "floor"

_SHAPES = {
    64: (2, 4, 2, 4),
    1_024: (4, 8, 4, 8),
    10_240: (8, 8, 20, 8),
    102_400: (16, 16, 50, 8),
    1_048_576: (32, 32, 32, 32),
}
# torch needs half a second for all groups of a million ranks.
_STOCK_REPETITIONS = {1_048_576: 5}


def run(run: Run) -> Outcome:
    """Measure each operation at each size."""
    sizes = run.choose(list(_SHAPES), [64, 10_240])
    repetitions = run.choose(9, 3)
    outcome = Outcome()
    torch.set_num_threads(1)  # the copy is one processor's work, as the enumeration is
    for repetition in range(repetitions):
        for index, size in enumerate(sizes):
            run.tell(repetition * len(sizes) + index, repetitions * len(sizes), f"{size:,} ranks")
            for operation, side, elapsed in _repetition(size, repetition):
                measurement = outcome.of(operation, size)
                measurement.figure = "" if is_cold(operation) else "layouts"
                measurement.add(side, elapsed)
    outcome.measurements.sort(key=lambda one: _OPERATIONS.index(one.operation.split(",")[0]))
    outcome.checks = _checks(outcome, sizes)
    return outcome


_OPERATIONS = [
    "coalesce",
    "unflatten",
    "complement",
    "all groups of an axis",
    "my group of an axis",
]


def _repetition(size: int, repetition: int) -> list[tuple[str, str, float]]:
    scenarios = {STOCK: _with_torch(size), OURS: _with_ours(size), _FLOOR: _floor(size)}
    if repetition >= _STOCK_REPETITIONS.get(size, repetition + 1):
        del scenarios[STOCK]
    order = list(scenarios)[:: 1 if repetition % 2 == 0 else -1]
    first = repetition == 0
    played = {side: play(scenarios[side], with_answers=first, with_cold=True) for side in order}
    answers = {side: one.answers for side, one in played.items()}
    del answers[_FLOOR]
    same_answers(answers)
    return [
        (operation, side, elapsed)
        for side, one in played.items()
        for operation, elapsed in one.times_ns.items()
    ]


def _strides(size: int) -> tuple[int, ...]:
    _, dp, cp, tp = _SHAPES[size]
    return (dp * cp * tp, cp * tp, tp, 1)


def _with_ours(size: int) -> Scenario:
    shape, strides = _SHAPES[size], _strides(size)
    identity = _core.RankMap.identity(size)
    names = {
        "AxisLayout": _core.AxisLayout,
        "RankGroups": _core.RankGroups,
        "shape": shape[1:3],
        "strides": strides[1:3],
        "world": _core.Layout.from_shape((size,)),
        "sizes": shape,
        "axis": _core.AxisLayout(shape[1], strides[1]),
        "size": size,
        "ranks": identity,
    }
    yield Action("coalesce", "AxisLayout(shape, strides)", names, _modes, repeatable=True)
    yield Action(
        "unflatten",
        "world.unflatten(0, sizes)",
        names,
        lambda layout: [_modes(axis) for axis in layout],
        repeatable=True,
    )
    yield Action("complement", "axis.complement(size)", names, _modes, repeatable=True)
    yield Action(
        "all groups of an axis",
        "RankGroups(axis, ranks).all()",
        names,
        lambda groups: groups.tolist(),
        repeatable=True,
    )
    yield Action(
        "my group of an axis",
        "RankGroups(axis, ranks).ranks_of(0)",
        names,
        list,
        repeatable=True,
    )


def _modes(axis: Any) -> tuple[tuple[int, int], ...]:
    return tuple(zip(axis.sizes, axis.strides, strict=True))


def _with_torch(size: int) -> Scenario:
    shape, strides = _SHAPES[size], _strides(size)
    names = {
        "axis_layout": _torch_axis,
        "shape": shape[1:3],
        "strides": strides[1:3],
        "world": _torch_layout((size,), (1,)),
        "inner": _torch_layout(shape, strides),
        "axis": _torch_axis((shape[1],), (strides[1],)),
        "size": size,
    }
    yield Action("coalesce", "axis_layout(shape, strides)", names, _torch_modes, repeatable=True)
    # The same as `_unflatten` of a mesh, with the layout of the new axes at hand.
    yield Action(
        "unflatten",
        "world.splice(0, 1, world[0].composition(inner))",
        names,
        _torch_axes_modes,
        repeatable=True,
    )
    yield Action("complement", "axis.complement(size)", names, _torch_modes, repeatable=True)
    yield Action("all groups of an axis", "axis.global_ranks(size)", names, list, repeatable=True)
    yield Action("my group of an axis", "axis.all_ranks_from_zero()", names, list, repeatable=True)


_FlatLayout: Any = getattr(_mesh_layout, "_FlatLayout", None)  # from 2.13 on


def _torch_axis(sizes: tuple[int, ...], strides: tuple[int, ...]) -> Any:
    if _FlatLayout is not None:
        return _FlatLayout(sizes, strides)
    return _mesh_layout._MeshLayout(sizes, strides).coalesce()


def _torch_layout(sizes: tuple[int, ...], strides: tuple[int, ...]) -> Any:
    if _FlatLayout is not None:
        return _mesh_layout._MeshLayout.from_sizes_strides(sizes, strides)
    return _mesh_layout._MeshLayout(sizes, strides)


def _torch_modes(axis: Any) -> tuple[tuple[int, int], ...]:
    # Older torch keeps a mode of size 1 where nothing else is left, and does not always merge.
    coalesced = axis if _FlatLayout is not None else axis.coalesce()
    return tuple((size, stride) for size, stride in coalesced.sizes_and_strides if size > 1)


def _torch_axes_modes(layout: Any) -> list[Any]:
    return [_torch_modes(layout[index]) for index in range(len(layout))]


def _floor(size: int) -> Scenario:
    axis, source = _core.AxisLayout(4, 2), torch.arange(size)
    for operation in _OPERATIONS:
        if operation == "all groups of an axis":
            yield Action(operation, "source.clone()", {"source": source}, repeatable=True)
        else:
            yield Action(operation, "axis.size", {"axis": axis}, repeatable=True)


def _checks(outcome: Outcome, sizes: list[int]) -> list[Check]:
    checks = []
    for operation in _OPERATIONS:
        samples = outcome.of(operation, 64).samples
        claim = f"{operation}, 64 ranks: of torch's time"
        checks.append(Check.within(claim, 1.05, samples[STOCK], samples[OURS]))
    if 1_048_576 in sizes:
        samples = outcome.of("all groups of an axis", 1_048_576).samples
        claim = "all groups of an axis, 1,048,576 ranks: of a copy of as many bytes"
        checks.append(Check.within(claim, 3, samples[_FLOOR], samples[OURS]))
        for operation in ("coalesce", "unflatten", "complement"):
            small, large = (outcome.of(operation, size).samples for size in (1_024, 1_048_576))
            claim = f"{operation}, 1,048,576 ranks: of its time at 1,024"
            checks.append(Check.within(claim, 1.5, small[OURS], large[OURS]))
    return checks
