"""What a placement of a mesh costs: ring steps that leave a node, a domain, a switch.

A ring collective sends the same number of bytes from each rank of a group to the next one. NCCL
builds its rings so that they enter each node once. So of a group that has ranks on n nodes, n steps
leave a node, or none if n is 1; and the same holds at each level of the cluster.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from meshverse import _torch_compat as compat
from meshverse._core import Layout
from meshverse.layouts.rank_tensors import plain_ranks
from meshverse.layouts.user_input import check_axis_names
from meshverse.nearest import did_you_mean

from .levels import Level

__all__ = ["Placements", "cost_of", "placements_of"]

_DEFAULT_RATIO = 10.0  # of the traffic of an axis to that of the axis before it

_AT_ONCE = 1 << 15  # positions, which then stay in the processor's cache


class Placements:
    """Placements of one mesh on one cluster, and what they cost.

    A placement says at each position of the mesh, in row-major order, on which *spot* its rank is.
    A spot is a set of ranks that are on the same part at every level: ranks of one spot are
    interchangeable. Spots are numbered so that those of a part follow each other.

    Args:
        levels: of the cluster, nested, innermost first.
        shape: of the mesh.
        weights: of each axis: its share of the traffic.
        factors: of each level: what one step that leaves a part of it costs.

    Attributes:
        spot_of_rank: an int64 tensor of shape (world size,).
        part_of_spot: for each level, the part of each spot, in ascending order: shape (levels,
            spots).
    """

    def __init__(
        self,
        levels: Sequence[Level],
        shape: Sequence[int],
        weights: Sequence[float],
        factors: Sequence[float],
    ) -> None:
        self.shape, self.weights, self.factors = tuple(shape), tuple(weights), tuple(factors)
        places = torch.stack([level.of_rank for level in reversed(levels)], dim=1)
        spots, spot_of_rank = torch.unique(places, dim=0, return_inverse=True)  # sorted
        self.spot_of_rank: torch.Tensor = spot_of_rank
        parts = spots.T.flip(0)  # those of a level follow each other, in some order
        changes = parts[:, 1:] != parts[:, :-1]
        self.part_of_spot = torch.zeros_like(parts)
        self.part_of_spot[:, 1:] = changes.cumsum(dim=1)

    @property
    def sizes(self) -> torch.Tensor:
        """Ranks of each spot."""
        return self.spot_of_rank.bincount()

    def ring_steps(self, placements: torch.Tensor) -> torch.Tensor:
        """Ring steps that leave a part, of all groups of an axis together.

        Args:
            placements: the spot at each position, shape (placements, world size).

        Returns:
            Shape (placements, axes, levels).
        """
        n_placements, world_size = placements.shape
        steps = placements.new_zeros(n_placements, len(self.shape), len(self.part_of_spot))
        for index, size in enumerate(self.shape):
            if size == 1:
                continue
            groups = placements.view(n_placements, *self.shape).movedim(index + 1, -1)
            spots = groups.reshape(n_placements, world_size // size, size)
            if bool((spots[..., 1:] < spots[..., :-1]).any()):  # often in order; sorting takes long
                spots = spots.sort(dim=-1).values
            for level, parts in enumerate(self.part_of_spot):
                of_rank = parts[spots]  # in order within a group: those of a part are together
                changes = (of_rank[..., 1:] != of_rank[..., :-1]).sum(dim=-1)
                steps[:, index, level] = (changes + (changes > 0)).sum(dim=-1)
        return steps

    def costs(self, placements: torch.Tensor) -> torch.Tensor:
        """What placements cost: ring steps times the axis's weight and the level's factor.

        Args:
            placements: the spot at each position, shape (placements, world size).

        Returns:
            Shape (placements,), float64.
        """
        each = torch.outer(
            torch.tensor(self.weights, dtype=torch.float64),
            torch.tensor(self.factors, dtype=torch.float64),
        )
        few = max(1, _AT_ONCE // placements.shape[1])
        steps = torch.cat([self.ring_steps(some) for some in torch.split(placements, few)])
        return (steps * each).sum(dim=(1, 2))

    def ranks(self, placement: torch.Tensor) -> torch.Tensor:
        """The ranks of placements: at each position the lowest of its spot that is left.

        Args:
            placement: the spot at each position, shape (..., world size), as the result.
        """
        ranks = self.spot_of_rank.argsort(stable=True).expand(placement.shape)
        return torch.empty_like(placement).scatter_(-1, placement.argsort(stable=True), ranks)


@compat.untraced()
def placements_of(
    levels: Sequence[Level],
    mesh_shape: Sequence[int],
    mesh_dim_names: Sequence[str] | None,
    traffic: Mapping[str, float] | None,
    factors: Mapping[str, float] | None,
) -> Placements:
    """The placements of a mesh, with what `Topology.order` is given read and checked.

    Raises:
        ValueError: a mesh of another number of ranks; traffic of an axis or factors of a level
            that there is not, or which are negative or no finite numbers.
        RuntimeError: names that repeat or do not match the shape.
    """
    shape, world_size = tuple(mesh_shape), len(levels[0].of_rank)
    size = Layout.from_shape(shape).size
    names = check_axis_names(mesh_dim_names, len(shape)) or ()
    if size != world_size:
        raise ValueError(
            f"mesh_shape {shape} has {size} ranks, but the topology has {world_size}: it tells "
            "where each rank of the mesh is. For a mesh over some ranks, make a topology of these "
            "in their order, and give ranks= yourself."
        )
    weights = [_DEFAULT_RATIO**index for index in range(len(shape))]
    if traffic is not None:
        said = _checked("traffic", traffic, names, "axes")
        weights = [said.get(names[axis], 1.0) if names else 1.0 for axis in range(len(shape))]
    level_names = [level.name for level in levels]
    costs = _checked("factors", factors or {}, level_names, "levels")
    return Placements(levels, shape, weights, [costs.get(name, 1.0) for name in level_names])


def cost_of(problem: Placements, ranks: Sequence[int] | torch.Tensor | None) -> float:
    """What a mesh costs with its ranks in this order; see `Topology.cost`.

    Raises:
        ValueError: ranks that are not each rank of the world once.
        RuntimeError: a tensor without values.
    """
    plain = None if ranks is None else plain_ranks(ranks)
    with compat.untraced():
        in_order = torch.arange(len(problem.spot_of_rank))
        given = in_order if plain is None else plain.flatten()
        if not torch.equal(given.sort().values, in_order):
            raise ValueError(
                f"An order of {len(in_order)} ranks has each of 0 to {len(in_order) - 1} once, "
                f"but got {given.tolist()[:16]}{' ...' * (len(given) > 16)}."
            )
        return float(problem.costs(problem.spot_of_rank[given].unsqueeze(0)))


def _checked(
    what: str, given: Mapping[str, Any], names: Sequence[str], of: str
) -> dict[str, float]:
    if unknown := [name for name in given if name not in names]:
        raise ValueError(
            f"{what}={dict(given)} names {unknown}, but the {of} are {list(names)}: name these."
            f"{did_you_mean(unknown[0], names)}"
        )
    for name, value in given.items():
        is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or value < 0:
            raise ValueError(f"{what}[{name!r}]={value!r}: give a finite number of 0 or more.")
    return {name: float(value) for name, value in given.items()}
