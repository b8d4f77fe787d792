"""The meshes of one universe: each of them once, their roots, and the flattened meshes.

torch keeps flattened meshes by name, at the root of the mesh they were flattened from. Meshes under
other isolation tags than the universe's first mesh must not find its flattened meshes, so they have
a root of their own: the first mesh under their tags. Its groups are made when they are used.

Example: a program flattens `mesh["dp", "cp"]` to "dp_cp", and again inside `isolate("a")`. Both
flattened meshes have that name. `mesh.get_group("dp_cp")` finds the first one at the root `mesh`. A
mesh under the tag "a" finds the second one, at the root that stands for `mesh` under "a".
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterator
from typing import TYPE_CHECKING

from meshverse._core import AxisLayout
from meshverse.layouts.derivation import MeshDescription, check_names_at_root
from meshverse.options.isolation import merge_tags, tag_parts
from meshverse.world.weak_registry import WeakRegistry

if TYPE_CHECKING:
    from meshverse.device_mesh.device_mesh import DeviceMesh

    from .universe import Universe


class UniverseMeshes:
    """The meshes of one universe.

    Args:
        keeps_coordinates: whether meshes can keep this rank's coordinate.
        has_plain_names: whether meshes may give torch plain lists of names of groups.

    Attributes:
        root: the first mesh of the universe, the root of all that is under its tags.
        keeps_coordinates: false where this process may be another rank later.
        has_plain_names: false while one of the groups has to be looked at before it is used.
    """

    def __init__(self, *, keeps_coordinates: bool, has_plain_names: bool) -> None:
        self.root: DeviceMesh | None = None
        self.keeps_coordinates, self.has_plain_names = keeps_coordinates, has_plain_names
        self._may_keep_coordinates = keeps_coordinates
        self._lock = threading.RLock()  # held to change the others below; readers copy them
        self._interned: dict[Hashable, DeviceMesh] = {}
        self._others: WeakRegistry[DeviceMesh] = WeakRegistry()  # meshes that are not among these
        # Of root meshes after it, by name: where an axis stands in the first of them that has it.
        self._later_axes: dict[str, dict[AxisLayout, int]] = {}
        # The other roots, by the tags of their axes and those of the meshes they are roots of.
        self._other_roots: dict[tuple[tuple[str, ...], frozenset[str]], DeviceMesh] = {}
        self._flattened: dict[tuple[str, str], DeviceMesh] = {}  # by name and tag

    def __iter__(self) -> Iterator[DeviceMesh]:
        """Iterate over the interned meshes, in the order in which they were made."""
        return iter(list(self._interned.values()))

    def __len__(self) -> int:
        return len(self._interned)

    def find(self, key: Hashable) -> DeviceMesh | None:
        """Return the mesh of a description and names of groups, or None."""
        return self._interned.get(key)

    def intern(self, mesh: DeviceMesh, key: Hashable) -> DeviceMesh:
        """Return the mesh that is here already under a key, or else this one, kept here.

        Args:
            mesh: to be kept here, if there is none like it.
            key: its description and names of groups; of a mesh of a user's subclass, its id.
        """
        root = self.root
        if root is None or mesh._description.tags or root._description.tags:
            with self._lock:  # of several threads, one makes the root
                root = self._root_of(mesh)
        if mesh._root_mesh is not root:
            mesh._take_root(root)
        return self._interned.setdefault(key, mesh)

    def keep(self, mesh: DeviceMesh) -> None:
        """Intern a mesh that somebody has already, or know of it, if there is one like it."""
        if self.intern(mesh, mesh._intern_key) is not mesh:
            self.note(mesh)

    def note(self, mesh: DeviceMesh) -> None:
        """Know of a mesh that is not the one of its kind here."""
        self._others.add(mesh)

    def move_without_groups(self, target: Universe) -> None:
        """Move the meshes that have no process groups into a universe, this or another.

        In an order that all ranks share, whatever order they loaded the meshes in.
        """
        bare = [(key, mesh) for key, mesh in dict(self._interned).items() if not mesh.has_groups]
        for key, mesh in sorted(bare, key=lambda pair: str(pair[1].description)):
            mesh._join(target)
            del self._interned[key]

    def set_plain_names(self, is_plain: bool) -> None:
        """Set whether meshes give torch plain lists of names, or lists that look at each use."""
        if is_plain or self.has_plain_names:
            self.has_plain_names = is_plain
            for mesh in (*self, *self._others.alive()):
                mesh._renew_group_names()

    def forget_coordinates(self) -> None:
        """Make the meshes find the coordinate at each read, and raise if this is another rank."""
        self.keeps_coordinates = False
        for mesh in (*self, *self._others.alive()):
            mesh._forget_coordinate()

    def keep_coordinates(self) -> None:
        """Undo `forget_coordinates`: this process is the rank again that it was."""
        self.keeps_coordinates = self._may_keep_coordinates
        if self.keeps_coordinates:
            for mesh in (*self, *self._others.alive()):
                mesh._keep_coordinate()

    # --- roots ----------------------------------------------------------------------------------

    def _root_of(self, mesh: DeviceMesh) -> DeviceMesh:
        """Return the root of a mesh of this universe. The first mesh to come is the first root."""
        first = self.root
        if first is None:
            self.root = mesh
            return mesh
        tags, parts = self._tags_of_root(first, mesh), _parts(mesh)
        if tags == first.description.axis_tags and parts <= _parts(first):
            return first
        root = self._other_roots.get((tags, parts))
        if root is None:
            root = self._other_roots[tags, parts] = first._under(tags)
            for (name, tag), flattened in self._flattened.items():
                if parts.issuperset(tag_parts(tag)):
                    root._add_flattened(name, flattened)
        return root

    @staticmethod
    def _tags_of_root(first: DeviceMesh, mesh: DeviceMesh) -> tuple[str, ...]:
        """Return the tags of a mesh's root, one for each axis of the first mesh.

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
            for (known_name, _), known in dict(self._flattened).items():
                if known_name == name:
                    flattened = known.layout[0]
                    check_names_at_root(name, axis, flattened, "a flattened mesh", self.root)

    def note_names(self, description: MeshDescription) -> None:
        """Note the names of a root mesh made after the first: no other axis gets them."""
        names = description.axis_names or ()
        with self._lock:
            for index, (name, axis) in enumerate(zip(names, description.layout, strict=False)):
                self._later_axes.setdefault(name, {}).setdefault(axis, index)

    def later_dim(self, description: MeshDescription) -> int | None:
        """Return where a one-axis mesh stands in a root mesh made after the first.

        None if it stands in none of them, or in the first one too.
        """
        names, root = description.axis_names or (), self.root
        if len(names) != 1 or root is None:
            return None
        name, axis = names[0], description.layout[0]
        of_first = zip(root.description.labels, root.description.layout, strict=True)
        return None if (name, axis) in of_first else self._later_axes.get(name, {}).get(axis)

    def check_flattened_name(self, name: str, axis: AxisLayout) -> None:
        """Check the name of a flattened axis.

        Raises:
            ValueError: a root mesh made after the first has another axis of this name.
        """
        for later in list(self._later_axes.get(name, ())):
            check_names_at_root(name, axis, later, "an axis of another root mesh", self.root)

    def flattened(self, name: str, tag: str) -> DeviceMesh | None:
        """Return the flattened mesh of this name under this tag, or None."""
        return self._flattened.get((name, tag))

    def add_flattened(self, name: str, tag: str, flattened: DeviceMesh) -> None:
        """Note a flattened mesh, at the roots of all meshes that may look it up by its name."""
        parts = frozenset(tag_parts(tag))
        with self._lock:
            self._flattened[name, tag] = flattened
            if self.root is not None and parts <= _parts(self.root):
                self.root._add_flattened(name, flattened)
            for (_, seen), root in self._other_roots.items():
                if parts <= seen:
                    root._add_flattened(name, flattened)


def _parts(mesh: DeviceMesh) -> frozenset[str]:
    tags = mesh.description.axis_tags
    return frozenset(part for tag in set(tags) for part in tag_parts(tag))
