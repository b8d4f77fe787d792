"""The coordinate as an operator of graphs: stock's on every rank, and nothing that grows."""

from __future__ import annotations

import math
from typing import cast

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh as StockDeviceMesh
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from helpers.meshes import MeshSpec, mesh_specs, shapes
from helpers.observation import OURS, STOCK, attempt
from helpers.operations import operations
from helpers.worlds import fake_world
from meshverse import DeviceMesh, init_device_mesh, isolate
from meshverse._core import RankMap
from meshverse.coordinate_op import (
    CoordinateArguments,
    coordinate,
    coordinate_arguments,
    coordinate_of,
    rank_digits,
)

_NAMES = ("pp", "dp", "ep", "cp", "tp")


def _arguments(mesh: StockDeviceMesh, index: int) -> CoordinateArguments | None:
    assert isinstance(mesh, DeviceMesh)
    return coordinate_arguments(mesh.layout[index], mesh.universe.rank_map)


def _coordinates(stock: StockDeviceMesh) -> dict[int, list[int]]:
    """The coordinate of every rank of a mesh and of its copies, as stock searches it in a table."""
    table = stock._layout.remap_to_tensor(stock._rank_map)
    return {int(table[tuple(at)]): at[1:] for at in (table >= 0).nonzero().tolist()}


def _check(stock: StockDeviceMesh, ours: StockDeviceMesh, world_size: int) -> None:
    expected, mine = _coordinates(stock), stock.get_coordinate()
    for index in range(ours.ndim):
        arguments = _arguments(ours, index)
        if arguments is None:
            return
        for rank in range(world_size):
            if rank in expected:
                assert coordinate_of(rank, *arguments) == expected[rank][index]
            else:
                with pytest.raises(AssertionError, match=rf"^Rank {rank} .* not in that mesh"):
                    coordinate_of(rank, *arguments)
        if mine is not None:
            assert coordinate(*arguments) == mine[index]


@st.composite
def _counted(draw: st.DrawFn) -> MeshSpec:
    """Meshes over ranks that are counted by some digits, in any order of these, with gaps."""
    shape = draw(shapes())
    order = draw(st.permutations(range(len(shape))))
    first, step = draw(st.integers(0, 5)), draw(st.integers(1, 3))
    counted = np.arange(math.prod(shape)).reshape([shape[axis] for axis in order])
    ranks = first + step * counted.transpose(np.argsort(order))
    values = tuple(ranks.flatten().tolist())
    return MeshSpec(
        world_size=max(values) + 1 + draw(st.integers(0, 2)),
        rank=draw(st.sampled_from(values)),
        shape=shape,
        names=_NAMES[: len(shape)],
        ranks=values,
    )


@given(mesh_specs(always_named=True) | _counted(), st.data())
def test_it_is_stocks_on_every_rank(spec: MeshSpec, data: st.DataObject) -> None:
    with fake_world(spec.world_size, spec.rank):
        stock, ours = [spec.build(STOCK)], [spec.build(OURS)]
        _check(stock[0], ours[0], spec.world_size)
        assume(stock[0].get_coordinate() is not None)
        for _ in range(data.draw(st.integers(0, 3))):
            operation = data.draw(operations(stock))
            pair = (
                attempt(lambda op=operation: op.apply(STOCK, stock)),
                attempt(lambda op=operation: op.apply(OURS, ours)),
            )
            if all(outcome.error is None for outcome in pair):
                _check(pair[0].value, pair[1].value, spec.world_size)
                stock.append(pair[0].value)
                ours.append(pair[1].value)


@given(_counted())
def test_counted_ranks_need_no_table(spec: MeshSpec) -> None:
    ranks = cast("tuple[int, ...]", spec.ranks)
    digits = rank_digits(RankMap.from_ranks(ranks))
    assert digits is not None
    assert tuple(digits.first + digits.layout(index) for index in range(len(ranks))) == ranks


# The third is 2 * i + 3 * j, of which no digit of the rank tells i. The next two are counted but
# for their last ranks, and the last one but for the order of its last two.
@pytest.mark.parametrize(
    "ranks",
    [
        [3, 2, 1, 0],
        [0, 1, 3, 2],
        [0, 2, 3, 5],
        [0, 1, 4, 5, 8, 10],
        [0, 1, 2, 3, 4, 6],
        [0, 4, 1, 5, 6, 2],
    ],
    ids=str,
)
def test_ranks_in_no_order_need_one(ranks: list[int]) -> None:
    assert rank_digits(RankMap.from_ranks(ranks)) is None


def test_its_arguments_do_not_grow() -> None:
    seen = []
    for size in (64, 10_240, 102_400):
        with fake_world(size, 5):
            mesh = init_device_mesh("cpu", (size // 32, 4, 8), mesh_dim_names=("pp", "dp", "tp"))
            flat = mesh["pp", "tp"]._flatten("both")
            seen.append([_arguments(mesh, 1), _arguments(flat, 0)])
    assert seen == [
        [([4, 8], [size, 1], 0), ([size // 32, 32, 8, 1], [size, 1], 0)]
        for size in (64, 10_240, 102_400)
    ]


def test_the_rank_is_that_of_the_world_in_which_it_runs() -> None:
    for size, rank in ((8, 5), (8, 2), (64, 63)):
        with fake_world(size, rank):
            assert torch.ops.meshverse.coordinate([4, 1], [size, 1], 0) == rank % 4
    with pytest.raises(ValueError, match="process group has not been initialized"):
        coordinate([4, 1], [8, 1], 0)


def test_a_rank_outside_gets_an_error(world) -> None:
    expected = (
        r"Rank 5 .* not in that mesh\. The ranks of the mesh begin at 0 and have \(size, stride\) "
        r"\(4, 1\)\. Run the graph only on ranks of the mesh"
    )
    with pytest.raises(AssertionError, match=expected):
        coordinate([4, 1], [4, 1], 0)


def test_torchs_own_checks_of_operators(world) -> None:
    result = torch.library.opcheck(coordinate, ([4, 1], [8, 1], 0))
    assert set(result.values()) == {"SUCCESS"}


def test_under_fake_tensors(world) -> None:
    with FakeTensorMode():  # where no number is unknown
        assert coordinate([4, 1], [8, 1], 0) == 1
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        unknown = coordinate([4, 1], [8, 1], 0)
        assert isinstance(unknown, torch.SymInt)
        known = mode.shape_env.bound_sympy(unknown.node.expr)
    assert (int(known.lower), int(known.upper)) == (0, 3)


def test_where_ranks_are_simulated(world) -> None:
    module = pytest.importorskip("torch.distributed._local_tensor", reason="is in later torch")
    with module.LocalTensorMode(8):
        each = coordinate([4, 1], [8, 1], 0)
        alike = coordinate([1, 1], [8, 1], 0)
    assert dict(each.node._local_ints) == {rank: rank % 4 for rank in range(8)}
    assert alike == 0
    assert coordinate([4, 1], [8, 1], 0) == 1


def test_isolated_and_lazy_meshes_ask_for_the_same(world) -> None:
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
    lazy = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"), lazy=True)
    with isolate("apart"):
        apart = mesh["tp"]
    expected = ([4, 1], [8, 1], 0)
    assert [_arguments(mesh, 1), _arguments(apart, 0), _arguments(lazy, -1)] == [expected] * 3
