"""Lists of c10d names of a mesh's process groups, which torch reads, that know when they are used.

torch's collectives take a mesh's group as `mesh._dim_group_names[dim]`. Asking for a name makes a
group that was left for later, and says what is wrong where the groups are gone or never were.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.compiler import is_dynamo_compiling

from meshverse.universe.universe import Universe


class GroupNames(list[str]):
    """c10d names of a mesh's groups, one per axis, some of which have to be looked at before use.

    Where all groups are live, a mesh has a plain list instead. Reading a name by its index counts
    as use of the group: the universe makes it first, or says why it cannot be used. (Not while
    torch.compile traces, which could not follow that.) Iterating over the names does not count.

    Attributes:
        universe: whose groups they are. Whoever makes this list sets it.
    """

    # Set, and not an argument: with cold caches, a list with an `__init__` and a `__dict__` of its
    # own took 35 us to make, where this one takes 13.
    __slots__ = ("universe",)
    universe: Universe

    def __getitem__(self, index: Any) -> Any:
        if is_dynamo_compiling():
            return super().__getitem__(index)
        found = list.__getitem__(self, index)  # twice as fast as super's, but not traceable
        universe = self.universe
        if not isinstance(index, slice) and found not in universe.ready_groups:
            universe.groups.before_use(found)
        return found


class MissingGroups(GroupNames):
    """The names of a mesh without process groups: asking for one must raise, saying what to do.

    Args:
        ndim: number of axes.
        refuse: raises.
    """

    __slots__ = ("_refuse",)

    def __init__(self, ndim: int, refuse: Callable[[], object]) -> None:
        super().__init__([""] * ndim)
        self._refuse = refuse

    def __getitem__(self, index: Any) -> Any:
        if not is_dynamo_compiling() and not isinstance(index, slice):
            self._refuse()
        return super().__getitem__(index)


class PromisedGroups(GroupNames):
    """The names of groups that are not requested yet: of a root that only stands for another mesh.

    Nobody may ever use such a root. So each axis's group is requested when its name is first read.

    Args:
        ndim: number of axes.
        request: requests the group of an axis from the universe, and returns its name.
    """

    __slots__ = ("_request",)

    def __init__(self, ndim: int, request: Callable[[int], str]) -> None:
        super().__init__([""] * ndim)
        self._request = request

    def __getitem__(self, index: Any) -> Any:
        if is_dynamo_compiling():
            return super().__getitem__(index)
        if isinstance(index, slice):
            return list(self)[index]
        self._name(range(len(self))[index])
        return super().__getitem__(index)

    def __iter__(self) -> Iterator[str]:
        return iter([self._name(index) for index in range(len(self))])

    @property
    def are_all_known(self) -> bool:
        """Whether all groups have been requested."""
        return all(list.__getitem__(self, index) for index in range(len(self)))

    def _name(self, index: int) -> str:
        name = list.__getitem__(self, index)
        if not name:
            name = self._request(index)
            list.__setitem__(self, index, name)
        return name
