"""Pieces of tensors: weights that are fused on one side, in other parts on the other."""

from __future__ import annotations

import gc
import random
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from helpers.crew import Crew
from helpers.tiers import in_tiers
from meshverse import init_device_mesh
from meshverse.parallel import Piece, Reshard


def _numbers(*shape: int, first: int = 0) -> Tensor:
    size = torch.Size(shape).numel()
    return torch.arange(first, first + size, dtype=torch.float32).view(shape)


def _on(mesh: Any, whole: Tensor, *placements: Any) -> DTensor:
    return distribute_tensor(whole, mesh, list(placements), src_data_rank=None)


# --- what a piece is -----------------------------------------------------------------------------


def test_a_piece_says_where_it_is() -> None:
    whole = torch.zeros(8, 6)
    piece = Piece(whole, -1, 2, 3)
    assert (piece.dim, piece.shape, piece.window) == (1, (8, 3), ((0, 8), (2, 3)))
    inner = Piece(Piece(piece, 0, 4, 4), 1, 1, 1)
    assert inner.whole is whole
    assert (inner.shape, inner.window) == ((4, 1), ((4, 4), (3, 1)))


@pytest.mark.parametrize(
    ("kind", "said", "given"),
    [
        (IndexError, "has no such dimension", (2, 0, 1)),
        (IndexError, "must be within elements 0 to 7", (0, 6, 3)),
        (IndexError, "must be within elements 0 to 7", (0, -1, 3)),
        (TypeError, "float", (0, 0.0, 3)),
    ],
)
def test_a_piece_that_is_not_there(kind: type[Exception], said: str, given: Any) -> None:
    with pytest.raises(kind, match=said):
        Piece(torch.zeros(8, 6), *given)
    with pytest.raises(TypeError, match=r"Piece\(list"):
        Piece([1, 2], 0, 0, 1)  # type: ignore[arg-type]


# --- slices --------------------------------------------------------------------------------------


def _slices_of_dtensors() -> None:
    mesh = init_device_mesh("cpu", (2,))
    whole = _numbers(8, 4)
    weight = nn.Parameter(_on(mesh, whole, Shard(0)))
    plain = {"q": torch.zeros(4, 4)}
    with pytest.raises(ValueError, match=r"source 'q' is a copy .*Give meshverse.parallel.Piece"):
        Reshard({"q": weight[:4]}, plain)
    with torch.no_grad(), pytest.raises(ValueError, match="target 'q' is a copy"):
        Reshard(plain, {"q": weight[:4]})
    move = Reshard({"q": Piece(weight, 0, 0, 4), "k": weight[:, :2]}, {**plain, "k": whole[:, 2:]})
    with torch.no_grad():
        weight.mul_(2)
    move()  # the values of now
    assert torch.equal(plain["q"], 2 * _numbers(8, 4)[:4])
    assert torch.equal(whole[:, 2:], 2 * _numbers(8, 4)[:, :2])
    Reshard({"q": torch.ones(4, 4)}, {"q": Piece(weight, 0, 2, 4)})()
    expected = 2 * _numbers(8, 4)
    expected[2:6] = 1
    assert torch.equal(weight.full_tensor(), expected)


@pytest.mark.processes
def test_a_slice_that_is_a_copy_is_refused_and_a_piece_moves(crew: Crew) -> None:
    crew.run(_slices_of_dtensors, 2)


# --- any pieces on any meshes --------------------------------------------------------------------


def _random_side(
    chance: random.Random, meshes: list[Any], window: list[tuple[int, int]], value: Tensor
) -> tuple[Any, Tensor | DTensor]:
    """A piece of a tensor that is larger than it by some elements, and that tensor."""
    before = [start for start, _ in window]
    shape = [
        start + length + rest
        for (start, length), rest in zip(window, [chance.randrange(4) for _ in window], strict=True)
    ]
    whole = torch.full(shape, -1.0)
    at = tuple(slice(b, b + n) for b, n in zip(before, value.shape, strict=True))
    whole[at] = value
    tensor: Any = whole
    if chance.random() < 0.85:
        mesh = chance.choice(meshes)
        placements = [
            Shard(chance.randrange(len(shape))) if chance.random() < 0.8 else Replicate()
            for _ in range(mesh.ndim)
        ]
        tensor = _on(mesh, whole, *placements)
    piece = tensor
    for dim, (start, length) in enumerate(window):
        if (start, length) != (0, shape[dim]) or chance.random() < 0.3:
            piece = Piece(piece, dim, start, length)
    return piece, tensor


