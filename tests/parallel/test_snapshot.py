"""A state that is kept in memory, on real ranks. A folder is a host."""

from __future__ import annotations

import errno
import gc
import logging
import os
import random
import re
import shutil
import sys
from collections import Counter, UserDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from snapshot_job import WIDTH, Job
from torch import nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.device_mesh import DeviceMesh as StockDeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.parameter import UninitializedParameter

from helpers.crew import Crew
from helpers.forked import Forked
from helpers.held import grown
from helpers.versions import AT_LEAST_2_12
from meshverse import init_device_mesh
from meshverse.parallel import Snapshot
from meshverse.parallel.snapshot.file import SnapshotFile, names_in
from meshverse.parallel.snapshot.hosts import partners_of

HOSTS = 2


def _folder(root: Path) -> Path:
    return root / f"host{dist.get_rank() * HOSTS // dist.get_world_size()}"


# --- A whole trainer -----------------------------------------------------------------------------


def _train(root: Path, copies: int, replicas: int) -> list[float]:
    job, snapshot = Job(replicas), Snapshot(_folder(root), copies=copies)
    assert snapshot.load(job.state) is None
    losses = []
    for step in range(5):
        losses.append(job.step())
        if step < 3:
            snapshot.save(step + 1, job.state)
    return losses


def _go_on(root: Path, copies: int, replicas: int) -> tuple[int | None, list[float]]:
    job, snapshot = Job(replicas), Snapshot(_folder(root), copies=copies)
    job.step()  # what a load must undo
    step = snapshot.load(job.state)
    losses = []
    for number in range(step or 0, 5):
        losses.append(job.step())
        snapshot.save(number + 1, job.state)
    return step, losses


@pytest.mark.parametrize(
    ("copies", "replicas", "lost"),
    [
        pytest.param(1, 1, "host0", marks=pytest.mark.long),
        pytest.param(0, 2, "nothing", marks=pytest.mark.sweep),
    ],
)
def test_losses_after_a_load_equal_those_without_one(
    crew: Crew, tmp_path: Path, copies: int, replicas: int, lost: str
) -> None:
    losses = crew.run(_train, 8, tmp_path, copies, replicas)[0]
    shutil.rmtree(tmp_path / lost, ignore_errors=True)
    for step, later in crew.run(_go_on, 8, tmp_path, copies, replicas):
        assert (step, later) == (3, losses[3:])
    for host in ("host0", "host1"):
        assert len(names_in(tmp_path / host)) <= 4 * 2 * (1 + copies)


def _begin_anew(root: Path) -> list[float]:
    job, snapshot = Job(1), Snapshot(_folder(root))
    assert snapshot.load(job.state) is None
    losses = [job.step() for _ in range(3)]
    snapshot.save(3, job.state)
    return losses


@pytest.mark.long
def test_a_job_that_finds_a_part_of_a_step_begins_like_one_that_finds_nothing(
    crew: Crew, tmp_path: Path
) -> None:
    losses = crew.run(_begin_anew, 4, tmp_path)
    shutil.rmtree(tmp_path / "host1")
    assert crew.run(_begin_anew, 4, tmp_path) == losses


def _values(job: Job) -> dict[str, torch.Tensor]:
    values = dict(job.model.named_parameters())
    for name, parameter in job.model.named_parameters():
        of_optimizer = job.optimizer.state[parameter]
        values |= {f"{name} {key}": of_optimizer[key] for key in ("exp_avg", "exp_avg_sq")}
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).detach()
        for name, value in values.items()
    }


def _shared(job: Job) -> dict[str, Any]:
    """Return the state without the values that each rank has for itself."""
    return {key: value for key, value in job.state.items() if "of rank" not in key}


def _train_replicas(root: Path) -> dict[str, torch.Tensor]:
    job, snapshot = Job(replicas=2), Snapshot(_folder(root))
    for step in range(2):
        job.step()
        snapshot.save(step + 1, _shared(job))
    return _values(job)


def _load_replicas(
    root: Path, replicas: int
) -> tuple[int | None, dict[str, torch.Tensor], dict[str, Any]]:
    job, snapshot = Job(replicas), Snapshot(_folder(root))
    job.step()
    step = snapshot.load(_shared(job))
    return step, _values(job), job.scheduler.state_dict()


@pytest.mark.long
def test_replicas_cover_a_lost_host_on_as_many_and_on_fewer_ranks(
    crew: Crew, tmp_path: Path
) -> None:
    saved = crew.run(_train_replicas, 8, tmp_path)[0]
    shutil.rmtree(tmp_path / "host1")
    for n_ranks, replicas in ((8, 2), (4, 1)):
        for step, values, scheduler in crew.run(_load_replicas, n_ranks, tmp_path, replicas):
            assert (step, scheduler["last_epoch"]) == (2, 2)
            torch.testing.assert_close(values, saved, rtol=0, atol=0)


