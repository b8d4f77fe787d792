"""Jobs that lose ranks, with real processes: killed, stopped, slow, or ended by an error."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import sleep
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
from meshverse.repair.membership import JobStore

_LOST_AFTER = 5.0
_STEPS = 10
_LLAMA_STEPS = 24

# What happens to a rank: in which world, in which step, and at which of its moments.
Fate = tuple[int, int, str, str]  # rank, step, moment, what


def _parts(address: str) -> tuple[str, int]:
    host, port = address.split(":")
    return host, int(port)


class _Fates:
    """Fates of this process, by the world and the moment in a step.

    Args:
        fates: by number of the world, what happens to its ranks.
        address: address of the store.
    """

    def __init__(self, fates: dict[int, list[Fate]], address: str) -> None:
        self._fates, self._address, self._n_worlds = fates, address, 0

    def _store(self) -> dist.TCPStore:
        return dist.TCPStore(*_parts(self._address), is_master=False, wait_for_workers=False)

    def now(self, job: repair.Job, moment: str) -> None:
        fates = self._fates.get(job.world, [])
        for rank, step, when, what in fates:
            if (rank, step, when) == (job.rank, job.step, moment):
                self._meet(
                    f"{job.world} {step}", sum(one[1:] == (step, when, what) for one in fates)
                )
                if what == "waits":
                    store = self._store()
                    store.set("waits", "")
                    while not store.check(["goes on"]):
                        sleep(0.1)
                _befall(what)

    def _meet(self, where: str, n_ranks: int) -> None:
        """Wait for the other ranks of the same fate: they would notice this one's."""
        store = self._store()
        store.add(f"met {where}", 1)
        while store.add(f"met {where}", 0) < n_ranks:
            sleep(0.01)

    def connect(self, initialize: Callable[..., None], **given: Any) -> None:
        """Create a default group: the moments "connect" and, for survivors, "connect again"."""
        self._n_worlds += 1
        moment = "connect" if self._n_worlds == 1 else "connect again"
        self.at_call(moment, given["rank"])
        if self.is_next("connecting", given["rank"]):
            given["store"] = _KillsItsReader(given["store"])
        initialize(**given)

    def at_call(self, moment: str, own_rank: int | None = None) -> None:
        """As `now`, in a function that the job calls: the first time that a rank calls it."""
        if self.is_next(moment, dist.get_rank() if own_rank is None else own_rank):
            _befall("killed")

    def is_next(self, moment: str, own_rank: int) -> bool:
        """Whether this call of a rank meets a fate: the first one, or as many as are given."""
        ranks = [rank for rank, _, when, _ in self._fates.get(0, []) if when == moment]
        return own_rank in ranks and self._store().add(f"fate {moment}", 1) <= len(ranks)


class _KillsItsReader(dist.Store):
    """A store that kills this process as soon as it reads where the other ranks listen."""

    def __init__(self, store: dist.Store) -> None:
        super().__init__()
        self._store = store

    def set(self, key: str, value: Any) -> None:
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        self._store.get(key)
        _befall("killed")
        return b""

    def wait(self, keys: list[str], timeout: Any = None) -> None:
        self.get(keys[0])


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
    2: ((1, 1, 2), ("replicate", "shard", "tp")),
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


def _build_llama(n_ranks: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes, axes = _SHAPES[n_ranks]
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=axes)
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
    )
    model = LlamaForCausalLM(config)
    by_columns = "self_attn.q_proj self_attn.k_proj self_attn.v_proj mlp.gate_proj mlp.up_proj"
    plan: Any = {name: ColwiseParallel() for name in by_columns.split()}
    plan |= {name: RowwiseParallel() for name in ("self_attn.o_proj", "mlp.down_proj")}
    for layer in model.model.layers:
        parallelize_module(layer, mesh["tp"], plan)
        fully_shard(layer, mesh=mesh["replicate", "shard"])
    fully_shard(model, mesh=mesh["replicate", "shard"])
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def _loss_of_llama(model: nn.Module, step: int) -> torch.Tensor:
    tokens = torch.randint(64, (4, 8), generator=torch.Generator().manual_seed(step))
    loss: torch.Tensor = model(input_ids=tokens, labels=tokens).loss
    return loss


def _loss(model: nn.Module, step: int) -> torch.Tensor:
    inputs, targets = batch(step)
    return (model(inputs) - targets).square().mean()


