"""Jobs that lose ranks, with real processes: killed, stopped, slow, or ended by an error."""

from __future__ import annotations

import os
import signal
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from helpers.jobs import Jobs
from helpers.tiers import in_tiers
from helpers.training import batch, make_model
from meshverse import init_device_mesh, repair

_LOST_AFTER = 5.0
_STEPS = 10

# What happens to a rank: in which world, in which step, and at which of its moments.
Fate = tuple[int, int, str, str]  # rank, step, moment, what


class _Fates:
    """What happens to this process, by the world and the moment in a step.

    Args:
        fates: by number of the world, what happens to one of its ranks.
    """

    def __init__(self, fates: dict[int, list[Fate]]) -> None:
        self._fates = fates

    def now(self, job: repair.Job, moment: str) -> None:
        for rank, step, when, what in self._fates.get(job.world, []):
            if (rank, step, when) == (job.rank, job.step, moment):
                _befall(what)

    def at_call(self, moment: str, address: str) -> None:
        """As `now`, in a function that the job calls: the first time that a rank calls it."""
        ranks = [rank for rank, _, when, _ in self._fates.get(0, []) if when == moment]
        if dist.is_initialized() and dist.get_rank() in ranks:
            host, port = address.split(":")
            store = dist.TCPStore(host, int(port), is_master=False, wait_for_workers=False)
            if store.add(f"fate {moment}", 1) == 1:
                _befall("killed")


def _befall(what: str) -> None:
    if what == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif what == "slow":
        os.system(f"(sleep {_LOST_AFTER / 2}; kill -CONT {os.getpid()}) &")
        os.kill(os.getpid(), signal.SIGSTOP)
    elif what == "a ghost":  # it continues when the others have gone on
        os.system(f"(sleep {3 * _LOST_AFTER}; kill -CONT {os.getpid()}) &")
        os.kill(os.getpid(), signal.SIGSTOP)
    elif what == "error":
        raise ValueError("a bug")


_SHAPES = {
    4: ((2, 1, 2), ("replicate", "shard", "tp")),
    8: ((2, 2, 2), ("replicate", "shard", "tp")),
}


def _build(n_ranks: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    sizes, axes = _SHAPES[n_ranks]
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=axes)
    model = make_model()
    for block in model:
        plan: Any = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(block, mesh["tp"], plan)
        fully_shard(block, mesh=mesh["replicate", "shard"])
    fully_shard(model, mesh=mesh["replicate", "shard"])
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def _train(
    address: str,
    n_ranks: int,
    fates: dict[int, list[Fate]],
    kind: str = "eager",
    steps: int = _STEPS,
    **options: Any,
) -> Any:
    """Train; return the losses that this process has seen by step, and its rank."""
    losses: dict[int, str] = {}
    own = _Fates(fates)

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        own.at_call("build", address)
        model, optimizer = _build(dist.get_world_size())
        if kind == "compiled":
            model.compile(backend="aot_eager")
        return model, optimizer

    def load(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
        own.at_call("load", address)
        return 0

    def step(job: repair.Job) -> None:
        own.now(job, "commit")
        job.state[1].step()
        own.now(job, "committed")

    options = {"lost_after": _LOST_AFTER, "slow_after": 10, "backend": "gloo", **options}
    with repair.join(address, ranks=n_ranks, build=build, load=load, **options) as job:
        while job.step < steps:
            try:
                model, optimizer = job.state
                own.now(job, "begin")
                inputs, targets = batch(job.step)
                loss = (model(inputs) - targets).square().mean()
                own.now(job, "forward")
                loss.backward()
                own.now(job, "backward")
                job.commit(partial(step, job))
                optimizer.zero_grad()
                losses[job.step] = loss.item().hex()
            except job.LOST:  # noqa: PERF203
                own.now(job, "repair")
                job.repair()
    return losses, job.rank


@pytest.fixture(scope="module")
def undisturbed() -> dict[int, dict[int, str]]:
    """The losses of runs that lose nobody, by number of ranks and step."""
    found: dict[int, dict[int, str]] = {}
    for n_ranks in (4, 8):
        jobs = Jobs()
        try:
            jobs.start(_train, n_ranks, n_ranks, {})
            answers = jobs.wait()
        finally:
            jobs.close()
        assert all(answer[0] == answers[0][0] for answer in answers), answers
        found[n_ranks] = answers[0][0]
        assert len(found[n_ranks]) == _STEPS
    return found


def _check(answers: list[Any], n_ranks: int, expected: dict[int, str]) -> list[Any]:
    """Check that the job has finished with all ranks, and that all losses are the expected ones."""
    finished = [answer for answer in answers if isinstance(answer, tuple)]
    assert sorted(rank for _, rank in finished) == list(range(n_ranks)), answers
    for losses, _ in finished:
        assert losses.items() <= expected.items(), (answers, expected)
    assert any(losses == expected for losses, _ in finished), answers
    return [answer for answer in answers if not isinstance(answer, tuple)]


_MOMENTS = ["build", "load", "begin", "forward", "backward", "commit", "committed"]


@pytest.mark.parametrize(
    ("moment", "what"),
    in_tiers(
        [
            *((moment, "killed") for moment in _MOMENTS),
            *((moment, "stopped") for moment in ("forward", "commit")),
            ("forward", "slow"),
            ("forward", "a ghost"),
            ("backward", "error"),
            ("repair", "killed"),
        ],
        [("forward", "killed"), ("commit", "killed"), ("forward", "a ghost")],
    ),
)
def test_a_job_that_loses_a_rank_equals_one_that_does_not(
    jobs: Jobs, undisturbed: dict[int, dict[int, str]], moment: str, what: str
) -> None:
    step = 0 if moment in ("build", "load") else 3
    fates: dict[int, list[Fate]] = {0: [(2, step, moment, what)]}
    if moment == "repair":  # another rank is lost first
        fates[0].append((1, step, "forward", "killed"))
    jobs.start(_train, 6, 4, fates)
    others = _check(jobs.wait(kills_stopped=what == "stopped"), 4, undisturbed[4])
    killed = -signal.SIGKILL  # as a rank is that is stopped, when all others have ended
    expected = {"killed": killed, "stopped": killed, "error": "ValueError: a bug", "a ghost": 1}
    n_lost = 0 if what == "slow" else 2 if moment == "repair" else 1
    assert others.count(expected.get(what)) == n_lost
    assert others.count("SystemExit: 0") == len(others) - n_lost  # spares that were not needed
