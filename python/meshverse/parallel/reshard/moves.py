"""From what all ranks have to what is planned: which tensor moves from which ranks to which."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, NamedTuple

import torch

from meshverse._core import AxisLayout, Holders, Layout, RankMap
from meshverse.graphs.traced_coordinates import rank_digits

from .roster import SIDES, Part, Roster, in_words
from .sides import Grid, Spec, layout_of

__all__ = ["Move", "Moves", "moves_of"]

_N_NAMED = 5  # names that an error lists


class Layouted(NamedTuple):
    """How some ranks lay a tensor out: what the core's planner takes as a side."""

    holders: int
    dims: tuple[int, ...]
    factors: tuple[int, ...]
    right_to_left: bool


@dataclass
class Move:
    """One tensor, from one set of ranks to another.

    Attributes:
        name: of the tensor.
        shape: of the whole tensor.
        dtype: in which it is sent.
        source: how it is laid out there.
        target: how it is laid out there.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    source: Layouted
    target: Layouted

    def planned(self) -> tuple[Any, ...]:
        """What the core's planner takes."""
        return self.shape, self.dtype.itemsize, self.source, self.target


class Moves(NamedTuple):
    """All tensors that move, and the ranks that hold them."""

    holders: list[Holders]
    moves: list[Move]

    def is_held(self, side: Layouted, rank: int) -> bool:
        """Whether a rank has a part of what is laid out so."""
        return self.holders[side.holders].coordinates_of(rank) is not None


def moves_of(roster: Roster, world_size: int) -> Moves:
    """What moves where.

    Raises:
        ValueError: names that one side lacks, shapes that differ, dtypes that cannot be cast.
    """
    groups = {side: _groups_of(roster.sides[side]) for side in SIDES}
    _check_names({side: groups[side].keys() for side in SIDES})
    holders = _HoldersList(world_size)
    for side in SIDES:
        _check_all_have(side, groups[side], roster.sides[side])
    moves = []
    for name in sorted(groups["source"]):
        # Where several meshes hold a source, any of them will do: the first, on all ranks.
        origin = min(groups["source"][name], key=lambda group: min(group.firsts))
        source = holders.layouted(origin, name in roster.right_to_left["source"])
        for group in (*groups["source"][name], *groups["target"][name]):
            _check_fit(name, origin.spec, group.spec)
        for group in groups["target"][name]:
            target = holders.layouted(group, name in roster.right_to_left["target"])
            dtype = _wire_dtype(name, origin.spec.dtype, group.spec.dtype)
            moves.append(Move(name, origin.spec.shape, dtype, source, target))
    return Moves(holders.all, moves)


@dataclass
class _Group:
    """The ranks that lay a tensor out alike: copies of one mesh, at these first ranks.

    Attributes:
        spec: of the tensor.
        grid: of one copy of the mesh; None where each rank has the whole tensor.
        firsts: the ranks at which the copies begin.
        parts: numbers of the parts of the side that have the tensor so.
    """

    spec: Spec
    grid: Grid | None
    firsts: set[int] = field(default_factory=set)
    parts: list[int] = field(default_factory=list)


def _groups_of(parts: Iterable[Part]) -> dict[str, list[_Group]]:
    found: dict[str, dict[Any, _Group]] = {}
    for number, part in enumerate(parts):
        for name, spec in part.content.specs.items():
            is_plain = spec.mesh < 0
            grid = None if is_plain else part.content.grids[spec.mesh]
            firsts = part.ranks if is_plain else part.firsts[spec.mesh]
            key = (spec._replace(mesh=0), grid)
            group = found.setdefault(name, {}).setdefault(key, _Group(spec, grid))
            group.firsts.update(firsts)
            group.parts.append(number)
    return {
        name: sorted(groups.values(), key=lambda group: min(group.firsts))
        for name, groups in found.items()
    }


def _check_names(names: Mapping[str, Iterable[str]]) -> None:
    for side, other in (("source", "target"), ("target", "source")):
        known = set(names[other])
        if lacking := sorted(set(names[side]) - known):
            shown = ", ".join(map(repr, lacking[:_N_NAMED]))
            more = f" and {len(lacking) - _N_NAMED} more" if len(lacking) > _N_NAMED else ""
            near = get_close_matches(lacking[0], known, n=1)
            hint = f" (near {lacking[0]!r}, it has {near[0]!r})" if near else ""
            raise ValueError(
                f"Reshard: the {other} has no tensor named {shown}{more}, which the {side} "
                f"has{hint}. Both sides need the same names: leave out what does not move, and "
                "give rename= where names differ."
            )


