"""Plan of one rank: the messages and local copies of each run, from all ranks' descriptions."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshverse._core import Holders, Layout, RankMap, plan_reshard
from meshverse._torch_compat.tracing import outside_torch_modes

from .ranks import in_words
from .sides import Content, Description, Grid, Spec

_N_NAMED = 5  # names that an error lists
_N_SHOWN = 16  # peers in a printed table
_ROUNDS_IN_FLIGHT = 2  # while one round's messages are exchanged, the next round's are packed
_ALIGNMENT = 16  # bytes of the largest element


class Sharding(NamedTuple):
    """Layout of a tensor on the ranks that hold it, in the form that `plan_reshard` takes."""

    holders: int  # index in `Transfers.holders`
    dims: tuple[int, ...]  # for each axis of the holders: the dimension that it splits, or -1
    factors: tuple[int, ...]  # for each axis: the split factor of a `_StridedShard`, or 1
    right_to_left: bool  # whether strided splits are applied after the plain ones; see `Side`


class Narrow(NamedTuple):
    """A part of a local tensor: start and length along some of its dimensions."""

    dims: tuple[int, ...] = ()
    spans: tuple[tuple[int, int], ...] = ()

    def of(self, local: Tensor) -> Tensor:
        """Return this part of a local tensor, as a view."""
        if not local.numel():  # FSDP2 may keep an empty local tensor in any shape
            return local
        for dim, (start, length) in zip(self.dims, self.spans, strict=True):
            local = local.narrow(dim, start, length)
        return local


class Transfer(NamedTuple):
    """A tensor, or a box of it, to copy from the ranks of its source to the ranks of its target.

    A box is a range of elements along every dimension. A piece is copied as one or more boxes.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype  # of the elements in messages
    source: Sharding
    target: Sharding
    source_at: Narrow = Narrow()  # the box within local tensors of the source
    target_at: Narrow = Narrow()  # the box within local tensors of the target


class Transfers(NamedTuple):
    """All transfers of a `Reshard`, the same on all ranks."""

    holders: list[Holders]  # sets of ranks that hold tensors
    all: list[Transfer]

    def parts(self, side: str, rank: int) -> list[tuple[str, Narrow] | None]:
        """Return, for each transfer, the part that it reads or writes on a rank.

        Args:
            side: "source" to return the parts that are read, "target" for those that are written.
            rank: global rank, or rank in the connection.

        Returns:
            For each transfer, the tensor's name and the part of its local tensor; None if the
            transfer does not use this rank on this side.
        """
        has = [each.coordinates_of(rank) is not None for each in self.holders]
        return [
            (each.name, getattr(each, f"{side}_at")) if has[getattr(each, side).holders] else None
            for each in self.all
        ]


def transfers_of(described: Mapping[int, Description], contents: Mapping[str, Any]) -> Transfers:
    """Match each target tensor to its source.

    Raises:
        ValueError: one side lacks a name, shapes disagree, or a dtype cannot be cast; or not all
            ranks of a mesh pass a tensor in the same way.
        RuntimeError: axes split a tensor in different orders on some ranks.
    """
    sources, targets = (_groups_of(side, described, contents) for side in ("source", "target"))
    _check_names("source", sources, "target", targets)
    _check_names("target", targets, "source", sources)
    holders = _HoldersList()
    transfers: list[Transfer] = []
    for name in sorted(sources):
        # Several groups may hold the source. All ranks take the first one.
        origin = sources[name][0]
        for group in (*sources[name], *targets[name]):
            shape, other = (tuple(n for _, n in each.spec.window) for each in (origin, group))
            if shape != other:
                raise ValueError(
                    f"Reshard: {name!r} has the shape {shape} in the source and {other} in the "
                    "target or on other ranks. The shape of the whole tensor or piece must be the "
                    "same everywhere."
                )
        for group in targets[name]:
            dtype = _wire_dtype(name, origin.spec.dtype, group.spec.dtype)
            transfers += _boxes(name, dtype, origin, group, holders)
    return Transfers(holders.all, transfers)


