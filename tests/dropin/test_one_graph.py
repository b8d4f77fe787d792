"""One graph for all ranks (`compile_on_one_rank`): it names no rank, and does not grow."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh as StockDeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn import functional as F

from helpers.compiling import COMPILES
from helpers.observation import Family
from helpers.one_graph import (
    Traced,
    compiled_on_one_rank,
    constant_bytes,
    needs_one_graph,
    trace,
)
from helpers.sides import SIDES, side
from helpers.tiers import in_tiers
from helpers.worlds import fake_world, in_worlds
from meshverse import init_device_mesh, isolate

pytestmark = [*COMPILES, needs_one_graph]

_RANKS = 10_240
_AXES = ("dp", "tp")
_A_FEW = 64  # bytes of the constants that torch itself puts into a graph of these programs

_Program = Callable[[DTensor, DTensor, DTensor], Any]


def _cut(whole: DTensor) -> Tensor:
    return whole.redistribute(placements=[Shard(1)]).to_local()


def _rows(rows: DTensor, words: DTensor) -> Tensor:
    return F.embedding(words, rows).redistribute(placements=[Replicate()]).to_local()


_PROGRAMS: dict[str, _Program] = {
    "uneven shards": lambda rows, words, whole: _cut(whole),
    "rows of an embedding": lambda rows, words, whole: _rows(rows, words),
    "shard to replicate": lambda rows, words, whole: rows.full_tensor(),
    "two cuts": lambda rows, words, whole: _cut(whole) * 2 + _cut(whole * 3),
}


def _inputs(mesh: StockDeviceMesh) -> tuple[DTensor, DTensor, DTensor]:
    rows = DTensor.from_local(torch.ones(3, 7), mesh, [Shard(0)], run_check=False)
    words = _whole(torch.tensor([0, 1, 5]), mesh)
    # The last rank has a column less than the others.
    columns = torch.arange(3.0 * (2 * mesh.size() - 1)).reshape(3, -1)
    return rows, words, _whole(columns, mesh)


def _whole(x: Tensor, mesh: StockDeviceMesh) -> DTensor:
    return DTensor.from_local(x, mesh, [Replicate()], run_check=False)


_MESHES: dict[str, Callable[[StockDeviceMesh], StockDeviceMesh]] = {
    "an inner axis": lambda mesh: mesh["tp"],
    "an outer axis": lambda mesh: mesh["dp"],
    "a flattened axis": lambda mesh: mesh["dp", "tp"]._flatten("all"),
}


def _traced(
    program: str, which: str, family: Family, size: int = _RANKS, dynamic: bool | None = None
) -> Traced:
    mesh = family.init_device_mesh("cpu", (size // 8, 8), mesh_dim_names=_AXES)
    return trace(_PROGRAMS[program], *_inputs(_MESHES[which](mesh)), dynamic=dynamic)


@pytest.mark.parametrize(
    ("program", "which"),
    in_tiers(
        itertools.product(_PROGRAMS, _MESHES),
        [("rows of an embedding", "an outer axis")],
        [*itertools.product(_PROGRAMS, _MESHES)][::3],
    ),
)
def test_all_ranks_have_one_text(program: str, which: str) -> None:
    texts = set()
    for rank in (0, 5, _RANKS - 1):
        with fake_world(_RANKS, rank), side("ours") as family:
            traced = _traced(program, which, family)
            texts.add(traced.text)
            assert constant_bytes(traced.graph) <= _A_FEW
    assert len(texts) == 1
    assert f"[{_RANKS}]" not in texts.pop()


@pytest.mark.parametrize(
    ("program", "dynamic"),
    in_tiers(
        itertools.product(_PROGRAMS, [None, True, False]),
        [("uneven shards", None)],
        [*itertools.product(_PROGRAMS, [None, True, False])][::2],
    ),
)
def test_outputs_are_stocks(program: str, dynamic: bool | None) -> None:
    seen = {}
    for which in SIDES:
        with fake_world(24, 21), side(which) as family:
            seen[which] = _traced(program, "an inner axis", family, 24, dynamic).output
    assert seen["ours"].equal(seen["stock"])
    assert seen["installed"].equal(seen["stock"])


@pytest.mark.parametrize("which", in_tiers(SIDES, ["ours"]))
def test_constants_as_the_world_grows(which: str) -> None:
    grown = []
    sizes = (64, _RANKS)
    for size in sizes:
        with fake_world(size, 5), side(which) as family:
            grown.append(constant_bytes(_traced("two cuts", "an inner axis", family, size).graph))
    # What it is about: stock carries the ranks once for each use.
    assert grown == [2 * 4 * size if which == "stock" else 0 for size in sizes]


def test_a_graph_runs_on_another_rank_in_another_world() -> None:
    with fake_world(24, 2):
        mesh = init_device_mesh("cpu", (3, 8), mesh_dim_names=_AXES)["tp"]
        x = torch.arange(21.0).reshape(3, 7)
        traced = trace(_cut_of_plain, x, mesh)
        assert traced.output.flatten().tolist() == [2, 9, 16]
    shards = []
    for rank in range(16, 23):
        with fake_world(24, rank):
            mesh = init_device_mesh("cpu", (3, 8), mesh_dim_names=_AXES)
            shards.append(traced.graph(x, mesh["tp"])[0])
    assert torch.cat(shards, 1).equal(x)


@in_worlds((8, 5))
def test_ranks_in_no_order_are_carried_as_stock_carries_them(world) -> None:
    order = [[0, 3, 1, 2], [5, 4, 7, 6]]
    seen = {}
    for which in SIDES:
        with side(which) as family:
            mesh = family.DeviceMesh("cpu", order, mesh_dim_names=_AXES)
            x = torch.arange(21.0).reshape(3, 7)
            seen[which] = trace(_cut_of_plain, x, mesh["tp"])
    assert seen["ours"].output.flatten().tolist() == [0, 1, 7, 8, 14, 15]
    assert seen["ours"].output.equal(seen["stock"].output)
    assert [constant_bytes(traced.graph) for traced in seen.values()] == [32, 32, 32]


def _cut_of_plain(x: Tensor, mesh: StockDeviceMesh) -> Tensor:
    return _cut(_whole(x, mesh))


@in_worlds((8, 5))
def test_ranks_that_are_counted_across_are_not_carried(world) -> None:
    x = torch.arange(21.0).reshape(3, 7)
    across = torch.arange(8).reshape(4, 2).t()  # [[0, 2, 4, 6], [1, 3, 5, 7]]
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=_AXES, ranks=across.flatten().tolist())
    traced = trace(_cut_of_plain, x, mesh["tp"])
    assert traced.output.flatten().tolist() == [4, 5, 11, 12, 18, 19]
    assert constant_bytes(traced.graph) == 0


@in_worlds((8, 5))
def test_an_isolated_mesh(world) -> None:
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=_AXES)
    with isolate("apart"):
        apart = mesh["tp"]
    texts = [trace(_cut, _inputs(m)[2]).text for m in (mesh["tp"], apart)]
    assert "meshverse.coordinate.default([4, 1], [8, 1], 0)" in texts[0]
    assert texts[0] == texts[1]


def test_a_rank_outside_of_the_mesh_compiles_for_its_members() -> None:
    x = torch.arange(21.0).reshape(3, 7)
    texts, shards = [], []
    for rank in (0, 4, 7):
        with fake_world(8, rank):
            mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",), ranks=[4, 5, 6, 7])
            with compiled_on_one_rank(), FakeTensorMode(shape_env=ShapeEnv()):
                place = mesh._sym_get_coordinate(0)
                assert isinstance(place, torch.SymInt)
            if rank == 0:
                with pytest.raises(AssertionError, match="not in that mesh"):
                    torch.ops.meshverse.coordinate([4, 1], [4, 1], 4)
                continue
            traced = trace(_cut_of_plain, x, mesh)
            texts.append(traced.text)
            shards.append(traced.output.flatten().tolist())
    assert texts[0] == texts[1]
    assert shards == [[0, 1, 7, 8, 14, 15], [6, 13, 20]]


@in_worlds((8, 5))
def test_without_symbols_a_coordinate_is_a_number(world) -> None:
    seen = []
    for which in SIDES:
        with side(which) as family, compiled_on_one_rank():
            mesh = family.init_device_mesh("cpu", (2, 4), mesh_dim_names=_AXES)
            seen.append([mesh._sym_get_coordinate(index) for index in (0, 1, -1)])
            with FakeTensorMode():
                seen.append([mesh._sym_get_coordinate(index) for index in (0, 1, -1)])
    assert seen == [[1, 1, 1]] * 6


@in_worlds((8, 5))
@pytest.mark.parametrize("which", SIDES)
def test_a_rank_outside_has_none_where_nothing_is_compiled(world, which: str) -> None:
    with side(which) as family:
        mesh = family.DeviceMesh("cpu", [0, 1], mesh_dim_names=("tp",))
        with pytest.raises(AssertionError):
            mesh._sym_get_coordinate(0)


# Stock's stops here in 2.13: "device_mesh._get_submesh is not an OpOverload".
@pytest.mark.long
@in_worlds((8, 5))
def test_inductor_compiles_a_graph_of_a_mesh_and_its_slice(world, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=_AXES)
    x = DTensor.from_local(torch.ones(3, 8), mesh, [Replicate()] * 2, run_check=False)
    rows = DTensor.from_local(torch.ones(3, 2), mesh["tp"], [Shard(0)], run_check=False)

    def program(x: DTensor, rows: DTensor) -> Tensor:
        cut = (x * 2).redistribute(placements=[Replicate(), Shard(1)]).to_local()
        return cut + rows.sum(0).redistribute(placements=[Replicate()]).to_local()

    with compiled_on_one_rank():
        output = torch.compile(program, fullgraph=True)(x, rows)
    assert output.equal(program(x, rows))
