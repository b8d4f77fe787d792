"""The plan of one rank, from the tensors of all ranks: its transfers and their messages."""

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

from meshverse import _torch_compat as compat
from meshverse._core import Holders, Layout, RankMap, plan_reshard

from .ranks import in_words
from .sides import Content, Description, Grid, Spec

_N_NAMED = 5  # names that an error lists
_N_SHOWN = 16  # peers in a printed table
_IN_FLIGHT = 2  # steps at once: while one is exchanged, the next is packed
_ALIGNMENT = 16  # bytes of the largest element


class Sharding(NamedTuple):
    """Layout of a tensor on the ranks that hold it, as the core's planner takes it."""

    holders: int  # index in `Transfers.holders`
    dims: tuple[int, ...]  # for each axis of the holders, the dimension that it splits, or -1
    factors: tuple[int, ...]  # for each axis, the split factor of a `_StridedShard`, or 1
    right_to_left: bool  # whether strided splits are applied after the plain ones, as by FSDP2


class Narrow(NamedTuple):
    """A part of a local tensor: start and length along some of its dimensions."""

    dims: tuple[int, ...] = ()
    spans: tuple[tuple[int, int], ...] = ()

    def of(self, local: Tensor) -> Tensor:
        """Return that part of a local tensor."""
        if not local.numel():  # FSDP2 may keep an empty one in any shape
            return local
        for dim, (start, length) in zip(self.dims, self.spans, strict=True):
            local = local.narrow(dim, start, length)
        return local


