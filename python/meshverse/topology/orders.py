"""Looking for the order of ranks that costs least.

Even clusters are the usual ones: there the best placement cuts the mesh into equal boxes, one for
each node, which are cut out of equal larger boxes, one for each domain and switch. Those chains of
boxes are searched in full. For uneven clusters the same placements are tried with the ranks of the
cluster in several orders, and small ones are searched further, in full where that is possible.

All ranks search in the same way, with the same result: nothing depends on time or chance.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator, Sequence

import torch

from .cost import Placements

__all__ = ["best_placement", "candidates"]

_Digits = list["tuple[int, int]"]  # (axis, size), the one that varies fastest first
_Box = tuple[int, ...]  # its size along each axis

_SEARCHED_IN_FULL = 40_000  # placements
_IMPROVED = 40  # ranks up to which swaps are tried
_IMPROVEMENTS = 60
_STARTS = 4  # placements that swaps begin with
_EVALUATED = 1_000_000  # ranks of all placements that are tried, together
_RELABELLED = 16  # placements whose slices are put in order
_LARGEST_CHAIN = 3_000  # boxes up to which chains of boxes are searched


def best_placement(problem: Placements) -> torch.Tensor:
    """The placement that costs least of those that were looked at; the identity if none is better.

    Returns:
        The spot at each position, shape (world size,).
    """
    with _one_thread():
        return _best_placement(problem)


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Have torch use one thread: ranks that share a node would wait for each other's threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _best_placement(problem: Placements) -> torch.Tensor:
    identity = problem.spot_of_rank
    tried = torch.stack([identity, *candidates(problem)])
    costs = problem.costs(tried)
    if _count(problem) <= _SEARCHED_IN_FULL:
        everything = torch.tensor(list(_arrangements(problem.sizes.tolist())))
        found = _most_ascending(problem, _cheapest(everything, problem.costs(everything)))
    elif len(identity) <= _IMPROVED:
        starts = tried[costs.argsort(stable=True)[:_STARTS]]
        improved = torch.stack([_improved(problem, start) for start in starts])
        found = _most_ascending(problem, _cheapest(improved, problem.costs(improved)))
    else:
        found = _most_ascending(problem, _cheapest(tried, costs))
    cost_found, cost_identity = problem.costs(torch.stack([found, identity])).tolist()
    return found if cost_found < cost_identity else identity


def _cheapest(placements: torch.Tensor, costs: torch.Tensor) -> torch.Tensor:
    return placements[costs == costs.min()]


def _most_ascending(problem: Placements, placements: torch.Tensor) -> torch.Tensor:
    """Of placements that cost the same, the one whose ranks descend along axes least often.

    Where its ranks ascend along an axis, groups have the order that they would have anyway.
    """
    several = torch.cat([_relabelled(problem, placements[:_RELABELLED]), placements])
    grids = problem.ranks(several).view(-1, *problem.shape)
    descents = torch.zeros(len(several), dtype=torch.int64)
    for axis in range(1, grids.ndim):
        descents += (grids.diff(dim=axis) < 0).flatten(1).sum(dim=1)
    return several[descents.argmin()]


def _relabelled(problem: Placements, placements: torch.Tensor) -> torch.Tensor:
    """The placements with the slices along each axis in the order of their lowest ranks.

    The groups have the same spots as before, so it costs the same.
    """
    for index, size in enumerate(problem.shape, start=1):
        grids = problem.ranks(placements).view(-1, *problem.shape).movedim(index, 1)
        order = grids.reshape(len(placements), size, -1).amin(dim=2).argsort(dim=1)
        rows = torch.arange(len(placements))[:, None]
        slices = placements.view(-1, *problem.shape).movedim(index, 1)[rows, order]
        placements = slices.movedim(1, index).reshape(len(placements), -1)
    return placements


# --- placements that are tried ------------------------------------------------------------------


def candidates(problem: Placements) -> list[torch.Tensor]:
    """Placements that may be good; at least some, however large the world is."""
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
    """The positions of a mesh in the order in which digits count them."""
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    positions = torch.zeros(1, dtype=torch.int64)
    for axis, size in digits:
        positions = (torch.arange(size).unsqueeze(1) * strides[axis] + positions).flatten()
        strides[axis] *= size
    return positions


def _spot_sequences(problem: Placements) -> Iterator[torch.Tensor]:
    """The spots of all ranks, those of a part together: as they are numbered; large parts first."""
    spots = torch.arange(problem.part_of_spot.shape[1])
    sizes = problem.sizes
    yield spots.repeat_interleave(sizes)
    if all(bool((of_level == of_level[0]).all()) for of_level in _part_sizes(problem)):
        return
    order = spots
    for parts in [spots, *problem.part_of_spot]:  # stable: the outermost level decides
        ranks = torch.zeros(int(parts.max()) + 1, dtype=torch.int64).index_add(0, parts, sizes)
        order = order[parts[order].argsort(stable=True)]
        order = order[ranks[parts[order]].argsort(descending=True, stable=True)]
    yield order.repeat_interleave(sizes[order])


def _to_pack(problem: Placements, digits: _Digits) -> list[int]:
    """Sizes of boxes, inside each other, of which parts of the cluster hold some and a rest."""
    boxes = list(itertools.accumulate((size for _, size in digits), int.__mul__))
    packed = []
    for sizes in _part_sizes(problem):
        usual = int(sizes.mode().values)
        box = max((box for box in boxes if box <= usual), default=1)
        if any(size % box for size in sizes.tolist()):
            packed.append(box)
    return list(dict.fromkeys(packed))


def _packed(problem: Placements, box: int) -> torch.Tensor:
    """The spots of all ranks, so that each part has as many whole boxes as it can hold.

    What is left on the parts of one level makes up boxes within the parts of the next.

    Args:
        problem: whose.
        box: ranks in one box.
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
    """Ranks of each part, level by level."""
    sizes = problem.sizes
    return [
        torch.zeros(int(parts.max()) + 1, dtype=torch.int64).index_add(0, parts, sizes)
        for parts in problem.part_of_spot
    ]