def _random_pieces(first: int, last: int) -> None:
    world = dist.get_world_size()
    shapes = [(world,), (2, world // 2), (world // 2, 2)]
    meshes = [init_device_mesh("cpu", shape) for shape in shapes]
    for seed in range(first, last):
        chance = random.Random(seed)
        sides: list[dict[str, Any]] = [{}, {}]
        wholes: list[dict[str, Any]] = [{}, {}]
        values = {}
        for name in "abc":
            extent = [chance.choice([1, 2, 3, 5, 9]) for _ in range(chance.randrange(1, 3))]
            values[name] = _numbers(*extent, first=seed)
            for number in range(2):
                window = [(chance.choice([0, 0, 1, 4]), length) for length in extent]
                value = values[name] if number == 0 else values[name] * 0
                side = _random_side(chance, meshes, window, value)
                sides[number][name], wholes[number][name] = side
        with Reshard(*sides, buffer_bytes=chance.choice([1024, 1 << 20])) as move:
            move()
            traffic = move.explain()
        assert sum(traffic.received.values()) == traffic.lower_bound
        for name, piece in sides[1].items():
            tensor = wholes[1][name]
            found = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            expected = torch.full(found.shape, -1.0)
            window = piece.window if isinstance(piece, Piece) else [(0, n) for n in found.shape]
            expected[tuple(slice(s, s + n) for s, n in window)] = values[name]
            assert torch.equal(found, expected), (seed, name)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("first", "last"), in_tiers([(0, 10), (10, 75), (75, 300)], [(0, 10)], [(10, 75)])
)
def test_random_pieces(crew: Crew, first: int, last: int) -> None:
    """Equal to what slices of the whole tensors give, with no byte too many."""
    crew.run(_random_pieces, 4, first, last)


# --- fused weights of trainers under FSDP2 and tensor parallelism ---------------------------------


def _of_fsdp2(rows: int) -> None:
    """Strided shards, of which some are empty: 14 rows over tp 2 and dp 2; 2 rows over tp 4."""
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(nn.Linear(6, 2 * rows, bias=False))
    whole = _numbers(2 * rows, 6)
    with torch.no_grad():
        model[0].weight.copy_(whole)
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    weight = model[0].weight
    gate, up = torch.zeros(rows, 6), torch.zeros(rows, 6)
    pieces = {"gate": Piece(weight, 0, 0, rows), "up": Piece(weight, 0, rows, rows)}
    with Reshard(pieces, {"gate": gate, "up": up}) as move:
        move()
    assert torch.equal(torch.cat([gate, up]), whole)
    both = torch.zeros(2 * rows, 6)
    with Reshard({"w": weight}, {"w": both}) as move:
        move()
    assert torch.equal(both, whole)
    with Reshard({"gate": up, "up": gate}, pieces) as move:
        move()
    assert torch.equal(weight.full_tensor(), torch.cat([up, gate]))


@pytest.mark.processes
@pytest.mark.parametrize("rows", in_tiers([1, 5, 7], [1, 5]))
def test_pieces_of_strided_and_empty_shards(crew: Crew, rows: int) -> None:
    crew.run(_of_fsdp2, 8, rows)


def _empty_columns() -> None:
    """FSDP2 has 0 x 0 elements where tensor parallelism leaves 3 x 0, also of a fused weight."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for columns in (1, 2, 3):
        model = nn.Sequential(nn.Linear(columns, 3))
        with torch.no_grad():
            model[0].weight.copy_(_numbers(3, columns))
        parallelize_module(model, mesh["tp"], {"0": RowwiseParallel()})
        fully_shard(model, mesh=mesh["dp"])
        weight, whole, rows = model[0].weight, torch.zeros(3, columns), torch.zeros(2, columns)
        with Reshard({"w": weight, "r": Piece(weight, 0, 1, 2)}, {"w": whole, "r": rows}) as move:
            move()
        assert torch.equal(whole, _numbers(3, columns))
        assert torch.equal(rows, _numbers(3, columns)[1:])
        with Reshard({"w": whole * 2}, {"w": weight}) as move:
            move()
        with Reshard({"w": weight}, {"w": whole}) as move:  # torch's full_tensor() hangs
            move()
        assert torch.equal(whole, 2 * _numbers(3, columns))


@pytest.mark.processes
def test_empty_shards_of_any_shape(crew: Crew) -> None:
    crew.run(_empty_columns, 4)


# --- the end of a move ---------------------------------------------------------------------------


def _closed() -> None:
    source = {"w": torch.ones(8)} if dist.get_rank() == 0 else None
    target = {"w": torch.zeros(8)}
    held = [weakref.ref(each["w"]) for each in (source, target) if each]
    for runs in (0, 2):
        move = Reshard(source, target, name=str(runs))
        for _ in range(runs):
            move(async_op=True).wait()
        move.close()
        assert "closed" in repr(move)
        assert move.explain().lower_bound in (0, 32)
        if runs:
            del source, target
            gc.collect()
            assert [each() for each in held] == [None] * len(held)


@pytest.mark.processes
def test_a_move_that_is_closed_lets_go_of_the_tensors(crew: Crew) -> None:
    crew.run(_closed, 2)
