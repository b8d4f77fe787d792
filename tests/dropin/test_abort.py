"""`DeviceMesh.abort()`, which stock has from 2.15 on: it ends a mesh's groups, and no others."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh as StockDeviceMesh

from helpers.crew import Crew
from helpers.forked import SECONDS
from helpers.observation import Family
from helpers.sides import SIDES, side
from helpers.worlds import live_groups
from meshverse import init_device_mesh

_SIDES = SIDES if hasattr(StockDeviceMesh, "abort") else ("ours",)


def _mesh(family: Family) -> StockDeviceMesh:
    return family.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def _sum_of_ranks(group: dist.ProcessGroup) -> float:
    total = torch.full((2,), float(dist.get_rank()))
    dist.all_reduce(total, group=group)
    return total[1].item()


def _abort_one_of_two(side_name: str) -> list[float]:
    with side(side_name) as family:
        mesh, other = _mesh(family), _mesh(family)
        ended = {mesh.get_group(axis).group_name for axis in ("dp", "tp")}
        before = live_groups()
        with pytest.raises(RuntimeError, match="root mesh"):
            mesh["tp"].abort()
        assert live_groups() == before
        dist.barrier()
        mesh.abort()
        assert live_groups().keys() == before.keys() - ended
        for use in (lambda: mesh.get_group("tp"), lambda: mesh["dp"].get_group()):
            with pytest.raises(RuntimeError, match=r"Could not resolve|was aborted.*mesh again"):
                use()
        return [_sum_of_ranks(kept.get_group("tp")) for kept in (other, _mesh(family))]


def test_abort_ends_the_groups_of_one_mesh_and_no_others(crew: Crew) -> None:
    for name in _SIDES:
        sums = crew.run(_abort_one_of_two, 4, name)
        assert sums == [[1, 1], [1, 1], [5, 5], [5, 5]], name


def _abort_over_the_world(folder: str) -> bool:
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("world",))
    assert mesh.get_group() is dist.group.WORLD
    rank = dist.get_rank()
    dist.barrier()
    mesh.abort()
    gone = not dist.is_initialized()
    store = dist.FileStore(f"{folder}/after", 4)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=4)
    return gone


def test_abort_ends_the_default_group_where_the_mesh_is_on_it(crew: Crew, tmp_path: Path) -> None:
    assert crew.run(_abort_over_the_world, 4, str(tmp_path)) == [True] * 4


def _abort_while_the_peer_waits(folder: str, tag: str | None) -> bool:
    """Rank 0 aborts during a collective, in which its peer takes no part before that."""
    rank = dist.get_rank()
    dist.barrier()
    dist.destroy_process_group()
    own = dist.FileStore(str(Path(folder) / "world"), 2)
    minutes = timedelta(minutes=10)  # in which an operation that waits does not end by itself
    dist.init_process_group("gloo", store=own, rank=rank, world_size=2, timeout=minutes)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",), isolate=tag)
    assert mesh.get_group() is dist.group.WORLD or tag
    turns = dist.FileStore(str(Path(folder) / "turns"), 2)
    if rank == 0:
        dist.all_reduce(torch.zeros(1), group=mesh.get_group(), async_op=True)
        mesh.abort()
        with pytest.raises(RuntimeError, match="Create the mesh again"):
            mesh.get_group()
        turns.set("rank 0 aborted", "")
    else:  # raises if rank 0 waits for it
        turns.wait(["rank 0 aborted"], timedelta(seconds=60))
    is_left = dist.is_initialized()
    if is_left:
        dist.destroy_process_group()
    after = dist.FileStore(str(Path(folder) / "after"), 2)
    dist.init_process_group("gloo", store=after, rank=rank, world_size=2)  # which the crew ends
    return is_left


@pytest.mark.parametrize("tag", [None, "own"])
def test_abort_waits_for_no_other_rank(crew: Crew, tmp_path: Path, tag: str | None) -> None:
    # Without a tag, the axis uses the default group, which is aborted too.
    assert crew.run(_abort_while_the_peer_waits, 2, str(tmp_path), tag) == [tag is not None, True]


_ABORTS_AND_EXITS = """
import sys
from datetime import timedelta
import torch
import torch.distributed as dist
from meshverse import init_device_mesh

rank, folder = int(sys.argv[1]), sys.argv[2]
store = dist.FileStore(folder + "/world", 2)
dist.init_process_group(
    "gloo", store=store, rank=rank, world_size=2, timeout=timedelta(minutes=10)
)
mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",), isolate="own")
if rank == 0:
    dist.all_reduce(torch.zeros(1), group=mesh.get_group(), async_op=True)
    mesh.abort()
else:
    sys.stdin.read()  # until the test closes it, once rank 0 has ended
dist.destroy_process_group()
"""


@pytest.mark.long
def test_a_process_that_aborted_exits_without_waiting(tmp_path: Path) -> None:
    program = tmp_path / "aborts.py"
    program.write_text(_ABORTS_AND_EXITS)
    with contextlib.ExitStack() as started:
        peer, aborting = (
            started.enter_context(
                subprocess.Popen(
                    [sys.executable, str(program), str(rank), str(tmp_path)], stdin=subprocess.PIPE
                )
            )
            for rank in (1, 0)
        )
        for process in (peer, aborting):
            started.callback(process.communicate)
        assert aborting.wait(SECONDS) == 0
        assert peer.poll() is None
