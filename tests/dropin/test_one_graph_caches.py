"""Torch's caches: one rank's compiled graph serves the others, and the next process."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch._inductor.config
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import DeviceMesh as StockDeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn import functional as F

from helpers.compiling import COMPILES
from helpers.crew import Crew
from helpers.one_graph import compiled_on_one_rank, needs_one_graph
from helpers.tiers import in_tiers
from helpers.training import TOLERANCE, batch, make_model, tensor_parallel
from helpers.worlds import fake_world
from meshverse import init_device_mesh

pytestmark = [*COMPILES, needs_one_graph, pytest.mark.long]

_Program = tuple[Callable[..., Any], tuple[Any, ...]]
_AXES = ("dp", "tp")


def _table(columns: int) -> Tensor:
    return torch.arange(8.0 * columns).reshape(8, columns)


def _rows_of_an_embedding(mesh: StockDeviceMesh) -> _Program:
    tp = mesh["tp"]
    words = distribute_tensor(torch.tensor([0, 7, 3, 4]), tp, [Replicate()])

    def program(table: DTensor, words: DTensor) -> Tensor:
        return F.embedding(words, table).redistribute(placements=[Replicate()]).to_local()

    return program, (distribute_tensor(_table(3), tp, [Shard(0)]), words)


def _uneven_shards(mesh: StockDeviceMesh) -> _Program:
    def program(x: DTensor) -> Tensor:
        cut = (x * 2).redistribute(placements=[Replicate(), Shard(1)])
        again = (x + 1).redistribute(placements=[Replicate(), Shard(1)])
        return (cut * again).redistribute(placements=[Replicate()] * 2).to_local()

    return program, (distribute_tensor(_table(7), mesh, [Replicate()] * 2),)


def _shard_to_replicate(mesh: StockDeviceMesh) -> _Program:
    def program(x: DTensor) -> Tensor:
        return (x * 2).redistribute(placements=[Replicate()] * 2).to_local()

    return program, (distribute_tensor(_table(3), mesh, [Shard(0), Shard(0)]),)


def _group_along_an_axis(mesh: StockDeviceMesh) -> _Program:
    def program(x: Tensor) -> Tensor:
        return funcol.all_reduce(x, "sum", (mesh, 1)) + 1

    return program, (_table(3) + dist.get_rank(),)


_DTENSORS = {
    "rows of an embedding": _rows_of_an_embedding,
    "uneven shards": _uneven_shards,
    "shard to replicate": _shard_to_replicate,
}
_PROGRAMS = {**_DTENSORS, "group along an axis": _group_along_an_axis}


class Counted(NamedTuple):
    """Graphs that torch's two caches had, and those they did not have."""

    hits: int
    misses: int


def _counted() -> Counted:
    inductor, autograd = counters["inductor"], counters["aot_autograd"]
    assert inductor["fxgraph_cache_bypass"] == autograd["autograd_cache_bypass"] == 0
    return Counted(
        inductor["fxgraph_cache_hit"] + autograd["autograd_cache_hit"],
        inductor["fxgraph_cache_miss"] + autograd["autograd_cache_miss"],
    )


@contextlib.contextmanager
def _nothing_cached(folder: str | None = None) -> Iterator[None]:
    """As in a process that has compiled nothing, with an empty folder for torch's caches.

    Ranks may be given one folder together, as on one host. Then each kernel is compiled once, and a
    graph that was not found is still counted, by the rank that was the first to ask for it.
    """
    torch.compiler.reset()
    counters.clear()
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the processes; what is compiled is for a number of threads
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as empty:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", folder or empty)
        yield
    torch.set_num_threads(n_threads)


def _mesh() -> StockDeviceMesh:
    # Ranks wait for one that compiles.
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=_AXES, timeout=timedelta(minutes=5))


def _compiled_ahead(run: Callable[[], Any], rank: int = 0) -> bytes:
    """Compile a program as one rank, without other processes; return the cache artifacts."""
    with _nothing_cached(), fake_world(4, rank):
        run()
        assert _counted().hits == 0
        saved = torch.compiler.save_cache_artifacts()
        assert saved is not None
        return saved[0]


def _run(
    name: str, mesh: StockDeviceMesh, *, is_for_all: bool = True, is_compiled: bool = True
) -> Tensor:
    program, inputs = _PROGRAMS[name](mesh)
    if not is_compiled:
        return program(*inputs)  # type: ignore[no-any-return]
    with compiled_on_one_rank() if is_for_all else contextlib.nullcontext():
        output: Tensor = torch.compile(program, fullgraph=True)(*inputs)
    return output


def _run_from(
    artifacts: bytes, name: str, is_for_all: bool = True, folder: str | None = None
) -> tuple[bool, Counted]:
    mesh = _mesh()
    expected = _run(name, mesh, is_compiled=False)
    with _nothing_cached(folder):
        assert torch.compiler.load_cache_artifacts(artifacts) is not None
        output = _run(name, mesh, is_for_all=is_for_all)
        return output.equal(expected), _counted()


