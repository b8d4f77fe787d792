"""torch.compile and torch.export on our meshes: the graphs of stock, and no more of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import DeviceMesh as StockDeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn import functional as F

from helpers.compiling import COMPILES
from helpers.observation import OURS, Family, attempt
from helpers.sides import MESHES_ARE_PLAIN_CLASSES, SIDES, mesh_class, side
from helpers.tiers import in_tiers
from helpers.training import batch, make_model, tensor_parallel
from helpers.worlds import fake_world

_SIZE, _RANK = 8, 5
_AXES = ("dp", "tp")

pytestmark = COMPILES


class Compiled(NamedTuple):
    """Observations of a program on its compiled function."""

    frames: list[int]  # compiled so far, after each call
    shapes: list[tuple[int, ...]]  # of what the calls gave


class Recorder:
    """Calls a function compiled as one graph, and counts what is compiled for it."""

    def __init__(self, function: Callable[..., Tensor], backend: str = "aot_eager") -> None:
        self.counter = CompileCounterWithBackend(backend)
        self.function = torch.compile(function, backend=self.counter, fullgraph=True)
        self.seen = Compiled([], [])

    def __call__(self, *args: Any) -> Tensor:
        output = self.function(*args)
        self.seen.frames.append(self.counter.frame_count)
        self.seen.shapes.append(tuple(output.shape))
        return output


def _grid(family: Family, shape: tuple[int, int] = (2, 4)) -> StockDeviceMesh:
    return family.init_device_mesh("cpu", shape, mesh_dim_names=_AXES)


def _matrix() -> Tensor:
    return torch.arange(32.0).reshape(4, 8)


def _shard(mesh: StockDeviceMesh) -> DTensor:
    return DTensor.from_local(_matrix(), mesh, [Shard(0)] * mesh.ndim, run_check=False)


# --- programs: each builds its meshes anew, compiles and calls -----------------------------------


def _gather(x: DTensor) -> Tensor:
    return (x * 2).redistribute(placements=[Replicate()] * x.device_mesh.ndim).to_local()


def _dtensor(family: Family) -> Compiled:
    call = Recorder(_gather)
    mesh = _grid(family)["tp"]
    call(_shard(mesh))
    call(_shard(mesh))
    return call.seen


def _equal_mesh(family: Family) -> Compiled:
    call = Recorder(_gather)
    for _ in range(3):
        call(_shard(_grid(family)["tp"]))
    return call.seen


def _different_meshes(family: Family) -> Compiled:
    call = Recorder(_gather)
    for mesh in (_grid(family), _grid(family, (4, 2)), _grid(family)):
        call(_shard(mesh["dp"]))
        call(_shard(mesh["tp"]))
    return call.seen


def _slice_inside(family: Family) -> Compiled:
    mesh = _grid(family)

    def gather_over_tp(x: Tensor) -> Tensor:
        shard = DTensor.from_local(x, mesh["tp"], [Shard(0)], run_check=False)
        return shard.redistribute(placements=[Replicate()]).to_local()

    call = Recorder(gather_over_tp)
    call(_matrix())
    call(_matrix())
    return call.seen


def _use_mesh(x: Tensor, mesh: StockDeviceMesh) -> Tensor:
    shard = DTensor.from_local(x, mesh, [Replicate(), Shard(0)], run_check=False)
    factor = mesh.size(1) + mesh["tp"].get_local_rank() + mesh["tp"].get_group().size()
    return shard.redistribute(placements=[Replicate(), Replicate()]).to_local() * factor


def _mesh_as_argument(family: Family) -> Compiled:
    call = Recorder(_use_mesh)
    mesh = _grid(family)
    for argument in (mesh, mesh, _grid(family), _grid(family, (4, 2))):
        call(_matrix(), argument)
    return call.seen


def _train(call: Recorder, model: nn.Module, inputs: Tensor) -> None:
    for _ in range(2):
        F.mse_loss(call(inputs), torch.zeros_like(inputs)).backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
        model.zero_grad()


def _tensor_parallel_model(family: Family) -> Compiled:
    model = make_model(1)
    tensor_parallel(model[0], _grid(family)["tp"])
    call = Recorder(model)
    _train(call, model, batch(0)[0])
    return call.seen


def _fsdp_blocks(family: Family) -> Compiled:
    """Every block compiled by itself, as trainers do; FSDP2's hooks run between them."""
    counter = CompileCounterWithBackend("aot_eager")
    mesh = _grid(family)
    model = make_model(2)
    for block in model:
        block.compile(backend=counter, fullgraph=True)
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    inputs = batch(0)[0]
    seen = Compiled([], [])
    for _ in range(2):
        output = model(inputs)
        output.square().mean().backward()
        seen.frames.append(counter.frame_count)
        seen.shapes.extend([tuple(output.shape), *(tuple(p.shape) for p in model.parameters())])
        model.zero_grad()
    return seen


_PROGRAMS = {
    "DTensor": _dtensor,
    "equal mesh made again": _equal_mesh,
    "different meshes": _different_meshes,
    "slice inside": _slice_inside,
    "mesh as argument": _mesh_as_argument,
    "tensor parallel": _tensor_parallel_model,
    "FSDP2 by block": _fsdp_blocks,
}


_FRAMES = {"different meshes": [1, 2, 3, 4, 4, 4], "mesh as argument": [1, 1, 1, 2]}