class Transfer(NamedTuple):
    """One tensor, or a box of one, that moves from one set of ranks to another.

    A box is a range of elements along every dimension. Pieces are moved as boxes.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype  # of the elements that are sent
    source: Sharding
    target: Sharding
    source_at: Narrow = Narrow()  # the box in local tensors of the source
    target_at: Narrow = Narrow()


class Transfers(NamedTuple):
    """All transfers of a move and the ranks that hold its tensors; the same on all ranks."""

    holders: list[Holders]
    all: list[Transfer]

    def parts(self, side: str, rank: int) -> list[tuple[str, Narrow] | None]:
        """Return the tensor and the part of it that each transfer reads or writes on a rank."""
        has = [each.coordinates_of(rank) is not None for each in self.holders]
        return [
            (each.name, getattr(each, f"{side}_at")) if has[getattr(each, side).holders] else None
            for each in self.all
        ]


def transfers_of(described: Mapping[int, Description], contents: Mapping[str, Any]) -> Transfers:
    """Match each target tensor to its source.

    Raises:
        ValueError: one side lacks a name, shapes disagree, or a dtype cannot be cast.
        RuntimeError: ranks split a tensor in different orders.
    """
    sources, targets = (_groups_of(side, described, contents) for side in ("source", "target"))
    _check_names("source", sources, "target", targets)
    _check_names("target", targets, "source", sources)
    holders = _HoldersList()
    transfers: list[Transfer] = []
    for name in sorted(sources):
        # If several meshes hold a source, any of them will do: all ranks take the first.
        origin = sources[name][0]
        for group in (*sources[name], *targets[name]):
            shape, other = (tuple(n for _, n in each.spec.window) for each in (origin, group))
            if shape != other:
                raise ValueError(
                    f"Reshard: {name!r} has the shape {shape} in the source and {other} in the "
                    "target or on other ranks. The whole tensor or piece must have one shape."
                )
        for group in targets[name]:
            dtype = _wire_dtype(name, origin.spec.dtype, group.spec.dtype)
            transfers += _boxes(name, dtype, origin, group, holders)
    return Transfers(holders.all, transfers)


@dataclass
class _Group:
    """Ranks that shard a tensor in the same way: meshes of one grid, at different first ranks."""

    spec: Spec
    grid: Grid | None  # of each mesh; None if each rank has the whole tensor
    firsts: set[int] = field(default_factory=set)  # of the meshes; without a grid, all the ranks
    # Digests of the `Content`s that list the tensor.
    digests: list[str] = field(default_factory=list)
    right_to_left: bool = False  # as in `Sharding`

    def ranks(self) -> list[int]:
        """Return the ranks of all these meshes. O(ranks)."""
        if self.grid is None or self.grid.ranks is not None:
            return sorted(self.firsts) if self.grid is None else list(self.grid.ranks or ())
        positions = self.grid.layout.collapse()
        offsets = [positions(place) for place in range(positions.size)]
        return [first + offset for first in sorted(self.firsts) for offset in offsets]

    def shards(self, dim: int) -> tuple[Tensor, Tensor, list[dict[int, int]]]:
        """Return, for a dimension, each element's shard number and index in it, and all shards.

        The elements are those of the window. A shard is given by its coordinates, by axis.
        """
        (start, length), size = self.spec.window[dim], self.spec.shape[dim]
        sizes = () if self.grid is None else self.grid.layout.shape
        splits = zip(range(len(sizes)), sizes, self.spec.dims, self.spec.factors, strict=True)
        own = tuple((axis, n, factor) for axis, n, of, factor in splits if of == dim and n > 1)
        owners, places, shards = _shards(size, own, self.right_to_left)
        return owners[start : start + length], places[start : start + length], shards

    def __str__(self) -> str:
        shape, dtype, window, _, dims, factors = self.spec
        splits = [("no dimension", f"dimension {dim}")[dim >= 0] for dim in dims]
        strides = f", with split factors {factors}" if max(factors, default=1) > 1 else ""
        part = f"elements {window} of a {dtype} of shape {shape}"
        return f"{part}, split along {splits} by the mesh's axes{strides}"


def _groups_of(
    side: str, described: Mapping[int, Description], contents: Mapping[str, Any]
) -> dict[str, list[_Group]]:
    """Return by name the groups of ranks that shard a tensor alike, by their lowest first rank."""
    members = defaultdict[str, dict[int, list[int]]](dict)  # `firsts` by digest of content and rank
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
            f"Reshard: ranks have split {side} {both[0]!r} in different orders: the local shapes "
            "fit FSDP2 on some ranks and distribute_tensor on others. All ranks must split it the "
            "same way."
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
            "Both sides must have the same names: leave out what does not move, and pass rename= "
            "where names differ."
        )


def _check_all_have(
    side: str, groups: Mapping[str, Iterable[_Group]], members: Mapping[str, Iterable[int]]
) -> None:
    """Check that if one rank of a mesh passes a tensor, all its ranks pass it in the same way."""
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
                    "mesh must pass the same tensors, with the same shape, dtype and placements, "
                    "and must be among ranks=."
                )


def _wire_dtype(name: str, source: str, target: str) -> torch.dtype:
    of_source, of_target = getattr(torch, source), getattr(torch, target)
    if not torch.can_cast(of_source, of_target):
        raise ValueError(
            f"Reshard: {name!r} is {source} in the source and {target} in the target, which cannot "
            "hold its values. Cast one of them first."
        )
    return min(of_source, of_target, key=lambda dtype: dtype.itemsize)  # type: ignore[no-any-return]


class _HoldersList:
    """List of the distinct sets of ranks that hold tensors."""

    def __init__(self) -> None:
        self.all: list[Holders] = []
        self._ranks: dict[Any, tuple[RankMap, Layout]] = {}
        self._known: dict[Any, int] = {}

    def sharding(self, group: _Group, at: Mapping[int, int]) -> Sharding:
        """Return the sharding over the ranks of a group that have these coordinates, by axis."""
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
        # The first axis goes over the meshes, which all hold the same tensor.
        dims = (-1, *(spec.dims[axis] for axis in others))
        factors = (1, *(spec.factors[axis] for axis in others))
        return Sharding(self._known[key], dims, factors, group.right_to_left)


def _boxes(
    name: str, dtype: torch.dtype, source: _Group, target: _Group, holders: _HoldersList
) -> Iterator[Transfer]:
    """Yield the transfers of one tensor: one, or for a piece of a sharded dimension, several.

    Such a piece is cut wherever a shard of either side ends: the core's planner takes only tensors
    that begin where their first shard begins.
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
            places = [span.at[number] for span in choice]
            at = {axis: place for _, shard in places for axis, place in shard.items()}
            starts = [(start, span.length) for (start, _), span in zip(places, choice, strict=True)]
            laid_out.append((holders.sharding(side, at), Narrow(tuple(cut), tuple(starts))))
        (one, at_one), (other, at_other) = laid_out
        yield Transfer(name, tuple(shape), dtype, one, other, at_one, at_other)


