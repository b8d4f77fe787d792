"""Asking the universe for the process groups of a mesh's axes."""

from __future__ import annotations

from collections.abc import Sequence

from meshverse._core import Layout
from meshverse.layouts.derivation import MeshDescription
from meshverse.options.overrides import Override

from .torch_view import ViewedMesh

__all__ = ["RequestingMesh"]


class RequestingMesh(ViewedMesh):
    """A mesh that asks for process groups: of new axes, or of its axes under other tags."""

    def _group_names_for(
        self,
        layout: Layout,
        names: Sequence[str],
        overrides: Sequence[Override],
        tags: Sequence[str],
        *,
        call: str,
        first: int = 0,
    ) -> list[str]:
        """Names of my groups along some axes, made where needed; none outside the rank map.

        `layout` is that of the mesh they are for, `names` are those of its axes from `first` on.
        Overrides and tags have one entry per axis, or are empty if no axis has one.
        """
        if not (overrides or tags or self._preserve_rank_order):
            known = self._universe.known_names(layout, names, first)
            if known is not None:
                return known
        groups = self._universe.groups
        requests = groups.requests.of_axes(
            layout, names, overrides, tags, self._preserve_rank_order, first
        )
        made = groups.get_or_make(requests, call, layout)
        return [group.name for group in made if group.name is not None]

    def _group_names_under(
        self, tags: Sequence[str], description: MeshDescription, group_names: Sequence[str] | None
    ) -> list[str] | None:
        """Names of groups like these, where the axes shall have another tag than they have."""
        if group_names is None:
            return None
        pairs = enumerate(zip(description.axis_tags, tags, strict=True))
        changed = [index for index, (before, after) in pairs if before != after]
        groups = self._universe.groups.request_tagged(
            description.layout.select(changed),
            [description.labels[index] for index in changed],
            [group_names[index] for index in changed] if group_names else [],
            [tags[index] for index in changed],
        )
        names = list(group_names)
        for index, group in zip(changed, groups, strict=True):
            if group.name is not None:
                names[index] = group.name
        return names
