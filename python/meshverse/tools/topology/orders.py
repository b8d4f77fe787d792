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

All ranks search in the same way and find the same order: nothing depends on time or chance. The
search uses lists and the core, no tensors: torch would spread their work over its threads, for
which the ranks of a node compete, and the program's own threads may be using them.
"""

from __future__ import annotations

import itertools
import math
import numbers
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import gt, itemgetter, mul
from typing import Any

import torch

from meshverse._core import Layout, ring_steps
from meshverse._torch_compat.tracing import outside_torch_modes
from meshverse.layouts.user_input import as_rank_tensor, check_axis_names
from meshverse.wording import counted, did_you_mean

from .levels import Level

_DEFAULT_RATIO = 10.0  # default traffic of an axis, relative to the axis before it

_Digits = list["tuple[int, int]"]  # (axis, size) of nested loops over a mesh, the innermost first
_Box = tuple[int, ...]  # size of a box of the mesh along each axis
_Placement = Sequence[int]  # spot at each position of the mesh

_SEARCHED_IN_FULL = 40_000  # largest number of placements all of which are tried
_LISTED = 12_000_000  # largest number of their positions in all
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
        spot_of_rank: spot of each rank.
        ranks_of_spot: ranks of each spot, ascending.
        part_of_spot: for each level, the part of each spot, ascending.
        sizes: number of ranks of each spot.
        part_sizes: for each level, the number of ranks of each part.
    """

    def __init__(
        self,
        levels: Sequence[Level],
        shape: Sequence[int],
        weights: Sequence[float],
        factors: Sequence[float],
    ) -> None:
        self.shape, self.weights, self.factors = tuple(shape), tuple(weights), tuple(factors)
        places = list(zip(*(level.of_rank.tolist() for level in reversed(levels)), strict=True))
        spots = sorted(set(places))
        number = {place: spot for spot, place in enumerate(spots)}
        self.spot_of_rank: list[int] = [number[place] for place in places]
        self.ranks_of_spot: list[list[int]] = [[] for _ in spots]
        for rank, spot in enumerate(self.spot_of_rank):
            self.ranks_of_spot[spot].append(rank)
        # Equal parts of a level are consecutive, as levels are nested.
        of_levels = reversed(list(zip(*spots, strict=True)))
        self.part_of_spot: list[list[int]] = [_numbered(parts) for parts in of_levels]
        self.sizes = [len(ranks) for ranks in self.ranks_of_spot]
        self.part_sizes = [_ranks_of_parts(parts, self.sizes) for parts in self.part_of_spot]

    def costs(self, placements: Sequence[_Placement]) -> list[float]:
        """Return costs of placements: ring steps times the axis's weight and the level's factor."""
        each = [weight * factor for weight in self.weights for factor in self.factors]
        steps = ring_steps(self.shape, self.part_of_spot, placements)
        return [math.fsum(map(mul, counted, each)) for counted in steps]

    def ranks(self, placement: _Placement) -> list[int]:
        """Return the rank at each position of a placement: each spot's ranks in ascending order."""
        left = [iter(ranks) for ranks in self.ranks_of_spot]
        return list(map(next, map(left.__getitem__, placement)))


def _numbered(parts: Iterable[int]) -> list[int]:
    """Return 0 for each of the first equal parts, 1 for those after them, and so on."""
    runs = enumerate(itertools.groupby(parts))
    return [number for number, (_, run) in runs for _ in run]


@outside_torch_modes()
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
            level that does not exist; or a value, or the cost, is negative or not a finite number.
        TypeError: `traffic` or `factors` is not a mapping.
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
    costs = _checked("factors", {} if factors is None else factors, level_names, "levels")
    each = [costs.get(name, 1.0) for name in level_names]
    if not math.isfinite(sum(weights) * sum(each) * world_size):
        raise ValueError(
            f"traffic={traffic} with factors={factors} gives a cost that is not a finite number: "
            "give smaller numbers. Only their ratios count."
        )
    return Placements(levels, shape, weights, each)