@dataclass
class _Group:
    """Ranks that shard a tensor in the same way, on meshes that differ in their first rank only."""

    spec: Spec
    grid: Grid | None  # the grid of every mesh; None if each rank has the whole tensor
    firsts: set[int] = field(default_factory=set)  # the first ranks; without a grid, all ranks
    digests: list[str] = field(default_factory=list)  # of each `Content` that lists the tensor
    right_to_left: bool = False  # as in `Sharding`

    def ranks(self) -> list[int]:
        """Return the ranks of all these meshes. O(number of ranks)."""
        if self.grid is None or self.grid.ranks is not None:
            return sorted(self.firsts) if self.grid is None else list(self.grid.ranks or ())
        positions = self.grid.layout.collapse()
        offsets = [positions(index) for index in range(positions.size)]
        return [first + offset for first in sorted(self.firsts) for offset in offsets]

    def shards(self, dim: int) -> tuple[Tensor, Tensor, list[dict[int, int]]]:
        """Return how one dimension of the window is sharded.

        Returns:
            For each element, the number of its shard; for each element, its index within that
            shard; and for each shard, its coordinates by axis.
        """
        (start, length), size = self.spec.window[dim], self.spec.shape[dim]
        sizes = () if self.grid is None else self.grid.layout.shape
        splits = zip(range(len(sizes)), sizes, self.spec.dims, self.spec.factors, strict=True)
        own = tuple((axis, n, factor) for axis, n, of, factor in splits if of == dim and n > 1)
        owners, indices, shards = _shards(size, own, self.right_to_left)
        return owners[start : start + length], indices[start : start + length], shards

    def __str__(self) -> str:
        shape, dtype, window, _, dims, factors = self.spec
        splits = ", ".join(f"dimension {dim}" if dim >= 0 else "no dimension" for dim in dims)
        strides = f" with split factors {factors}" if max(factors, default=1) > 1 else ""
        is_whole = window == tuple((0, size) for size in shape)
        part = "" if is_whole else f"the piece with (start, length) {window} of "
        what = f"{part}a {dtype} tensor of shape {shape}"
        return f"{what}, of which the mesh's axes split {splits}{strides}"


def _groups_of(
    side: str, described: Mapping[int, Description], contents: Mapping[str, Any]
) -> dict[str, list[_Group]]:
    """Return, for each tensor of one side, its groups of ranks, in order of the lowest first rank.

    Raises:
        RuntimeError: axes split a tensor in different orders on some ranks.
        ValueError: not all ranks of a mesh pass a tensor in the same way.
    """
    members = defaultdict[str, dict[int, list[int]]](dict)  # by content's digest: `firsts` by rank
    orders: set[str] = set()
    for rank, description in described.items():
        if has := description.sides.get(side):
            members[has.content][rank] = has.firsts
            orders.add(has.orders)
    right_to_left, left_to_right = (
        {name for digest in orders for name in contents[digest][order]} for order in (0, 1)
    )
    if both := sorted(right_to_left & left_to_right):
        raise RuntimeError(
            f"Reshard: {side} {both[0]!r} is split in different orders on some ranks: local shapes "
            "are those of FSDP2 on some ranks, and those of distribute_tensor on others. Split it "
            "in the same way on all ranks."
        )
    found: dict[str, dict[Any, _Group]] = {}
    for digest, ranks in members.items():
        content: Content = contents[digest]
        firsts = [set(each) for each in zip(*ranks.values(), strict=True)]
        for name, spec in content.specs.items():
            grid = None if spec.mesh < 0 else content.grids[spec.mesh]
            key = (spec._replace(mesh=0), grid)
            group = found.setdefault(name, {}).setdefault(key, _Group(spec, grid))
            group.firsts.update(ranks if grid is None else firsts[spec.mesh])
            group.digests.append(digest)
            group.right_to_left = name in right_to_left
    groups = {
        name: sorted(alike.values(), key=lambda group: min(group.firsts))
        for name, alike in found.items()
    }
    _check_all_have(side, groups, members)
    return groups


def _check_names(side: str, names: Iterable[str], other: str, known: Iterable[str]) -> None:
    if lacking := sorted(set(names) - set(known)):
        shown = ", ".join(map(repr, lacking[:_N_NAMED]))
        more = f" and {len(lacking) - _N_NAMED} more" if len(lacking) > _N_NAMED else ""
        near = get_close_matches(lacking[0], known, n=1)
        hint = f" (the {other} has {near[0]!r}, a similar name)" if near else ""
        raise ValueError(
            f"Reshard: the {other} has no tensor named {shown}{more}, which the {side} has{hint}. "
            "Both sides must have the same names: leave out tensors that are not transferred, and "
            "pass rename= if names differ."
        )


