"""The O(world size) forms of a rank map that torch reads: built at first read, then shared."""

from __future__ import annotations

import weakref
from typing import Any, cast

import torch

from meshverse._core import RankArray, RankGroups, RankMap
from meshverse._torch_compat.tracing import outside_torch_modes
from meshverse.descriptors import computed
from meshverse.locks import state_lock


class RankTuple(tuple[int, ...]):
    """A tuple of ranks that keeps its hash, and equals itself in O(1).

    torch hashes and compares such tuples inside training steps. Equal rank maps share one object
    (see `rank_views`), so hashing, after the first time, and comparing are O(1). Their results are
    those of a plain tuple.
    """

    _hash: int | None = None

    def __eq__(self, other: object) -> bool:
        return self is other or tuple.__eq__(self, cast("tuple[int, ...]", other)) is True

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = tuple.__hash__(self)
        return self._hash

    def __deepcopy__(self, memo: dict[int, Any]) -> RankTuple:
        return self  # as with any tuple of integers; torch.compile's guards compare with this copy

    def __reduce__(self) -> tuple[Any, ...]:
        return tuple, (tuple(self),)


class HashedRanks:
    """The hash of a tuple of ranks without the tuple, for a key that is only hashed."""

    def __init__(self, rank_map: RankMap) -> None:
        same = _CORE_HASHES_AS_PYTHON
        self._hash = rank_map.tuple_hash() if same else hash(tuple(rank_map.ranks().tolist()))

    def __hash__(self) -> int:
        return self._hash


# Whether the core's hash of a tuple is that of this Python: another version may hash differently.
_CORE_HASHES_AS_PYTHON = RankMap.from_ranks([5, 2, 8]).tuple_hash() == hash((5, 2, 8))


class RankViews:
    """The forms of a rank map that torch's own code reads from a mesh: tensor, tuple and hash.

    Every mesh and universe with the same ranks shares them. Each costs O(world size), once.
    """

    def __init__(self, rank_map: RankMap) -> None:
        # A weak reference: `_views` keeps this object for as long as the rank map lives.
        self._rank_map = weakref.ref(rank_map)

    def _ranks(self) -> RankArray:
        rank_map = self._rank_map()
        assert rank_map is not None, "whoever reads a view has the rank map"
        return rank_map.ranks()

    @computed
    def tensor(self) -> torch.Tensor:
        """Return the global rank at every position: an int32 CPU tensor of shape (n,)."""
        with outside_torch_modes():
            return torch.frombuffer(self._ranks(), dtype=torch.int32)

    @computed
    def hashed(self) -> HashedRanks:
        """Return an object that has the same hash as `tuple`."""
        rank_map = self._rank_map()
        assert rank_map is not None
        return HashedRanks(rank_map)

    @computed
    def tuple(self) -> RankTuple:
        """Return the global rank at every position, as a tuple."""
        return RankTuple(self._ranks().tolist())


_views: weakref.WeakKeyDictionary[RankMap, RankViews] = weakref.WeakKeyDictionary()


def rank_views(rank_map: RankMap) -> RankViews:
    """Return the views of a rank map; the same object for equal rank maps."""
    views = _views.get(rank_map)
    if views is None:
        with state_lock.held:
            views = _views.setdefault(rank_map, RankViews(rank_map))
    return views


@outside_torch_modes()
def ascends(groups: RankGroups) -> bool:
    """Return whether the ranks ascend within each group. O(number of ranks)."""
    within, between = groups.axis, groups.offsets
    ranks = rank_views(groups.rank_map).tensor.as_strided(
        (*between.sizes, *within.sizes), (*between.strides, *within.strides)
    )
    each = ranks.reshape(groups.n_groups, groups.group_size)
    return not bool((each[:, 1:] < each[:, :-1]).any())
