"""Ranks that are not processes, tensors that are not data: threads, LocalTensor, fake, meta."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh as StockDeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.multi_threaded_pg import ThreadLocalWorld

from helpers.forked import CONTEXT, SECONDS
from helpers.observation import Family, observe
from helpers.sides import SIDES, mesh_class, side
from helpers.tiers import in_tiers
from helpers.training import batch, make_model, tensor_parallel
from helpers.worlds import in_worlds

_AXES = ("dp", "tp")
_RANKS = [[0, 1], [2, 3]]
on_each_side = pytest.mark.parametrize("which", SIDES)
of_four = in_worlds((4, 1))


def _mesh(family: Family) -> StockDeviceMesh:
    return family.init_device_mesh("cpu", (2, 2), mesh_dim_names=_AXES)


# --- ranks as threads ----------------------------------------------------------------------------


def _on_threads(program: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Run a program on four ranks, which are threads of this process; what it returned, by rank."""
    pytest.importorskip("expecttest", reason="torch's threaded backend imports it")
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        # The module reads options off the command line as it is imported.
        patch.setattr(sys, "argv", sys.argv[:1])
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_distributed import spawn_threads_and_init_comms

    answers: dict[int, Any] = {}

    @spawn_threads_and_init_comms(world_size=4)
    def run(_: object) -> None:
        answers[dist.get_rank()] = program(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        if not hasattr(ThreadLocalWorld, "comms"):  # as in 2.11, whose own end of a world needs it
            patch.setattr(ThreadLocalWorld, "comms", [], raising=False)
        run(None)
    assert sorted(answers) == [0, 1, 2, 3]
    return [answers[rank] for rank in range(4)]


def _sum_of_ranks(group: dist.ProcessGroup) -> float:
    total = torch.full((2,), float(dist.get_rank()))
    dist.all_reduce(total, group=group)
    return total.tolist()[1]


def _as_a_thread(family: Family) -> dict[str, Any]:
    mesh = _mesh(family)
    world = mesh._flatten("world")
    groups = [mesh.get_group("dp"), mesh.get_group("tp"), world.get_group()]
    whole = torch.arange(30.0).reshape(5, 6)  # uneven over two
    sharded = distribute_tensor(whole, mesh, [Shard(0), Shard(1)])
    return {
        "meshes": (mesh, mesh["tp"]),  # kept alive, so that no two have one address
        "class": type(mesh["tp"]),
        "coordinate": list(mesh.get_coordinate()),
        "local ranks": [mesh.get_local_rank("dp"), mesh["tp"].get_local_rank()],
        "ranks": [dist.get_process_group_ranks(group) for group in groups],
        "sums": [_sum_of_ranks(group) for group in groups],
        "slice is one object": mesh["tp"] is mesh["tp"],
        "local": sharded.to_local().tolist(),
        "full": sharded.full_tensor().equal(whole),
        "product": (sharded @ sharded.t()).full_tensor().equal(whole @ whole.t()),
    }


def _threads_of(which: str) -> list[dict[str, Any]]:
    with side(which) as family:
        answers = _on_threads(_as_a_thread, family)
    return [{key: answer[key] for key in answer.keys() - {"meshes"}} for answer in answers]


@pytest.mark.parametrize("which", in_tiers(SIDES, ["ours"]))
def test_ranks_as_threads(which: str) -> None:
    # In a process of its own, because 2.11 allows for no other world after one of threads.
    with ProcessPoolExecutor(1, CONTEXT) as pool:
        answers = pool.submit(_threads_of, which).result(SECONDS)
    whole = torch.arange(30.0).reshape(5, 6)
    for rank, answer in enumerate(answers):
        dp, tp = divmod(rank, 2)
        assert answer["coordinate"] == answer["local ranks"] == [dp, tp]
        assert answer["ranks"] == [[tp, tp + 2], [2 * dp, 2 * dp + 1], [0, 1, 2, 3]]
        assert answer["sums"] == [sum(ranks) for ranks in answer["ranks"]]
        assert answer["local"] == whole.chunk(2, 0)[dp].chunk(2, 1)[tp].tolist()
        assert (answer["full"], answer["product"]) == (True, True)
        assert answer["class"] is mesh_class(which)
        assert answer["slice is one object"] or which == "stock"


one_world_of_threads_only = pytest.mark.skipif(
    not hasattr(ThreadLocalWorld, "comms"),
    reason="torch 2.11 crashes in the next world after one of threads, with stock's meshes too",
)


@one_world_of_threads_only
def test_each_thread_has_meshes_of_its_own() -> None:
    with side("ours") as family:
        answers = _on_threads(_as_a_thread, family)
    for kind in zip(*(answer["meshes"] for answer in answers), strict=True):
        assert len({id(mesh) for mesh in kind}) == 4
        assert len({id(mesh.universe) for mesh in kind}) == 4


@one_world_of_threads_only
def test_threads_one_world_after_another() -> None:
    for _ in range(3):
        with side("ours") as family:
            assert [answer["full"] for answer in _on_threads(_as_a_thread, family)] == [True] * 4


# --- LocalTensor: all ranks in one thread --------------------------------------------------------


@contextlib.contextmanager
def _local_tensors() -> Iterator[None]:
    reason = "LocalTensorMode is in later torch"
    module = pytest.importorskip("torch.distributed._local_tensor", reason=reason)
    with module.LocalTensorMode(4):
        yield


def _plain(value: Any) -> torch.Tensor:
    """The value that all ranks have; fails if they differ."""
    return value.reconcile()  # type: ignore[no-any-return]


@on_each_side
@in_worlds((4, 0))
def test_local_tensors(world, which: str) -> None:
    whole, other = torch.arange(30.0).reshape(5, 6), torch.ones(6, 4).triu()
    with side(which) as family, _local_tensors():
        mesh = _mesh(family)
        left = distribute_tensor(whole, mesh, [Shard(0), Shard(1)])
        right = distribute_tensor(other, mesh, [Replicate(), Shard(0)])
        product = left @ right
        moved = product.redistribute(placements=[Replicate(), Shard(1)])
        assert type(product.device_mesh) is mesh_class(which)
        assert product.placements[1] == Partial()
        assert _plain(left.full_tensor()).equal(whole)
        assert _plain(product.full_tensor()).equal(whole @ other)
        assert _plain(moved.full_tensor()).equal(whole @ other)
        # What each of the four ranks has.
        locals_ = moved.to_local()._local_tensors
        for rank, local in locals_.items():
            assert local.equal((whole @ other).chunk(2, 1)[rank % 2])
        assert len(locals_) == 4


@on_each_side
@in_worlds((4, 0))
def test_local_tensors_over_slices_and_flattened_axes(world, which: str) -> None:
    whole = torch.arange(24.0).reshape(8, 3)
    with side(which) as family, _local_tensors():
        mesh = _mesh(family)
        for axis in (mesh["dp"], mesh["tp"], mesh._flatten("world")):
            sharded = distribute_tensor(whole, axis, [Shard(0)])
            assert _plain(sharded.full_tensor()).equal(whole)
            assert _plain((sharded * 2).sum().full_tensor()).item() == 2 * whole.sum().item()


# --- the fake backend ----------------------------------------------------------------------------


def _sharded_by_fake_ranks(family: Family) -> dict[str, Any]:
    mesh = family.init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("replicate", "shard", "tp"))
    model = make_model()
    for block in model:
        tensor_parallel(block, mesh["tp"])
        fully_shard(block, mesh=mesh["replicate", "shard"])
    fully_shard(model, mesh=mesh["replicate", "shard"])
    parameters = dict(model.named_parameters())
    before = {name: value.to_local().shape for name, value in parameters.items()}
    output = model(batch(0)[0])
    output.sum().backward()
    return {
        "locals": before,
        "placements": {name: str(value.placements) for name, value in parameters.items()},
        "gradients": {name: value.grad.to_local().shape for name, value in parameters.items()},
        "output": output.shape,
        "whole": [value.full_tensor().shape for value in parameters.values()],
        "meshes": [value.device_mesh.mesh.tolist() for value in parameters.values()],
    }