class _Slices:
    """This rank's samples of batches that all ranks have in common, whatever their number."""

    def __init__(self) -> None:
        self._generator = torch.Generator().manual_seed(5)

    def batch(self) -> torch.Tensor:
        n_slices = dist.get_world_size() // 2  # ranks of tp take the same samples
        full = torch.randn(16, WIDTH, generator=self._generator)
        return full.chunk(n_slices)[dist.get_rank() // 2]

    def state_dict(self) -> dict[str, Any]:
        return {"data": self._generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._generator.set_state(state["data"])


def _train_slices(root: Path, replicas: int, saves: bool) -> tuple[int | None, list[float]]:
    job, snapshot = Job(replicas), Snapshot(_folder(root))
    job.model.eval()  # ranks draw the dropout of their own samples
    job.data = _Slices()
    state = {**_shared(job), "data": job.data}
    first = None if saves else snapshot.load(state)
    losses = []
    for step in range(first or 0, 6):
        losses.append(job.step() * 2 / dist.get_world_size())
        if saves and step < 3:
            snapshot.save(step + 1, state)
    return first, losses


@pytest.mark.long
def test_4_ranks_go_on_from_8(crew: Crew, tmp_path: Path) -> None:
    _, expected = crew.run(_train_slices, 8, tmp_path, 2, True)[0]
    shutil.rmtree(tmp_path / "host1")
    for first, losses in crew.run(_train_slices, 4, tmp_path, 1, False):
        assert first == 3
        assert losses == pytest.approx(expected[3:], rel=1e-5)
    assert len(set(expected)) == 6


def _train_staged(root: Path) -> tuple[int | None, float, float]:
    job, snapshot = Job(1), Snapshot(_folder(root))
    # Pinned memory and copies that do not block need CUDA.
    stager = DefaultStager(StagingOptions(False, False, use_non_blocking_copy=False))
    staged: Any = None
    for step in range(4):
        loss = job.step()  # changes the state in place
        if staged:
            snapshot.save(step, staged)
        staging = stager.stage({key: value.state_dict() for key, value in job.state.items()})
        assert isinstance(staging, Future)
        staged = staging.result()
    stager.close()
    dist.barrier()
    loaded = Snapshot(_folder(root)).load(job.state)
    return loaded, job.step(), loss


@pytest.mark.long
@pytest.mark.skipif(not AT_LEAST_2_12, reason="the stager of torch 2.11 fails at its second state")
def test_a_staged_state_is_saved_as_it_was_when_it_was_staged(crew: Crew, tmp_path: Path) -> None:
    for step, again, loss in crew.run(_train_staged, 4, tmp_path):
        assert (step, again) == (3, loss)


# --- Small states --------------------------------------------------------------------------------


def _state(value: float, own: bool = False) -> dict[str, Any]:
    """Return a sharded, a replicated, an unsharded and a pickled value; all 0 in a fresh one."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    full = torch.arange(24.0).view(8, 3) * value
    state: dict[str, Any] = {
        "sharded": distribute_tensor(full, mesh, [Shard(0)]),
        "replicated": distribute_tensor(full + value, mesh, [Replicate()]),
        "nested": {"plain": torch.full((5,), value, dtype=torch.bfloat16), "count": int(value)},
    }
    if own:
        state["own"] = dist.get_rank() * value
    return state


def _plain(state: dict[str, Any]) -> list[Any]:
    nested = state["nested"]
    tensors = [state["sharded"].full_tensor(), state["replicated"].full_tensor(), nested["plain"]]
    return [*(tensor.tolist() for tensor in tensors), nested["count"], state.get("own")]


def _save(root: Path, steps: list[int], last_on: Sequence[int], own: bool) -> None:
    snapshot = Snapshot(_folder(root))
    snapshot.load(_state(0, own))
    for step in steps:
        state = _state(step, own)
        dist.barrier()
        if step < steps[-1] or dist.get_rank() in last_on:
            snapshot.save(step, state)


def _load(root: Path, own: bool = False) -> tuple[int | None, list[Any], list[Any], list[str]]:
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    log = logging.getLogger("meshverse.parallel.snapshot.snapshot")
    log.addHandler(handler)
    state = _state(0, own)
    step = Snapshot(_folder(root)).load(state)
    log.removeHandler(handler)
    expected = _plain(_state(step or 0, own))
    return step, _plain(state), expected, [record.getMessage() for record in records]


def _assert_loaded(answers: list[Any], step: int | None) -> str:
    for loaded, values, expected, _ in answers:
        assert loaded == step
        assert values == expected
    return " ".join(text for *_, said in answers for text in said)


def test_all_ranks_load_the_newest_step_that_all_have_saved(crew: Crew, tmp_path: Path) -> None:
    crew.run(_save, 4, tmp_path, [1, 2, 3], (1, 2, 3), False)
    assert _assert_loaded(crew.run(_load, 4, tmp_path), 2) == ""
    # A later run saves step 3 on the other rank: files of two runs are not combined.
    crew.run(_save, 4, tmp_path, [3], (0,), False)
    _assert_loaded(crew.run(_load, 4, tmp_path), 2)
    _assert_loaded(crew.run(_load, 2, tmp_path), 2)


def test_a_damaged_file_does_not_count(crew: Crew, tmp_path: Path) -> None:
    crew.run(_save, 4, tmp_path, [1, 2], range(4), False)
    newest = names_in(tmp_path / "host1")[-1]
    assert (newest.step, newest.owner) == (2, 3)
    with (tmp_path / "host1" / str(newest)).open("r+b") as file:
        file.seek(64)
        file.write(b"\xff")
    _assert_loaded(crew.run(_load, 4, tmp_path), 1)


@pytest.mark.parametrize("n_bytes", [0, 10])
def test_nor_does_a_file_that_is_empty_or_cut_off(crew: Crew, tmp_path: Path, n_bytes: int) -> None:
    crew.run(_save, 4, tmp_path, [1, 2], range(4), False)
    newest = names_in(tmp_path / "host1")[-1]
    os.truncate(tmp_path / "host1" / str(newest), n_bytes)
    _assert_loaded(crew.run(_load, 4, tmp_path), 1)


def test_steps_may_count_tokens(crew: Crew, tmp_path: Path) -> None:
    steps = [10**12 - 1, 10**12, 3 * 10**13]
    crew.run(_save, 2, tmp_path, steps, range(2), False)
    _assert_loaded(crew.run(_load, 2, tmp_path), steps[-1])


def _load_each_others_beside_a_default_device(root: Path) -> tuple[int | None, list[float]]:
    rank = dist.get_rank()
    folder = root / f"host{rank}"
    Snapshot(folder).save(1, {f"of {rank}": torch.full((4,), float(rank))})
    dist.barrier()
    state = {f"of {1 - rank}": torch.zeros(4)}
    torch.set_default_device("meta")
    try:
        step = Snapshot(folder).load(state)
    finally:
        torch.set_default_device(None)
    return step, state[f"of {1 - rank}"].tolist()


def test_ranks_exchange_their_parts_whatever_the_default_device_is(
    crew: Crew, tmp_path: Path
) -> None:
    loaded = crew.run(_load_each_others_beside_a_default_device, 2, tmp_path)
    assert loaded == [(1, [1.0] * 4), (1, [0.0] * 4)]


def test_what_nobody_has_is_named_and_leaves_the_state_alone(crew: Crew, tmp_path: Path) -> None:
    crew.run(_save, 4, tmp_path, [7], range(4), False)
    shutil.rmtree(tmp_path / "host1")
    said = _assert_loaded(crew.run(_load, 4, tmp_path), None)
    assert "No snapshot is whole: step 7 lacks 'sharded'" in said
    assert "the files of ranks [2, 3] on " in said
    assert f"{tmp_path / 'host1'} are lost" in said
    assert "replicated" not in said


def test_values_that_differ_between_ranks_go_to_their_own_rank_or_nowhere(
    crew: Crew, tmp_path: Path
) -> None:
    crew.run(_save, 4, tmp_path, [7], range(4), True)
    _assert_loaded(crew.run(_load, 4, tmp_path, True), 7)
    said = _assert_loaded(crew.run(_load, 2, tmp_path, True), None)
    assert "step 7 lacks this rank's value of 'own' (other ranks saved different values" in said


def _errors(root: Path) -> None:
    with pytest.raises(ValueError, match="keep=1 steps are too few"):
        Snapshot(root, keep=1)
    with pytest.raises(ValueError, match="copies=2 is not possible"):
        Snapshot(root, copies=2)
    snapshot = Snapshot(root, copies=1)
    for step in (1, 2):
        with pytest.raises(ValueError, match="copies=1 needs a second host: all 2 ranks share"):
            snapshot.save(step, {})
    with pytest.raises(ValueError, match="failure_domain='' is no name"):
        Snapshot(root, failure_domain="")
    rank = dist.get_rank()
    for domain, folder, message in (
        (f"rack {rank}", root, "ranks 0 and 1 share a folder, but have failure_domain='rack 0'"),
        (("rack", None)[rank], root / str(rank), "rank 1 has no failure_domain, and other ranks"),
        ("rack", root / str(rank), "needs a second failure domain: all hosts are in 'rack'"),
    ):
        snapshot = Snapshot(folder, copies=1, failure_domain=domain)
        for step in (1, 2):
            with pytest.raises(ValueError, match=message):
                snapshot.save(step, {})
    assert not names_in(root)
    snapshot = Snapshot(root)
    for step in (True, 1.0, "3", None):
        with pytest.raises(TypeError, match=r"step=.* pass an int from 0"):
            snapshot.save(step, {})
    with pytest.raises(ValueError, match="step=-5: steps are counted from 0"):
        snapshot.save(-5, {})
    snapshot.save(1, {"a": torch.ones(2)})
    with pytest.raises(ValueError, match="step 1 is not after step 1"):
        snapshot.save(1, {"a": torch.ones(2)})


def test_bad_arguments_raise(crew: Crew, tmp_path: Path) -> None:
    crew.run(_errors, 2, tmp_path)


def _state_of_fsdp1(root: Path) -> list[str]:
    model = FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu"))
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        states = [{"model": model.state_dict()}, {"parameters": dict(model.named_parameters())}]
    snapshot, messages = Snapshot(root), []
    for state in states:
        with pytest.raises(TypeError) as error:
            snapshot.save(1, state)
        messages.append(str(error.value))
    assert names_in(root) == []
    dist.barrier()
    snapshot.save(1, {"other": torch.ones(1)})
    for state, message in zip(states, messages, strict=True):
        with pytest.raises(TypeError, match=re.escape(message)):
            snapshot.load(state)
    return messages


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_shards_of_fsdp1_are_refused_by_name(crew: Crew, tmp_path: Path) -> None:
    for of_state, of_parameters in crew.run(_state_of_fsdp1, 2, tmp_path):
        assert of_state.startswith("'model.weight' is a ShardedTensor, whose parts")
        assert of_parameters.startswith(
            "'parameters._fsdp_wrapped_module._flat_param' is a FlatParameter, whose parts"
        )
        assert "Use fully_shard (FSDP2) in place of" in of_state


# --- Values that a snapshot cannot hold, or that have no place ------------------------------------


class _Inside:
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class _Two(torch.Tensor):
    pass


def _freed() -> torch.Tensor:
    tensor = torch.ones(8)
    tensor.untyped_storage().resize_(0)
    return tensor


def _strided(rows: int, factor: int) -> DTensor:
    mesh = init_device_mesh("cpu", (2, 1))
    placements = [_StridedShard(0, split_factor=factor), Replicate()]
    return DTensor.from_local(torch.ones(rows), mesh, placements, run_check=False)


def _on_descending_ranks() -> DTensor:
    return distribute_tensor(torch.arange(4.0), StockDeviceMesh("cpu", [1, 0]), [Shard(0)])


def _partial() -> DTensor:
    return DTensor.from_local(torch.ones(2), init_device_mesh("cpu", (2,)), [Partial()])


def _in_tuple() -> tuple[DTensor, int]:
    mesh = init_device_mesh("cpu", (2,))
    return distribute_tensor(torch.arange(4.0), mesh, [Shard(0)]), 1


_REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "in a tuple": (_in_tuple, "'a' is a tuple with DTensors"),
    "freed": (_freed, "'a' has no memory"),
    "strided": (lambda: _strided(4, 2), "is not split into 2 equal blocks"),
    "descending ranks": (_on_descending_ranks, "whose ranks do not ascend along axis 0"),
    "partial": (_partial, r"redistribute it to Replicate\(\) or Shard\(\) first"),
    "expanded": (lambda: torch.ones(1).expand(3), "'a' is expanded"),
    "sparse": (lambda: torch.ones(3).to_sparse(), "'a' is a torch.sparse_coo tensor"),
    "meta": (lambda: torch.ones(3, device="meta"), "'a' is a meta tensor"),
    "subclass": (lambda: torch.ones(3).as_subclass(_Two), "'a' is a _Two"),
    "uninitialized": (UninitializedParameter, "'a' is uninitialized"),
    "object inside": (lambda: {"b": _Inside()}, r"'a\.b' is a _Inside inside of a container"),
    "read-only": (lambda: MappingProxyType({"b": 1}), r"'a\.b' is in a mappingproxy"),
    "one name": (lambda: {0: 1, "0": 2}, r"two values of the state have the name 'a\.0'"),
}


def _refused(root: Path) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    snapshot = Snapshot(_folder(root))
    snapshot.save(1, {"a": torch.ones(2)})
    for name, (make, _) in _REFUSED.items():
        found[name] = []
        for call in (lambda state: snapshot.save(2, state), snapshot.load):
            with pytest.raises((TypeError, ValueError)) as error:
                call({"a": make()})
            found[name].append(str(error.value))
    snapshot.save(3, {"a": torch.ones(2)})
    return found


def test_what_could_not_be_loaded_again_is_refused_by_name(crew: Crew, tmp_path: Path) -> None:
    for found in crew.run(_refused, 2, tmp_path):
        for name, (_, message) in _REFUSED.items():
            assert all(re.search(message, text) for text in found[name]), found[name]


def _other_states(root: Path) -> list[Any]:
    """Return what loads of other states than the saved one return, and the states afterwards."""
    saved = {"a": torch.full((2,), 300.7), "b": {"c": 1, "d": UserDict(e=2)}, "f": {0: 5, 1: [6]}}
    Snapshot(_folder(root)).save(1, saved)
    dist.barrier()
    others: list[dict[str, Any]] = [
        {"a": torch.zeros(2), "b": {"c": {3}, "d": UserDict(e=(4,))}, "f": {0: 0, 1: 0}},
        {"a": torch.zeros(2), "b": {"c": {3}, "d": UserDict(e=(4,))}, "f": {0: 0}},
        {"a": torch.zeros(2, dtype=torch.uint8), "b": {"c": 0, "d": {"e": 0}}, "f": {0: 0, 1: 0}},
        {**saved, "g": {7}},
    ]
    return [(Snapshot(_folder(root)).load(state), _as_lists(state)) for state in others]


def _as_lists(state: Any) -> Any:
    if isinstance(state, Mapping):
        return {key: _as_lists(value) for key, value in state.items()}
    return state.tolist() if isinstance(state, torch.Tensor) else state


def test_a_state_gets_all_that_was_saved_or_stays_as_it_was(crew: Crew, tmp_path: Path) -> None:
    value = torch.tensor(300.7).item()
    for loaded in crew.run(_other_states, 2, tmp_path):
        assert loaded == [
            (1, {"a": [value] * 2, "b": {"c": 1, "d": {"e": 2}}, "f": {0: 5, 1: [6]}}),
            (None, {"a": [0.0] * 2, "b": {"c": {3}, "d": {"e": (4,)}}, "f": {0: 0}}),
            (None, {"a": [0] * 2, "b": {"c": 0, "d": {"e": 0}}, "f": {0: 0, 1: 0}}),
            (
                None,
                {"a": [value] * 2, "b": {"c": 1, "d": {"e": 2}}, "f": {0: 5, 1: [6]}, "g": {7}},
            ),
        ]


def _of_each_rank(root: Path, kind: str, saves: bool) -> tuple[int | None, list[float]]:
    """Save or load values that differ between ranks under one key. Each rank has a folder."""
    rank = dist.get_rank()
    value = torch.arange(1.0, 1 + (1 << 19))
    value = value + rank if kind == "of other meshes" else value.roll(2 * rank)  # the same words
    if kind == "of other meshes":
        mesh = init_device_mesh("cpu", (1,), ranks=[rank])
        value = DTensor.from_local(value, mesh, [Shard(0)])
    state = {"a": value if saves else torch.zeros_like(value)}
    snapshot, step = Snapshot(root / f"rank{rank}"), None
    if saves:
        snapshot.save(1, state)
    else:
        step = snapshot.load(state)
    local = state["a"].to_local() if isinstance(state["a"], DTensor) else state["a"]
    return step, local[:2].tolist()


@pytest.mark.parametrize("kind", ["of other meshes", "with one sum"])
def test_no_rank_gets_another_ones_value(crew: Crew, tmp_path: Path, kind: str) -> None:
    crew.run(_of_each_rank, 3, tmp_path, kind, True)
    loaded = crew.run(_of_each_rank, 3, tmp_path, kind, False)
    assert [step for step, _ in loaded] == [1] * 3
    assert len({tuple(values) for _, values in loaded}) == 3
    shutil.rmtree(tmp_path / "rank2")  # the others' values differ, so none can be taken for its
    assert crew.run(_of_each_rank, 3, tmp_path, kind, False) == [(None, [0.0, 0.0])] * 3


def _interrupted_save(root: Path) -> list[str]:
    snapshot = Snapshot(root)
    for step in range(1, 4):
        snapshot.save(step, {"a": torch.ones(2)})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SnapshotFile, "_checksum", _raise_interrupt)
        with pytest.raises(KeyboardInterrupt):
            snapshot.save(4, {"a": torch.ones(2)})
    left = [path.name for path in root.glob("*.snapshot")]  # hidden ones too
    snapshot.save(4, {"a": torch.ones(2)})
    return left


def _raise_interrupt(*_: object) -> int:
    raise KeyboardInterrupt


def test_an_interrupted_save_leaves_no_file(crew: Crew, tmp_path: Path) -> None:
    (left,) = crew.run(_interrupted_save, 1, tmp_path)
    assert [name.split(".")[1] for name in left] == ["000000000003"]


def _settings(root: Path) -> list[str]:
    messages = []
    for keep, copies in ((2 + dist.get_rank(), 0), (2, dist.get_rank())):
        with pytest.raises(ValueError, match=r"\(keep, copies\) must be the same") as error:
            Snapshot(_folder(root), keep=keep, copies=copies).save(1, {})
        messages.append(str(error.value))
    for keep_of_others in (2.5, True, float("inf")):
        with pytest.raises(TypeError, match=r"keep=.* pass an int from 2"):
            Snapshot(root, keep=keep_of_others)  # type: ignore[arg-type]
    os.chmod(root, 0o777)
    with pytest.raises(PermissionError, match="could write files, which load"):
        Snapshot(root)
    return messages


def test_other_settings_on_other_ranks_are_refused(crew: Crew, tmp_path: Path) -> None:
    for messages in crew.run(_settings, 2, tmp_path):
        assert "is (2, 0) on rank 0, (3, 0) on rank 1" in messages[0]
        assert "is (2, 0) on rank 0, (2, 1) on rank 1" in messages[1]


def _two_in_one_folder(root: Path) -> tuple[int | None, list[float]]:
    first, second = Snapshot(root), Snapshot(root)
    first.save(1, {"a": torch.ones(2)})
    with pytest.raises(ValueError, match="another Snapshot of this process saves into") as error:
        second.save(1, {"a": torch.zeros(2)})
    assert second.load({"a": torch.zeros(2)}) == 1  # which may be read
    del first, second, error
    gc.collect()  # what the error's frames hold
    again, state = Snapshot(root), {"a": torch.zeros(2)}
    step = again.load(state)
    again.save(3, state)  # the first one is gone
    return step, state["a"].tolist()


def test_one_folder_is_one_snapshots(crew: Crew, tmp_path: Path) -> None:
    assert crew.run(_two_in_one_folder, 2, tmp_path) == [(1, [1.0, 1.0])] * 2


def _after_chdir(root: Path) -> int | None:
    os.chdir(root)
    snapshot = Snapshot("relative")
    for step, folder in enumerate((root, root.parent, root), 1):
        os.chdir(folder)
        snapshot.save(step, {"a": torch.ones(2)})
    return Snapshot(root / "relative").load({"a": torch.zeros(2)})


def test_a_relative_folder_is_that_of_the_construction(crew: Crew, tmp_path: Path) -> None:
    assert crew.run(_after_chdir, 1, tmp_path) == [3]


# --- Failure domains -----------------------------------------------------------------------------


def test_copies_are_in_another_failure_domain() -> None:
    draw = random.Random(0)
    for n_domains in range(2, 7):
        for _ in range(50):
            sizes = [draw.randint(1, 9) for _ in range(n_domains)]
            domains = [f"rack {number}" for number, size in enumerate(sizes) for _ in range(size)]
            draw.shuffle(domains)
            partners = partners_of(domains)
            assert all(domains[a] != domains[b] for a, b in enumerate(partners))
            n_others = len(domains) - max(sizes)
            most = max(Counter(partners).values())
            assert most == max(1, -(-max(sizes) // n_others))  # the fewest that are possible
    assert partners_of(["a", "b", "c"]) == [1, 2, 0]


def _save_in_racks(root: Path, racks: list[str | None]) -> None:
    rank = dist.get_rank()
    snapshot = Snapshot(root / f"host{rank}", copies=1, failure_domain=racks[rank])
    snapshot.save(1, _state(1))


def _load_in_racks(root: Path) -> tuple[int | None, bool]:
    state = _state(0)
    step = Snapshot(root / f"host{dist.get_rank()}").load(state)
    return step, _plain(state) == _plain(_state(step or 0))


@pytest.mark.parametrize("racks", [["a", "a", "b", "b"], [None] * 4])
def test_a_lost_rack_is_covered_if_its_hosts_say_so(
    crew: Crew, tmp_path: Path, racks: list[str | None]
) -> None:
    crew.run(_save_in_racks, 4, tmp_path, racks)
    for host in ("host0", "host1"):
        shutil.rmtree(tmp_path / host)
    covered = None if None in racks else 1  # host 1 has the copies of host 0
    assert crew.run(_load_in_racks, 4, tmp_path) == [(covered, True)] * 4


# --- What one rank cannot do ----------------------------------------------------------------------

_ODD = 1  # of four ranks with a folder each; it exchanges no copies with rank 3


def _raise_on_one_rank(refused: str, step: str) -> None:
    if refused == step and dist.get_rank() == _ODD:
        raise KeyError(f"no {step}")


class _Value:
    """A value that one rank cannot pickle, or not unpickle."""

    def __init__(self, refused: str) -> None:
        self.refused = refused

    def __reduce__(self) -> Any:
        _raise_on_one_rank(self.refused, "pickle")
        return _restored, (self.refused,)


def _restored(refused: str) -> _Value:
    _raise_on_one_rank(refused, "unpickle")
    return _Value(refused)


class _Object:
    """An object, a method of which raises on one rank."""

    def __init__(self, refused: str = "") -> None:
        self.refused, self.loaded = refused, False

    def state_dict(self) -> dict[str, Any]:
        _raise_on_one_rank(self.refused, "state_dict")
        return {"key": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        _raise_on_one_rank(self.refused, "load_state_dict")
        self.loaded = True


def _message(call: Callable[..., object], *arguments: object) -> str:
    with pytest.raises(Exception, match=rf"\(on ranks \[{_ODD}\]\)$") as error:
        call(*arguments)
    return str(error.value)


def _refused_load(root: Path, refused: str) -> tuple[str, list[float], bool, int | None]:
    folder, is_odd = root / f"host{dist.get_rank()}", dist.get_rank() == _ODD
    saved = {"a": torch.ones(2), "b": _Value(refused), "c": _Object()}
    Snapshot(folder).save(1, saved)
    dist.barrier()
    state = {"a": torch.zeros(2), "b": 0, "c": _Object(refused)}
    begun = folder / ".000000-00000000.000000000001.000000.snapshot"
    if is_odd and refused == "clean-up":
        begun.mkdir()  # unlink() refuses it
    if is_odd and refused == "plan":
        state["b"] = torch.ones(1).expand(3)
    text = _message(Snapshot(folder).load, state)
    if begun.exists():
        begun.rmdir()
    values = state["a"].tolist()
    again = {"a": torch.zeros(2), "b": 0, "c": _Object()}
    step = None if refused == "unpickle" else Snapshot(folder).load(again)
    return text, values, state["c"].loaded, step


@pytest.mark.parametrize(
    ("refused", "message"),
    [
        ("state_dict", "KeyError: 'no state_dict'"),
        ("clean-up", r"\.000000-00000000\.000000000001\.000000\.snapshot"),
        ("plan", "'b' is expanded"),
        ("unpickle", r"'b' cannot be unpickled from \S+\.000000000001\.000001\.snapshot of rank 1"),
    ],
)
def test_what_one_rank_cannot_load_raises_on_all_and_changes_nothing(
    crew: Crew, tmp_path: Path, refused: str, message: str
) -> None:
    for text, values, is_loaded, step in crew.run(_refused_load, 4, tmp_path, refused):
        assert re.search(message, text)
        assert (values, is_loaded) == ([0.0] * 2, False)
        assert step == (None if refused == "unpickle" else 1)


def test_an_object_that_one_rank_cannot_load_raises_on_all(crew: Crew, tmp_path: Path) -> None:
    loaded = crew.run(_refused_load, 4, tmp_path, "load_state_dict")
    for rank, (text, _, is_loaded, step) in enumerate(loaded):
        assert "state['c'] (_Object) raises KeyError: 'no load_state_dict'" in text
        assert "the state may be loaded in part" in text
        assert (is_loaded, step) == (rank != _ODD, 1)


def _refused_save(root: Path, refused: str) -> tuple[str, set[str], int | None, list[float]]:
    rank = dist.get_rank()
    folder = root / f"host{rank}"
    snapshot = Snapshot(folder, copies=1)
    for step in (1, 2):
        snapshot.save(step, {"a": torch.full((2,), float(step)), "b": 0})
        dist.barrier()
    state = {"a": torch.full((2,), 3.0), "b": _Value(refused), "large": torch.ones(10_000)}
    with pytest.MonkeyPatch.context() as patch:
        if rank == _ODD and refused in ("own file", "copy"):
            owner = ".000001." if refused == "own file" else ".000000."
            patch.setattr(os, "posix_fallocate", partial(_fill_disk, os.posix_fallocate, owner))
        step = -3 if (refused, rank) == ("step", _ODD) else 3
        text = _message(snapshot.save, step, state)
    left = {name.rpartition("-")[2].split(".")[1] for name in os.listdir(folder)}
    snapshot.save(3, {**state, "b": 0})
    dist.barrier()
    if rank == _ODD:
        shutil.rmtree(folder)
    dist.barrier()
    loaded = {"a": torch.zeros(2), "b": 0, "large": torch.zeros(10_000)}
    return text, left, Snapshot(folder).load(loaded), loaded["a"].tolist()


def _fill_disk(allocate: Callable[..., None], owner: str, opened: int, *sizes: int) -> None:
    if owner in os.readlink(f"/proc/self/fd/{opened}"):
        raise OSError(errno.ENOSPC, "full")
    allocate(opened, *sizes)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="files are named by /proc")
@pytest.mark.parametrize(
    ("refused", "message"),
    [
        ("step", "step=-3: steps are counted from 0"),
        ("pickle", "KeyError: 'no pickle'"),
        ("own file", "does not fit into .*host1"),
        ("copy", "does not fit into .*host1"),
    ],
)
def test_what_one_rank_cannot_save_raises_on_all_and_can_be_saved_again(
    crew: Crew, tmp_path: Path, refused: str, message: str
) -> None:
    for text, left, step, values in crew.run(_refused_save, 4, tmp_path, refused):
        assert re.search(message, text)
        assert "000000000003" not in left
        assert (step, values) == (3, [3.0] * 2)  # of the lost host, from its copies


def _refused_beginning(root: Path, refused: str) -> tuple[str, int | None]:
    is_odd = dist.get_rank() == _ODD
    folder = root / f"host{dist.get_rank()}"
    snapshot = Snapshot(folder)
    if is_odd and refused == "folder":
        folder.rmdir()
    text = _message(snapshot.save, -1 if is_odd and refused == "step" else 1, {"a": 1})
    folder.mkdir(exist_ok=True)
    snapshot.save(1, {"a": 1})
    dist.barrier()
    return text, Snapshot(folder).load({"a": 0})


@pytest.mark.parametrize(
    ("refused", "message"), [("step", "step=-1: steps are counted from 0"), ("folder", "No such")]
)
def test_what_one_rank_cannot_begin_raises_on_all(
    crew: Crew, tmp_path: Path, refused: str, message: str
) -> None:
    for text, step in crew.run(_refused_beginning, 4, tmp_path, refused):
        assert message in text
        assert step == 1


# --- What a save and a load leave behind ----------------------------------------------------------

_CHANGING, _STEPS = 100, 10


def _held(root: Path) -> tuple[dict[str, int], int]:
    """Return what this process and all folders have while no rank saves, and Python's blocks."""
    gc.collect()
    dist.barrier()
    maps = Path("/proc/self/maps").read_text().splitlines()
    held = {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "maps of files": sum("/" in line for line in maps),
        "files": sum(path.is_file() for path in root.rglob("*")),
    }
    dist.barrier()
    return held, sys.getallocatedblocks()


def _save_and_load_often(root: Path) -> list[tuple[dict[str, int], int]]:
    tensor, held = _state(1)["sharded"], []
    for _ in range(4):  # attempts
        snapshot, state = Snapshot(_folder(root), copies=1), {"sharded": tensor}
        names = [str(number) for number in range(_CHANGING)]
        first = snapshot.load({**state, "numbers": dict.fromkeys(names, 0.0)}) or 0
        for step in range(first + 1, first + 1 + _STEPS):
            if step == first + 4:  # as many saves as fill the folder
                held.append(_held(root))
            numbers = {name: step + float(name) / 1000 for name in names}
            snapshot.save(step, {**state, "numbers": numbers})
            dist.barrier()
        held.append(_held(root))
    return held


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="counts are read from /proc")
@pytest.mark.long
def test_nothing_grows_with_saves_and_loads(crew: Crew, tmp_path: Path) -> None:
    for looks in crew.run(_save_and_load_often, 4, tmp_path):
        held, blocks = zip(*looks, strict=True)
        assert held[0]["files"] == 4 * 2 * 2  # ranks; kept steps; own files and copies
        assert {each["files"] for each in held[2:]} == {held[2]["files"]}
        assert [grown(held[2], later) for later in held[3:]] == [{}] * len(held[3:])
        # Each number of an earlier step that were kept would take a block.
        assert blocks[-1] - blocks[-2] < _CHANGING * (_STEPS - 3)


# --- Kills in the middle of a save ---------------------------------------------------------------

_SAVE = """
import sys, torch, torch.distributed as dist
from meshverse.parallel import Snapshot
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
state = {str(i): torch.zeros(1_000_000) for i in range(16)}
snapshot = Snapshot(sys.argv[1])
first = snapshot.load(state) or 0
assert all(bool((value == first).all()) for value in state.values()), first
print(first, flush=True)
for step in range(first + 1, int(sys.argv[2])):
    for value in state.values():
        value.fill_(step)
    snapshot.save(step, state)
"""


@pytest.mark.long
@pytest.mark.processes
def test_a_kill_in_the_middle_of_a_save_leaves_the_step_before(tmp_path: Path) -> None:
    last = 0
    for _ in range(5):
        begun = set(tmp_path.glob(".*.snapshot"))
        program = Forked(["-c", _SAVE, str(tmp_path), str(10**9)])
        while not (names_in(tmp_path) and set(tmp_path.glob(".*.snapshot")) - begun):
            assert program.is_alive()
        program.kill()
        _, out, err = program.communicate()
        assert not err
        last, before = names_in(tmp_path)[-1].step, last
        assert not out or int(out) == before
    status, out, err = Forked(["-c", _SAVE, str(tmp_path), "0"]).communicate()
    assert (status, out, err) == (0, f"{last}\n", "")