def _check_all_have(
    side: str, groups: Mapping[str, Iterable[_Group]], members: Mapping[str, Iterable[int]]
) -> None:
    """Check that all ranks of a mesh pass a tensor in the same way, if one of them passes it."""
    checked = set()
    for name, alike in groups.items():
        for group in alike:
            key = (group.grid, frozenset(group.firsts), tuple(group.digests))
            if group.grid is None or key in checked:
                continue
            checked.add(key)
            have = {rank for digest in group.digests for rank in members[digest]}
            if lacking := set(group.ranks()) - have:
                raise ValueError(
                    f"Reshard: {side} {name!r} is not the same on all ranks of its mesh: "
                    f"{in_words(have)} passed {group}; {in_words(lacking)} did not. All ranks of a "
                    "mesh must be in ranks=, and pass the same tensors with the same shape, dtype "
                    "and placements."
                )


def _wire_dtype(name: str, source: str, target: str) -> torch.dtype:
    of_source, of_target = getattr(torch, source), getattr(torch, target)
    if not torch.can_cast(of_source, of_target):
        raise ValueError(
            f"Reshard: {name!r} is {source} in the source and {target} in the target, which cannot "
            "hold the source's values. Cast one of them first."
        )
    if not _can_copy(of_source, of_target):
        raise ValueError(
            f"Reshard: {name!r} is {source} in the source and {target} in the target, and torch "
            "cannot copy such elements. Give views of both as another dtype, such as uint8."
        )
    return min(of_source, of_target, key=lambda dtype: dtype.itemsize)  # type: ignore[no-any-return]


@lru_cache(maxsize=256)
def _can_copy(source: torch.dtype, target: torch.dtype) -> bool:
    """Return whether torch copies elements of one dtype to another, by trying it on the CPU."""
    with outside_torch_modes():
        one, other = torch.zeros(2, 16, dtype=torch.uint8, device="cpu")
        try:
            other.view(target)[:1].copy_(one.view(source)[:1])
        except RuntimeError:  # includes NotImplementedError
            return False
    return True


class _HoldersList:
    """List of the distinct sets of ranks that hold tensors."""

    def __init__(self) -> None:
        self.all: list[Holders] = []
        self._ranks: dict[Any, tuple[RankMap, Layout]] = {}
        self._known: dict[Any, int] = {}

    def sharding(self, group: _Group, at: Mapping[int, int]) -> Sharding:
        """Return the sharding over some ranks of a group.

        Args:
            group: ranks that hold the tensor.
            at: coordinates by axis; only ranks with these coordinates count.
        """
        meshes = (group.grid, tuple(sorted(group.firsts)))
        key = (*meshes, tuple(sorted(at.items())))
        if key not in self._known:
            if meshes not in self._ranks:
                shape = () if group.grid is None else group.grid.layout.shape
                is_listed = group.grid is not None and group.grid.ranks is not None
                rows = Layout.from_shape((1 if is_listed else len(group.firsts), *shape))
                self._ranks[meshes] = RankMap.from_ranks(group.ranks()), rows
            rank_map, axes = self._ranks[meshes]
            base = sum(axes[axis + 1](coordinate) for axis, coordinate in at.items())
            others = [index for index in range(len(axes)) if index - 1 not in at]
            self._known[key] = len(self.all)
            self.all.append(Holders(rank_map, base, axes.select(others)))
        spec = group.spec
        others = [axis for axis in range(len(spec.dims)) if axis not in at]
        # Axis 0 of the holders numbers the meshes of the group, each of which has the whole tensor.
        dims = (-1, *(spec.dims[axis] for axis in others))
        factors = (1, *(spec.factors[axis] for axis in others))
        return Sharding(self._known[key], dims, factors, group.right_to_left)


def _boxes(
    name: str, dtype: torch.dtype, source: _Group, target: _Group, holders: _HoldersList
) -> Iterator[Transfer]:
    """Yield the transfers of one tensor: one for a whole tensor, one or more for a piece.

    A piece is cut wherever a shard of either side ends, because `plan_reshard` takes only tensors
    that begin at the start of a shard.
    """
    sides, shape = (source, target), [length for _, length in source.spec.window]
    cut = [
        dim
        for dim in range(len(shape))
        if any(side.spec.window[dim] != (0, side.spec.shape[dim]) for side in sides)
    ]
    for choice in itertools.product(*(_spans(source, target, dim) for dim in cut)):
        for dim, span in zip(cut, choice, strict=True):
            shape[dim] = span.length
        laid_out: list[tuple[Sharding, Narrow]] = []
        for number, side in enumerate(sides):
            shards = [span.at[number] for span in choice]
            at = {axis: coordinate for _, shard in shards for axis, coordinate in shard.items()}
            starts = [(start, span.length) for (start, _), span in zip(shards, choice, strict=True)]
            laid_out.append((holders.sharding(side, at), Narrow(tuple(cut), tuple(starts))))
        (one, at_one), (other, at_other) = laid_out
        yield Transfer(name, tuple(shape), dtype, one, other, at_one, at_other)