class _Span(NamedTuple):
    """Elements of a piece along a dimension that lie in one shard on each side."""

    length: int
    at: list[tuple[int, dict[int, int]]]  # for each side: first element in its shard, coordinates


@compat.untraced()  # real tensors, even if FakeTensorMode is active
def _spans(source: _Group, target: _Group, dim: int) -> list[_Span]:
    """Cut a piece along one dimension, where a shard of either side ends."""
    sides = [group.shards(dim) for group in (source, target)]
    one, other = ((of.diff() != 0) | (places.diff() != 1) for of, places, _ in sides)
    ends, size = (one | other).nonzero().flatten() + 1, len(sides[0][0])
    return [
        _Span(stop - i, [(int(places[i]), shards[int(of[i])]) for of, places, shards in sides])
        for i, stop in itertools.pairwise([0, *ends.tolist(), size] if size else [])
    ]


@lru_cache(maxsize=256)
def _shards(
    size: int, splits: tuple[tuple[int, int, int], ...], right_to_left: bool
) -> tuple[Tensor, Tensor, list[dict[int, int]]]:
    """Return each element's shard number and index in the shard, and each shard's coordinates.

    Each split is an axis, its size and its split factor, in the order of the axes;
    `csrc/reshard/spans.h` explains them.
    """
    ordered = list(splits)
    if right_to_left:
        strided = [(axis, parts, 1) for axis, parts, factor in splits if factor > 1]
        ordered = [split for split in splits if split[2] == 1] + strided[::-1]
    shards: list[tuple[dict[int, int], Tensor]] = [({}, torch.arange(size))]
    for axis, parts, factor in ordered:
        whole, shards = shards, []
        for (at, elements), place in itertools.product(whole, range(parts)):
            chunks = [_chunk(_chunk(elements, factor, i), parts, place) for i in range(factor)]
            shards.append(({**at, axis: place}, torch.cat(chunks)))
    owners, places = torch.empty(size, dtype=torch.int64), torch.empty(size, dtype=torch.int64)
    for number, (_, elements) in enumerate(shards):
        owners[elements] = number
        places[elements] = torch.arange(len(elements))
    return owners, places, [at for at, _ in shards]