def cost_of(problem: Placements, ranks: Sequence[int] | torch.Tensor | None) -> float:
    """Compute the cost of a mesh with its ranks in this order; see `Topology.cost`.

    Raises:
        ValueError: `ranks` does not have each rank of the world once.
        RuntimeError: `ranks` is a tensor without values.
    """
    plain = None if ranks is None else as_rank_tensor(ranks)
    with outside_torch_modes():
        in_order = list(range(len(problem.spot_of_rank)))
        given = in_order if plain is None else plain.flatten().tolist()
    if sorted(given) != in_order:
        raise ValueError(
            f"ranks= must have each of the ranks 0 to {len(in_order) - 1} once, but got "
            f"{given[:16]}{' ...' * (len(given) > 16)}."
        )
    return problem.costs([[problem.spot_of_rank[rank] for rank in given]])[0]


def _checked(
    what: str, given: Mapping[str, Any], names: Sequence[str], of: str
) -> dict[str, float]:
    if not isinstance(given, Mapping):
        raise TypeError(f"{what}={given!r}: give a mapping from {of} to numbers.")
    if unknown := [name for name in given if name not in names]:
        raise ValueError(
            f"{what}={dict(given)} names {unknown}, but the {of} are {list(names)}."
            f"{did_you_mean(unknown[0], names)}"
        )
    for name, value in given.items():
        is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
        if not is_number or not 0 <= value <= sys.float_info.max:
            raise ValueError(f"{what}[{name!r}]={value!r:.80}: give a finite number of 0 or more.")
    return {name: float(value) for name, value in given.items()}


# --- the search ---------------------------------------------------------------------------------


def best_order(problem: Placements) -> torch.Tensor:
    """Return the ranks of the cheapest placement that was found; 0, 1, 2, ... if none is cheaper.

    Returns:
        Rank at each position, shape (world size,).
    """
    identity: _Placement = problem.spot_of_rank
    if len(problem.sizes) == 1:  # all ranks are interchangeable
        return torch.arange(len(identity))
    tried: Sequence[_Placement]
    count = _count(problem)
    if count <= _SEARCHED_IN_FULL and count * len(identity) <= _LISTED:
        tried = list(_arrangements(problem.sizes))
    else:
        tried = [identity, *candidates(problem)]
        if len(identity) <= _IMPROVED:
            costs = problem.costs(tried)
            starts = sorted(range(len(tried)), key=costs.__getitem__)[:_STARTS]
            tried = [_improved(problem, tried[start]) for start in starts]
    costs = problem.costs(tried)
    least = min(costs)
    cheapest = [placement for placement, cost in zip(tried, costs, strict=True) if cost == least]
    found = _most_ascending(problem, cheapest)
    cost_found, cost_identity = problem.costs([found, identity])
    is_cheaper = cost_found < cost_identity
    return torch.tensor(problem.ranks(found) if is_cheaper else range(len(identity)))


def _most_ascending(problem: Placements, placements: Sequence[_Placement]) -> _Placement:
    """Return, of equally cheap placements, the one whose ranks descend least often along axes.

    A group whose ranks ascend is also in torch's order, so other meshes can share it.
    """
    axes = [_Slices(problem.shape, axis) for axis, size in enumerate(problem.shape) if size > 1]
    several = [_relabeled(problem, placement, axes) for placement in placements[:_RELABELLED]]
    several += placements

    def descents(placement: _Placement) -> int:
        ranks = problem.ranks(placement)
        return sum(axis.descents(ranks) for axis in axes)

    return min(several, key=descents)


def _relabeled(problem: Placements, placement: _Placement, axes: Sequence[_Slices]) -> _Placement:
    """Return a placement with the slices along each axis sorted by their lowest ranks.

    The groups keep their spots, so the costs do not change.
    """
    for axis in axes:
        lowest = list(map(min, axis.slices(problem.ranks(placement))))
        slices = axis.slices(placement)
        in_order = sorted(range(axis.size), key=lowest.__getitem__)
        placement = axis.joined([slices[index] for index in in_order])
    return placement