@in_worlds((8, 0), (8, 5))
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped:UserWarning")
def test_a_training_step_with_the_fake_backend(world) -> None:
    seen = {}
    for which in SIDES:
        with side(which) as family:
            seen[which] = _sharded_by_fake_ranks(family)
    assert seen["ours"] == seen["stock"]
    assert seen["installed"] == seen["stock"]
    assert seen["ours"]["output"] == batch(0)[0].shape


# --- FakeTensorMode ------------------------------------------------------------------------------

_REAL_RANKS = torch.tensor(_RANKS, dtype=torch.int32)
_FROM: dict[str, Callable[[Family], StockDeviceMesh]] = {
    "shape": _mesh,
    "list": lambda family: family.DeviceMesh("cpu", _RANKS, mesh_dim_names=_AXES),
    "tensor": lambda family: family.DeviceMesh("cpu", _REAL_RANKS, mesh_dim_names=_AXES),
}


@of_four
@pytest.mark.parametrize("which", ["ours", "installed"])
@pytest.mark.parametrize("source", _FROM)
def test_made_and_read_under_fake_tensors(world, which: str, source: str) -> None:
    with side(which) as family, FakeTensorMode():
        mesh = _FROM[source](family)
        ranks, slice_ranks = mesh.mesh, mesh["tp"].mesh
        coordinate = mesh.get_coordinate()
    assert (type(ranks), type(slice_ranks)) == (torch.Tensor, torch.Tensor)
    assert (ranks.device.type, ranks.tolist()) == ("cpu", _RANKS)
    assert slice_ranks.tolist() == [0, 1]
    assert list(coordinate) == [0, 1]
    assert observe(mesh) == observe(_mesh(family))


