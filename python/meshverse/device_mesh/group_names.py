"""Lists of the c10d names of a mesh's process groups; reading a name counts as use of the group.

torch's collectives get a mesh's group by reading `mesh._dim_group_names[dim]`. If that group is
lazy, the read creates it; if the mesh has no groups or they have ended, it raises an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.compiler import is_dynamo_compiling

from meshverse._torch_compat.c10d_groups import find_c10d_group
from meshverse._torch_compat.one_graph import is_dynamo_at_work
from meshverse._torch_compat.tracing import let_graphs_read, not_traced
from meshverse.groups.registry import GroupRegistry
from meshverse.universe.universe import Universe


class GroupNames(list[str]):
    """List of the c10d names of a mesh's groups, one per axis.

    Used for meshes with a group that is lazy or suspended or has ended; other meshes have a plain
    list. (If the default group can be reconfigured, all meshes have this one.) When a name is read
    by its index, the universe creates the group if it is lazy, or raises the error that says why it
    cannot be used. While torch.compile traces, reading the name of a lazy group raises an error
    instead of creating it. Iterating and slicing do neither (but see `DeferredGroupNames`).

    Attributes:
        universe: universe of the groups. The code that creates this list sets it.
    """

    # An attribute instead of an argument of `__init__`: with cold caches, creating a list with an
    # `__init__` and a `__dict__` took 35 us, and creating this one takes 13.
    __slots__ = ("universe",)
    universe: Universe

    def __getitem__(self, index: Any) -> Any:
        if is_dynamo_compiling():
            traced = super().__getitem__(index)
            if isinstance(traced, str):
                check_in_graph(traced)
            return traced
        found = list.__getitem__(self, index)  # twice as fast as super's, but not traceable
        universe = self.universe
        if not isinstance(index, slice) and found not in universe.ready_groups:
            universe.groups.before_use(found)
        return found


@not_traced
def check_in_graph(name: str) -> None:
    """Check that a graph of torch.compile can use the group of this c10d name.

    Raises:
        RuntimeError: it is a lazy group that is not created yet, or cannot be used any more.
    """
    group = GroupRegistry.find_current(name)
    if group is not None:
        group.check_in_graph()
    elif find_c10d_group(name) is None:
        raise RuntimeError(
            f"The process group {name} of a mesh in a compiled function has ended, with its "
            "universe or world. Create the mesh again, or call meshverse.revive() if the world "
            "ended."
        )


class NoGroupNames(GroupNames):
    """The names of a mesh without process groups: reading one raises an error.

    Args:
        ndim: number of axes.
        refuse: function that raises the error, which says how to get groups.
    """

    __slots__ = ("_refuse",)

    def __init__(self, ndim: int, refuse: Callable[[], object]) -> None:
        super().__init__([""] * ndim)
        self._refuse = refuse

    def __getitem__(self, index: Any) -> Any:
        if not is_dynamo_compiling() and not isinstance(index, slice):
            self._refuse()
        return super().__getitem__(index)


def prepare_for_graph() -> None:
    """Let a graph of torch.compile read the names of a mesh that it derives from another one.

    Does nothing if torch.compile is not tracing.
    """
    if is_dynamo_at_work():
        let_graphs_read(GroupNames, _names_in_graph)
        let_graphs_read(NoGroupNames, _names_in_graph)


def _names_in_graph(names: GroupNames) -> list[str]:
    if isinstance(names, NoGroupNames):
        names[0]  # raises
    found = list(names)
    for name in found:
        check_in_graph(name)
    return found


class DeferredGroupNames(GroupNames):
    """The names of groups that the universe is asked for only when a name is first read.

    Meshes under another isolation tag get a root mesh under that tag. A program may never use the
    groups of that root, so they are not requested when it is created.

    Args:
        ndim: number of axes.
        request: function that requests the group of an axis from the universe, and returns its
            name.
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