def _check_all_have(
    side: str, groups: Mapping[str, Iterable[_Group]], parts: Sequence[Part]
) -> None:
    """Check that all ranks of a mesh give a tensor alike, if one of them does."""
    checked = set()
    for name, alike in groups.items():
        for group in alike:
            key = (group.grid, frozenset(group.firsts), tuple(group.parts))
            if group.grid is None or key in checked:
                continue
            checked.add(key)
            have = {rank for number in group.parts for rank in parts[number].ranks}
            if lacking := set(_ranks_of(group.grid, sorted(group.firsts))) - have:
                raise ValueError(
                    f"Reshard: {side} {name!r} is on a mesh of which {in_words(have)} gave it as "
                    f"{_laid_out(group.spec)}, and {in_words(lacking)} did not. All ranks of a "
                    "mesh give the same tensors, of one shape, dtype and placements."
                )


def _laid_out(spec: Spec) -> str:
    placements = [
        "Replicate()"
        if dim < 0
        else f"Shard({dim})"
        if factor == 1
        else f"_StridedShard({dim}, split_factor={factor})"
        for dim, factor in zip(spec.dims, spec.factors, strict=True)
    ]
    return f"{spec.dtype} of shape {spec.shape} with placements ({', '.join(placements)})"


def _check_fit(name: str, source: Spec, target: Spec) -> None:
    if source.shape != target.shape:
        raise ValueError(
            f"Reshard: {name!r} has the shape {source.shape} in the source and {target.shape} in "
            "the target, or on other ranks: all must be the whole tensor's."
        )


def _wire_dtype(name: str, source: str, target: str) -> torch.dtype:
    of_source, of_target = getattr(torch, source), getattr(torch, target)
    if not torch.can_cast(of_source, of_target):
        raise ValueError(
            f"Reshard: {name!r} is {source} in the source and {target} in the target, which cannot "
            "hold its values. Cast one of them before."
        )
    smaller: torch.dtype = of_target if of_target.itemsize < of_source.itemsize else of_source
    return smaller


class _HoldersList:
    """The holders of all tensors, each once."""

    def __init__(self, world_size: int) -> None:
        self.all: list[Holders] = []
        self._identity = RankMap.identity(world_size)
        self._known: dict[tuple[Grid | None, tuple[int, ...]], int] = {}

    def layouted(self, group: _Group, right_to_left: bool) -> Layouted:
        key = (group.grid, tuple(sorted(group.firsts)))
        if key not in self._known:
            self._known[key] = len(self.all)
            self.all.append(self._holders(group.grid, key[1]))
        # The first axis is that of the copies, which hold the same.
        dims, factors = (-1, *group.spec.dims), (1, *group.spec.factors)
        return Layouted(self._known[key], dims, factors, right_to_left)

    def _holders(self, grid: Grid | None, firsts: Sequence[int]) -> Holders:
        axes = Layout([]) if grid is None else layout_of(grid.axes)
        if grid is not None and grid.ranks is not None:
            copies = Layout([AxisLayout(1)]).concatenate(Layout.from_shape(axes.shape))
            return Holders(RankMap.from_ranks(grid.ranks), 0, copies)
        found = rank_digits(RankMap.from_ranks(firsts))
        if found is not None:
            together = Layout([found.layout]).concatenate(axes)
            if together.is_orthogonal():
                return Holders(self._identity, found.first, together)
        rows = Layout.from_shape((len(firsts), *axes.shape))
        return Holders(RankMap.from_ranks(_ranks_of(grid, firsts)), 0, rows)


def _ranks_of(grid: Grid | None, firsts: Sequence[int]) -> list[int]:
    if grid is not None and grid.ranks is not None:
        return list(grid.ranks)
    positions = (Layout([]) if grid is None else layout_of(grid.axes)).collapse()
    return [first + positions(index) for first in firsts for index in range(positions.size)]
