"""Search for a cheap order of ranks: the cost of a placement of a mesh, and placements to try.

A ring collective sends the same number of bytes from each rank of a group to the next one: a ring
step. NCCL builds its rings so that they enter each node once. So if a group has ranks on n nodes, n
of its steps leave a node, or none if n is 1. For switches, which NCCL does not know, it is a lower
bound.

Most clusters are even: all parts of a level have equally many ranks. There, the placements tried
first cut the mesh into equal boxes, one per node, inside equal larger boxes, one per domain and per
switch. For several sizes of the boxes, the cheapest chains of such boxes are computed. On uneven
clusters, the same placements are tried with the cluster's ranks in several orders. In worlds of at
most 40 ranks, swaps of two ranks may improve the result. If the mesh can be placed in few ways, all
of them are tried instead.

All ranks search in the same way and find the same order: nothing depends on time or chance.
"""

from __future__ import annotations

import itertools
import math
import numbers
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from meshverse import _torch_compat as compat
from meshverse._core import Layout
from meshverse.layouts.user_input import check_axis_names, plain_ranks
from meshverse.wording import counted, did_you_mean

from .levels import Level

_DEFAULT_RATIO = 10.0  # default traffic of an axis, relative to the axis before it
_AT_ONCE = 1 << 15  # positions evaluated together: they fit into the processor's cache

_Digits = list["tuple[int, int]"]  # (axis, size) of nested loops over a mesh, the innermost first
_Box = tuple[int, ...]  # size of a box of the mesh along each axis

_SEARCHED_IN_FULL = 40_000  # largest number of placements all of which are tried
_IMPROVED = 40  # largest number of ranks for which swaps are tried
_IMPROVEMENTS = 60  # largest number of swaps of one placement
_STARTS = 4  # number of placements that are improved by swaps
_EVALUATED = 1_000_000  # largest number of placements tried, times ranks
_RELABELLED = 16  # number of placements whose slices are sorted
_LARGEST_CHAIN = 3_000  # largest number of different boxes for which chains are searched


class Placements:
    """Placements of one mesh on one cluster, and their costs.

    A *spot* is a set of ranks that are on the same part at every level, so ranks of one spot are
    interchangeable. A placement assigns a spot to each position of the mesh, in row-major order.
    Spots are numbered so that the spots of a part are consecutive.

    Args:
        levels: levels of the cluster, nested, innermost first.
        shape: shape of the mesh.
        weights: traffic of each axis, relative to the others.
        factors: for each level, the cost of one step that leaves a part of it.

    Attributes:
        spot_of_rank: spot of each rank: int64, shape (world size,).
        part_of_spot: for each level, the part of each spot, ascending: shape (levels, spots).
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
        parts = spots.T.flip(0)  # equal parts of a level are consecutive
        changes = parts[:, 1:] != parts[:, :-1]
        self.part_of_spot = torch.zeros_like(parts)
        self.part_of_spot[:, 1:] = changes.cumsum(dim=1)

    @property
    def sizes(self) -> torch.Tensor:
        """Number of ranks of each spot, shape (spots,)."""
        return self.spot_of_rank.bincount()

    def ring_steps(self, placements: torch.Tensor) -> torch.Tensor:
        """Count the ring steps that leave a part, over all groups of an axis.

        Args:
            placements: spot at each position, shape (placements, world size).

        Returns:
            Numbers of steps, shape (placements, axes, levels).
        """
        n_placements, world_size = placements.shape
        steps = placements.new_zeros(n_placements, len(self.shape), len(self.part_of_spot))
        for index, size in enumerate(self.shape):
            if size == 1:
                continue
            groups = placements.view(n_placements, *self.shape).movedim(index + 1, -1)
            spots = groups.reshape(n_placements, world_size // size, size)
            if bool((spots[..., 1:] < spots[..., :-1]).any()):  # sort only if needed: it is slow
                spots = spots.sort(dim=-1).values
            for level, parts in enumerate(self.part_of_spot):
                of_rank = parts[spots]  # sorted within a group: equal parts are adjacent
                changes = (of_rank[..., 1:] != of_rank[..., :-1]).sum(dim=-1)
                steps[:, index, level] = (changes + (changes > 0)).sum(dim=-1)
        return steps

    def costs(self, placements: torch.Tensor) -> torch.Tensor:
        """Return costs of placements: ring steps times the axis's weight and the level's factor.

        Args:
            placements: spot at each position, shape (placements, world size).

        Returns:
            Costs, float64, shape (placements,).
        """
        each = torch.outer(
            torch.tensor(self.weights, dtype=torch.float64),
            torch.tensor(self.factors, dtype=torch.float64),
        )
        few = max(1, _AT_ONCE // placements.shape[1])
        steps = torch.cat([self.ring_steps(some) for some in torch.split(placements, few)])
        return (steps * each).sum(dim=(1, 2))

    def ranks(self, placement: torch.Tensor) -> torch.Tensor:
        """Return the rank at each position of placements: each spot's ranks in ascending order.

        Args:
            placement: spot at each position, shape (..., world size).

        Returns:
            Ranks, of the same shape.
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
    """Return the placements of a mesh, after a check of the arguments of `Topology.order`.

    Raises:
        ValueError: the mesh has another number of ranks; `traffic` names an axis or `factors` a
            level that does not exist; or a value is negative or not a finite number.
        RuntimeError: names repeat or do not match the shape.
    """
    shape, world_size = tuple(mesh_shape), len(levels[0].of_rank)
    size = Layout.from_shape(shape).size
    names = check_axis_names(mesh_dim_names, len(shape)) or ()
    if size != world_size:
        raise ValueError(
            f"mesh_shape {shape} has {counted(size, 'rank')}, but the topology has {world_size:,}: "
            "they must be equal. For a mesh over some ranks, create a topology of these ranks, in "
            "their order, and pass ranks= to the mesh."
        )
    weights = [_DEFAULT_RATIO**index for index in range(len(shape))]
    if traffic is not None:
        given = _checked("traffic", traffic, names, "axes")
        weights = [given.get(name, 1.0) for name in names or [""] * len(shape)]
    level_names = [level.name for level in levels]
    costs = _checked("factors", factors or {}, level_names, "levels")
    return Placements(levels, shape, weights, [costs.get(name, 1.0) for name in level_names])


