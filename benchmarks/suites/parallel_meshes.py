"""A trainer's meshes by `meshverse.parallel` and the same steps with stock torch.

The steps with stock torch are the cheapest that give meshes of one root, as FSDP2 needs: the
experts' mesh unflattens the flattened stage, and the mesh for FSDP2 is a concatenation. Both sides
make the groups of every axis of these meshes; stock makes one for the flattened stage besides.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch.distributed.device_mesh import DeviceMesh as StockDeviceMesh
from torch.distributed.device_mesh import init_device_mesh

from harness import OURS, STOCK, Action, Check, Outcome, Run, Scenario, is_cold, play, same_answers
from meshverse.parallel import (
    FSDP2Config,
    ParallelismSizes,
    create_device_meshes,
    get_flat_mesh,
    get_fsdp_dp_mesh,
)
from trainer_views import answers, count_process_groups
from worlds import fake_world

__all__ = ["METHOD", "SCALE", "TITLE", "run"]

TITLE = "A trainer's meshes with meshverse.parallel"
METHOD = "one rank of a fake world, processor time of its thread; both sides in turn"
SCALE = "ranks"

_FLATTENED = {
    "dp": ("dp_replicate", "dp_shard"),
    "dp_shard_cp": ("dp_shard", "cp"),
    "dp_cp": ("dp_replicate", "dp_shard", "cp"),
}
_GROUPS = "process groups of these meshes"


class _Shape(NamedTuple):
    """Degrees of parallelism; expert parallelism takes from all but pp and dp_replicate."""

    pp: int
    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int
    ep: int

    @property
    def axes(self) -> dict[str, int]:
        """Sizes of the axes of the dense mesh, by name."""
        return {name: size for name, size in self._asdict().items() if name != "ep"}

    @property
    def experts(self) -> dict[str, int]:
        """Axes of a pipeline stage seen by the experts."""
        stage = self.dp_replicate * self.dp_shard * self.cp * self.tp
        return {"ep_shard": stage // self.ep, "ep": self.ep}


_SHAPES = {
    64: _Shape(pp=2, dp_replicate=2, dp_shard=4, cp=2, tp=2, ep=4),
    10_240: _Shape(pp=4, dp_replicate=2, dp_shard=80, cp=2, tp=8, ep=64),
    102_400: _Shape(pp=8, dp_replicate=4, dp_shard=200, cp=2, tp=8, ep=64),
}


_COLD_SIZES = (64, 10_240)
_STOCK_REPETITIONS = {102_400: 2}  # some four seconds each


class _Built(NamedTuple):
    """The meshes of one side: the root, the experts' mesh and the flattened axes by name."""

    root: Any
    experts: Any
    flattened: dict[str, Any]


def run(run: Run) -> Outcome:
    """Measure both sides at all sizes."""
    sizes = run.choose(list(_SHAPES), [64, 10_240])
    repetitions = run.choose(7, 3)
    outcome = Outcome()
    for repetition in range(repetitions):
        for index, size in enumerate(sizes):
            run.tell(repetition * len(sizes) + index, repetitions * len(sizes), f"{size:,} ranks")
            sides = [STOCK, OURS][:: 1 if repetition % 2 == 0 else -1]
            if repetition >= _STOCK_REPETITIONS.get(size, repetition + 1):
                sides.remove(STOCK)
            _repeat(outcome, size, sides)
    outcome.measurements.sort(key=lambda one: (one.unit, one.operation))
    outcome.checks = _checks(outcome)
    return outcome


def _repeat(outcome: Outcome, size: int, sides: list[str]) -> None:
    seen = {}
    for side in sides:
        with fake_world(size, 777 % size):
            times = 3 if size in _COLD_SIZES else 2
            scenarios = [_scenario(side, _SHAPES[size]) for _ in range(times)]
            played = play(*scenarios, with_answers=True)
            groups = 1 + (count_process_groups() - 1) // times  # the default group is one
        seen[side] = played.answers
        for operation, elapsed in played.times_ns.items():
            outcome.of(operation, size).add(side, elapsed)
            if not is_cold(operation):
                outcome.of(operation, size).figure = "meshes"
        outcome.of(_GROUPS, size).unit = "groups"
        outcome.of(_GROUPS, size).add(side, groups)
    same_answers(seen)


def _scenario(side: str, shape: _Shape) -> Scenario:
    build, fsdp_mesh = (
        (_build_with_stock, _fsdp_mesh_with_stock)
        if side == STOCK
        else (_build_with_ours, lambda built: get_fsdp_dp_mesh(built.root))
    )
    names: dict[str, Any] = {"build": build, "fsdp_mesh": fsdp_mesh, "shape": shape}
    built = yield Action("build all meshes of a trainer", "build(shape)", names, _all_answers)
    names["built"] = built
    yield Action("ask for FSDP2's mesh", "fsdp_mesh(built)", names, answers)
    yield Action("ask for FSDP2's mesh again", "fsdp_mesh(built)", names, answers, 1, True)


def _all_answers(built: _Built) -> dict[str, Any]:
    meshes = {"root": built.root, "experts": built.experts, **built.flattened}
    return {name: answers(mesh) for name, mesh in meshes.items()}


def _build_with_stock(shape: _Shape) -> _Built:
    root = init_device_mesh("cpu", tuple(shape.axes.values()), mesh_dim_names=tuple(shape.axes))
    flattened = {name: root[axes]._flatten(name) for name, axes in _FLATTENED.items()}
    stage = root["dp_replicate", "dp_shard", "cp", "tp"]._flatten("stage")
    experts = stage._unflatten(0, tuple(shape.experts.values()), tuple(shape.experts))
    return _Built(root, experts, flattened)


def _build_with_ours(shape: _Shape) -> _Built:
    sizes = ParallelismSizes(
        pp_size=shape.pp,
        dp_replicate_size=shape.dp_replicate,
        tp_size=shape.tp,
        cp_size=shape.cp,
        ep_size=shape.ep,
    )
    world_size = 1
    for size in shape.axes.values():
        world_size *= size
    root, experts = create_device_meshes(FSDP2Config(), sizes, world_size=world_size)
    return _Built(root, experts, {name: get_flat_mesh(root, name) for name in _FLATTENED})


def _fsdp_mesh_with_stock(built: _Built) -> Any:
    concatenate: Callable[..., Any] = StockDeviceMesh._concatenate
    return concatenate([built.root["dp_replicate"], built.flattened["dp_shard_cp"]])


def _checks(outcome: Outcome) -> list[Check]:
    checks = []
    for operation, times in (
        ("build all meshes of a trainer", 100),
        ("ask for FSDP2's mesh again", 10),
    ):
        for size, least in ((10_240, times), (64, 1 / 1.05)):
            samples = outcome.of(operation, size).samples
            claim = f"{operation}, {size:,} ranks: faster than stock"
            checks.append(Check.faster(claim, least, samples[STOCK], samples[OURS]))
    groups = outcome.of(_GROUPS, 10_240)
    checks.append(Check(_GROUPS, groups.median(OURS), 11, at_least=False, unit="groups"))
    return checks