def _build_random(n_ranks: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """As `_build`, with a buffer."""
    model, optimizer = _build(n_ranks)
    model.register_buffer("count", torch.zeros(()))
    return model, optimizer


def _random_loss(model: nn.Module, step: int) -> torch.Tensor:
    """A loss with dropout, the same on all ranks, and with a buffer that is replaced."""
    inputs, targets = batch(step)
    model.count = model.count + 1
    outputs = model(nn.functional.dropout(inputs, 0.2))
    return (outputs - targets).square().mean() * (1 + model.count / 100)


_KINDS: dict[str, tuple[Callable[..., Any], Callable[..., torch.Tensor]]] = {
    "eager": (_build, _loss),
    "compiled": (_build, _loss),
    "llama": (_build_llama, _loss_of_llama),
    "random": (_build_random, _random_loss),
}


def _train(
    address: str,
    n_ranks: int | list[int],
    fates: dict[int, list[Fate]],
    kind: str = "eager",
    folder: str = "",
    options: dict[str, Any] | None = None,
) -> Any:
    """Train; return the losses that this process has seen by step, and its rank."""
    losses: dict[int, str] = {}
    own = _Fates(fates, address)

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        own.at_call("build")
        model, optimizer = _KINDS[kind.split()[-1]][0](dist.get_world_size())
        if "compiled" in kind:
            model.compile(backend="aot_eager")
        return model, optimizer

    def load(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
        own.at_call("load")
        file = f"{folder}/{dist.get_rank()}"
        if not os.path.exists(file):
            return 0
        saved = torch.load(file, weights_only=False)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        return int(saved["step"])

    def save(job: repair.Job) -> None:
        model, optimizer = job.state
        parts = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({**parts, "step": job.step}, f"{folder}/{job.rank}")

    def step(job: repair.Job) -> None:
        own.now(job, "commit")
        job.state[1].step()
        own.now(job, "committed")

    dist.init_process_group = partial(own.connect, dist.init_process_group)
    steps = _LLAMA_STEPS if "llama" in kind else _STEPS
    usual = {"load": load, "lost_after": _LOST_AFTER, "slow_after": 10, "backend": "gloo"}
    with repair.join(address, ranks=n_ranks, build=build, **usual | (options or {})) as job:
        while job.step < steps:
            try:
                model, optimizer = job.state
                own.now(job, "begin")
                loss = _KINDS[kind.split()[-1]][1](model, job.step)
                own.now(job, "forward")
                loss.backward()
                own.now(job, "backward")
                job.commit(partial(step, job))
                optimizer.zero_grad()
                losses[job.step] = loss.item().hex()
                if job.step == 2 and folder:
                    save(job)
            except job.LOST:  # noqa: PERF203
                own.now(job, "repair")
                job.repair()
    return losses, job.rank


@pytest.fixture(scope="module")
def undisturbed() -> dict[int, str]:
    """The losses of a run that loses nobody, by step."""
    jobs = Jobs()
    try:
        jobs.start(_train, 4, 4, {})
        answers = jobs.wait()
    finally:
        jobs.close()
    assert all(answer[0] == answers[0][0] for answer in answers), answers
    assert len(answers[0][0]) == _STEPS
    return dict(answers[0][0])


def _check(answers: list[Any], n_ranks: int, expected: dict[int, str]) -> list[Any]:
    """Check that the job has finished with all ranks, and that all losses are the expected ones."""
    finished = [answer for answer in answers if isinstance(answer, tuple)]
    assert sorted(rank for _, rank in finished) == list(range(n_ranks)), answers
    for losses, _ in finished:
        assert losses.items() <= expected.items(), (answers, expected)
    assert any(losses == expected for losses, _ in finished), answers
    return [answer for answer in answers if not isinstance(answer, tuple)]


_MOMENTS = ["connect", "build", "load", "begin", "forward", "backward", "commit", "committed"]


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
            ("connect again", "killed"),
        ],
        [("commit", "killed")],
        [
            ("load", "killed"),
            ("forward", "stopped"),
            ("forward", "a ghost"),
            ("connect again", "killed"),
        ],
    ),
)
def test_a_job_that_loses_a_rank_equals_one_that_does_not(
    jobs: Jobs, undisturbed: dict[int, str], moment: str, what: str
) -> None:
    step = 0 if moment in ("connect", "build", "load") else 3
    # Rank 3 gets its initial weights from rank 2.
    fates: dict[int, list[Fate]] = {0: [(3 if step == 0 else 2, step, moment, what)]}
    is_second = moment in ("repair", "connect again")  # another rank is lost first
    if is_second:
        fates[0].append((1, step, "forward", "killed"))
    jobs.start(_train, 6, 4, fates)
    others = _check(jobs.wait(kills_stopped=what == "stopped"), 4, undisturbed)
    killed = -signal.SIGKILL  # as a rank is that is stopped, when all others have ended
    expected = {"killed": killed, "stopped": killed, "error": "ValueError: a bug", "a ghost": 1}
    n_lost = 0 if what == "slow" else 1 + is_second
    assert others.count(expected.get(what)) == n_lost
    assert others.count("SystemExit: 0") == len(others) - n_lost  # spares that were not needed


