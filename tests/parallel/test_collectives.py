"""Collectives of one process, their checks, and how they are chosen."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from helpers.worlds import fake_world, group_names, in_worlds
from meshverse.parallel import (
    Collective,
    CollectiveConfig,
    MeshCollective,
    SingleProcessCollective,
    build_collective,
)

_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


@pytest.fixture
def alone() -> SingleProcessCollective:
    return SingleProcessCollective("cpu")


def test_who_a_process_alone_is(alone) -> None:
    assert (alone.rank, alone.world_size, alone.local_rank) == (0, 1, 0)
    assert (alone.dp_rank, alone.dp_world_size, alone.tp_rank, alone.tp_world_size) == (0, 1, 0, 1)
    assert alone.is_master
    assert alone.is_local_master
    assert alone.local is alone.tp_world is alone
    assert alone.process_group is None
    assert alone.default_device == torch.device("cpu")


def test_the_interface_is_abstract() -> None:
    with pytest.raises(TypeError, match="abstract"):
        Collective()  # type: ignore[abstract]


def test_results_of_a_process_alone_are_copies(alone) -> None:
    tensor = torch.arange(4.0, requires_grad=True)
    for gathered in (alone.all_gather(tensor), alone.all_gather_to_list(tensor)[0]):
        assert torch.equal(gathered, tensor.detach())
        assert gathered.data_ptr() != tensor.data_ptr()
        assert not gathered.requires_grad


def test_a_process_alone_has_one_source(alone) -> None:
    for send in (alone.broadcast, alone.broadcast_objects):
        with pytest.raises(ValueError, match="Source rank 1 of a collective of 1 processes"):
            send([None], src=1)


# --- which collective ----------------------------------------------------------------------------


@pytest.fixture
def no_torchrun(monkeypatch) -> None:
    for name in _VARIABLES:
        monkeypatch.delenv(name, raising=False)


def test_without_torchrun_it_is_a_process_alone(no_torchrun) -> None:
    collective = build_collective(CollectiveConfig(device_type="cpu"))
    assert type(collective) is SingleProcessCollective
    assert not dist.is_initialized()


def test_one_process_cannot_be_split(no_torchrun) -> None:
    with pytest.raises(ValueError, match="tp_size=2 and sharding_world_size=None for one process"):
        build_collective(CollectiveConfig(tp_size=2))


def test_half_of_torchruns_variables(no_torchrun, monkeypatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(ValueError, match=r"\['WORLD_SIZE', 'LOCAL_WORLD_SIZE'\] are missing"):
        build_collective(CollectiveConfig())


def test_with_torchruns_variables_it_is_the_world(no_torchrun, monkeypatch) -> None:
    values = {"RANK": 13, "WORLD_SIZE": 16, "LOCAL_RANK": 5, "LOCAL_WORLD_SIZE": 8}
    for name, value in values.items():
        monkeypatch.setenv(name, str(value))
    with fake_world(16, 13):
        collective = build_collective(CollectiveConfig(device_type="cpu", tp_size=2))
        assert isinstance(collective, MeshCollective)
        assert collective.meshes.parallel_mesh.shape == (2, 4, 2)
        assert collective.meshes.physical_mesh.shape == (2, 8)


# --- meshes and refusals -------------------------------------------------------------------------


@in_worlds((16, 13))
@pytest.mark.parametrize(
    ("tp_size", "sharding", "shape", "dp_rank"),
    [
        (1, None, (2, 8, 1), 13),
        (4, None, (2, 2, 4), 3),
        (2, 8, (1, 8, 2), 6),
        (2, 2, (4, 2, 2), 6),
        (8, 1, (2, 1, 8), 1),
    ],
)
def test_the_two_meshes_share_a_universe(world, tp_size, sharding, shape, dp_rank) -> None:
    collective = MeshCollective(
        13,
        16,
        local_world_size=8,
        local_rank=5,
        device_type="cpu",
        tp_size=tp_size,
        sharding_world_size=sharding,
    )
    parallel, physical = collective.meshes
    assert (parallel.mesh_dim_names, parallel.shape) == (("dp_replicate", "dp_shard", "tp"), shape)
    assert (physical.mesh_dim_names, physical.shape) == (("nodes", "local_ranks"), (2, 8))
    assert physical.universe is parallel.universe
    explained = parallel.universe.explain()
    assert explained.created == len({group.ranks for group in explained.groups if group.created})
    assert collective.tp_rank == 13 % tp_size
    assert (collective.dp_rank, collective.dp_world_size) == (dp_rank, 16 // tp_size)
    assert (collective.rank, collective.world_size, collective.local_rank) == (13, 16, 5)
    assert not collective.is_master
    assert not collective.is_local_master
    assert (collective.local.rank, collective.local.world_size) == (5, 8)
    assert (collective.tp_world.rank, collective.tp_world.world_size) == (13 % tp_size, tp_size)
    assert collective.local is collective.local
    assert collective.tp_world.local.world_size == tp_size  # TP lies in a node


@in_worlds((8, 5))
def test_equal_axes_of_the_two_meshes_share_groups(world) -> None:
    sizes = {"local_world_size": 4, "local_rank": 1, "device_type": "cpu"}
    parallel, physical = MeshCollective(5, 8, **sizes).meshes
    assert parallel.get_group("dp_shard") is physical.get_group("local_ranks")
    assert parallel.get_group("dp_replicate") is physical.get_group("nodes")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"local_world_size": 3}, "local_world_size=3 does not divide world_size=8"),
        ({"local_world_size": 0}, r"\{'local_world_size': 0\} must be ints above 0"),
        ({"tp_size": 3}, "tp_size=3 does not divide local_world_size=4"),
        ({"tp_size": 8}, "tp_size=8 does not divide local_world_size=4.*one node"),
        ({"tp_size": 2, "sharding_world_size": 3}, r"sharding_world_size=3 .*tp_size=4"),
        ({"tp_size": 2, "sharding_world_size": 8}, r"sharding_world_size=8 .*world_size / tp_si"),
        ({"tp_size": "2"}, r"\{'tp_size': '2'\} must be ints above 0"),
        ({"tp_size": 2.0}, r"\{'tp_size': 2.0\} must be ints above 0"),
        ({"tp_size": True}, r"\{'tp_size': True\} must be ints above 0"),
        ({"sharding_world_size": -1}, r"\{'sharding_world_size': -1\} must be ints"),
        ({"local_rank": 2}, r"local_rank=2 of rank 5 with local_world_size=4: it must be 1"),
        ({"world_size": 4}, r"rank=5 of world_size=4, .*is rank 5 of 8"),
        ({"rank": 1}, r"rank=1 of world_size=8, .*is rank 5 of 8"),
        ({"process_group": dist.GroupMember.NON_GROUP_MEMBER}, "not a member"),
        ({"device_type": "cuda:1"}, r"device_type='cuda:1' must be .*local_rank=1\. Give 'cuda'"),
    ],
)
@in_worlds((8, 5))
def test_what_does_not_fit_is_refused_with_the_numbers(world, changed, message) -> None:
    before = group_names()
    arguments = {"rank": 5, "world_size": 8, "local_world_size": 4, "local_rank": 1}
    with pytest.raises(ValueError, match=message):
        MeshCollective(**{**arguments, "device_type": "cpu", **changed})
    assert group_names() == before


@pytest.mark.parametrize(
    "sizes", [{"tp_size": 4}, {"tp_size": 1}, {"tp_size": 2, "sharding_world_size": 4}]
)
@in_worlds((8, 5))
def test_sizes_that_are_not_those_of_the_meshes_given_are_refused(world, sizes) -> None:
    place = {"local_world_size": 4, "local_rank": 1, "device_type": "cpu"}
    whole = MeshCollective(5, 8, tp_size=2, **place)
    assert MeshCollective(5, 8, mesh=whole.meshes, **place).tp_world_size == 2
    with pytest.raises(ValueError, match=r"but mesh= has tp=2 and dp_shard=2"):
        MeshCollective(5, 8, mesh=whole.meshes, **place, **sizes)


@pytest.mark.parametrize(
    "sizes", [{"local_world_size": 0}, {"local_world_size": 8}, {"world_size": 16}]
)
@in_worlds((8, 5))
def test_a_world_that_is_not_that_of_the_meshes_given_is_refused(world, sizes) -> None:
    place = {"world_size": 8, "local_world_size": 4, "local_rank": 1, "device_type": "cpu"}
    whole = MeshCollective(5, **place)
    with pytest.raises(ValueError, match=r"but mesh= has (8 ranks|4 ranks on each node)\."):
        MeshCollective(5, mesh=whole.meshes, **{**place, **sizes})


def test_refused_before_the_world_is_started() -> None:
    with pytest.raises(ValueError, match="tp_size=2 does not divide local_world_size=1"):
        MeshCollective(0, 1, local_world_size=1, local_rank=0, device_type="cpu", tp_size=2)
    assert not dist.is_initialized()


def test_the_world_of_gpus_is_bound_to_the_device(monkeypatch) -> None:
    calls = []

    def start(*arguments, **keywords) -> None:
        calls.append((*arguments, keywords))
        raise InterruptedError

    # This machine need not have a GPU: what would be started there is only written down.
    monkeypatch.setattr(torch.cuda, "set_device", calls.append)
    monkeypatch.setattr(dist, "init_process_group", start)
    with pytest.raises(InterruptedError):
        MeshCollective(5, 8, local_world_size=4, local_rank=1, device_type="cuda")
    device = torch.device("cuda", 1)
    assert calls == [device, ("nccl", {"rank": 5, "world_size": 8, "device_id": device})]


@in_worlds((8, 5))
def test_other_devices_communicate_by_way_of_the_cpu(world) -> None:
    with pytest.warns(UserWarning, match="'mps' are copied to 'cpu' and back"):
        collective = MeshCollective(5, 8, local_world_size=4, local_rank=1, device_type="mps")
    assert collective.default_device == torch.device("mps")
    assert collective.meshes.parallel_mesh.device_type == "cpu"
