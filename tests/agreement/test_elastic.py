"""A job that crashes and is started again by torchrun, on the same store, with another mesh."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from helpers.forked import printed_by, torchrun

_SCRIPT = r"""
import os, sys, threading, time
from datetime import timedelta
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg
from meshverse import init_device_mesh

backend, crash = sys.argv[1:]
store, rank, size = next(dist.rendezvous("env://"))
store.set_timeout(timedelta(seconds=30))
dist.init_process_group(backend, store=store, rank=rank, world_size=size)

def rendezvous(where):
    store.add(where, 1)
    while store.add(where, 0) < size:
        time.sleep(0.01)  # sleep: it looks again

def come_after(first, step):  # once one of these has written into the store in its next call
    store.add(f"at {step}", 0)
    rendezvous(f"before {step}")
    known = store.num_keys()
    rendezvous(f"at {step}")  # from here on, only what a call tells the others is new in the store
    while rank not in first and store.num_keys() == known:
        time.sleep(0.01)  # sleep: it looks again

attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
shape = [(2, 2), (4, 1)][attempt]
if attempt == 0:
    if crash == "after its mesh" or rank != 2:
        init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"), lazy=crash != "after its mesh")
        store.add("made", 1)
    if rank == 2:
        while store.add("made", 0) < (4 if crash == "after its mesh" else 3):
            time.sleep(0.05)  # sleep: it looks again
        os._exit(3)
    threading.Event().wait()  # torchrun ends this process
come_after([2], "the mesh")  # the one that crashed is the first
mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
os.write(1, f"rank {rank} has {tuple(mesh.shape)} {mesh.get_coordinate()}\n".encode())
come_after([0, 1, 2], "the odd mesh")
try:
    init_device_mesh("cpu", (2, 2), mesh_dim_names=("odd" if rank == 3 else "even", "tp"))
except RuntimeError as error:
    assert "building different meshes" in str(error)
    os.write(1, f"rank {rank} got an error\n".encode())
rendezvous("the end")  # rank 0 may keep the store
dist.destroy_process_group()
"""


def _environment(shares_store: bool) -> dict[str, str]:
    # torchrun keeps one store for all attempts; gloo cannot start again on it, in torch either.
    return {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": str(int(not shares_store))}


@pytest.mark.processes
@pytest.mark.parametrize(
    ("backend", "shares_store", "crash"),
    [
        pytest.param("fake", True, "after its mesh", marks=pytest.mark.long),
        pytest.param("fake", True, "before its mesh", marks=pytest.mark.long),
        pytest.param("gloo", False, "after its mesh", marks=pytest.mark.long),
        pytest.param("gloo", False, "before its mesh", marks=pytest.mark.long),
    ],
)
def test_a_job_that_torchrun_restarts_may_build_another_mesh(
    tmp_path: Path, backend: str, shares_store: bool, crash: str
) -> None:
    script = tmp_path / "train.py"
    script.write_text(_SCRIPT)
    logs, env = tmp_path / "logs", _environment(shares_store)
    agent = torchrun(4, script, backend, crash, folder=logs, restarts=1, env=env)
    status, out, err = agent.communicate()
    said = [printed_by(rank, logs).splitlines() for rank in range(4)]
    assert status == 0, (said, out, err)
    for rank, lines in enumerate(said):
        assert f"rank {rank} has (4, 1) ({rank}, 0)" in lines
    assert "rank 3 got an error" in said[3]  # the comparison is still on
