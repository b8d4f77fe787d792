"""Asking the universe for the process groups of a mesh's axes."""

from __future__ import annotations

from collections.abc import Sequence

from meshverse._core import Layout
from meshverse.layouts.derivation import MeshDescription
from meshverse.options.overrides import Override

from .rank_order import note_order
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
        made = groups.get_or_make(requests, call, layout, first=first)
        rank_map = self._universe.rank_map
        if not self._preserve_rank_order and not (layout.is_sorted() and rank_map.is_sorted()):
            self._note_order(layout, names, first)
        return [group.name for group in made if group.name is not None]

    def _note_order(self, layout: Layout, names: Sequence[str], first: int) -> None:
        universe = self._universe
        ascends = universe.groups.requests.ascends
        pairs = zip(layout.axes[first : first + len(names)], names, strict=True)
        if (sorted_by_torch := [name for axis, name in pairs if not ascends(axis)]) and (
            universe.world is not None
        ):
            note_order(universe.world, self, universe.rank_map, sorted_by_torch)

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
