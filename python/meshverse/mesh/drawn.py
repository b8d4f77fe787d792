"""A mesh as a picture."""

from __future__ import annotations

from typing import cast

from meshverse.nearest import did_you_mean
from meshverse.pictures import Picture, PicturedGroups, PicturedView
from meshverse.report.pictured import node_size_here

from .membership import MemberMesh

__all__ = ["DrawnMesh"]


class DrawnMesh(MemberMesh):
    """A mesh that can be drawn."""

    def draw(self, axis: str | int | None = None, *, node_size: int | None = None) -> Picture:
        """This mesh as a picture: the ranks by node, coloured by group, mine outlined.

        `print()` shows it as text, `.show()` in colours (with rich), a notebook as SVG; `.to_svg()`
        and `.to_html()` give it to write to a file. Of a submesh, all groups of its universe along
        these axes are drawn. No group is made for it. O(ranks), when it is shown.

        Args:
            axis: name or index of the axis, or name of a flattened axis; by default a panel for
                each axis of this mesh.
            node_size: ranks 0 to n-1 are on the first node, and so on. By default what torchrun
                says (`LOCAL_WORLD_SIZE`); where nothing does, ranks are drawn in lines of eight.

        Raises:
            KeyError: no such name.
            IndexError: no such index.
            ValueError: a node size that is not positive.
        """
        labels = list(self._labels())
        if isinstance(axis, str):
            if axis not in labels:
                return self._draw_flattened(axis, node_size)
            shown = [labels.index(axis)]
        elif axis is None:
            shown = list(range(len(labels)))
        elif -len(labels) <= axis < len(labels):
            shown = [axis % len(labels)]
        else:
            raise IndexError(f"There is no axis {axis} to draw: the mesh has {len(labels)}.")
        title = ", ".join(f"{label}={size}" for label, size in zip(labels, self.shape, strict=True))
        keeps_order = self._description.preserve_rank_order
        return Picture(
            title=f"Mesh {title} of {self._universe.rank_map}",
            rank_map=self._universe.rank_map,
            rank=self._universe.rank,
            groups=tuple(PicturedGroups((labels[i],), self.layout[i], keeps_order) for i in shown),
            views=(PicturedView(title, tuple((labels[i], at) for at, i in enumerate(shown))),),
            node_size=node_size_here() if node_size is None else node_size,
        )

    def _draw_flattened(self, name: str, node_size: int | None) -> Picture:
        flattened, labels = self._root().flattened, list(self._labels())
        if name not in flattened:
            known = [*labels, *flattened]
            raise KeyError(
                f"There is no axis {name!r} to draw: the axes are {labels}, the flattened axes "
                f"{list(flattened)}.{did_you_mean(name, known)}"
            )
        return cast("DrawnMesh", flattened[name]).draw(0, node_size=node_size)