_FOUND, _NOT_FOUND = Counted(2, 0), Counted(0, 2)  # each of the two caches counts a graph


@pytest.mark.parametrize("name", in_tiers(_DTENSORS, list(_DTENSORS)[:1], []))
def test_four_ranks_run_what_one_compiled(crew: Crew, name: str, tmp_path: Path) -> None:
    artifacts = _compiled_ahead(lambda: _run(name, _mesh()))
    answers = crew.run(_run_from, 4, artifacts, name, True, str(tmp_path))
    assert answers == [(True, _FOUND)] * 4


def test_otherwise_a_graph_is_for_ranks_that_share_its_groups() -> None:
    # It names rank 0's group along "tp", which is rank 1's, too.
    name = "group along an axis"
    artifacts = _compiled_ahead(lambda: _run(name, _mesh(), is_for_all=False))
    for rank, expected in enumerate([_FOUND, _FOUND, _NOT_FOUND, _NOT_FOUND]):
        with fake_world(4, rank):
            assert _run_from(artifacts, name, is_for_all=False)[1] == expected


def _run_again(folder: str) -> tuple[Tensor, Counted]:
    with _nothing_cached(f"{folder}/{dist.get_rank()}"):
        return _run("group along an axis", _mesh(), is_for_all=False), _counted()


def test_the_next_run_of_a_job_finds_its_graphs_by_the_names_of_its_groups(crew: Crew) -> None:
    with tempfile.TemporaryDirectory() as folder:
        first = crew.run(_run_again, 4, folder)
        crew.stop()
        again = crew.run(_run_again, 4, folder)
    assert [counted for _, counted in first] == [_NOT_FOUND] * 4
    assert [counted for _, counted in again] == [_FOUND] * 4
    assert all(a[0].equal(b[0]) for a, b in zip(first, again, strict=True))


# --- one rank's graph on another rank's disk, compiled for one rank only -------------------------


def _my_columns(rank: int, folder: str) -> tuple[list[float], Counted]:
    with _nothing_cached(folder), fake_world(4, rank):
        whole = DTensor.from_local(_table(4)[:1], _mesh(), [Replicate()] * 2, run_check=False)
        columns = torch.compile(_cut, fullgraph=True)(whole)
        return columns.flatten().tolist(), _counted()


def _cut(whole: DTensor) -> Tensor:
    return (whole * 1).redistribute(placements=[Replicate(), Shard(1)]).to_local()


def test_a_rank_is_not_given_the_graph_of_another() -> None:
    with tempfile.TemporaryDirectory() as folder:
        seen = [_my_columns(rank, folder) for rank in (0, 1, 0, 1)]
    assert [shard for shard, _ in seen] == [[0, 1], [2, 3]] * 2
    assert [counted for _, counted in seen] == [_NOT_FOUND] * 2 + [_FOUND] * 2


# --- training: FSDP2 around blocks that are compiled, tensor parallelism inside of them ----------


def _step(mesh: StockDeviceMesh, is_compiled: bool) -> list[float]:
    """Losses of two steps of a fresh model."""
    model = make_model(1)
    for block in model:
        tensor_parallel(block, mesh["tp"])
        if is_compiled:
            block.compile(fullgraph=True)
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(2):
        inputs, targets = (t.chunk(2)[mesh.get_local_rank("dp")] for t in batch(step))
        loss = F.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _losses(mesh: StockDeviceMesh, is_compiled: bool) -> Tensor:
    precompiled = torch._inductor.config.patch(cpp_cache_precompile_headers=True)
    with compiled_on_one_rank(), precompiled:  # which pays with some thirty kernels
        return torch.tensor(_step(mesh, is_compiled))


def _group_sum(mesh: StockDeviceMesh, is_compiled: bool) -> Tensor:
    return _run("group along an axis", mesh, is_compiled=is_compiled)


_OnMesh = Callable[[StockDeviceMesh, bool], Tensor]


def _on_what_rank_0_compiled(run: _OnMesh, folder: str) -> tuple[bool, Counted]:
    """Rank 0 compiles, and the others answer its collectives; then all run what it compiled."""
    mesh, box = _mesh(), [None]
    with _nothing_cached():
        expected = run(mesh, dist.get_rank() == 0)
        if dist.get_rank() == 0:
            box = list(torch.compiler.save_cache_artifacts()[:1])
        else:
            assert _counted() == Counted(0, 0)
    dist.broadcast_object_list(box, 0)
    with _nothing_cached(folder):
        torch.compiler.load_cache_artifacts(box[0])
        output = run(mesh, True)
        return output.allclose(expected, rtol=TOLERANCE), _counted()


@pytest.mark.parametrize("run", [_group_sum, _losses])
def test_what_one_of_the_ranks_compiled(crew: Crew, run: _OnMesh, tmp_path: Path) -> None:
    answers = crew.run(_on_what_rank_0_compiled, 4, run, str(tmp_path))
    for is_right, counted in answers:
        assert is_right
        assert counted.hits > 0
        assert counted.misses == 0
