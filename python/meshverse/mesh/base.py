"""A mesh in a universe: what it is, which process groups it has, which mesh is its root."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, ClassVar, cast

from torch.distributed.device_mesh import DeviceMesh as StockDeviceMesh
from typing_extensions import Self

from meshverse._core import Layout
from meshverse.layouts.computed import computed
from meshverse.layouts.derivation import MeshDescription
from meshverse.options.isolation import tag_parts
from meshverse.universe.universe import Universe

from .group_names import GroupNames, MissingGroups, PromisedGroups

__all__ = ["ATTRIBUTES", "MeshBase"]

# All attributes that this package sets on a mesh. Any other was set by a user or a subclass.
ATTRIBUTES = frozenset(
    {
        "_coordinate_on_dim",
        "_description",
        "_device_type",
        "_dim_group_names",
        "_flatten_mapping",
        "_hash",
        "_identity",
        "_mesh_dim_names",
        "_pg_registry",
        "_preserve_rank_order",
        "_rank",
        "_root_mesh",
        "_shape",
        "_slices",
        "_thread_id",
        "_universe",
    }
)

# A mesh over at most this many ranks is hashed when it is made: torch will ask for the hash, and it
# takes microseconds. Over more ranks the first hash takes longer, and waits until it is asked for.
_SMALL_WORLD = 1024


class _CheckedCoordinate:
    """What is read of a mesh that does not keep this rank's coordinate, as the rank may change."""

    def __get__(self, mesh: MeshBase | None, owner: type) -> Any:
        return self if mesh is None else mesh._find_coordinate()


