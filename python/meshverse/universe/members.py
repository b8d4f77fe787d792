"""The half of a universe that knows its meshes: one of each kind, and their roots."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from typing import Any, Protocol, TypeVar, cast

from torch.distributed.device_mesh import DeviceMesh as StockDeviceMesh
from typing_extensions import Self

from meshverse._core import AxisLayout
from meshverse.layouts.derivation import MeshDescription
from meshverse.report.pictured import ExplainedView
from meshverse.world.weak_registry import WeakRegistry

from .owner import GroupOwner, WorldUniverses
from .parts import ranks_outside
from .roots import RootedMesh, Roots
from .warm_up import WarmedUp, warm_up

__all__ = ["Member", "MeshOwner"]


class Member(RootedMesh, Protocol):
    """What a universe asks of the meshes that are made in it."""

    # Read where the cost of a property would show.
    _description: MeshDescription
    _root_mesh: Any

    @property
    def has_groups(self) -> bool:
        """Whether process groups were made for the mesh."""

    @property
    def group_names(self) -> tuple[str, ...] | None:
        """c10d names of my groups, one an axis; none outside the mesh; None without groups."""

    @property
    def intern_key(self) -> Hashable:
        """What makes the mesh itself within its universe."""

    def take_root(self, root: Any) -> None:
        """Have this root; itself, or none yet, makes it a root."""

    def join(self, universe: Any) -> None:
        """Enter a universe, on its process groups."""

    def forget_place(self) -> None:
        """Find this rank's coordinate anew each time it is asked for."""


_Mesh = TypeVar("_Mesh", bound=Member)


class MeshOwner(GroupOwner):
    """A universe as the owner of meshes. `Universe` has the constructor."""

    size: int
    keeps_places: bool
    roots: Roots[Member]
    _meshes: dict[Hashable, Member]
    _others: WeakRegistry[Member]
    _is_kept: bool

    @property
    def root(self) -> StockDeviceMesh | None:
        """The first mesh made here, which the others under its isolation tags call their root."""
        return cast("StockDeviceMesh | None", self.roots.first)

    @property
    def flattened(self) -> Mapping[str, StockDeviceMesh]:
        """The flattened meshes under the isolation tags of the first mesh here, by name."""
        return {} if self.root is None else self.root._flatten_mapping

    def add_flattened(self, name: str, tag: str, flattened: Member) -> None:
        """Note a flattened mesh, for all meshes here that may ask for it by its name."""
        with self._lock:
            self.roots.add_flattened(name, tag, flattened)

    def intern(self, mesh: _Mesh, key: Hashable = None) -> _Mesh:
        """The mesh that is here already with the same axes, names and groups, or else this one.

        Args:
            mesh: to be kept here, if there is none like it.
            key: the mesh's `intern_key`, if the caller knows it.
        """
        with self._lock:  # of several threads, one makes the root
            root = self.roots.first
            if root is None or mesh._description.tags or root._description.tags:
                root = self.roots.of(mesh)
            if mesh._root_mesh is not root:
                mesh.take_root(root)
            if not self._is_kept:
                self._keep()
        if key is None:
            key = mesh.intern_key
        return self._meshes.setdefault(key, mesh)  # type: ignore[return-value]

    def note(self, mesh: Member) -> None:
        """Know of a mesh that is not the one of its kind here."""
        self._others.add(mesh)

    def forget_places(self) -> None:
        """Have the meshes find the coordinate at each read, and raise if this is another rank."""
        self.keeps_places = False
        for mesh in (*list(self._meshes.values()), *self._others.alive()):
            mesh.forget_place()

    def _views(self) -> list[ExplainedView]:
        views: dict[tuple[object, ...], ExplainedView] = {}
        for mesh in list(self._meshes.values()):
            what = mesh._description
            if what.layout.size == self.size:
                key = (what.labels, what.layout, mesh.group_names)
                flattened = {} if views else self._flattened_axes()
                views.setdefault(key, ExplainedView(what, mesh.group_names, flattened))
        return list(views.values())

    def _flattened_axes(self) -> dict[str, AxisLayout]:
        flattened = cast("Mapping[str, Member]", self.flattened)
        return {name: mesh._description.layout.collapse() for name, mesh in flattened.items()}

    def _keep(self) -> None:
        # Every call that makes groups gives a mesh, so this sees them all.
        if self._ended is not None or self.world is None or self._groups is None:
            return
        if self._groups.has_own:
            self.world.state(WorldUniverses).kept.append(self)
            self._is_kept = True

    def bind(self, target: Self) -> None:
        """Give the meshes here that have no process groups those of a universe, this or another.

        They move into the target, onto the groups it has, and new ones with default options for
        axes it has none for. So all ranks of the meshes call this, with the same meshes loaded.

        Raises:
            RuntimeError: no mesh here lacks process groups.
            ValueError: the target has not all these ranks.
        """
        if outside := ranks_outside(self.rank_map, target.rank_map):
            raise ValueError(
                f"Meshes over {self.rank_map} cannot be bound to a universe of "
                f"{target.rank_map}: it has no ranks {outside}."
            )
        bare = {key: mesh for key, mesh in self._meshes.items() if not mesh.has_groups}
        if not bare:
            raise RuntimeError(
                f"The meshes of this universe of {self.rank_map} have process groups already; "
                "bind() is for meshes that were loaded or made without them."
            )
        if target.rank_map != self.rank_map:
            target = target.part(self.rank_map)
        # In an order that all ranks share, whatever order they loaded the meshes in.
        for key, mesh in sorted(bare.items(), key=lambda item: str(item[1].description)):
            mesh.join(target)
            del self._meshes[key]

    def warm_up(
        self, axis_names: Collection[str] | None = None, *, show_progress: bool = False
    ) -> list[WarmedUp]:
        """Make lazy groups now and connect every group, by one small all-reduce on each.

        The first step then does not pay for it, and ranks that use the groups in different orders
        do not wait for one another. All ranks of the universe call this with the same names.

        Args:
            axis_names: of axes whose groups are wanted, by any name they were asked for; by
                default all groups.
            show_progress: draw a bar on the terminal (needs rich). The log tells in any case.

        Returns:
            What was warmed up and the seconds it took, in the order in which it was done.

        Raises:
            KeyError: no group was asked for by one of the names.
            RuntimeError: the universe has no mesh or no process groups.
        """
        groups = self._all_groups()
        roots = [universe.root for universe in (self, *self._all_parts()) if universe.root]
        if not roots:
            raise RuntimeError(f"The universe of {self.rank_map} has no mesh yet: make one first.")
        return warm_up(groups, axis_names, roots[0].device_type, show_progress=show_progress)