def _chunk(elements: Tensor, parts: int, index: int) -> Tensor:
    length = -(-len(elements) // parts)
    return elements[index * length : (index + 1) * length]


class Message(NamedTuple):
    """Boxes that one rank sends another in one round."""

    peer: int
    n_bytes: int
    boxes_at: int
    n_boxes: int


class Step(NamedTuple):
    """Messages that a rank exchanges at once: at most one sent, and one received."""

    sent: Message | None
    received: Message | None


@dataclass(frozen=True)
class Plan:
    """Messages and local copies of one rank in a run."""

    transfers: list[Transfer]  # of all ranks
    # For each side, what each transfer reads or writes on this rank: tensor's name and part.
    parts: dict[str, list[tuple[str, Narrow] | None]]
    steps: list[Step]  # in the order in which all ranks exchange them
    n_buffers: int  # steps at once; each has one buffer to send and one to receive
    sent_bytes: int  # length of the longest message that this rank sends
    received_bytes: int  # length of the longest message that this rank receives
    _boxes: list[int]
    _kept: list[int]

    def boxes(self, message: Message) -> Iterator[tuple[int, int, list[int], list[int]]]:
        """Yield a message's boxes: transfer, first byte in the message, starts, extents."""
        numbers, at = self._boxes, message.boxes_at
        for _ in range(message.n_boxes):
            transfer, first_byte, n = numbers[at : at + 3]
            middle = at + 3 + n
            starts, extents = numbers[at + 3 : middle], numbers[middle : middle + n]
            yield transfer, first_byte, starts, extents
            at = middle + n

    def kept(self) -> Iterator[tuple[int, list[int], list[int], list[int]]]:
        """Yield the local copies: transfer, starts in the source, starts in the target, extents."""
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
    """Plan a run for one rank. The cost depends on its own shards and peers, not on all ranks.

    Nodes are blocks of `node_size` ranks, or those in `node_of_rank`.
    """
    messages, boxes, kept = plan_reshard(
        transfers.holders,
        [(each.shape, each.dtype.itemsize, each.source, each.target) for each in transfers.all],
        rank,
        world_size,
        buffer_bytes // (2 * _IN_FLIGHT) // _ALIGNMENT * _ALIGNMENT,
        node_size,
        node_of_rank,
    )
    steps: dict[tuple[int, int], dict[bool, Message]] = {}
    for step, turn, peer, is_sent, n_bytes, boxes_at, n_boxes in messages.tolist():
        message = Message(peer, n_bytes, boxes_at, n_boxes)
        steps.setdefault((step, turn), {})[bool(is_sent)] = message
    ordered = [Step(both.get(True), both.get(False)) for both in steps.values()]
    sent = max((step.sent.n_bytes for step in ordered if step.sent), default=0)
    received = max((step.received.n_bytes for step in ordered if step.received), default=0)
    parts = {side: transfers.parts(side, rank) for side in ("source", "target")}
    n_buffers = min(_IN_FLIGHT, len(ordered))
    numbers = boxes.tolist(), kept.tolist()
    return Plan(transfers.all, parts, ordered, n_buffers, sent, received, *numbers)


class Traffic:
    """Bytes that one rank sends, receives and keeps in each run; prints as a table.

    Attributes:
        rank: the rank.
        sent: bytes sent to each rank.
        received: bytes received from each rank.
        kept: bytes of targets that this rank already has in its sources, and copies locally.
        lower_bound: bytes that this rank must receive in any plan.
        staging: bytes of memory for messages during a run, at most.
        rounds: number of steps, one after the other, in which this rank sends or receives.
    """

    def __init__(self, plan: Plan, rank: int, target_bytes: int) -> None:
        self.rank = rank
        sent, received = defaultdict[int, int](int), defaultdict[int, int](int)
        for step in plan.steps:
            for message, by_peer in zip(step, (sent, received), strict=True):
                if message is not None:
                    by_peer[message.peer] += message.n_bytes
        self.sent, self.received = dict(sorted(sent.items())), dict(sorted(received.items()))
        self.kept = sum(
            math.prod(extents) * plan.transfers[transfer].dtype.itemsize
            for transfer, *_, extents in plan.kept()
        )
        self.lower_bound = target_bytes - self.kept
        self.staging = plan.n_buffers * (plan.sent_bytes + plan.received_bytes)
        self.rounds = len(plan.steps)

    def to_dict(self) -> dict[str, Any]:
        """Return the attributes as a dict of plain data."""
        return dict(vars(self))

    def __str__(self) -> str:
        sent, received = sum(self.sent.values()), sum(self.received.values())
        head = (
            f"Rank {self.rank} receives {_in_bytes(received)} in each run (no less is possible: "
            f"{_in_bytes(self.lower_bound)}), sends {_in_bytes(sent)} and keeps "
            f"{_in_bytes(self.kept)}, in {self.rounds} rounds with {_in_bytes(self.staging)} of "
            "memory for messages."
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