@of_four
@on_each_side
def test_dtensors_of_fake_tensors(world, which: str) -> None:
    with side(which) as family:
        mesh = _mesh(family)
        with FakeTensorMode():
            sharded = distribute_tensor(torch.empty(5, 6), mesh, [Shard(0), Shard(1)])
            product = (sharded @ sharded.t()).redistribute(placements=[Shard(0), Replicate()])
            assert isinstance(product, DTensor)
            assert isinstance(product.to_local(), FakeTensor)
            assert sharded.to_local().shape == (3, 3)
            assert product.to_local().shape == (3, 5)


# --- meta as the default device ------------------------------------------------------------------


@contextlib.contextmanager
def _default_device_meta() -> Iterator[None]:
    before = torch.get_default_device()
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)
    assert torch.get_default_device() == before


_META: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "with torch.device": lambda: torch.device("meta"),
    "set_default_device": _default_device_meta,
}


@of_four
@pytest.mark.parametrize("default", _META)
@pytest.mark.parametrize("source", _FROM)
def test_made_and_read_with_meta_as_default(world, source: str, default: str) -> None:
    seen = {}
    for which in SIDES:
        with side(which) as family, _META[default]():
            assert torch.empty(1).device.type == "meta"
            mesh = _FROM[source](family)
            seen[which] = observe(mesh)
            assert (mesh.mesh.device.type, mesh.mesh.tolist()) == ("cpu", _RANKS)
            assert mesh["tp"].mesh.tolist() == [0, 1]
            assert mesh._flatten("world").mesh.tolist() == [0, 1, 2, 3]
    assert seen["ours"] == seen["stock"]
    assert seen["installed"] == seen["stock"]


@of_four
@pytest.mark.parametrize("default", _META)
def test_a_model_made_on_meta(world, default: str) -> None:
    seen = {}
    for which in SIDES:
        with side(which) as family, _META[default]():
            mesh = _mesh(family)
            model = make_model()
            for block in model:
                tensor_parallel(block, mesh["tp"])
                fully_shard(block, mesh=mesh["dp"])
        assert {value.device.type for value in model.parameters()} == {"meta"}
        model.to_empty(device="cpu")
        locals_ = [value.to_local() for value in model.parameters()]
        seen[which] = [(local.device.type, local.shape) for local in locals_]
    assert seen["ours"] == seen["stock"]
    assert seen["installed"] == seen["stock"]