class MeshBase(StockDeviceMesh):
    """A mesh in a universe.

    It has no constructor: a subclass calls `_describe`, then `_enter`.
    """

    class_of_derived: ClassVar[type[MeshBase]]
    _dim_group_names: list[str]  # type: ignore[assignment]  # read and written by torch too
    _coordinate_on_dim: Any = _CheckedCoordinate()

    def _describe(self, description: MeshDescription) -> None:
        self._description = description
        # One step, where reading the fields by name would look each of them up.
        self._device_type, layout, self._mesh_dim_names, self._preserve_rank_order, _, _ = (
            description
        )
        self._shape = layout.shape
        self._flatten_mapping = {}

    def _enter(self, universe: Universe) -> None:
        self._universe = universe
        self._rank = universe.rank
        self._thread_id = universe.thread_id
        self._pg_registry = universe.process_groups
        self._slices: dict[object, MeshBase] = {}
        self._hash = None
        self._identity = (universe.rank_map, universe.token, self._description)
        if universe.keeps_places:
            position = universe.position
            layout = self._description.layout
            self._coordinate_on_dim = None if position is None else layout.coordinate(position)
        # If this mesh has isolation tags, `Universe.intern` may give it another root.
        root: Any = universe.roots.first
        self._root_mesh = None if root is self else root
        if universe.size <= _SMALL_WORLD:
            hash(self)

    def forget_place(self) -> None:
        """Find this rank's coordinate, and which ranks a part of the mesh has, anew when asked."""
        names = ["_coordinate_on_dim"]
        if self._description.layout.size != self._universe.size:
            names.append("mesh")
        for name in names:
            with contextlib.suppress(AttributeError):
                delattr(self, name)

    def _find_coordinate(self) -> tuple[int, ...] | None:
        """This rank's coordinate, or None outside of the mesh.

        Raises:
            AttributeError: nobody knows its rank, as of stock's mesh for XLA without a group.
            RuntimeError: this process is another rank now than the one that made the mesh.
        """
        universe = self._universe
        if universe.rank < 0:
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute '_coordinate_on_dim'"
            )
        if universe.world is not None:
            universe.world.check_rank()
        position = universe.position
        return None if position is None else self._description.layout.coordinate(position)

    def take_root(self, root: StockDeviceMesh | None) -> None:
        """Set the root of this mesh. None, or the mesh itself, makes it a root."""
        self._root_mesh = None if root is self else root

    @classmethod
    def _made(
        cls, universe: Universe, description: MeshDescription, group_names: Sequence[str] | None
    ) -> Self:
        """A mesh of this class that the universe does not know."""
        mesh = object.__new__(cls)
        mesh._fill(universe, description, group_names)
        return mesh

    def _fill(
        self, universe: Universe, description: MeshDescription, group_names: Sequence[str] | None
    ) -> None:
        self._describe(description)
        self._enter(universe)
        self._take_group_names(group_names)
        universe.note(self)  # type: ignore[arg-type]  # which is one of its meshes

    def _take_group_names(self, group_names: Sequence[str] | None) -> None:
        """Use these process groups, one per axis; None for a mesh without process groups."""
        if group_names is None:
            self._dim_group_names = MissingGroups(len(self._shape), self._refuse_groups)
            return
        universe = self._universe
        # torch.compile cannot take in a mesh that is made within a graph with a list of another
        # class.
        if universe.has_plain_names and all(
            name in universe.process_groups for name in group_names
        ):
            self._dim_group_names = list(group_names)
        else:
            self._dim_group_names = names = GroupNames(group_names)
            names.universe = universe

    def renew_group_names(self) -> None:
        """Give torch a plain list of names of groups, or one that looks at each use."""
        names: list[str] = vars(self).get("_dim_group_names", MissingGroups)
        if type(names) in (list, GroupNames):
            self._take_group_names(list(names))

    def _refuse_groups(self) -> None:
        why = (
            "was made or loaded without them. After init_process_group(), call mesh.bind() on all "
            "its ranks."
            if self._may_have_groups
            else "is for XLA, whose compiler communicates without process groups."
        )
        raise RuntimeError(f"DeviceMesh process groups not initialized! {self} {why}")

    @property
    def description(self) -> MeshDescription:
        """What this mesh is, apart from its universe and its process groups."""
        return self._description

    @property
    def _may_have_groups(self) -> bool:
        return self._device_type != "xla"  # whose meshes have none in stock

    @property
    def has_groups(self) -> bool:
        """Whether process groups were made for this mesh, by its ranks; true on all ranks then."""
        return not isinstance(self._dim_group_names, MissingGroups)

    @property
    def group_names(self) -> tuple[str, ...] | None:
        """c10d names of my groups, one per axis; None without process groups.

        Empty on a rank outside the mesh.
        """
        names = self._dim_group_names
        return None if isinstance(names, MissingGroups) else tuple(names)

    @computed
    def key_digests(self) -> list[str | None]:
        """Digests of the options keys of my groups, one per axis; empty outside the mesh."""
        names = self._dim_group_names
        if isinstance(names, PromisedGroups) and not names.are_all_known:
            return []
        pairs = zip(self.layout, self.group_names or (), strict=False)
        return [self._universe.key_digest(*pair) for pair in pairs]

    @property
    def intern_key(self) -> Hashable:
        """What identifies this mesh within its universe: its description and its process groups.

        A mesh of a user's subclass is identified by its id: it may have other attributes besides.
        """
        if type(self) is not self.class_of_derived:
            return id(self)  # the universe keeps it, so no other mesh there will have this id
        return self._description, self.group_names

    def _labels(self) -> Sequence[str]:
        """What to call the axes in messages: their names, or numbers where they have none."""
        return self._description.labels

    def _root(self) -> Self:
        return cast("Self", self._get_root_mesh())

    @property
    def flattened(self) -> Mapping[str, MeshBase]:
        """The meshes that were flattened from this one or its submeshes, if it is the root."""
        return cast("Mapping[str, MeshBase]", self._flatten_mapping)

    def add_flattened(self, name: str, flattened: MeshBase, *, replace: bool = False) -> None:
        """Note a flattened mesh at this root.

        Args:
            name: its name.
            flattened: the mesh.
            replace: replace one of the same name in any case, and not only one under fewer tags.
        """
        known = self.flattened.get(name)
        if known is None or replace or _n_tags(flattened) > _n_tags(known):
            self._flatten_mapping[name] = flattened

    # Stock's versions of these three read `_layout`, which is made only for meshes of which torch
    # reads it.
    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self._shape)

    @property
    def shape(self) -> tuple[int, ...]:
        """Size of every axis."""
        return self._shape

    def size(self, mesh_dim: int | None = None) -> int:
        """Number of ranks of this mesh, or along one axis.

        Args:
            mesh_dim: index of the axis.
        """
        return self.layout.size if mesh_dim is None else self._shape[mesh_dim]

    @property
    def universe(self) -> Universe:
        """The universe this mesh belongs to: its ranks, process groups and related meshes."""
        return self._universe

    @property
    def layout(self) -> Layout:
        """The axis layouts of this mesh over the positions of its universe's rank map."""
        return self._description.layout


def _n_tags(flattened: MeshBase) -> int:
    tags = flattened.description.tags
    return len(tag_parts(tags[0])) if tags else 0