class _Slices:
    """The slices of a mesh along one axis, which has more than one coordinate."""

    def __init__(self, shape: Sequence[int], axis: int) -> None:
        n, self.size = math.prod(shape), shape[axis]
        self._length = n // self.size
        stride = math.prod(shape[axis + 1 :])
        block = self.size * stride  # positions whose coordinates along the axes before are equal
        positions = [
            range(start, start + stride)
            for first in range(0, block, stride)
            for start in range(first, n, block)
        ]
        indices = [
            range(start, start + stride)
            for first in range(0, self._length, stride)
            for start in range(first, n, self._length)
        ]
        self._by_coordinate = itemgetter(*itertools.chain(*positions))
        self._by_position = itemgetter(*itertools.chain(*indices))

    def slices(self, values: Sequence[int]) -> list[tuple[int, ...]]:
        """Return the values of each slice, given those at all positions."""
        flat = self._by_coordinate(values)
        starts = range(0, len(flat), self._length)
        return [flat[start : start + self._length] for start in starts]

    def joined(self, slices: Sequence[Sequence[int]]) -> tuple[int, ...]:
        """Return the values at all positions, given those of each slice."""
        joined: tuple[int, ...] = self._by_position([*itertools.chain(*slices)])
        return joined

    def descents(self, values: Sequence[int]) -> int:
        """Count the pairs of neighbors along the axis of which the first has the larger value."""
        flat = self._by_coordinate(values)
        return sum(map(gt, flat, flat[self._length :]))


# --- placements to try --------------------------------------------------------------------------


