"""Copies and pickles of a mesh, and of what a subclass adds to it."""

from __future__ import annotations

import copy
import copyreg
import functools
from typing import Any, ClassVar, cast

from typing_extensions import Self

from meshverse.layouts.computed import computed

from .base import ATTRIBUTES
from .membership import MemberMesh

__all__ = ["CopyableMesh"]


class CopyableMesh(MemberMesh):
    """A mesh of which a copy is the same object, as a universe has each of its meshes once.

    A mesh of a user's subclass is really copied, as in stock, with the attributes that the subclass
    or its user set. Pickle finds how a mesh is saved in its dispatch table, where `saved_mesh` puts
    it.
    """

    decouple_backend_at_save: ClassVar[bool] = False
    """Whether meshes that are saved come back apart from this world: without its process groups,
    and unequal to its meshes, until `bind()`. Otherwise a loaded mesh finds its universe again."""

    def __copy__(self) -> Self:
        copied = self._twin()
        if copied is not self:
            copied.__setstate__(self.__getstate__())
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        copied = memo[id(self)] = self._twin()
        if copied is not self:
            copied.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return copied

    def _twin(self) -> Self:
        """This mesh once more, without what a subclass adds; the same object if it is interned."""
        if self.decouple_backend_at_save:
            load, arguments, *_ = self._reduced()
            return cast("Self", load(*arguments))
        if type(self) is self.class_of_derived:
            return self
        twin = self._made(self._universe, self._description, self.group_names)
        if not twin.has_groups:  # so that bind() finds it
            self._universe.keep(twin)
        return twin

    def _reduced(self) -> Any:
        reduce: Any = copyreg.dispatch_table[self.class_of_derived]
        return reduce(self)

    # Called for subclasses only: pickle finds our class itself in its dispatch table.
    def __reduce_ex__(self, protocol: Any) -> Any:
        if type(self).__reduce__ is not object.__reduce__:  # the subclass defines its own way
            return self.__reduce__()
        return self._reduced()

    def __getstate__(self) -> dict[str, Any]:
        """What a subclass or its user set on this mesh; `save_mesh` saves all else."""
        own = _own_attributes(type(self))
        return {name: value for name, value in vars(self).items() if name not in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take what `__getstate__` gave.

        Raises:
            ValueError: it holds what a mesh of ours has itself, which is not saved in this way.
        """
        own = sorted(_own_attributes(type(self)) & set(state))
        if own:
            raise ValueError(
                f"A saved {type(self).__name__} sets {own}, which the mesh has itself: a subclass "
                "may save attributes of its own only."
            )
        vars(self).update(state)


@functools.cache
def _own_attributes(mesh_class: type) -> frozenset[str]:
    """Names of all that a mesh has itself."""
    members = [item for base in mesh_class.__mro__ for item in vars(base).items()]
    return ATTRIBUTES.union(name for name, value in members if isinstance(value, computed))
