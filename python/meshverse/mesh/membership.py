"""How meshes come into a universe: derived from others, under other tags, or bound."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, ClassVar, cast

from typing_extensions import Self

from meshverse.layouts.derivation import MeshDescription
from meshverse.options.isolation import current_tag, tag_inside
from meshverse.universe.universe import Universe

from .group_names import PromisedGroups
from .requests import RequestingMesh

__all__ = ["MemberMesh"]


class MemberMesh(RequestingMesh):
    """A mesh as its universe knows it, see `universe.Member`."""

    class_of_derived: ClassVar[type[MemberMesh]]

    @classmethod
    def _in_universe(
        cls, universe: Universe, description: MeshDescription, group_names: Sequence[str] | None
    ) -> Self:
        """The one mesh of a universe with this description and these groups (None: without).

        Of `class_of_derived`, whatever subclass it is derived from, as in stock.
        """
        mesh: Any = object.__new__(cls.class_of_derived)
        mesh._describe(description)
        mesh._enter(universe)
        mesh._take_group_names(group_names)
        key = description, None if group_names is None else tuple(group_names)
        interned: Self = universe.intern(mesh, key)
        return interned

    def _derive(self, description: MeshDescription, group_names: Sequence[str] | None) -> Self:
        """The mesh of my universe with this description and these groups.

        Inside an `isolate` block it is that mesh under the block's tag.
        """
        block = current_tag()
        if not block:
            return self._in_universe(self._universe, description, group_names)
        tags = [tag_inside(block, tag) for tag in description.axis_tags]
        return self._derive_under(tags, description, group_names)

    def _derive_under(
        self, tags: Sequence[str], description: MeshDescription, group_names: Sequence[str] | None
    ) -> Self:
        """The mesh of my universe with this description, but under these isolation tags."""
        group_names = self._group_names_under(tags, description, group_names)
        return self._in_universe(self._universe, description.with_tags(tags), group_names)

    def under(self, tags: Sequence[str]) -> Self:
        """This mesh under other isolation tags, to be a root: its groups are made when used."""
        mesh = object.__new__(cast("type[Self]", self.class_of_derived))
        mesh._describe(self._description.with_tags(tags))
        mesh._enter(self._universe)
        mesh.take_root(None)
        self._universe.note(mesh)
        if self.group_names:

            def request(index: int) -> str:
                with contextlib.suppress(AttributeError):
                    del mesh.key_digests  # of no groups, if they were asked for before
                axis, description = slice(index, index + 1), self._description
                if description.axis_tags[index] == tags[index]:
                    return str(self._dim_group_names[index])
                names = self._universe.groups.request_tagged(
                    description.layout.select([index]),
                    description.labels[axis],
                    list.__getitem__(self._dim_group_names, axis),
                    tags[axis],
                )
                return str(names[0].name)

            mesh._dim_group_names = names = PromisedGroups(self.ndim, request)
            names.universe = self._universe
        else:
            mesh._take_group_names(self.group_names)
        return mesh

    def join(self, universe: Universe) -> None:
        """Enter a universe, for `Universe.bind`: on its groups, made where it has none."""
        block = current_tag()
        tags = [tag_inside(block, tag) for tag in self._description.axis_tags]
        self._description = self._description.with_tags(tags)
        # These may have been computed already, for another rank, universe or tags.
        self.forget_place()
        for computed_before in ("mesh", "compile_guard", "key_digests", "_layout"):
            with contextlib.suppress(AttributeError):
                delattr(self, computed_before)
        self._enter(universe)
        names = None
        if self._may_have_groups:
            names = self._group_names_for(self.layout, self._labels(), (), tags, call="bind")
        self._take_group_names(names)
        universe.keep(self)
