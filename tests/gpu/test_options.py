"""Options of single axes arrive at the backend, and a timeout ends what nobody answers."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from helpers import via_store
from helpers.all_reduce import reached_by, reached_ranks
from helpers.at_platforms import at
from helpers.crew import WORLD_TIMEOUT_SECONDS
from helpers.platforms import World, backend_of, world_at
from meshverse import init_device_mesh

_AXES = ("dp", "tp")
_USUAL = "usual"


def _options(platform: str) -> Any:
    """Options that say something else than fresh ones. c10d hands those of gloo to nobody."""
    if platform == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options.is_high_priority_stream = True
        options.config.min_ctas, options.config.max_ctas = 2, 4
        return options
    options = via_store.loaded().SplittingOptions()
    options.channels = 3
    return options


def _said(platform: str, options: Any) -> dict[str, Any]:
    """Return the options of the backend as c10d gives them back."""
    if platform == "nccl":
        config = options.config  # NCCL's own, from which the communicator was made
        ctas = config.min_ctas, config.max_ctas
        return {"ctas": ctas, "priority": options.is_high_priority_stream}
    return {"channels": options.channels}


def _by_axis(wanted: World) -> dict[str, Any]:
    with world_at(wanted) as platform:
        mesh = init_device_mesh(
            platform.device,
            (2, 2),
            mesh_dim_names=_AXES,
            backend_override={"tp": _options(wanted.platform)},
        )
        view = mesh.unflatten(
            "tp", (2,), ("ep",), backend_override={"ep": _options(wanted.platform)}
        )
        usual = mesh.unflatten("tp", (2,), ("usual",))
        groups = {
            "dp": mesh.get_group("dp"),
            "tp": mesh.get_group("tp"),
            _USUAL: usual.get_group(_USUAL),
        }
        return {
            "said": {
                name: _said(wanted.platform, backend_of(group, wanted).options)
                for name, group in groups.items()
            },
            "asked": _said(wanted.platform, _options(wanted.platform)),
            "of the default group": _said(
                wanted.platform, backend_of(dist.group.WORLD, wanted).options
            ),
            "shared": view.get_group("ep") is groups["tp"],
            "reached": [reached_by(group, platform.device) for group in groups.values()],
        }


@at("splitting", "splitting bound", "nccl", "nccl bound", "nccl bound mixed")
def test_options_of_one_axis_are_those_of_its_backend(
    world: World, run: Callable[..., list[Any]]
) -> None:
    for rank, seen in enumerate(run(_by_axis, 4, world)):
        dp = [int(other % 2 == rank % 2) for other in range(4)]
        tp = [int(other // 2 == rank // 2) for other in range(4)]
        assert seen["reached"] == [dp, tp, tp]
        assert seen["said"]["tp"] == seen["asked"]
        assert seen["said"]["dp"] == seen["said"][_USUAL] == seen["of the default group"]
        assert seen["said"]["dp"] != seen["asked"]
        assert seen["shared"]


def _with_timeout(wanted: World, seconds: float) -> set[float]:
    with world_at(wanted) as platform:
        mesh = init_device_mesh(
            platform.device, (2, 2), mesh_dim_names=_AXES, timeout=timedelta(seconds=seconds)
        )
        groups = [*mesh.get_all_groups(), mesh.flatten("all").get_group()]
        return {backend_of(group, wanted).options._timeout.total_seconds() for group in groups}


@at("gloo", "nccl", "nccl bound")
def test_a_meshs_timeout_is_that_of_its_backends(
    world: World, run: Callable[..., list[Any]]
) -> None:
    assert run(_with_timeout, 4, world, 77.0) == [{77.0}] * 4


def _nobody_answers(wanted: World, seconds: float) -> dict[str, Any]:
    with world_at(wanted._replace(survives=True)) as platform:
        mesh = init_device_mesh(
            platform.device,
            (2, 2),
            mesh_dim_names=_AXES,
            timeout=timedelta(seconds=seconds),
        )
        mesh.universe.warm_up()
        outcome, waited = "", 0.0
        if dist.get_rank() == 1:
            start = time.monotonic()
            try:
                dist.all_reduce(torch.ones(4), group=mesh.get_group("tp"))
            except RuntimeError as error:
                outcome = str(error)
            waited = time.monotonic() - start
        others = reached_by(dist.group.WORLD, platform.device)
        return {"error": outcome, "waited": waited, "others": others}


# Not on NCCL, where the watchdog ends the process (test_timeouts.py): in torch 2.11,
# TORCH_NCCL_BLOCKING_WAIT did not end the call there; why is not known.
@pytest.mark.sweep
@at("gloo")
def test_a_timeout_ends_what_nobody_answers(world: World, run: Callable[..., list[Any]]) -> None:
    seconds = 30.0  # enough to make the groups on a busy machine, which the timeout is of, too
    answers = run(_nobody_answers, 4, world, seconds)
    for rank, seen in enumerate(answers):
        assert bool(seen["error"]) is (rank == 1)
        assert seen["others"] == [1, 1, 1, 1], "the default group works on"
    # Not before its time, and not as late as with the timeout of the default group.
    # duration: which of two timeouts is in force
    assert seconds - 0.5 <= answers[1]["waited"] < WORLD_TIMEOUT_SECONDS


def _of_all(wanted: World) -> dict[str, Any]:
    with world_at(wanted) as platform:
        mesh = init_device_mesh(
            platform.device, (2, 2), mesh_dim_names=_AXES, options=_options(wanted.platform)
        )
        flat = mesh.flatten("all")
        return {
            "said": [
                _said(wanted.platform, backend_of(group, wanted).options)
                for group in (*mesh.get_all_groups(), flat.get_group())
            ],
            "asked": _said(wanted.platform, _options(wanted.platform)),
            "reached": reached_ranks(mesh, platform.device),
            "whole": reached_by(flat.get_group(), platform.device),
        }


@at("splitting bound", "nccl", "nccl bound")
def test_options_of_a_mesh_reach_what_is_flattened_from_it(
    world: World, run: Callable[..., list[Any]]
) -> None:
    for seen in run(_of_all, 4, world):
        assert seen["said"] == [seen["asked"]] * 3
        assert sum(map(sum, seen["reached"].values())) == 4
        assert seen["whole"] == [1, 1, 1, 1]
