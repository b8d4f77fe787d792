"""What torch reads of a mesh's process groups: a list of c10d names, guarded where that is needed.

torch's collectives take a mesh's group as `mesh._dim_group_names[dim]`. A guarded list acts when
one of its names is asked for: it makes a group that was left for later, or says what is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

__all__ = ["GuardedNames", "MissingGroups"]


class GuardedNames(list[str]):
    """Group names that must not be used before something is done. Iterating does not count as use.

    Args:
        names: c10d names, one an axis.
        before_use: called with a name before it is given out; may raise.
    """

    def __init__(self, names: Iterable[str], before_use: Callable[[str], object]) -> None:
        super().__init__(names)
        self._before_use = before_use

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        for name in found if isinstance(index, slice) else [found]:
            self._before_use(name)
        return found


class MissingGroups(GuardedNames):
    """The names of a mesh without process groups: asking for one must raise, saying what to do.

    Args:
        ndim: number of axes.
        refuse: raises.
    """

    def __init__(self, ndim: int, refuse: Callable[[str], object]) -> None:
        super().__init__([""] * ndim, refuse)
