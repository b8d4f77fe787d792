"""The meshes of one universe, with their roots and the flattened meshes.

torch keeps flattened meshes by name, at the root of the mesh they were flattened from. A mesh with
other isolation tags than the universe's first mesh must not find the flattened meshes of that one.
So it has another root: a copy of the universe's first mesh with other tags, whose groups are
created when they are used.

Example: a program flattens `mesh["dp", "cp"]` to "dp_cp", and again inside `isolate("a")`. Both
flattened meshes have that name. `mesh.get_group("dp_cp")` finds the first one, at the root `mesh`.
A mesh under the tag "a" finds the second one, at the copy of `mesh` under "a".
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Iterator
from typing import TYPE_CHECKING, TypeAlias

from meshverse._core import AxisLayout
from meshverse.layouts.derivation import MeshDescription, check_names_at_root
from meshverse.locks import WeakRegistry, state_lock
from meshverse.options.isolation_tags import merge_tags, tag_parts

if TYPE_CHECKING:
    from meshverse.device_mesh.device_mesh import DeviceMesh

    from .universe import Universe


class UniverseMeshes:
    """The meshes of one universe.

    The *interned* meshes are those that the universe finds by their description and group names. It
    holds strong references to them, and weak references to all other meshes.

    Args:
        stores_coordinates: as the attribute.
        has_plain_names: as the attribute.

    Attributes:
        root: first mesh of the universe, the root of all meshes under its isolation tags.
        stores_coordinates: whether meshes store this rank's coordinate. False if this process may
            get another rank.
        world_has_ended: whether the world has ended that gave this process its rank.
        has_plain_names: whether a mesh's list of group names for torch is a plain `list` while all
            its groups are live. If not, it is a `GroupNames`, which checks each use of a group.
    """

    def __init__(self, *, stores_coordinates: bool, has_plain_names: bool) -> None:
        self.root: DeviceMesh | None = None
        self.stores_coordinates, self.has_plain_names = stores_coordinates, has_plain_names
        self._may_store_coordinates = stores_coordinates
        self.world_has_ended = False
        self._interned: dict[Hashable, DeviceMesh] = {}
        self._others: WeakRegistry[DeviceMesh] = WeakRegistry()  # meshes that are not interned
        # Axis name -> axis layout -> its index in the mesh. For root meshes created after the
        # universe's first; if several have the axis, the oldest one counts.
        self._later_axes: dict[str, dict[AxisLayout, int]] = {}
        # Other roots. Key: the tag of each root axis, and the set of single tags in the tags of the
        # meshes under it ("a; and b" has a and b).
        self._other_roots: dict[tuple[tuple[str, ...], frozenset[str]], DeviceMesh] = {}
        self._flattened: dict[tuple[str, str], DeviceMesh] = {}  # by name and tag

    def __iter__(self) -> Iterator[DeviceMesh]:
        """Iterate over the interned meshes, oldest first."""
        return iter(list(self._interned.values()))

    def __len__(self) -> int:
        return len(self._interned)

    def find(self, key: Hashable) -> DeviceMesh | None:
        """Return the interned mesh of a key, or None; see `intern`."""
        return self._interned.get(key)

    def intern(self, mesh: DeviceMesh, key: Hashable) -> DeviceMesh:
        """Return the interned mesh of a key: the existing one, or else this one from now on.

        This sets the root of `mesh`, too.

        Args:
            mesh: mesh to intern, if none is interned under the key.
            key: the mesh's description and group names; for a mesh of a user's subclass, its id.
        """
        root = self.root
        if root is None or mesh._description.tags or root._description.tags:
            with state_lock.held:  # of several threads, one creates the root
                root = self._root_of(mesh)
        if mesh._root_mesh is not root:
            mesh._take_root(root)
        known = self._interned.setdefault(key, mesh)
        self._update(mesh)
        return known

    def add(self, mesh: DeviceMesh) -> None:
        """Intern a mesh; hold it weakly if an equal one is interned already."""
        if self.intern(mesh, mesh._intern_key) is not mesh:
            self.note(mesh)

    def note(self, mesh: DeviceMesh) -> None:
        """Hold a mesh weakly, without interning it."""
        self._others.add(mesh)
        self._update(mesh)

    def _update(self, mesh: DeviceMesh) -> None:
        """Have a mesh notice what happened in its universe before it was listed here."""
        names = mesh._dim_group_names
        if type(names) is list and not all(name in mesh._pg_registry for name in names):
            mesh._renew_group_names()
        if self.world_has_ended:
            mesh._note_world_end()

    def move_without_groups(self, target: Universe) -> None:
        """Move the meshes without process groups into a universe, which may be this one.

        They move in the same order on all ranks, in whatever order each rank loaded them.

        Raises:
            ValueError: one of their axes has the name of a flattened mesh there with another
                layout. Then nothing has changed.
        """
        if target.meshes is not self and self.root is not None and not self.root._has_groups:
            target.meshes._take_names_of(self, self.root)
        bare = [(key, mesh) for key, mesh in dict(self._interned).items() if not mesh._has_groups]
        # The root comes first, so that it is the root again in a universe without one.
        order = {id(mesh): (mesh is not self.root, str(mesh._description)) for _, mesh in bare}
        for key, mesh in sorted(bare, key=lambda pair: order[id(pair[1])]):
            mesh._move_to(target)
            del self._interned[key]
            if mesh is self.root and target.meshes is not self:
                self.root = None

    def may_have(self, descriptions: Collection[MeshDescription]) -> bool:
        """Return whether one of these may be a mesh of this universe; any may if it has none yet.

        Its axes are axes of the root, by name and layout; or it was created here by `unflatten`.
        """
        if self.root is None:
            return True
        mine = self.root._description
        if any(
            (one.layout, one.axis_names) == (mine.layout, mine.axis_names) for one in descriptions
        ):
            return True  # in most calls
        of_root = set(_labeled(mine))
        return any(
            of_root.issuperset(_labeled(one))
            or any(_labeled(mesh._description) == _labeled(one) for mesh in self)
            for one in descriptions
        )

    def use_checked_group_names(self) -> None:
        """Put all names of groups into lists that check each use, for good."""
        self.has_plain_names = False
        for mesh in (*self, *self._others.alive()):
            mesh._renew_group_names()

    def renew_names(self, name: str) -> None:
        """Choose the kind of list again for each mesh with this group."""
        if not self.has_plain_names:
            return
        for mesh in (*self, *self._others.alive()):
            if list.__contains__(mesh._dim_group_names, name):
                mesh._renew_group_names()

    def note_world_end(self) -> None:
        """Stop storing coordinates, and make the meshes unequal to meshes of torch's classes.

        From now on, each read of a coordinate computes it, and raises if the rank has changed.
        """
        self.stores_coordinates, self.world_has_ended = False, True
        for mesh in (*self, *self._others.alive()):
            mesh._note_world_end()

    def on_revive(self) -> None:
        """Undo `note_world_end`: this process is the rank again that it was."""
        self.stores_coordinates, self.world_has_ended = self._may_store_coordinates, False
        for mesh in (*self, *self._others.alive()):
            mesh._on_revive()

    # --- roots ----------------------------------------------------------------------------------

    def _root_of(self, mesh: DeviceMesh) -> DeviceMesh:
        """Return the root of a mesh of this universe. The first mesh becomes the first root."""
        first = self.root
        if first is None:
            self.root = mesh
            return mesh
        tags, single_tags = self._tags_of_root(first, mesh), _single_tags(mesh)
        if tags == first._description.axis_tags and single_tags <= _single_tags(first):
            return first
        root = self._other_roots.get((tags, single_tags))
        if root is None:
            root = self._other_roots[tags, single_tags] = first._root_with_tags(tags)
            for (name, tag), flattened in self._flattened.items():
                if single_tags.issuperset(tag_parts(tag)):
                    root._add_flattened(name, flattened)
        return root

    @staticmethod
    def _tags_of_root(first: DeviceMesh, mesh: DeviceMesh) -> tuple[str, ...]:
        """Return the tags of a mesh's root, one for each axis of the first mesh.

        These are the first mesh's own tags, if the mesh has no other ones. Otherwise, each axis
        of the first mesh that `mesh` also has gets the tag that it has in `mesh`; each other axis
        gets all tags of `mesh`, merged.

        Example: the first mesh has axes pp, dp and tp without tags. A mesh of dp alone, under "a",
        has the root whose axes are all under "a".
        """
        own, tags = first._description.axis_tags, mesh._description.axis_tags
        axes = list(zip(first._description.labels, first._description.layout, strict=True))
        known = dict(
            zip(
                zip(mesh._description.labels, mesh._description.layout, strict=True),
                tags,
                strict=True,
            )
        )
        agrees = all(known.get(axis, tag) == tag for axis, tag in zip(axes, own, strict=True))
        if agrees and _single_tags(mesh) <= _single_tags(first):
            return own
        merged = merge_tags(tags)
        return tuple(known.get(axis, merged) for axis in axes)

    def check_names(self, description: MeshDescription) -> None:
        """Check the axis names of a second or later root mesh before it is created.

        Raises:
            ValueError: an axis has the name of a flattened mesh with another layout.
        """
        self._check(_named_axes(description))

    def _check(self, axes: Iterable[_NamedAxis]) -> None:
        for name, axis, _ in axes:
            for (known_name, _), known in dict(self._flattened).items():
                if known_name == name:
                    flattened = known._description.layout[0]
                    check_names_at_root(name, axis, flattened, "a flattened mesh", self.root)

    def note_names(self, description: MeshDescription) -> None:
        """Reserve the axis names of a second or later root mesh."""
        self._note(_named_axes(description))

    def _note(self, axes: Iterable[_NamedAxis]) -> None:
        with state_lock.held:
            for name, axis, index in axes:
                self._later_axes.setdefault(name, {}).setdefault(axis, index)

    def _take_names_of(self, left: UniverseMeshes, root: DeviceMesh) -> None:
        """Check and reserve the axis names of another universe's root meshes, which move here."""
        named = [
            (name, axis, index)
            for name, axes in left._later_axes.items()
            for axis, index in axes.items()
        ]
        if not self.may_have([root._description]):
            named += _named_axes(root._description)
        self._check(named)
        self._note(named)

    def later_dim(self, description: MeshDescription) -> int | None:
        """Return the index of a 1-D mesh's axis in a second or later root mesh.

        None if no such root mesh has this axis, or if the first root mesh has it.
        """
        names, root = description.axis_names or (), self.root
        if len(names) != 1 or root is None:
            return None
        name, axis = names[0], description.layout[0]
        of_first = zip(root._description.labels, root._description.layout, strict=True)
        return None if (name, axis) in of_first else self._later_axes.get(name, {}).get(axis)

    def check_flattened_name(self, name: str, axis: AxisLayout) -> None:
        """Check the name of a flattened axis.

        Raises:
            ValueError: a second or later root mesh has another axis of this name.
        """
        for later in list(self._later_axes.get(name, ())):
            check_names_at_root(name, axis, later, "an axis of another root mesh", self.root)

    def flattened(self, name: str, tag: str) -> DeviceMesh | None:
        """Return the flattened mesh of this name under this tag, or None."""
        return self._flattened.get((name, tag))

    def add_flattened(self, name: str, tag: str, flattened: DeviceMesh) -> None:
        """Add a flattened mesh to the roots of all meshes that may look it up by its name.

        One that it replaces, as its group was destroyed, is held weakly from now on.
        """
        single_tags = frozenset(tag_parts(tag))
        with state_lock.held:
            replaced = self._flattened.get((name, tag))
            self._flattened[name, tag] = flattened
            if replaced is not None and replaced is not flattened:
                self._others.add(replaced)
                for key in [key for key, mesh in self._interned.items() if mesh is replaced]:
                    del self._interned[key]
            if self.root is not None and single_tags <= _single_tags(self.root):
                self.root._add_flattened(name, flattened)
            for (_, tags_under_root), root in self._other_roots.items():
                if single_tags <= tags_under_root:
                    root._add_flattened(name, flattened)


_NamedAxis: TypeAlias = tuple[str, AxisLayout, int]  # an axis of a root mesh, with its index there


def _named_axes(description: MeshDescription) -> list[_NamedAxis]:
    pairs = zip(description.axis_names or (), description.layout, strict=False)
    return [(*pair, index) for index, pair in enumerate(pairs)]


def _labeled(description: MeshDescription) -> list[tuple[str, AxisLayout]]:
    return list(zip(description.labels, description.layout, strict=True))


def _single_tags(mesh: DeviceMesh) -> frozenset[str]:
    tags = mesh._description.axis_tags
    return frozenset(single for tag in set(tags) for single in tag_parts(tag))