@pytest.mark.long
def test_a_rank_is_killed_while_the_others_wait_for_its_connection(
    jobs: Jobs, undisturbed: dict[int, str]
) -> None:
    """Several times: each time, some of the others may connect to it rather than wait."""
    jobs.start(_train, 7, 4, {0: [(3, 0, "connecting", "killed")] * 3})
    assert _check(jobs.wait(), 4, undisturbed) == [-signal.SIGKILL] * 3


@pytest.mark.parametrize(
    "lost",
    [
        pytest.param([2, 3], id="a whole replica"),
        pytest.param([0, 2], id="all copies of a shard", marks=pytest.mark.long),
        pytest.param([0, 1, 2, 3], id="all ranks", marks=pytest.mark.sweep),
    ],
)
def test_several_ranks_at_once(
    jobs: Jobs, undisturbed: dict[int, str], lost: list[int], tmp_path: Path
) -> None:
    fates: dict[int, list[Fate]] = {0: [(rank, 5, "forward", "killed") for rank in lost]}
    jobs.start(_train, 4 + len(lost), 4, fates, "eager", str(tmp_path))
    others = _check_all(jobs.wait(), 4, undisturbed)
    assert others == [-signal.SIGKILL] * len(lost)


@pytest.mark.long
def test_a_job_begins_again_if_a_shard_is_lost_before_the_first_checkpoint(
    jobs: Jobs, undisturbed: dict[int, str], tmp_path: Path
) -> None:
    """Ranks 0 and 2 hold the same shards. Later losses are repaired as usual."""
    fates: dict[int, list[Fate]] = {
        0: [(rank, 1, "forward", "killed") for rank in (0, 2)],
        2: [(3, 5, "forward", "killed")],
    }
    jobs.start(_train, 7, 4, fates, "eager", str(tmp_path))
    assert _check_all(jobs.wait(), 4, undisturbed) == [-signal.SIGKILL] * 3


def _check_all(answers: list[Any], n_ranks: int, expected: dict[int, str]) -> list[Any]:
    """As `_check`, if no process needs to have seen all steps."""
    finished = [answer for answer in answers if isinstance(answer, tuple)]
    assert sorted(rank for _, rank in finished) == list(range(n_ranks)), answers
    assert all(losses.items() <= expected.items() for losses, _ in finished), (answers, expected)
    assert all(max(losses) == _STEPS for losses, _ in finished), answers
    return [answer for answer in answers if not isinstance(answer, tuple)]


