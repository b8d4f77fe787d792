"""A job that crashes and is started again by torchrun, on the same store, with another mesh."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_SCRIPT = r"""
import os, sys, time
from datetime import timedelta
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg
from meshverse import init_device_mesh

backend, crash = sys.argv[1:]
store, rank, size = next(dist.rendezvous("env://"))
store.set_timeout(timedelta(seconds=30))
dist.init_process_group(backend, store=store, rank=rank, world_size=size)
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
shape = [(2, 2), (4, 1)][attempt]
if attempt == 0:
    if crash == "after its mesh" or rank != 2:
        init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"), lazy=crash != "after its mesh")
        store.add("made", 1)
    if rank == 2:
        while store.add("made", 0) < (4 if crash == "after its mesh" else 3):
            time.sleep(0.05)
        os._exit(3)
    time.sleep(60)
if rank != 2:  # the one that crashed comes first
    time.sleep(1)
mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
os.write(1, f"rank {rank} has {tuple(mesh.shape)} {mesh.get_coordinate()}\n".encode())
time.sleep(1 if rank == 3 else 0)
try:
    init_device_mesh("cpu", (4,), mesh_dim_names=("odd" if rank == 3 else "even",))
except RuntimeError as error:
    assert "building different meshes" in str(error)
    os.write(1, f"rank {rank} is told\n".encode())
store.add("done", 1)
while store.add("done", 0) < 4:  # rank 0 may keep the store
    time.sleep(0.05)
dist.destroy_process_group()
"""


@pytest.mark.processes
@pytest.mark.timeout(200)
@pytest.mark.parametrize("crash", ["after its mesh", "before its mesh"])
@pytest.mark.parametrize(
    ("backend", "shares_store"), [("fake", True), ("gloo", False)], ids=["fake", "gloo"]
)
def test_a_restarted_job_may_build_another_mesh(
    tmp_path: Path, backend: str, shares_store: bool, crash: str
) -> None:
    script = tmp_path / "train.py"
    script.write_text(_SCRIPT)
    # torchrun keeps one store for all attempts; gloo cannot start again on it, in torch either.
    environment = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": str(int(not shares_store))}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
    ended = subprocess.run(
        [*command, "--max-restarts=1", str(script), backend, crash],
        env=environment,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    lines = ended.stdout.splitlines()
    for rank in range(4):
        assert f"rank {rank} has (4, 1) ({rank}, 0)" in lines
    # The comparison is still on.
    assert "rank 3 is told" in lines