def _run(name: str, program: Callable[[Family], Any]) -> Any:
    torch.compiler.reset()
    with fake_world(_SIZE, _RANK), side(name) as family:
        assert type(_grid(family)) is mesh_class(name)
        return program(family)


@pytest.mark.parametrize("program", in_tiers(_PROGRAMS, ["different meshes", "slice inside"]))
def test_compiles_as_often_as_stock(program: str) -> None:
    """A second call compiles nothing; equal meshes share graphs, and others do not, as in stock."""
    stock, ours, installed = (_run(name, _PROGRAMS[program]) for name in SIDES)
    assert ours == stock
    assert installed == stock
    assert ours.frames == _FRAMES.get(program, ours.frames)
    assert ours.frames[0] > 0


def test_compiled_gives_what_eager_gives() -> None:
    def differ(family: Family) -> float:
        call = Recorder(_use_mesh, "eager")
        mesh = _grid(family)
        return (call(_matrix(), mesh) - _use_mesh(_matrix(), mesh)).abs().max().item()

    assert _run("ours", differ) == 0


# --- guards --------------------------------------------------------------------------------------


def _various_meshes() -> list[StockDeviceMesh]:
    """Meshes of rank 5 of 8 that differ in one thing or another, and some that are equal."""
    grid, other = _grid(OURS), _grid(OURS, (4, 2))
    cube = OURS.init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("a", "b", "c"))
    nameless = OURS.init_device_mesh("cpu", (2, 4))
    backwards = OURS.DeviceMesh("cpu", [[7, 6, 5, 4], [3, 2, 1, 0]], mesh_dim_names=_AXES)
    meta = OURS.DeviceMesh("meta", [[0, 1, 2, 3], [4, 5, 6, 7]], mesh_dim_names=_AXES)
    meshes = [grid, other, cube, nameless, backwards, meta, _grid(OURS)]
    meshes += [grid["dp"], grid["tp"], other["dp"], other["tp"], backwards["tp"], meta["tp"]]
    meshes += [cube["a", "c"], cube["c"], cube["a", "b"]._flatten("ab"), cube._flatten("abc")]
    # Before 2.13 unequal to the flattened one above.
    meshes.append(OURS.init_device_mesh("cpu", (8,), mesh_dim_names=("abc",)))
    return [*meshes, OURS.DeviceMesh("cpu", [4, 5, 6, 7], mesh_dim_names=("tp",))]


@pytest.mark.usefixtures("world")
def test_guards_differ_where_meshes_do() -> None:
    meshes = _various_meshes()
    equal_pairs = 0
    for one in meshes:
        for another in meshes:
            have_equal_guards = one._compile_guard == another._compile_guard
            assert have_equal_guards == (one == another), (one, another)
            equal_pairs += one == another
    assert len(meshes) < equal_pairs < len(meshes) ** 2, "some of them are equal, most are not"


def _reads_tuple_again(family: Family) -> bool:
    """Whether a call of what is compiled already asks for the tuple of all ranks."""
    mesh = _grid(family)
    views = mesh.universe.rank_views
    gather, use = Recorder(_gather), Recorder(_use_mesh)
    shard = _shard(mesh["tp"])
    gather(shard)
    use(_matrix(), mesh)
    for each in (views, mesh, mesh["tp"], mesh["dp"]):  # compiling looks at all a mesh has
        vars(each).pop("tuple", None)
        vars(each).pop("_flatten_rank_map", None)
    gather(shard)
    use(_matrix(), mesh)
    read = "tuple" in vars(views)
    assert gather.seen.frames == use.seen.frames == [1, 1]
    return read


@pytest.mark.skipif(MESHES_ARE_PLAIN_CLASSES, reason="torch 2.11 has no guard of its own for them")
def test_compiled_calls_read_no_tuple_of_all_ranks() -> None:
    """Guards of ours are short; stock's compare all the ranks of the mesh at each call."""
    assert not _run("ours", _reads_tuple_again)


# --- export --------------------------------------------------------------------------------------


class _Gather(nn.Module):
    """Takes a shard of mine, gives the whole."""

    def __init__(self, mesh: StockDeviceMesh) -> None:
        super().__init__()
        self.mesh = mesh

    def forward(self, x: Tensor) -> Tensor:
        return _gather(DTensor.from_local(x, self.mesh, [Shard(0)], run_check=False))


def _export_gather(family: Family) -> tuple[int, ...]:
    module = _Gather(_grid(family)["tp"])
    return _exported_shape(module, _matrix())


def _export_tensor_parallel(family: Family) -> tuple[int, ...]:
    model = make_model(1)
    tensor_parallel(model[0], _grid(family)["tp"])
    return _exported_shape(model, batch(0)[0])


def _export_dtensor(family: Family) -> tuple[int, ...]:
    class Double(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x * 2).sum(0)

    return _exported_shape(Double(), _shard(_grid(family)["tp"]))


def _exported_shape(module: nn.Module, example: Tensor) -> tuple[int, ...]:
    program = torch.export.export(module, (example,))
    return tuple(program.module()(example).shape)


@pytest.mark.parametrize("program", [_export_gather, _export_tensor_parallel, _export_dtensor])
def test_export_comes_out_as_with_stock(program: Callable[[Family], Any]) -> None:
    stock, ours, installed = (_run(name, lambda f: attempt(lambda: program(f))) for name in SIDES)
    assert (ours.value, ours.error) == (stock.value, stock.error)
    assert (installed.value, installed.error) == (stock.value, stock.error)