def cost_of(problem: Placements, ranks: Sequence[int] | torch.Tensor | None) -> float:
    """Compute the cost of a mesh with its ranks in this order; see `Topology.cost`.

    Raises:
        ValueError: `ranks` does not have each rank of the world once.
        RuntimeError: `ranks` is a tensor without values.
    """
    plain = None if ranks is None else plain_ranks(ranks)
    with compat.untraced():
        in_order = torch.arange(len(problem.spot_of_rank))
        given = in_order if plain is None else plain.flatten()
        if not torch.equal(given.sort().values, in_order):
            raise ValueError(
                f"ranks= must have each of the ranks 0 to {len(in_order) - 1} once, but got "
                f"{given.tolist()[:16]}{' ...' * (len(given) > 16)}."
            )
        return float(problem.costs(problem.spot_of_rank[given].unsqueeze(0)))


def _checked(
    what: str, given: Mapping[str, Any], names: Sequence[str], of: str
) -> dict[str, float]:
    if unknown := [name for name in given if name not in names]:
        raise ValueError(
            f"{what}={dict(given)} names {unknown}, but the {of} are {list(names)}."
            f"{did_you_mean(unknown[0], names)}"
        )
    for name, value in given.items():
        is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or value < 0:
            raise ValueError(f"{what}[{name!r}]={value!r}: give a finite number of 0 or more.")
    return {name: float(value) for name, value in given.items()}


# --- the search ---------------------------------------------------------------------------------


def best_order(problem: Placements) -> torch.Tensor:
    """Return the ranks of the cheapest placement that was found; 0, 1, 2, ... if none is cheaper.

    Returns:
        Rank at each position, shape (world size,).
    """
    identity = problem.spot_of_rank
    if _count(problem) <= _SEARCHED_IN_FULL:
        tried = torch.tensor(list(_arrangements(problem.sizes.tolist())))
    else:
        tried = torch.stack([identity, *candidates(problem)])
        if len(identity) <= _IMPROVED:
            starts = tried[problem.costs(tried).argsort(stable=True)[:_STARTS]]
            tried = torch.stack([_improved(problem, start) for start in starts])
    costs = problem.costs(tried)
    found = _most_ascending(problem, tried[costs == costs.min()])
    cost_found, cost_identity = problem.costs(torch.stack([found, identity])).tolist()
    return problem.ranks(found) if cost_found < cost_identity else torch.arange(len(identity))


def _most_ascending(problem: Placements, placements: torch.Tensor) -> torch.Tensor:
    """Return, of equally cheap placements, the one whose ranks descend least often along axes.

    A group whose ranks ascend is also in torch's order, so other meshes can share it.
    """
    several = torch.cat([_relabelled(problem, placements[:_RELABELLED]), placements])
    grids = problem.ranks(several).view(-1, *problem.shape)
    descents = torch.zeros(len(several), dtype=torch.int64)
    for axis in range(1, grids.ndim):
        descents += (grids.diff(dim=axis) < 0).flatten(1).sum(dim=1)
    return several[descents.argmin()]


