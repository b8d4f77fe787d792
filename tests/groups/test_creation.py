"""When the members of a group may make it by themselves, and what happens when they may not."""

from __future__ import annotations

import pickle
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.testing._internal.distributed.fake_pg import FakeStore

from helpers.replaced import replace_everywhere
from helpers.worlds import fake_world
from meshverse import DeviceMesh, init_device_mesh
from meshverse._torch_compat.backends import all_ranks_reason
from meshverse._torch_compat.c10d_creation import create_c10d_group

_AXES = ("dp", "tp")


@pytest.mark.parametrize("backend", ["mpi", "cpu:mpi,cuda:nccl", "cuda:nccl,cpu:mpi"])
def test_mpi_needs_all_ranks(world, backend: str) -> None:
    assert all_ranks_reason(dist.group.WORLD, backend) == "MPI"


def test_members_suffice_otherwise(world) -> None:
    for backend in ("gloo", "fake", "cpu:gloo,cuda:nccl"):
        assert all_ranks_reason(dist.group.WORLD, backend) is None


def test_the_barrier_variable_needs_all_ranks(world, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_DIST_INIT_BARRIER", "1")
    reason = all_ranks_reason(dist.group.WORLD, "gloo")
    assert reason == "TORCH_DIST_INIT_BARRIER=1"


def test_a_mesh_of_an_ended_world_gives_no_group_of_the_next() -> None:
    ones = torch.ones(2)
    with fake_world(8, 3):
        old = init_device_mesh("cpu", (2, 4), mesh_dim_names=_AXES)
    with fake_world(8, 3):
        new = init_device_mesh("cpu", (2, 4), mesh_dim_names=_AXES)
        assert new.get_group("tp").group_name == list(old._dim_group_names)[1], "the names repeat"
        for use in (lambda: old.get_group("tp"), lambda: funcol.all_reduce(ones, "sum", (old, 1))):
            with pytest.raises(
                RuntimeError, match=r"gone \(there is another one now\).*Create the mesh"
            ):
                use()


def test_concatenating_meshes_of_two_universes_keeps_all_groups_at_hand(world) -> None:
    one = init_device_mesh("cpu", (2, 4), mesh_dim_names=_AXES)
    other = init_device_mesh("cpu", (4, 2), mesh_dim_names=("ep", "pair"))
    joined = DeviceMesh._concatenate([one["dp"], other["pair"]])
    assert set(joined._dim_group_names) <= set(joined._pg_registry)
    assert joined.get_group("pair") is other.get_group("pair")
    assert pickle.loads(pickle.dumps(joined)) is joined
    hows = {group["name"]: group["how"] for group in one.universe.explain().to_dict()["groups"]}
    name = other.get_group("pair").group_name
    assert hows[name] == "of axis 'pair' of another mesh"
    row, _, foot = str(one.universe.explain()).partition("Requested 0 times: ")
    assert "-     0 times" in row
    assert foot.startswith("a mesh of another universe brought the group")
    one.universe.destroy()
    assert other.get_group("pair").group_name == name


def test_groups_of_a_combined_mesh_end_with_their_universe(world) -> None:
    one, other = (init_device_mesh("cpu", (2, 4), mesh_dim_names=_AXES) for _ in range(2))
    joined = DeviceMesh._concatenate([one["dp"], other["tp"]])
    other.universe.destroy()
    with pytest.raises(RuntimeError, match=r"was destroyed, by .*Create the mesh again"):
        joined.get_group("tp")
    assert joined.get_group("dp") is one.get_group("dp")


def test_a_loaded_mesh_finds_its_universe_whatever_other_meshes_were_made() -> None:
    dist.init_process_group("fake", rank=3, world_size=8, store=FakeStore())
    try:
        first = init_device_mesh("cpu", (2, 4), mesh_dim_names=_AXES)
        DeviceMesh("cpu", [0, 3], mesh_dim_names=("part",))
        first._get_all_submeshes("dp")
        second = init_device_mesh("cpu", (2, 4), mesh_dim_names=_AXES)
        assert (first.universe.serial, second.universe.serial) == (0, 1)
    finally:
        dist.destroy_process_group()


def test_the_inherited_timeout_is_no_part_of_a_name(world) -> None:
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=_AXES)
    options = mesh.universe.world.default_options
    assert "timeout=1800s" in repr(options.key)
    assert "timeout" not in repr(options.key.without_timeout())


@pytest.mark.skipif(sys.version_info < (3, 11), reason="errors have notes since Python 3.11")
def test_an_error_of_torchs_own_class_gets_a_note_of_the_group(
    world, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise torch.AcceleratorError("CUDA error: out of memory")

    replace_everywhere(monkeypatch, create_c10d_group, fails)
    with pytest.raises(torch.AcceleratorError) as raised:
        init_device_mesh("cpu", (2, 4), mesh_dim_names=_AXES)
    assert raised.value.__notes__ == [
        "Rank 5 could not create the process group of axis 'dp' with ranks [1, 5]."
    ]
