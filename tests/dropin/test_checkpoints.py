"""DTensors and models that are copied, saved and loaded: on the same mesh, another, or without."""

from __future__ import annotations

import copy
import io
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh as StockDeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from helpers.crew import Crew
from helpers.forked import SECONDS, Forked
from helpers.observation import Family
from helpers.sides import side
from helpers.tiers import in_tiers
from helpers.training import TOLERANCE, batch, make_model, tensor_parallel


def _mesh(family: Family) -> StockDeviceMesh:
    return family.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def _whole() -> torch.Tensor:
    return torch.arange(30.0).reshape(5, 6)  # uneven over two


def _save_and_load(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


_ROUND_TRIPS: dict[str, Callable[[Any], Any]] = {
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "torch.save": _save_and_load,
}


# --- on the same mesh ----------------------------------------------------------------------------


def _round_trip(side_name: str, way: str) -> dict[str, bool]:
    with side(side_name) as family:
        mesh = _mesh(family)
        tp = mesh["tp"]
        sharded = distribute_tensor(_whole(), mesh, [Shard(0), Shard(1)])
        over_slice = distribute_tensor(_whole(), tp, [Shard(1)])
        go = _ROUND_TRIPS[way]
        back, back_slice = go(sharded), go(over_slice)
        return {
            "mesh": go(mesh) is mesh,
            "slice": go(tp) is tp,
            "tensor's mesh": back.device_mesh is mesh,
            "tensor's slice": back_slice.device_mesh is tp,
            "placements": back.placements == sharded.placements,
            "local": back.to_local().equal(sharded.to_local()),
            "full": back.full_tensor().equal(_whole()),
            "full over slice": back_slice.full_tensor().equal(_whole()),
            "used together": (back + sharded).full_tensor().equal(2 * _whole()),
        }


@pytest.mark.parametrize("way", in_tiers(_ROUND_TRIPS, ["pickle", "torch.save"]))
@pytest.mark.parametrize("which", ["ours", "installed"])
def test_dtensors_come_back_on_the_same_mesh(crew: Crew, which: str, way: str) -> None:
    for answer in crew.run(_round_trip, 4, which, way):
        assert all(answer.values()), answer


def _copied_model(kind: str) -> dict[str, bool]:
    with side("ours") as family:
        mesh = _mesh(family)
        if kind == "fsdp2":  # whose modules refuse to be copied, so it is their state
            state = get_model_state_dict(_sharded_model(mesh))
            twin = copy.deepcopy(state)
        else:
            model = make_model()
            for block in model:
                tensor_parallel(block, mesh["tp"])
            copied = copy.deepcopy(model)
            state, twin = dict(model.named_parameters()), dict(copied.named_parameters())
        pairs = [(state[name], twin[name]) for name in state]
        return {
            "all there": len(pairs) == len(twin) == len(make_model().state_dict()),
            "meshes": all(mine.device_mesh is theirs.device_mesh for mine, theirs in pairs),
            "weights": all(m.full_tensor().equal(t.full_tensor()) for m, t in pairs),
            "apart": all(m.to_local().data_ptr() != t.to_local().data_ptr() for m, t in pairs),
        }


@pytest.mark.parametrize("kind", ["tensor parallel", "fsdp2"])
def test_a_copied_model_stays_on_its_mesh(crew: Crew, kind: str) -> None:
    for answer in crew.run(_copied_model, 4, kind):
        assert all(answer.values()), answer


# --- distributed checkpoints ---------------------------------------------------------------------


def _sharded_model(mesh: StockDeviceMesh) -> nn.Sequential:
    model = make_model()
    for block in model:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _into_another_shape(side_name: str, folder: str, way: str) -> dict[str, bool]:
    with side(side_name) as family:
        model = _sharded_model(_mesh(family))
        state = get_model_state_dict(model)
        if way == "async":
            dcp.async_save(state, checkpoint_id=folder).result(timeout=SECONDS)
        else:
            dcp.save(state, checkpoint_id=folder)
        dist.barrier()  # what is written is loaded from the next line on

        line = family.init_device_mesh("cpu", (4,), mesh_dim_names=("shard",))
        other = _sharded_model(line)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.zero_()
        loaded = get_model_state_dict(other)
        dcp.load(loaded, checkpoint_id=folder)
        set_model_state_dict(other, loaded)
        expected = make_model().state_dict()
        return {
            "weights": all(
                value.full_tensor().equal(expected[name])
                for name, value in other.named_parameters()
            ),
            "mesh": all(value.device_mesh is line for value in other.parameters()),
            "output": torch.allclose(other(batch(0)[0]), make_model()(batch(0)[0]), atol=TOLERANCE),
        }


@pytest.mark.parametrize("way", ["in place", "async"])
@pytest.mark.parametrize("which", ["ours", "installed"])
def test_distributed_checkpoint(crew: Crew, which: str, way: str, tmp_path: Path) -> None:
    for answer in crew.run(_into_another_shape, 4, which, str(tmp_path / "checkpoint"), way):
        assert all(answer.values()), answer


# A file, since the saving processes that torch spawns import it again.
_SAVED_BY_PROCESSES = """
import sys, torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from meshverse import DeviceMesh, init_device_mesh

if __name__ == "__main__":
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    whole = torch.arange(30.0).reshape(5, 6)
    state = {"on two axes": distribute_tensor(whole, mesh, [Shard(0), Replicate()]),
             "on a slice": distribute_tensor(whole, mesh["dp"], [Shard(1)])}
    by_processes = AsyncCheckpointerType.PROCESS
    future = dcp.async_save(
        state, checkpoint_id=sys.argv[1], async_checkpointer_type=by_processes)
    future.result()
    dist.barrier()
    line = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    loaded = {name: distribute_tensor(torch.zeros(5, 6), line, [Shard(0)]) for name in state}
    dcp.load(loaded, checkpoint_id=sys.argv[1])
    assert all(tensor.full_tensor().equal(whole) for tensor in loaded.values())
    assert type(mesh) is DeviceMesh
    dist.barrier()
    dist.destroy_process_group()
    print("saved and loaded")
"""


@pytest.mark.long
@pytest.mark.processes
def test_saved_by_processes_of_their_own(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(_SAVED_BY_PROCESSES)
    launch = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    arguments = ["--nproc-per-node", "2", str(program), str(tmp_path / "checkpoint")]
    done = subprocess.run(
        [sys.executable, *launch, *arguments],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("saved and loaded") == 2


# --- without process groups ----------------------------------------------------------------------

_LOADER = """
import sys, torch, torch.distributed as dist, torch.distributed.tensor, meshverse
loaded = torch.load(sys.argv[1], weights_only=True)
mesh = loaded.device_mesh
assert not dist.is_initialized()
assert type(mesh) is meshverse.DeviceMesh
assert mesh.mesh.tolist() == [[0, 1], [2, 3]]
assert mesh["tp"].mesh.tolist() == [2, 3]
assert list(mesh.get_coordinate()) == [1, 0], mesh.get_coordinate()
assert loaded.shape == (5, 6)
assert loaded.to_local().equal(torch.arange(30.0).reshape(5, 6)[3:, :3])
for use in (lambda: mesh.get_group("tp"), lambda: mesh["dp"].get_group(), loaded.full_tensor):
    try:
        use()
    except RuntimeError as error:
        assert "mesh.bind()" in str(error), error
    else:
        raise AssertionError("it has no process groups")
print("loaded")
"""


def _save_from_rank_2(path: str) -> None:
    with side("ours") as family:
        sharded = distribute_tensor(_whole(), _mesh(family), [Shard(0), Shard(1)])
    if dist.get_rank() == 2:
        torch.save(sharded, path)


def test_loaded_in_a_process_without_process_groups(crew: Crew, tmp_path: Path) -> None:
    path = str(tmp_path / "dtensor.pt")
    crew.run(_save_from_rank_2, 4, path)
    assert Forked(["-c", _LOADER, path]).communicate() == (0, "loaded\n", "")


def _decoupled() -> dict[str, Any]:
    with side("ours") as family, pytest.MonkeyPatch.context() as patch:
        patch.setattr(family.DeviceMesh, "decouple_backend_at_save", True)
        mesh = _mesh(family)
        sharded = distribute_tensor(_whole(), mesh, [Shard(0), Shard(1)])
        back: DTensor = _save_and_load(sharded)
        loaded = back.device_mesh
        seen: dict[str, Any] = {
            "apart": loaded != mesh and mesh != loaded,
            "local": back.to_local().equal(sharded.to_local()),
            "coordinate": list(loaded.get_coordinate()) == list(mesh.get_coordinate()),
        }
        for use in (lambda: loaded.get_group("tp"), back.full_tensor):
            with pytest.raises(RuntimeError, match=r"mesh\.bind\(\)"):
                use()
        loaded.bind()
        seen["equal"] = loaded == mesh and mesh == loaded
        seen["full"] = back.full_tensor().equal(_whole())
        moved = back.redistribute(placements=[Replicate(), Shard(0)])
        seen["moved"] = moved.full_tensor().equal(_whole())
        seen["used together"] = (back + sharded).full_tensor().equal(2 * _whole())
        return seen


def test_a_decoupled_dtensor_is_bound(crew: Crew) -> None:
    for answer in crew.run(_decoupled, 4):
        assert all(answer.values()), answer