def _relabelled(problem: Placements, placements: torch.Tensor) -> torch.Tensor:
    """Return the placements with the slices along each axis sorted by their lowest ranks.

    The groups keep their spots, so the costs do not change.
    """
    for index, size in enumerate(problem.shape, start=1):
        grids = problem.ranks(placements).view(-1, *problem.shape).movedim(index, 1)
        order = grids.reshape(len(placements), size, -1).amin(dim=2).argsort(dim=1)
        rows = torch.arange(len(placements))[:, None]
        slices = placements.view(-1, *problem.shape).movedim(index, 1)[rows, order]
        placements = slices.movedim(1, index).reshape(len(placements), -1)
    return placements


# --- placements to try --------------------------------------------------------------------------


def candidates(problem: Placements) -> list[torch.Tensor]:
    """Return placements that may be cheap: a million positions in all, or 4 if that is more."""
    budget = max(4, _EVALUATED // len(problem.spot_of_rank))
    sequences = list(_spot_sequences(problem))
    placements: list[torch.Tensor] = []
    known = set()
    for digits in itertools.chain(_chains(problem), _stacks(problem)):
        if tuple(digits) in known:
            continue
        known.add(tuple(digits))
        positions = _positions(problem.shape, digits)
        for spots in (*sequences, *(_packed(problem, v) for v in _to_pack(problem, digits))):
            placement = torch.empty_like(spots)
            placement[positions] = spots
            placements.append(placement)
            if len(placements) >= budget:
                return placements
    return placements


def _positions(shape: Sequence[int], digits: _Digits) -> torch.Tensor:
    """Return the positions of a mesh in the order in which nested loops visit them."""
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    positions = torch.zeros(1, dtype=torch.int64)
    for axis, size in digits:
        positions = (torch.arange(size).unsqueeze(1) * strides[axis] + positions).flatten()
        strides[axis] *= size
    return positions


def _spot_sequences(problem: Placements) -> Iterator[torch.Tensor]:
    """Yield orders of all spots: that of the parts; if these are uneven, also large ones first."""
    spots = torch.arange(problem.part_of_spot.shape[1])
    sizes = problem.sizes
    yield spots.repeat_interleave(sizes)
    if all(bool((of_level == of_level[0]).all()) for of_level in _part_sizes(problem)):
        return
    order = spots
    for parts in [spots, *problem.part_of_spot]:  # stable sorts: the outermost level decides
        ranks = _ranks_of_parts(parts, sizes)
        order = order[parts[order].argsort(stable=True)]
        order = order[ranks[parts[order]].argsort(descending=True, stable=True)]
    yield order.repeat_interleave(sizes[order])


def _to_pack(problem: Placements, digits: _Digits) -> list[int]:
    """Return sizes of nested boxes that do not divide the size of every part of a level."""
    boxes = list(itertools.accumulate((size for _, size in digits), int.__mul__))
    packed = []
    for sizes in _part_sizes(problem):
        usual = int(sizes.mode().values)
        box = max((box for box in boxes if box <= usual), default=1)
        if any(size % box for size in sizes.tolist()):
            packed.append(box)
    return list(dict.fromkeys(packed))


def _packed(problem: Placements, box: int) -> torch.Tensor:
    """Return the spots of all ranks, with as many whole boxes on each part as it can hold.

    Ranks that are left over on the parts of one level form boxes within parts of the next level.

    Args:
        problem: cluster and mesh.
        box: number of ranks in one box.
    """
    spots = torch.arange(problem.part_of_spot.shape[1]).repeat_interleave(problem.sizes)
    left, boxes = torch.arange(len(spots)), []
    for parts in problem.part_of_spot:
        part = parts[spots[left]]
        counts = part.bincount()
        index = torch.arange(len(left)) - (counts.cumsum(0) - counts)[part]
        fits = index < (counts // box * box)[part]
        boxes.append(left[fits].view(-1, box))
        left = left[~fits]
    together = torch.cat([*boxes, left.view(-1, box)])
    return spots[together[together[:, 0].argsort()].flatten()]


def _part_sizes(problem: Placements) -> list[torch.Tensor]:
    """Return the number of ranks of each part, level by level."""
    return [_ranks_of_parts(parts, problem.sizes) for parts in problem.part_of_spot]


def _ranks_of_parts(parts: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    return torch.zeros(int(parts.max()) + 1, dtype=torch.int64).index_add(0, parts, sizes)


def _by_weight(problem: Placements) -> list[int]:
    """Return the axes by traffic, most first; of axes with equal traffic, the last one first."""
    return sorted(range(len(problem.shape)), key=lambda axis: (-problem.weights[axis], -axis))


def _stacks(problem: Placements) -> Iterator[_Digits]:
    """Yield nestings of whole axes, up to 720: first that with the most traffic innermost."""
    for axes in itertools.islice(itertools.permutations(_by_weight(problem)), 720):
        yield [(axis, problem.shape[axis]) for axis in axes]


def _chains(problem: Placements) -> Iterator[_Digits]:
    """Yield the cheapest chains of boxes inside boxes, for several sizes of boxes per level."""
    shape = problem.shape
    if math.prod(len(_divisors(size)) for size in shape) > _LARGEST_CHAIN:
        return
    boxes: dict[int, list[_Box]] = {}
    for box in itertools.product(*map(_divisors, shape)):
        boxes.setdefault(math.prod(box), []).append(box)
    choices = [_volumes(sorted(boxes), sizes) for sizes in _part_sizes(problem)]
    axes = _by_weight(problem)
    found: list[tuple[int, float, int, _Digits]] = []
    for volumes in itertools.islice(itertools.product(*choices), 64):
        if any(larger % smaller for smaller, larger in itertools.pairwise(volumes)):
            continue
        chains = _cheapest_chains(problem, [boxes[volume] for volume in volumes])
        for place, (cost, chain) in enumerate(chains):  # place: by cost, for these volumes
            digits = []
            for inner, outer in itertools.pairwise([(1,) * len(shape), *chain, shape]):
                digits += [(a, outer[a] // inner[a]) for a in axes if outer[a] > inner[a]]
            found.append((place, cost, len(found), digits))
    yield from (
        digits for *_, digits in sorted(found)
    )  # the cheapest chain of each choice of volumes first


def _volumes(known: Sequence[int], sizes: torch.Tensor) -> list[int]:
    """Return sizes of boxes to try for a level.

    These are the sizes nearest to the most frequent size of a part, below and above, and the
    greatest common divisor of all sizes.

    Args:
        known: sizes that boxes can have, in ranks.
        sizes: number of ranks on each part.
    """
    usual = int(sizes.mode().values)
    below = max(volume for volume in known if volume <= usual)
    above = min((volume for volume in known if volume >= usual), default=below)
    common = math.gcd(*sizes.tolist())
    return list(dict.fromkeys(v for v in (below, above, common) if v in (below, above, *known)))


def _cheapest_chains(
    problem: Placements, boxes: Sequence[Sequence[_Box]]
) -> list[tuple[float, tuple[_Box, ...]]]:
    """Find the cheapest chain that ends in each box of the last level; return the cheapest 12."""
    chains: dict[_Box, tuple[float, tuple[_Box, ...]]] = {(1,) * len(problem.shape): (0.0, ())}
    for level, of_level in enumerate(boxes):
        longer: dict[_Box, tuple[float, tuple[_Box, ...]]] = {}
        for box in of_level:
            inside = [
                chain for inner, chain in chains.items() if not any(map(int.__mod__, box, inner))
            ]
            if inside:
                cost, chain = min(inside)
                here = problem.factors[level] * _cost_of_box(problem, box)
                longer[box] = (cost + here, (*chain, box))
        chains = longer
    return sorted(chains.values())[:12]


def _cost_of_box(problem: Placements, box: _Box) -> float:
    """Return the cost at one level, without its factor, if each part has such a box of the mesh."""
    world_size = math.prod(problem.shape)
    axes = zip(problem.shape, problem.weights, box, strict=True)
    return sum(weight * world_size / inside for size, weight, inside in axes if inside < size)


def _divisors(number: int) -> list[int]:
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


# --- small worlds -------------------------------------------------------------------------------


def _count(problem: Placements) -> int:
    """Count the different placements; any number above `_SEARCHED_IN_FULL` means too many."""
    count, left = 1, 0
    for size in problem.sizes.tolist():
        left += size
        count *= math.comb(left, size)
        if count > _SEARCHED_IN_FULL:
            break
    return count


def _arrangements(left: list[int]) -> Iterator[tuple[int, ...]]:
    """Yield all sequences that have each spot as many times as `left` says."""
    if not any(left):
        yield ()
        return
    for spot, count in enumerate(left):
        if count:
            rest = [*left[:spot], count - 1, *left[spot + 1 :]]
            yield from ((spot, *others) for others in _arrangements(rest))


def _improved(problem: Placements, placement: torch.Tensor) -> torch.Tensor:
    """Return a placement improved by swaps of two ranks: each time the swap that saves most."""
    first, second = torch.triu_indices(len(placement), len(placement), offset=1)
    cost = float(problem.costs(placement.unsqueeze(0)))
    for _ in range(_IMPROVEMENTS):
        differ = placement[first] != placement[second]
        one, other = first[differ], second[differ]
        rows = torch.arange(len(one))
        swapped = placement.repeat(len(one), 1)
        swapped[rows, one], swapped[rows, other] = placement[other], placement[one]
        costs = problem.costs(swapped)
        best = int(costs.argmin())
        if float(costs[best]) >= cost:
            break
        placement, cost = swapped[best], float(costs[best])
    return placement
