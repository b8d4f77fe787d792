"""Moves of tensors played on one process, element by element: slow, and obviously right."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshverse._core import AxisLayout, Holders, Layout, RankMap, plan_reshard


class Grid(NamedTuple):
    """Holders, with the sizes of their axes."""

    holders: Holders
    sizes: list[int]


class Side(NamedTuple):
    """How one side lays a tensor out: what `plan_reshard` takes."""

    grid: int
    dims: list[int]
    factors: list[int]
    right_to_left: bool


class Move(NamedTuple):
    shape: list[int]
    itemsize: int
    source: Side
    target: Side


class Plan(NamedTuple):
    """The plan of one rank, in lists."""

    messages: list[list[int]]
    boxes: list[int]
    kept: list[int]


def grid_of(ranks: Sequence[int], sizes: Sequence[int], order: Sequence[int], world: int) -> Grid:
    """Ranks in row-major order over axes of these sizes, which are then put into another order."""
    strides = [math.prod(sizes[axis + 1 :]) for axis in range(len(sizes))]
    axes = Layout([AxisLayout(sizes[axis], strides[axis]) for axis in order])
    if list(ranks) == list(range(ranks[0], ranks[0] + len(ranks))):
        holders = Holders(RankMap.identity(world), ranks[0], axes)
    else:
        holders = Holders(RankMap.from_ranks(ranks), 0, axes)
    return Grid(holders, [sizes[axis] for axis in order])


def local_of(whole: Tensor, side: Side, grid: Grid, rank: int) -> Tensor | None:
    """Return the elements of a rank, split as torch splits; None if it has none."""
    coordinates = grid.holders.coordinates_of(rank)
    if coordinates is None:
        return None
    split = [axis for axis, dim in enumerate(side.dims) if dim >= 0]
    if side.right_to_left:  # plain chunks first, then what FSDP2 splits of them
        plain = [axis for axis in split if side.factors[axis] == 1]
        split = plain + [axis for axis in reversed(split) if side.factors[axis] > 1]
    local = whole
    for axis in split:
        dim, size, index = side.dims[axis], grid.sizes[axis], coordinates[axis]
        pieces = 1 if side.right_to_left else side.factors[axis]
        local = torch.cat(
            [_chunks(piece, size, dim)[index] for piece in _chunks(local, pieces, dim)], dim
        )
    return local.clone()


def _chunks(tensor: Tensor, n: int, dim: int) -> list[Tensor]:
    chunks = list(torch.chunk(tensor, n, dim))
    return chunks + [tensor.narrow(dim, 0, 0)] * (n - len(chunks))


class Played:
    """All ranks' plans of some moves, played.

    Attributes:
        plans: by rank.
        sources: by rank and move, local tensors of numbers that tell every element.
        wanted: the same of the targets.
        got: what the targets have when all messages were exchanged; -1 where nothing came.
        sent: bytes by rank.
        received: bytes by rank.
    """

    def __init__(
        self, grids: list[Grid], moves: list[Move], world: int, round_bytes: int, **nodes: Any
    ) -> None:
        self.moves = moves
        wholes = [torch.arange(math.prod(move.shape)).view(move.shape) for move in moves]
        self.plans, self.sources, self.wanted, self.got = [], [], [], []
        self.sent: defaultdict[int, int] = defaultdict(int)
        self.received: defaultdict[int, int] = defaultdict(int)
        holders = [grid.holders for grid in grids]
        for rank in range(world):
            arrays = plan_reshard(holders, moves, rank, world, round_bytes, **nodes)
            self.plans.append(Plan(*(array.tolist() for array in arrays)))
            locals_ = [
                [
                    local_of(whole, side, grids[side.grid], rank)
                    for whole, side in zip(wholes, sides, strict=True)
                ]
                for sides in ([m.source for m in moves], [m.target for m in moves])
            ]
            self.sources.append(locals_[0])
            self.wanted.append(locals_[1])
            self.got.append([t if t is None else torch.full_like(t, -1) for t in locals_[1]])
        self._world, self._round_bytes = world, round_bytes
        self._mail: dict[tuple[int, int, int], tuple[int, list[Tensor]]] = {}
        for rank, plan in enumerate(self.plans):
            self._send(rank, plan)
        for rank, plan in enumerate(self.plans):
            self._receive(rank, plan)
            self._keep(rank, plan)
        assert not self._mail, "messages that nobody receives"

    def least_bytes(self, rank: int) -> int:
        """Return the bytes a rank has to receive: elements that it wants and does not have."""
        total = 0
        for move, have, want in zip(self.moves, self.sources[rank], self.wanted[rank], strict=True):
            known = set() if have is None else set(have.flatten().tolist())
            wanted = [] if want is None else want.flatten().tolist()
            total += move.itemsize * sum(element not in known for element in wanted)
        return total

    def _boxes(self, plan: Plan, message: list[int]) -> list[tuple[int, tuple[slice, ...]]]:
        _, _, _, _, n_bytes, at, n_boxes = message
        boxes, passed = [], 0
        for _ in range(n_boxes):
            move, first_byte, n = plan.boxes[at : at + 3]
            starts, extents = plan.boxes[at + 3 :][:n], plan.boxes[at + 3 + n :][:n]
            assert first_byte == passed, "boxes follow one another"
            assert first_byte % self.moves[move].itemsize == 0, "elements are aligned"
            passed += math.prod(extents) * self.moves[move].itemsize
            boxes.append((move, _slices(starts, extents)))
            at += 3 + 2 * n
        assert passed == n_bytes <= self._round_bytes
        return boxes

    def _send(self, rank: int, plan: Plan) -> None:
        orders = [(step, turn) for step, turn, *_ in plan.messages]
        assert orders == sorted(orders)
        for message in plan.messages:
            step, turn, peer, is_sent, n_bytes, _, _ = message
            assert peer != rank
            assert step == (peer - rank if is_sent else rank - peer) % self._world
            if is_sent:
                assert (rank, peer, turn) not in self._mail, "one message a peer and round"
                boxes = self._boxes(plan, message)
                elements = [self.sources[rank][move][box].flatten() for move, box in boxes]
                self._mail[rank, peer, turn] = (n_bytes, elements)
                self.sent[rank] += n_bytes

    def _receive(self, rank: int, plan: Plan) -> None:
        for message in plan.messages:
            _, turn, peer, is_sent, n_bytes, _, _ = message
            if is_sent:
                continue
            expected, elements = self._mail.pop((peer, rank, turn))
            boxes = self._boxes(plan, message)
            assert (expected, len(elements)) == (n_bytes, len(boxes))
            for (move, box), content in zip(boxes, elements, strict=True):
                place = self.got[rank][move][box]
                assert bool((place == -1).all()), "an element comes once"
                place.copy_(content.view(place.shape))
            self.received[rank] += n_bytes

    def _keep(self, rank: int, plan: Plan) -> None:
        at = 0
        while at < len(plan.kept):
            move, n = plan.kept[at : at + 2]
            source, target, extents = (plan.kept[at + 2 + k * n :][:n] for k in range(3))
            place = self.got[rank][move][_slices(target, extents)]
            assert bool((place == -1).all()), "an element is kept or comes"
            place.copy_(self.sources[rank][move][_slices(source, extents)])
            at += 2 + 3 * n


def _slices(starts: Sequence[int], extents: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(a, a + n) for a, n in zip(starts, extents, strict=True))
