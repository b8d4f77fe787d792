"""Meshes in any order of ranks: what is sharded, saved, loaded and moved has the right values."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh as StockDeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from helpers.crew import Crew
from helpers.tiers import in_tiers
from helpers.worlds import fake_world, groups_created
from meshverse import DeviceMesh, Topology, init_device_mesh, init_mesh_partition
from meshverse.parallel import (
    FSDP2Config,
    ParallelismSizes,
    Reshard,
    create_device_meshes,
    redistribute,
)

_NAMES = ("replicas", "shards", "tp")
_PLAN = {"0": ColwiseParallel(), "2": RowwiseParallel()}


# --- models --------------------------------------------------------------------------------------


def _model() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(5, 12), nn.ReLU(), nn.Linear(12, 7))
    with torch.no_grad():
        first = 0
        for parameter in model.parameters():
            parameter.copy_(torch.arange(first, first + parameter.numel()).view(parameter.shape))
            first += parameter.numel()
    return model


def _sharded(mesh: DeviceMesh, model: nn.Sequential) -> nn.Sequential:
    """A model under tensor parallelism, and FSDP2 with replicas, over the axes that are there."""
    names = mesh.mesh_dim_names or ()
    if "tp" in names:
        parallelize_module(model, mesh["tp"], _PLAN)
    data = tuple(name for name in names if name != "tp")
    return fully_shard(model, mesh=mesh[data]) if data else model


def _whole(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: (each.full_tensor() if isinstance(each, DTensor) else each).detach()
        for name, each in model.named_parameters()
    }


def _check(got: dict[str, Tensor], wanted: dict[str, Tensor], what: str) -> None:
    assert got.keys() == wanted.keys(), what
    for name, value in wanted.items():
        assert torch.equal(got[name], value), f"{what}: {name}"


def _saved_and_loaded(model: nn.Sequential, other: nn.Sequential, folder: str) -> None:
    wanted = _whole(_model())
    dcp.save(get_model_state_dict(model), checkpoint_id=folder)
    alone = {name: torch.full_like(value, -1) for name, value in wanted.items()}
    dcp.load(alone, checkpoint_id=folder, no_dist=True)
    _check(alone, wanted, "a checkpoint that one process loads")
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.fill_(-1)
    state = get_model_state_dict(other)
    dcp.load(state, checkpoint_id=folder)
    _check(_whole(other), wanted, "a checkpoint on another mesh")


def _moved(source: nn.Sequential, target: nn.Sequential, what: str) -> None:
    with torch.no_grad():
        for parameter in target.parameters():
            parameter.fill_(-1)
    parameters = [dict(model.named_parameters()) for model in (source, target)]
    with Reshard(*parameters) as move:
        move()
    _check(_whole(target), _whole(_model()), what)


def _right_in_any_order(
    topology: Topology, shape: tuple[int, ...], names: tuple[str, ...], folder: str
) -> list[int]:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names, topology=topology)
    usual = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shards",))
    wanted = _whole(_model())
    model, other = _sharded(mesh, _model()), _sharded(usual, _model())
    _check(_whole(model), wanted, "full_tensor")
    exported = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    _check(exported, wanted, "full state dict")
    _saved_and_loaded(model, other, f"{folder}/from")
    _saved_and_loaded(other, model, f"{folder}/to")
    _moved(model, other, "Reshard to ranks in order")
    _moved(other, model, "Reshard from ranks in order")
    for name, parameter in model.named_parameters():
        moved = redistribute(parameter.detach(), usual, [Shard(0)])
        assert torch.equal(moved.full_tensor(), wanted[name]), f"redistribute of {name}"
        back = redistribute(moved, mesh, [Replicate()] * (mesh.ndim - 1) + [Shard(0)])
        assert torch.equal(back.full_tensor(), wanted[name]), f"redistribute of {name} back"
    for axis in names:  # what torch goes by is one thing
        coordinate = mesh.get_coordinate()[names.index(axis)]
        assert mesh.get_local_rank(axis) == mesh.get_group(axis).rank() == coordinate
    flat = mesh.flatten("all")
    assert dist.get_process_group_ranks(flat.get_group()) == mesh.mesh.flatten().tolist()
    return mesh.mesh.flatten().tolist()


_FOUR = {"a, b, b, a": list("abba"), "a, b, a, b": list("abab"), "a, a, b, a": list("aaba")}
_CLUSTERS = {
    **{name: Topology({"node": nodes}) for name, nodes in _FOUR.items()},
    "cyclic 2 x 4": Topology({"node": list("abababab")}),
    "cyclic 4 x 2": Topology({"node": list("abcdabcd")}),
    "uneven": Topology({"node": list("abbbaabb")}),
    "nodes alternate between switches": Topology(
        {"node": list("aabbccdd"), "switch": list("xxyyxxyy")}
    ),
    "a node's ranks are scattered": Topology(
        {"node": list("abbaabab"), "switch": list("xxxxxxxx")}
    ),
}
_SHAPES = {
    4: [((2, 2), ("shards", "tp")), ((4,), ("shards",)), ((2, 2), ("replicas", "shards"))],
    8: [
        ((4, 2), ("shards", "tp")),
        ((2, 4), ("shards", "tp")),
        ((2, 4), ("replicas", "shards")),
        ((2, 2, 2), _NAMES),
        ((8,), ("shards",)),
    ],
}


def _cases() -> Iterator[tuple[str, Any]]:
    for cluster, topology in _CLUSTERS.items():
        for shape, names in _SHAPES[topology.world_size]:
            key = f"{cluster}: {dict(zip(names, shape, strict=True))}"
            yield key, (topology, shape, names)


_CASES = dict(_cases())


@pytest.mark.processes
@pytest.mark.parametrize(
    "case", in_tiers(_CASES, ["a, b, b, a: {'shards': 2, 'tp': 2}"], [*_CASES][::9])
)
def test_values_are_right_in_the_order_of_a_topology(crew: Crew, tmp_path: Path, case: str) -> None:
    topology, shape, names = _CASES[case]
    program = _right_in_any_order
    answers = crew.run(program, topology.world_size, topology, shape, names, str(tmp_path))
    assert answers == [topology.order(shape, names).tolist()] * topology.world_size


# --- which groups are in another order -----------------------------------------------------------


def _groups(mesh: StockDeviceMesh) -> list[list[int]]:
    return [dist.get_process_group_ranks(group) for group in mesh.get_all_groups()]


def test_ranks_that_we_place_keep_their_order_in_groups() -> None:
    ranks = [6, 5, 4, 7, 1, 0, 3, 2]
    with fake_world(8, 5):
        mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"), ranks=ranks)
        assert _groups(mesh) == [[5, 7, 0, 2], [6, 5]]
        assert _groups(mesh.flatten("all")) == [ranks]
        assert _groups(mesh.unflatten("dp", (2, 2), ("a", "b")))[:2] == [[5, 0], [5, 7]]
        parts = {
            "one": {"mesh_shape": (4,), "ranks": [7, 6, 5, 4]},
            "other": {"mesh_shape": (2, 2), "ranks": [0, 3, 2, 1]},
        }
        assert _groups(init_mesh_partition("cpu", parts)["one"]) == [[7, 6, 5, 4]]
        built, _ = create_device_meshes(FSDP2Config(), ParallelismSizes(tp_size=2), ranks=ranks)
        assert _groups(built["tp"]) == [[6, 5]]
        assert _groups(built["dp_shard"]) == [[5, 7, 0, 2]]
        asked = init_device_mesh("cpu", (2,), ranks=[6, 5], preserve_rank_order=False)
        assert _groups(asked) == [[5, 6]]  # as in torch


def test_groups_that_ascend_are_those_of_a_mesh_in_order() -> None:
    in_turn = Topology({"node": list("ababcdcd")})
    with fake_world(8, 5):
        usual = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
        with groups_created(3):  # {1, 5}, {5, 7} and all four; {4, 5} is known
            placed = init_device_mesh(
                *("cpu", (2, 2, 2)),
                mesh_dim_names=("pp", "dp", "tp"),
                ranks=in_turn.order((2, 2, 2)),
                universe=usual.universe,
            )
            flat = placed["dp", "tp"].flatten()
        assert placed.mesh.flatten().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
        assert _groups(placed) == [[1, 5], [4, 5], [5, 7]]
        assert placed.get_group("dp") is usual.get_group("tp")
        assert _groups(flat) == [[4, 6, 5, 7]]


def test_a_mesh_in_another_order_is_not_stocks() -> None:
    with fake_world(4, 1):
        mesh = init_device_mesh("cpu", (2, 2), ranks=[3, 2, 1, 0])
        assert mesh != StockDeviceMesh("cpu", mesh.mesh)
        assert mesh != DeviceMesh("cpu", mesh.mesh)
        assert mesh == DeviceMesh("cpu", mesh.mesh, preserve_rank_order=True)
        ascending = init_device_mesh("cpu", (2, 2), ranks=[0, 1, 2, 3])
        assert ascending == StockDeviceMesh("cpu", ascending.mesh)


_WHY = "in an order that is not ascending, and its process groups have them sorted"


def test_a_mesh_as_torchs_says_once_that_its_groups_are_sorted(caplog) -> None:
    with fake_world(8, 3), caplog.at_level(logging.WARNING, "meshverse"):
        DeviceMesh("cpu", [[0, 2], [1, 3]])  # in each group ranks ascend
        init_device_mesh("cpu", (2,), ranks=[3, 2])
        DeviceMesh("cpu", [[3, 2]], preserve_rank_order=True)
        assert not caplog.records
        mesh = DeviceMesh("cpu", [[3, 2], [0, 1]], mesh_dim_names=("dp", "tp"))
        assert _groups(mesh) == [[0, 3], [2, 3]]
        DeviceMesh("cpu", [3, 1])
        (record,) = caplog.records
        assert f"lists ranks of axis 'dp' and 'tp' {_WHY}" in record.getMessage()
        assert "Give preserve_rank_order=True" in record.getMessage()
    caplog.clear()
    with fake_world(8, 0), caplog.at_level(logging.WARNING, "meshverse"):
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
        turned = DeviceMesh._concatenate([mesh["tp"], mesh["dp"]])
        assert not caplog.records
        assert turned.flatten("turned").mesh.tolist() == [0, 4, 1, 5, 2, 6, 3, 7]
        assert _WHY in caplog.text


# --- where all ranks make a group ----------------------------------------------------------------


def _made_by_all() -> tuple[list[list[int]], list[int]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_DIST_INIT_BARRIER", "1")
        patch.setattr("meshverse.groups.creation.NEW_GROUP_KEEPS_ORDER", False)  # as before 2.13
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"), ranks=[3, 1, 0, 2])
        hows = [group.request.all_ranks_reason for group in mesh.universe.groups]
        assert hows == ["TORCH_DIST_INIT_BARRIER=1"] * 2
        mine = torch.tensor([dist.get_rank()])
        gathered = [torch.empty_like(mine) for _ in range(2)]
        dist.all_gather(gathered, mine, group=mesh.get_group("b"))
        return _groups(mesh), torch.cat(gathered).tolist()


@pytest.mark.processes
def test_an_order_is_kept_where_all_ranks_make_the_groups(crew: Crew) -> None:
    answers = crew.run(_made_by_all, 4)
    assert [gathered for _, gathered in answers] == [[0, 2], [3, 1], [0, 2], [3, 1]]
    assert answers[1][0] == [[1, 2], [3, 1]]


# --- orders that topologies give -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("nodes", "shape", "order"),
    [
        ("abababab", (2, 4), [0, 2, 4, 6, 1, 3, 5, 7]),
        ("baabbaab", (2, 4), [0, 3, 4, 7, 1, 2, 5, 6]),
        ("bbbbaaaa", (2, 4), [0, 1, 2, 3, 4, 5, 6, 7]),
        ("abba", (2, 2), [0, 3, 1, 2]),  # in no order can both axes ascend
    ],
)
def test_ranks_ascend_along_axes_where_that_costs_nothing(nodes, shape, order) -> None:
    assert Topology({"node": list(nodes)}).order(shape).tolist() == order


def test_ranks_ascend_along_axes_on_large_clusters() -> None:
    cyclic = Topology({"node": [f"n{rank * 7 % 32}" for rank in range(256)]})
    grid = cyclic.order((4, 8, 8)).view(4, 8, 8)
    assert all(bool((grid.diff(dim=axis) > 0).all()) for axis in range(3))


# --- meshes whose groups torch has sorted ---------------------------------------------------------


def _whole_on(mesh: Any, whole: Tensor, *placements: Any) -> DTensor:
    """A tensor as `full_tensor` reads it: shards are given out by the rank in the group."""
    local = whole
    for axis, placement in enumerate(placements):
        if isinstance(placement, Shard):
            local = torch.chunk(local, mesh.size(axis), placement.dim)[mesh.get_local_rank(axis)]
    shape, stride = whole.shape, whole.stride()
    tensor = DTensor.from_local(
        local.clone(), mesh, list(placements), run_check=False, shape=shape, stride=stride
    )
    assert torch.equal(tensor.full_tensor(), whole)
    return tensor


def _sorted_by_torch(family: str) -> None:
    make = StockDeviceMesh if family == "stock" else DeviceMesh
    usual = init_device_mesh("cpu", (4,))
    whole = torch.arange(64.0).view(8, 8)
    meshes = [
        make("cpu", torch.tensor([[3, 2], [1, 0]])),
        make("cpu", torch.tensor([[0, 2], [1, 3]])),
        make("cpu", torch.tensor([3, 1, 0, 2])),
    ]
    if family == "ours":
        ours = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        meshes.append(DeviceMesh._concatenate([ours["b"], ours["a"]]).flatten("turned"))
        meshes.append(init_device_mesh("cpu", (4,), ranks=[3, 1, 0, 2], lazy=True))
    for mesh in meshes:
        placements = [Shard(0), Shard(1)][: mesh.ndim]
        tensor = _whole_on(mesh, whole, *placements)
        moved = redistribute(tensor, usual, [Shard(0)])
        assert torch.equal(moved.full_tensor(), whole), mesh.mesh.tolist()
        back = redistribute(_whole_on(usual, whole, Shard(1)), mesh, placements)
        assert torch.equal(back.full_tensor(), whole)
        plain, empty = torch.zeros(8, 8), torch.zeros_like(tensor)
        with Reshard({"w": tensor, "v": tensor}, {"w": plain, "v": empty}) as move:
            move()
        assert torch.equal(plain, whole)
        assert torch.equal(empty.full_tensor(), whole)
    lost = make("cpu", torch.tensor([[0, 3], [2, 1]]))
    shards = DTensor.from_local(torch.zeros(4, 4), lost, [Shard(0), Shard(1)])
    with pytest.raises(ValueError, match="has several ranks for one shard"):
        Reshard({"w": shards}, {"w": torch.zeros(8, 8)})


@pytest.mark.processes
@pytest.mark.parametrize(  # DTensor keeps stock's after their world
    "family", ["ours", pytest.param("stock", marks=pytest.mark.long)]
)
def test_moves_go_by_what_tensors_hold(crew: Crew, family: str) -> None:
    crew.run(_sorted_by_torch, 4, family)
