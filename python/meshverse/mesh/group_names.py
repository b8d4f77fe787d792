"""What torch reads of a mesh's process groups: a list of c10d names that knows when it is used.

torch's collectives take a mesh's group as `mesh._dim_group_names[dim]`. Asking for a name makes a
group that was left for later, and says what is wrong where the groups are gone or never were.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator
from typing import Any

from torch.compiler import is_compiling

__all__ = ["GroupNames", "MissingGroups", "PromisedGroups"]


class GroupNames(list[str]):
    """c10d names of a mesh's groups, one per axis.

    Reading a name by its index counts as use of the group. Iterating over the names does not.

    Args:
        names: c10d names.
        ready: names of the groups that need nothing before they are used.
        before_use: called with any other name before it is given out; may raise. Not while
            torch.compile traces, which could not follow it.
    """

    def __init__(
        self, names: Iterable[str], ready: Container[str], before_use: Callable[[str], object]
    ) -> None:
        list.__init__(self, names)  # as below
        self._ready = ready
        self._before_use = before_use

    def __getitem__(self, index: Any) -> Any:
        if is_compiling():
            return super().__getitem__(index)
        found = list.__getitem__(self, index)  # twice as fast as super's, but not traceable
        if not isinstance(index, slice) and found not in self._ready:
            self._before_use(found)
        return found


class MissingGroups(GroupNames):
    """The names of a mesh without process groups: asking for one must raise, saying what to do.

    Args:
        ndim: number of axes.
        refuse: raises.
    """

    def __init__(self, ndim: int, refuse: Callable[[str], object]) -> None:
        super().__init__([""] * ndim, (), refuse)


class PromisedGroups(GroupNames):
    """The names of groups that are not asked for yet: of a root that only stands for another mesh.

    Nobody may ever use such a root. So its groups are asked for when a name is first read.

    Args:
        ndim: number of axes.
        keep: asks the universe for the groups, and gives their names.
    """

    def __init__(self, ndim: int, keep: Callable[[], list[str]]) -> None:
        super().__init__([""] * ndim, (), lambda _: None)
        self._keep = keep

    def __getitem__(self, index: Any) -> Any:
        return self._keep()[index]

    def __iter__(self) -> Iterator[str]:
        return iter(self._keep())