def candidates(problem: Placements) -> list[_Placement]:
    """Return placements that may be cheap: a million positions in all, or 4 if that is more."""
    budget = max(4, _EVALUATED // len(problem.spot_of_rank))
    sequences = list(_spot_sequences(problem))
    packed: dict[int, list[int]] = {}
    placements: list[_Placement] = []
    known = set()
    for digits in itertools.chain(_chains(problem), _stacks(problem)):
        if tuple(digits) in known:
            continue
        known.add(tuple(digits))
        # There are at least two ranks: of one, the only placement needs no candidates.
        visited = itemgetter(*_visits(problem.shape, digits))
        for box in _to_pack(problem, digits):
            if box not in packed:
                packed[box] = _packed(problem, box)
        for spots in (*sequences, *(packed[box] for box in _to_pack(problem, digits))):
            placements.append(visited(spots))
            if len(placements) >= budget:
                return placements
    return placements


def _visits(shape: Sequence[int], digits: _Digits) -> list[int]:
    """Return when nested loops over a mesh visit each of its positions: 0 for the first one."""
    of_axis = [[0] for _ in shape]  # by coordinate along the axis
    n_inside = 1
    for axis, size in digits:
        steps = range(0, size * n_inside, n_inside)
        of_axis[axis] = [step + inside for step in steps for inside in of_axis[axis]]
        n_inside *= size
    visits = [0]
    for along in of_axis:
        visits = [before + visit for before in visits for visit in along]
    return visits


def _spot_sequences(problem: Placements) -> Iterator[list[int]]:
    """Yield orders of all spots: that of the parts; if these are uneven, also large ones first."""
    sizes = problem.sizes
    spots = list(range(len(sizes)))
    yield _repeated(spots, sizes)
    if all(len(set(of_level)) == 1 for of_level in problem.part_sizes):
        return
    order = spots
    for parts in [spots, *problem.part_of_spot]:  # stable sorts: the outermost level decides
        ranks = _ranks_of_parts(parts, sizes)
        keys = [(-ranks[part], part) for part in parts]
        order = sorted(order, key=keys.__getitem__)
    yield _repeated(order, sizes)


def _repeated(spots: Iterable[int], sizes: Sequence[int]) -> list[int]:
    """Return each spot as many times as it has ranks."""
    return [spot for spot in spots for _ in range(sizes[spot])]


def _to_pack(problem: Placements, digits: _Digits) -> list[int]:
    """Return sizes of nested boxes that do not divide the size of every part of a level."""
    boxes = list(itertools.accumulate((size for _, size in digits), int.__mul__))
    packed = []
    for sizes in problem.part_sizes:
        usual = _usual(sizes)
        box = max((box for box in boxes if box <= usual), default=1)
        if any(size % box for size in sizes):
            packed.append(box)
    return list(dict.fromkeys(packed))


def _packed(problem: Placements, box: int) -> list[int]:
    """Return the spots of all ranks, with as many whole boxes on each part as it can hold.

    Ranks that are left over on the parts of one level form boxes within parts of the next level.

    Args:
        problem: cluster and mesh.
        box: number of ranks in one box.
    """
    spots = _repeated(range(len(problem.sizes)), problem.sizes)
    left, boxes = list(range(len(spots))), []
    for parts in problem.part_of_spot:
        rest: list[int] = []
        for _, of_part in itertools.groupby(left, key=lambda index: parts[spots[index]]):
            inside = list(of_part)
            n_fitting = len(inside) // box * box
            boxes += [inside[start : start + box] for start in range(0, n_fitting, box)]
            rest += inside[n_fitting:]
        left = rest
    boxes += [left[start : start + box] for start in range(0, len(left), box)]
    boxes.sort()
    return [spots[index] for index in itertools.chain(*boxes)]


def _ranks_of_parts(parts: Sequence[int], sizes: Sequence[int]) -> list[int]:
    ranks = [0] * (max(parts) + 1)
    for part, size in zip(parts, sizes, strict=True):
        ranks[part] += size
    return ranks


def _usual(sizes: Sequence[int]) -> int:
    """Return the most frequent size; of several, the smallest."""
    times = Counter(sizes)
    return min(times, key=lambda size: (-times[size], size))


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
    choices = [_volumes(sorted(boxes), sizes) for sizes in problem.part_sizes]
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


def _volumes(known: Sequence[int], sizes: Sequence[int]) -> list[int]:
    """Return sizes of boxes to try for a level.

    These are the sizes nearest to the most frequent size of a part, below and above, and the
    greatest common divisor of all sizes.

    Args:
        known: sizes that boxes can have, in ranks.
        sizes: number of ranks on each part.
    """
    usual = _usual(sizes)
    below = max(volume for volume in known if volume <= usual)
    above = min((volume for volume in known if volume >= usual), default=below)
    common = math.gcd(*sizes)
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
    for size in problem.sizes:
        left += size
        count *= math.comb(left, size)
        if count > _SEARCHED_IN_FULL:
            break
    return count


def _arrangements(left: list[int]) -> Iterator[tuple[int, ...]]:
    """Yield all sequences that have each spot as many times as `left` says, the lowest first."""
    spots = _repeated(range(len(left)), left)
    while True:
        yield tuple(spots)
        # The next higher one: the last spot that a higher one follows is replaced by the lowest
        # such spot, and what comes after it ascends.
        at = len(spots) - 2
        while at >= 0 and spots[at] >= spots[at + 1]:
            at -= 1
        if at < 0:
            return
        other = len(spots) - 1
        while spots[other] <= spots[at]:
            other -= 1
        spots[at], spots[other] = spots[other], spots[at]
        spots[at + 1 :] = spots[:at:-1]


def _improved(problem: Placements, placement: _Placement) -> _Placement:
    """Return a placement improved by swaps of two ranks: each time the swap that saves most."""
    (cost,) = problem.costs([placement])
    for _ in range(_IMPROVEMENTS):
        swapped = []
        for one, other in itertools.combinations(range(len(placement)), 2):
            if placement[one] != placement[other]:
                swap = list(placement)
                swap[one], swap[other] = swap[other], swap[one]
                swapped.append(swap)
        costs = problem.costs(swapped)
        if not costs or min(costs) >= cost:
            break
        cost = min(costs)
        placement = swapped[costs.index(cost)]
    return placement