def _by_weight(problem: Placements) -> list[int]:
    """The axes, those with the most traffic first; of equal ones the last axis."""
    return sorted(range(len(problem.shape)), key=lambda axis: (-problem.weights[axis], -axis))


def _stacks(problem: Placements) -> Iterator[_Digits]:
    """Whole axes inside each other, the one that has the most traffic innermost, and all others."""
    for axes in itertools.islice(itertools.permutations(_by_weight(problem)), 720):
        yield [(axis, problem.shape[axis]) for axis in axes]


def _chains(problem: Placements) -> Iterator[_Digits]:
    """The cheapest boxes inside boxes, for several sizes of boxes at each level."""
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
        for place, (cost, chain) in enumerate(chains):
            digits = []
            for inner, outer in itertools.pairwise([(1,) * len(shape), *chain, shape]):
                digits += [(a, outer[a] // inner[a]) for a in axes if outer[a] > inner[a]]
            found.append((place, cost, len(found), digits))
    yield from (digits for *_, digits in sorted(found))  # the cheapest of all volumes first


def _volumes(known: Sequence[int], sizes: torch.Tensor) -> list[int]:
    """Sizes of boxes that suit parts of these sizes: the most usual, the common divisor, near ones.

    Args:
        known: sizes that boxes can have.
        sizes: of the parts, in ranks.
    """
    usual = int(sizes.mode().values)
    below = max(volume for volume in known if volume <= usual)
    above = min((volume for volume in known if volume >= usual), default=below)
    common = math.gcd(*sizes.tolist())
    return list(dict.fromkeys(v for v in (below, above, common) if v in (below, above, *known)))


def _cheapest_chains(
    problem: Placements, boxes: Sequence[Sequence[_Box]]
) -> list[tuple[float, tuple[_Box, ...]]]:
    """For each box of the last level, the cheapest chain of boxes inside each other up to it."""
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
    """What leaves the parts of one level if each has a box of the mesh, but for the factor."""
    world_size = math.prod(problem.shape)
    axes = zip(problem.shape, problem.weights, box, strict=True)
    return sum(weight * world_size / inside for size, weight, inside in axes if inside < size)


def _divisors(number: int) -> list[int]:
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


# --- small worlds -------------------------------------------------------------------------------


def _count(problem: Placements) -> int:
    """How many different placements there are; some number above the limit if there are many."""
    count, left = 1, 0
    for size in problem.sizes.tolist():
        left += size
        count *= math.comb(left, size)
        if count > _SEARCHED_IN_FULL:
            break
    return count


def _arrangements(left: list[int]) -> Iterator[tuple[int, ...]]:
    """All sequences that have each spot as often as is left of it."""
    if not any(left):
        yield ()
        return
    for spot, count in enumerate(left):
        if count:
            rest = [*left[:spot], count - 1, *left[spot + 1 :]]
            yield from ((spot, *others) for others in _arrangements(rest))


def _improved(problem: Placements, placement: torch.Tensor) -> torch.Tensor:
    """A placement after swaps of two ranks, each the one that saves most, while any does."""
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
