"""Every axis of a trainer's five views reaches its ranks, whatever the default group is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from helpers.all_reduce import expected_ranks, reached_by
from helpers.at_platforms import at
from helpers.platforms import World, world_at
from helpers.tiers import in_tiers
from meshverse import init_device_mesh
from trainer_views import Degrees, count_process_groups, five_views

_DEGREES = {
    2: Degrees(pp=1, dp_shard=1, tp=2, ep=2),
    4: Degrees(pp=1, dp_shard=2, tp=2, ep=2),
    8: Degrees(pp=2, dp_shard=2, tp=2, ep=2),
}


def _grids(d: Degrees) -> dict[str, tuple[np.ndarray, tuple[str, ...]]]:
    """The ranks of each view and the names of its axes, in plain numpy."""
    ranks = np.arange(d.world_size)
    views = {
        "world": {"world": d.world_size},
        "data": {"pp": d.pp, "batch": d.batch, "cp": d.cp, "tp": d.tp},
        "dense": {"pp": d.pp, "dp_replicate": d.dp_replicate, "fsdp": d.fsdp, "tp": d.tp},
        "experts": {"pp": d.pp, "dp_replicate": d.dp_replicate, "efsdp": d.efsdp, "ep": d.ep},
        "full": {
            "pp": d.pp,
            "dp_replicate": d.dp_replicate,
            "dp_shard": d.dp_shard,
            "cp": d.cp,
            "tp": d.tp,
        },
        "loss": {"pp": d.pp, "loss": d.batch * d.cp, "tp": d.tp},
    }
    return {name: (ranks.reshape(tuple(v.values())), tuple(v)) for name, v in views.items()}


def _reached(wanted: World, lazy: bool) -> dict[str, Any]:
    with world_at(wanted) as platform:

        def init(_: str, *shape: Any, **given: Any) -> Any:
            return init_device_mesh(platform.device, *shape, **given, lazy=lazy)

        views = five_views(init, _DEGREES[dist.get_world_size()])
        made = count_process_groups()
        devices = [platform.device, "cpu"] if wanted.is_mixed else [platform.device]
        reached = {
            name: {
                device: {
                    axis: reached_by(view.get_group(axis), device)
                    for axis in view.mesh_dim_names or ()
                }
                for device in devices
            }
            for name, view in views.items()
        }
        groups = views["world"].universe.explain().to_dict()["groups"]
        return {
            "reached": reached,
            "made": made,
            "used": count_process_groups(),
            "hows": {group["how"] for group in groups},
        }


def _check(answers: list[dict[str, Any]]) -> None:
    size = len(answers)
    for name, (grid, axes) in _grids(_DEGREES[size]).items():
        for rank, seen in enumerate(answers):
            expected = expected_ranks(grid, axes, rank, size)
            for device, reached in seen["reached"][name].items():
                assert reached == {axis: expected[axis] for axis in reached}, (name, rank, device)


@pytest.mark.parametrize("size", in_tiers([2, 4, 8], [4]))
@at("gloo", "gloo mixed", "nccl", "nccl bound", "nccl mixed", "nccl bound mixed")
def test_every_axis_reduces_the_right_sum(
    world: World, run: Callable[..., list[Any]], size: int
) -> None:
    answers = run(_reached, size, world, False)
    _check(answers)
    _check_ways(answers, world)


@at("splitting", "splitting bound", "splitting bound mixed")
def test_every_axis_reduces_the_right_sum_on_a_backend_that_splits(
    world: World, run: Callable[..., list[Any]]
) -> None:
    answers = run(_reached, 4, world, False)
    _check(answers)
    _check_ways(answers, world)


def _check_ways(answers: list[dict[str, Any]], world: World) -> None:
    way = "split off the default group" if world.is_bound else "created by its members"
    for seen in answers:
        assert way in seen["hows"]
        assert seen["hows"] <= {"the default group", way}
        assert seen["used"] == seen["made"]


@at("gloo", "splitting", "splitting bound", "nccl", "nccl bound")
def test_lazy_groups(world: World, run: Callable[..., list[Any]]) -> None:
    answers = run(_reached, 4, world, True)
    _check(answers)
    for seen in answers:
        # All ranks take part in a split, so that is never left for later.
        assert (seen["made"] == 1) is not world.is_bound
        assert seen["used"] > 1