@pytest.mark.long
@pytest.mark.parametrize(("n_ranks", "lost"), [(4, 0), (4, 2), (8, 1)])
def test_a_smaller_world_goes_on_with_the_state_of_the_larger_one(
    jobs: Jobs, undisturbed: dict[int, str], n_ranks: int, lost: int
) -> None:
    """The ranks of the other replica go on, half as many as before, with the same batches."""
    fates: dict[int, list[Fate]] = {0: [(lost, 5, "forward", "killed")]}
    jobs.start(_train, n_ranks, [n_ranks // 2, n_ranks], fates, "eager", "", {"load": None})
    others = _check_all(jobs.wait(), n_ranks // 2, undisturbed)
    ended = ["SystemExit: 0"] * (n_ranks // 2 - 1)
    assert sorted(map(str, others)) == sorted([str(-signal.SIGKILL), *ended])


@pytest.mark.long
def test_a_larger_world_goes_on_with_the_state_of_the_smaller_one(
    jobs: Jobs, undisturbed: dict[int, str]
) -> None:
    """Two ranks begin and one waits; at the first loss there are four, with two late ones."""
    fates: dict[int, list[Fate]] = {0: [(1, 5, "forward", "waits"), (1, 5, "forward", "killed")]}
    options = {"started_within": 4}
    jobs.start(_train, 3, [2, 4], fates, "eager", "", options)
    jobs.store.wait(["waits"])
    jobs.start(_train, 2, [2, 4], {}, "eager", "", options)
    sleep(3)
    jobs.store.set("goes on", "")
    others = _check_all(jobs.wait(), 4, undisturbed)
    assert others == [-signal.SIGKILL]


def test_nothing_is_left_to_wait_for_if_the_store_ends(jobs: Jobs) -> None:
    jobs.start(_train, 3, 2, {0: [(0, 5, "forward", "waits")]})
    jobs.store.wait(["waits"])
    jobs.end_store()
    answers = jobs.wait(60)
    assert all("JobFailedError: The" in str(answer) for answer in answers), answers
    assert all("store of the job cannot be reached" in str(answer) for answer in answers), answers


@pytest.mark.long
def test_a_spare_that_dies_while_it_waits_is_not_chosen(
    jobs: Jobs, undisturbed: dict[int, str]
) -> None:
    jobs.start(_train, 4, 4, {0: [(0, 5, "forward", "waits"), (1, 5, "forward", "killed")]})
    jobs.store.wait(["waits"])
    spares = jobs.start(_train, 3, 4, {})
    sleep(3)
    jobs.processes[spares[0]].kill()
    os.kill(jobs.processes[spares[1]].pid, signal.SIGSTOP)
    jobs.store.set("goes on", "")
    others = _check(jobs.wait(), 4, undisturbed)
    assert others == [-signal.SIGKILL] * 3


@pytest.mark.long
def test_too_few_are_left(jobs: Jobs) -> None:
    jobs.start(_train, 4, 4, {0: [(1, 3, "backward", "killed")]})
    first, *others = sorted(map(str, jobs.wait()))
    assert first == str(-signal.SIGKILL)
    assert len(others) == 3
    for error in others:
        assert error.startswith(
            "JobFailedError: The job cannot go on: 3 processes are left, and the job needs 4 ranks"
        )
        assert "has died" in error


def test_a_spare_that_died_while_it_waited_does_not_count_as_left(jobs: Jobs) -> None:
    jobs.start(_train, 2, 2, {0: [(1, 3, "forward", "waits"), (1, 3, "forward", "killed")]})
    jobs.store.wait(["waits"])
    (spare,) = jobs.start(_train, 1, 2, {})
    while not JobStore(jobs.store, "job").read("signed/1"):
        sleep(0.1)
    jobs.processes[spare].kill()
    jobs.store.set("goes on", "")
    *killed, error = sorted(jobs.wait(), key=lambda answer: isinstance(answer, str))
    assert killed == [-signal.SIGKILL] * 2
    assert "1 process is left, and the job needs 2 ranks" in error


def _without_load(address: str) -> None:
    """Both ranks are killed after a step; the spares have no checkpoint."""
    with repair.join(
        address, ranks=2, build=lambda: _build(2), lost_after=_LOST_AFTER, backend="gloo"
    ) as job:
        model, optimizer = job.state
        _loss(model, job.step).backward()
        job.commit(optimizer.step)
        _befall("killed")


@pytest.mark.long
def test_a_job_without_checkpoints_does_not_begin_again(jobs: Jobs) -> None:
    jobs.start(_without_load, 4)
    answers = sorted(map(str, jobs.wait()))
    assert answers[:2] == [str(-signal.SIGKILL)] * 2
    for error in answers[2:]:
        assert "no complete copy of its state is left (" in error
        assert error.count("has died") == 2


def _killed_at_the_end(address: str) -> str:
    """Rank 1 is killed while rank 0 waits for it in `close()`."""
    with repair.join(
        address, ranks=2, build=lambda: _build(2), lost_after=1, backend="gloo"
    ) as job:
        job.commit(job.state[1].step)
        if job.rank == 1:
            sleep(0.5)
            _befall("killed")
    return "closed"


def test_a_job_that_is_complete_stays_complete(jobs: Jobs) -> None:
    """torchrun starts a killed worker again, which then finds that it is not needed."""
    jobs.start(_killed_at_the_end, 2)
    assert sorted(map(str, jobs.wait())) == [str(-signal.SIGKILL), "closed"]
    jobs.start(_killed_at_the_end, 1)
    assert jobs.wait(60)[-1] == "SystemExit: 0"


def _suspended(address: str) -> int:
    with repair.join(
        address, ranks=2, build=lambda: _build(2), lost_after=1, backend="gloo"
    ) as job:
        store = dist.TCPStore(*_parts(address), is_master=False, wait_for_workers=False)
        store.add("waiting", 1)
        store.wait(["goes on"])
        job.commit(job.state[1].step)
    return job.world


@pytest.mark.long
def test_processes_that_were_suspended_together_do_not_lose_each_other(jobs: Jobs) -> None:
    """As on a host, or a virtual machine, that stands still for longer than `lost_after`."""
    jobs.start(_suspended, 2)
    while jobs.store.add("waiting", 0) < 2:
        sleep(0.05)
    for _ in range(5):
        for what in (signal.SIGSTOP, signal.SIGCONT):
            for process in jobs.processes:
                os.kill(process.pid, what)
            sleep(1.5 if what == signal.SIGSTOP else 0.6)
    jobs.store.set("goes on", "")
    assert jobs.wait() == [0, 0]


def _with_a_bug(address: str) -> None:
    def build() -> list[nn.Module]:
        return [nn.Linear(2, 2)]

    with repair.join(
        address, ranks=2, build=build, lost_after=1, backend="gloo", copies=lambda: [0, 1]
    ) as job:
        try:
            raise RuntimeError("a bug")
        except job.LOST:
            job.repair()


def test_an_error_of_the_program_itself_is_raised_again(jobs: Jobs) -> None:
    jobs.start(_with_a_bug, 2)
    answers = sorted(map(str, jobs.wait()))
    assert answers[-1] == "RuntimeError: a bug"
    # The other rank may hear first that this one has left.
    assert answers[0].startswith(("RuntimeError: a bug", "JobFailedError: The job cannot go on: 1"))


@pytest.mark.long
def test_buffers_and_random_numbers_go_back_to_the_beginning_of_a_step() -> None:
    answers = []
    for n_spares, fates in ((0, {}), (1, {0: [(2, 5, "backward", "killed")]})):
        jobs = Jobs()
        try:
            jobs.start(_train, 4 + n_spares, 4, fates, "random")
            answers.append(jobs.wait())
        finally:
            jobs.close()
    undisturbed = answers[0][0][0]
    assert len({*undisturbed.values()}) == _STEPS
    assert _check(answers[1], 4, undisturbed) == [-signal.SIGKILL]


@pytest.mark.sweep
@pytest.mark.parametrize("kind", ["llama", "compiled llama"])
def test_a_transformer_that_loses_three_ranks_equals_one_that_loses_none(kind: str) -> None:
    """HSDP of 2 x 2 with tensor parallelism of 2, killed at steps 7, 19 and 20."""
    answers = []
    fates: dict[int, list[Fate]] = {
        0: [(3, 7, "forward", "killed")],
        1: [(0, 19, "backward", "killed")],  # it has the store of its world
        2: [(6, 20, "commit", "killed")],
    }
    for n_spares, given in ((0, {}), (3, fates)):
        jobs = Jobs()
        try:
            jobs.start(_train, 8 + n_spares, 8, given, kind)
            answers.append(jobs.wait())
        finally:
            jobs.close()
    undisturbed = answers[0][0][0]
    assert len(undisturbed) == len({*undisturbed.values()}) == _LLAMA_STEPS
    assert all(losses == undisturbed for losses, _ in answers[0])
    finished = [answer for answer in answers[1] if isinstance(answer, tuple)]
    assert sorted(rank for _, rank in finished) == list(range(8))
    assert all(losses.items() <= undisturbed.items() for losses, _ in finished)
    assert sum(losses == undisturbed for losses, _ in finished) == 5


def _often(address: str, n_repairs: int) -> list[dict[str, int]]:
    """Rank 3 is killed in each world; what rank 0 has of the system, by world."""
    held: list[dict[str, int]] = []
    store = dist.TCPStore(*_parts(address), is_master=False, wait_for_workers=False)
    with repair.join(
        address, ranks=4, build=lambda: _build(4), lost_after=_LOST_AFTER, backend="gloo"
    ) as job:
        while job.step < n_repairs:
            try:
                model, optimizer = job.state
                _loss(model, job.step).backward()
                job.commit(optimizer.step)
                optimizer.zero_grad()
                gc.collect()
                held.append(
                    {
                        "groups": len(dist.distributed_c10d._world.pg_names),
                        "threads": len(os.listdir("/proc/self/task")),
                        "descriptors": len(os.listdir("/proc/self/fd")),
                        "keys": store.num_keys(),
                        "memory": int(Path("/proc/self/statm").read_text().split()[1]) // 256,
                    }
                )
                if job.rank == 3 and job.world < n_repairs:
                    _befall("killed")
            except job.LOST:  # noqa: PERF203
                job.repair()
    return held


@pytest.mark.sweep
def test_twenty_repairs_leave_nothing_behind(jobs: Jobs) -> None:
    jobs.start(_often, 4 + 20, 20)
    answers = [answer for answer in jobs.wait() if isinstance(answer, list)]
    held = max(answers, key=len)
    assert len(held) >= 20
    # Threads and sockets of a group end a little after it.
    for name in ("groups", "threads", "descriptors", "keys"):
        assert min(each[name] for each in held[10:]) <= held[1][name], (name, held)
    assert min(each["memory"] for each in held[15:]) < held[5]["memory"] + 10, held  # MiB