class _Span(NamedTuple):
    """Consecutive elements of a piece along a dimension that are in one shard on each side."""

    length: int
    # For each side: index of the first of these elements in its shard, and the shard's coordinates.
    at: list[tuple[int, dict[int, int]]]


@outside_torch_modes()  # real tensors, even if FakeTensorMode is active
def _spans(source: _Group, target: _Group, dim: int) -> list[_Span]:
    """Cut a piece along one dimension, wherever a shard of either side ends."""
    sides = [group.shards(dim) for group in (source, target)]
    one, other = ((of.diff() != 0) | (indices.diff() != 1) for of, indices, _ in sides)
    ends, size = (one | other).nonzero().flatten() + 1, len(sides[0][0])
    return [
        _Span(stop - i, [(int(indices[i]), shards[int(of[i])]) for of, indices, shards in sides])
        for i, stop in itertools.pairwise([0, *ends.tolist(), size] if size else [])
    ]


@lru_cache(maxsize=256)
def _shards(
    size: int, splits: tuple[tuple[int, int, int], ...], right_to_left: bool
) -> tuple[Tensor, Tensor, list[dict[int, int]]]:
    """Return how axes shard a dimension, in the form of `_Group.shards`.

    Args:
        size: size of the dimension.
        splits: for each axis that splits the dimension, in the order of the axes: the axis, its
            size and its split factor, which `csrc/reshard/spans.h` explains.
        right_to_left: as in `Sharding`.
    """
    ordered = list(splits)
    if right_to_left:
        strided = [(axis, parts, 1) for axis, parts, factor in splits if factor > 1]
        ordered = [split for split in splits if split[2] == 1] + strided[::-1]
    shards: list[tuple[dict[int, int], Tensor]] = [({}, torch.arange(size))]
    for axis, parts, factor in ordered:
        whole, shards = shards, []
        for (at, elements), index in itertools.product(whole, range(parts)):
            chunks = [_chunk(_chunk(elements, factor, i), parts, index) for i in range(factor)]
            shards.append(({**at, axis: index}, torch.cat(chunks)))
    owners, indices = torch.empty(size, dtype=torch.int64), torch.empty(size, dtype=torch.int64)
    for number, (_, elements) in enumerate(shards):
        owners[elements] = number
        indices[elements] = torch.arange(len(elements))
    return owners, indices, [at for at, _ in shards]


