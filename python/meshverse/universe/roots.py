"""The root meshes of one universe, and the flattened meshes that torch looks up at them.

torch keeps flattened meshes by name, at the root of the mesh they were flattened from. Meshes under
other isolation tags than the universe's first mesh must not find its flattened meshes, so they have
a root of their own: the first mesh under their tags. Its groups are made when they are used.

Example: a program flattens `mesh["dp", "cp"]` to "dp_cp", and again inside `isolate("a")`. Both
flattened meshes have that name. `mesh.get_group("dp_cp")` finds the first one at the root `mesh`. A
mesh under the tag "a" finds the second one, at the root that stands for `mesh` under "a".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshverse._core import AxisLayout
from meshverse.layouts.derivation import MeshDescription, check_names_at_root
from meshverse.options.isolation import merge_tags, tag_parts

if TYPE_CHECKING:
    from meshverse.device_mesh.device_mesh import DeviceMesh

__all__ = ["Roots"]


class Roots:
    """Roots and flattened meshes of one universe. The universe's lock protects it.

    Attributes:
        first: the first mesh of the universe, the root of all that is under its tags.
    """

    def __init__(self) -> None:
        self.first: DeviceMesh | None = None
        self._later_axes: dict[str, list[AxisLayout]] = {}  # of root meshes after it, by name
        # The others, by the tags of their axes and those of the meshes they are roots of.
        self._others: dict[tuple[tuple[str, ...], frozenset[str]], DeviceMesh] = {}
        self._flattened: dict[tuple[str, str], DeviceMesh] = {}  # by name and tag

    def of(self, mesh: DeviceMesh) -> DeviceMesh:
        """The root of a mesh of this universe. The first mesh that comes is the first root."""
        first = self.first
        if first is None:
            self.first = mesh
            return mesh
        tags, parts = self._tags_of_root(first, mesh), _parts(mesh)
        if tags == first.description.axis_tags and parts <= _parts(first):
            return first
        root = self._others.get((tags, parts))
        if root is None:
            root = self._others[tags, parts] = first._under(tags)
            for (name, tag), flattened in self._flattened.items():
                if parts.issuperset(tag_parts(tag)):
                    root._add_flattened(name, flattened)
        return root

    @staticmethod
    def _tags_of_root(first: DeviceMesh, mesh: DeviceMesh) -> tuple[str, ...]:
        """The tags of a mesh's root, one for each axis of the first mesh.

        An axis that the mesh has too keeps its tag. Every other axis gets all tags of the mesh,
        merged into one.

        Example: the first mesh has axes pp, dp and tp without tags. A mesh of dp alone, under "a",
        has the root whose axes are all under "a".
        """
        own, tags = first.description.axis_tags, mesh.description.axis_tags
        axes = list(zip(first.description.labels, first.layout, strict=True))
        known = dict(zip(zip(mesh.description.labels, mesh.layout, strict=True), tags, strict=True))
        agrees = all(known.get(axis, tag) == tag for axis, tag in zip(axes, own, strict=True))
        if agrees and _parts(mesh) <= _parts(first):
            return own
        merged = merge_tags(tags)
        return tuple(known.get(axis, merged) for axis in axes)

    def check_names(self, description: MeshDescription) -> None:
        """Check the names of a root mesh that is to come after the first.

        Raises:
            ValueError: one of them is that of a flattened mesh of other ranks.
        """
        for name, axis in zip(description.axis_names or (), description.layout, strict=False):
            for (known_name, _), known in self._flattened.items():
                if known_name == name:
                    flattened = known.layout[0]
                    check_names_at_root(name, axis, flattened, "a flattened mesh", self.first)

    def note_names(self, description: MeshDescription) -> None:
        """Note the names of a root mesh that came after the first: no other axis gets them."""
        names = description.axis_names or ()
        for name, axis in zip(names, description.layout, strict=False):
            self._later_axes.setdefault(name, []).append(axis)

    def check_flattened_name(self, name: str, axis: AxisLayout) -> None:
        """Check the name of a flattened axis.

        Raises:
            ValueError: a root mesh that came after the first has another axis of this name.
        """
        for later in self._later_axes.get(name, ()):
            check_names_at_root(name, axis, later, "an axis of another root mesh", self.first)

    def flattened(self, name: str, tag: str) -> DeviceMesh | None:
        """The flattened mesh of this name under this tag, if there is one."""
        return self._flattened.get((name, tag))

    def add_flattened(self, name: str, tag: str, flattened: DeviceMesh) -> None:
        """Note a flattened mesh, at the roots of all meshes it may be flattened from."""
        self._flattened[name, tag] = flattened
        parts = frozenset(tag_parts(tag))
        if self.first is not None and parts <= _parts(self.first):
            self.first._add_flattened(name, flattened)
        for (_, seen), root in self._others.items():
            if parts <= seen:
                root._add_flattened(name, flattened)


def _parts(mesh: DeviceMesh) -> frozenset[str]:
    tags = mesh.description.axis_tags
    return frozenset(part for tag in set(tags) for part in tag_parts(tag))
