"""Levels of a cluster: the node, NVLink domain and switch of each rank.

Their tensors are ordinary CPU tensors, whatever default device and torch modes the caller has set.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from meshverse._torch_compat.tracing import outside_torch_modes
from meshverse.wording import counted

LARGEST_WORLD = 1 << 24  # ranks; a larger number is taken for a mistake


@dataclass(frozen=True, eq=False)
class Level:
    """Locations of the ranks of a world, at one level of the cluster.

    Attributes:
        name: name of the level, such as "node".
        parts: names of the parts.
        of_rank: index in `parts` of the part that each rank is on: int64, shape (world size,).
    """

    name: str
    parts: tuple[str, ...]
    of_rank: torch.Tensor

    @property
    @outside_torch_modes()
    def sizes(self) -> torch.Tensor:
        """Number of ranks on each part, shape (number of parts,)."""
        return self.of_rank.bincount(minlength=len(self.parts))


@outside_torch_modes()
def level_of(name: str, part_of_rank: Sequence[str]) -> Level:
    """Return a level, given the name of the part that each rank is on.

    Raises:
        TypeError: a name is not a string, or the names are no sequence.
        ValueError: there are no ranks, or a name is empty.
    """
    if not isinstance(name, str):
        raise TypeError(
            f"The name of a level must be a string, such as 'node', but got {name!r} of type "
            f"{type(name).__name__}."
        )
    if not name.strip():
        raise ValueError(f"The name of a level is empty: {name!r}. Give a word, such as 'node'.")
    in_order = hasattr(part_of_rank, "__getitem__") and hasattr(part_of_rank, "__len__")
    if (
        not in_order  # such as a set
        or isinstance(part_of_rank, (str, Mapping))
        or not all(isinstance(part, str) for part in part_of_rank)
    ):
        raise TypeError(
            f"Level {name!r} must be one string per rank, the name of its {name}; got "
            f"{part_of_rank!r}"
        )
    if not len(part_of_rank):
        raise ValueError(f"The level {name!r} has no ranks: a topology needs at least one.")
    numbers: dict[str, int] = {}
    indices = [numbers.setdefault(part, len(numbers)) for part in part_of_rank]
    if "" in numbers:
        raise ValueError(
            f"Rank {list(part_of_rank).index('')} has no {name}: its name is empty. Name the "
            f"{name} of every rank."
        )
    return Level(name, tuple(numbers), torch.tensor(indices))


@outside_torch_modes()
def level_of_blocks(name: str, world_size: int, block_size: int) -> Level:
    """Return a level with ranks 0 to n-1 on the first part, the next n on the second, and so on.

    Raises:
        ValueError: a size is below 1, or larger than any world.
    """
    given: dict[str, Any] = {"world_size": world_size, f"{name}_size": block_size}
    for what, size in given.items():
        if isinstance(size, bool) or not isinstance(size, int) or not 0 < size <= LARGEST_WORLD:
            raise ValueError(f"{what}={size!r}: give an int above 0, at most {LARGEST_WORLD:,}.")
    of_rank = torch.arange(world_size) // block_size
    count = -(-world_size // block_size)
    return Level(name, tuple(f"{name}{index}" for index in range(count)), of_rank)


@outside_torch_modes()
def nested(levels: Sequence[Level]) -> tuple[Level, ...]:
    """Check that each part of a level lies inside one part of the next level.

    Args:
        levels: levels, innermost first. If they are not nested in this order, a level named
            "domain" is moved to where it fits.

    Returns:
        Levels, innermost first.

    Raises:
        ValueError: the levels have different numbers of ranks, or a part lies in two parts of the
            next level.
    """
    if not levels:
        raise ValueError('A topology needs a level: give one, such as {"node": ["a", "a", "b"]}.')
    sizes = {level.name: len(level.of_rank) for level in levels}
    if len(set(sizes.values())) > 1:
        given = ", ".join(f"the {name} of {counted(size, 'rank')}" for name, size in sizes.items())
        raise ValueError(
            f"The levels have different numbers of ranks: {given}. Give each level of every rank."
        )
    ordered = list(levels)
    domain = next((level for level in levels if level.name == "domain"), None)
    if domain is not None and any(len(_torn(*pair)) for pair in itertools.pairwise(levels)):
        ordered.remove(domain)
        # Of two nested levels, the outer one does not have more parts.
        outside = sum(len(level.parts) >= len(domain.parts) for level in ordered)
        ordered.insert(outside, domain)
    for inner, outer in itertools.pairwise(ordered):
        if len(torn := _torn(inner, outer)):
            raise _not_nested(inner, outer, int(torn[0]))
    return tuple(ordered)


def _torn(inner: Level, outer: Level) -> torch.Tensor:
    """Return the ranks whose outer part is not that of the first rank of their inner part."""
    ranks = torch.arange(len(inner.of_rank))
    first = torch.full((len(inner.parts),), len(ranks))
    first.scatter_reduce_(0, inner.of_rank, ranks, "amin")
    return (outer.of_rank[first][inner.of_rank] != outer.of_rank).nonzero().flatten()


def _not_nested(inner: Level, outer: Level, rank: int) -> ValueError:
    part = int(inner.of_rank[rank])
    other = inner.of_rank.tolist().index(part)
    return ValueError(
        f"{inner.name.capitalize()} {inner.parts[part]!r} is on two {outer.name} parts: rank "
        f"{other} is on {outer.name} {outer.parts[int(outer.of_rank[other])]!r}, rank {rank} on "
        f"{outer.parts[int(outer.of_rank[rank])]!r}. Levels are nested: all ranks of a "
        f"{inner.name} are on one {outer.name}. Correct one of the two levels, or leave it out."
    )