def _chunk(elements: Tensor, parts: int, index: int) -> Tensor:
    length = -(-len(elements) // parts)
    return elements[index * length : (index + 1) * length]


class Message(NamedTuple):
    """Boxes that one rank sends to another in one round."""

    peer: int  # the other rank
    n_bytes: int
    boxes_at: int  # index of the first box in `Plan._boxes`
    n_boxes: int


class Round(NamedTuple):
    """Messages that a rank exchanges at the same time: at most one sent and one received."""

    sent: Message | None
    received: Message | None


@dataclass(frozen=True)
class Plan:
    """Messages and local copies of one rank in a run."""

    transfers: list[Transfer]  # of all ranks
    parts: dict[str, list[tuple[str, Narrow] | None]]  # by side, as `Transfers.parts` returns them
    rounds: list[Round]  # in order; rounds without a message of this rank are left out
    n_buffers: int  # rounds in flight; each needs a buffer to send and a buffer to receive
    sent_bytes: int  # size of the largest message that this rank sends
    received_bytes: int  # size of the largest message that this rank receives
    _boxes: list[int]  # as `plan_reshard` returns them
    _kept: list[int]  # as `plan_reshard` returns them

    def boxes(self, message: Message) -> Iterator[tuple[int, int, list[int], list[int]]]:
        """Yield the boxes of a message.

        Each is (index of the transfer, first byte in the message, starts, extents), where starts
        are the first elements in the local tensor, by dimension.
        """
        numbers, at = self._boxes, message.boxes_at
        for _ in range(message.n_boxes):
            transfer, first_byte, n = numbers[at : at + 3]
            middle = at + 3 + n
            starts, extents = numbers[at + 3 : middle], numbers[middle : middle + n]
            yield transfer, first_byte, starts, extents
            at = middle + n

    def kept(self) -> Iterator[tuple[int, list[int], list[int], list[int]]]:
        """Yield the local copies.

        Each is (index of the transfer, starts in the source, starts in the target, extents).
        """
        numbers, at = self._kept, 0
        while at < len(numbers):
            transfer, n = numbers[at : at + 2]
            lists = [numbers[at + 2 + k * n : at + 2 + (k + 1) * n] for k in range(3)]
            yield transfer, lists[0], lists[1], lists[2]
            at += 2 + 3 * n


def plan_of(
    transfers: Transfers,
    rank: int,
    world_size: int,
    buffer_bytes: int,
    node_size: int = 1,
    node_of_rank: Sequence[int] | None = None,
) -> Plan:
    """Return the plan of one rank.

    The cost depends on this rank's shards and peers, not on the world size. Nodes are consecutive
    blocks of `node_size` ranks, unless `node_of_rank` has the node of each rank.
    """
    messages, boxes, kept = plan_reshard(
        transfers.holders,
        [(each.shape, each.dtype.itemsize, each.source, each.target) for each in transfers.all],
        rank,
        world_size,
        buffer_bytes // (2 * _ROUNDS_IN_FLIGHT) // _ALIGNMENT * _ALIGNMENT,
        node_size,
        node_of_rank,
    )
    by_round: dict[tuple[int, int], dict[bool, Message]] = {}
    # In a round, each rank sends to the rank `distance` above it. `number` counts the rounds of one
    # distance: several are needed for more bytes than one message may have.
    for distance, number, peer, is_sent, n_bytes, boxes_at, n_boxes in messages.tolist():
        message = Message(peer, n_bytes, boxes_at, n_boxes)
        by_round.setdefault((distance, number), {})[bool(is_sent)] = message
    rounds = [Round(both.get(True), both.get(False)) for both in by_round.values()]
    sent = max((each.sent.n_bytes for each in rounds if each.sent), default=0)
    received = max((each.received.n_bytes for each in rounds if each.received), default=0)
    parts = {side: transfers.parts(side, rank) for side in ("source", "target")}
    n_buffers = min(_ROUNDS_IN_FLIGHT, len(rounds))
    numbers = boxes.tolist(), kept.tolist()
    return Plan(transfers.all, parts, rounds, n_buffers, sent, received, *numbers)


class ReshardBytes:
    """Bytes that one rank sends, receives and copies locally in each run; prints as a table.

    Attributes:
        rank: the rank; in a connection's numbering, if there is one.
        sent: bytes sent, by receiving rank.
        received: bytes received, by sending rank.
        kept: bytes of targets that are copied locally, from this rank's own sources.
        lower_bound: bytes that this rank must receive in any plan: its targets without `kept`.
        staging: bytes of the staging buffers that a run allocates.
        rounds: number of rounds in which this rank sends or receives.
    """

    def __init__(self, plan: Plan, rank: int, target_bytes: int) -> None:
        self.rank = rank
        sent, received = defaultdict[int, int](int), defaultdict[int, int](int)
        for each in plan.rounds:
            for message, by_peer in zip(each, (sent, received), strict=True):
                if message is not None:
                    by_peer[message.peer] += message.n_bytes
        self.sent, self.received = dict(sorted(sent.items())), dict(sorted(received.items()))
        self.kept = sum(
            math.prod(extents) * plan.transfers[transfer].dtype.itemsize
            for transfer, *_, extents in plan.kept()
        )
        self.lower_bound = target_bytes - self.kept
        self.staging = plan.n_buffers * (plan.sent_bytes + plan.received_bytes)
        self.rounds = len(plan.rounds)

    def to_dict(self) -> dict[str, Any]:
        """Return the attributes as a dict of ints and of dicts of ints."""
        return dict(vars(self))

    def __str__(self) -> str:
        sent, received = sum(self.sent.values()), sum(self.received.values())
        head = (
            f"Rank {self.rank} receives {_in_bytes(received)} in each run (lower bound: "
            f"{_in_bytes(self.lower_bound)}), sends {_in_bytes(sent)} and copies "
            f"{_in_bytes(self.kept)} locally, in {self.rounds} rounds with "
            f"{_in_bytes(self.staging)} of staging buffers."
        )
        peers = sorted({*self.sent, *self.received})
        lines = [head, *(["  rank  sends to it  receives from it"] if peers else [])]
        for peer in peers[:_N_SHOWN]:
            to, of = (_in_bytes(each.get(peer, 0)) for each in (self.sent, self.received))
            lines.append(f"  {peer:>4}  {to:>11}  {of:>16}")
        if len(peers) > _N_SHOWN:
            lines.append(f"  and {len(peers) - _N_SHOWN} more ranks")
        return "\n".join(lines)


def _in_bytes(count: int) -> str:
    """Return a number of bytes with its unit, such as "147 MiB"."""
    size, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size /= 1024
        del units[0]
    decimals = 0 if size >= 100 or size == int(size) else 1
    return f"{size:,.{decimals}f} {units[0]}"
