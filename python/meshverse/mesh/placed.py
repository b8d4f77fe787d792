"""The process group along an axis of a mesh, and this rank's place in it."""

from __future__ import annotations

from typing import Any

from torch.compiler import is_dynamo_compiling
from torch.distributed.device_mesh import DeviceMesh as StockDeviceMesh

from meshverse import _torch_compat as compat
from meshverse._core import RankGroups
from meshverse.graphs.traced_coordinates import traced_coordinate
from meshverse.groups.request import GroupRequest

from .membership import MemberMesh

__all__ = ["PlacedMesh"]


class PlacedMesh(MemberMesh):
    """A mesh that gives out its process groups, and knows this rank's place in each."""

    def get_group(self, mesh_dim: int | str | None = None) -> compat.ProcessGroup:
        """The process group along one axis, mine.

        Args:
            mesh_dim: index or name of the axis, or name of a flattened axis; may be left out on a
                mesh with one axis.

        Raises:
            RuntimeError: the mesh has no process groups, or several and `mesh_dim` is left out.
            KeyError: no such name.
        """
        if is_dynamo_compiling():  # which traces stock's method
            return StockDeviceMesh.get_group(self, mesh_dim)
        try:
            name: str | None
            if mesh_dim is None and len(self._shape) == 1:
                name = self._dim_group_names[0]
            elif isinstance(mesh_dim, int):
                name = self._dim_group_names[mesh_dim]
            else:
                name = self._name_of_named_group(mesh_dim)
            if name is None:  # stock says what is wrong
                self._check_groups()
                return StockDeviceMesh.get_group(self, mesh_dim)
            return compat.resolve_group(name)
        except IndexError:
            self._check_groups()
            if self.group_names:
                raise
            rank, ranks = self._universe.rank, self._universe.rank_map
            raise IndexError(
                f"Rank {rank} is not in {self} over {ranks}, so it has no process group of it; "
                "get_coordinate() is None on such a rank."
            ) from None

    def _check_groups(self) -> None:
        if not self.has_groups:
            self._refuse_groups()

    def _name_of_named_group(self, mesh_dim: Any) -> str | None:
        root = self if self._root_mesh is None else self._root_mesh
        try:
            flattened = root._flatten_mapping.get(mesh_dim)
        except TypeError:  # it has no hash, so it is no name
            return None
        if flattened is not None:  # before an axis of mine of the same name, as in stock
            return flattened._dim_group_names[0]
        names = self._mesh_dim_names or ()
        return self._dim_group_names[names.index(mesh_dim)] if mesh_dim in names else None

    def get_local_rank(self, mesh_dim: int | str | None = None) -> int:
        """My rank in the process group along one axis. A lazy group is not made for it.

        Args:
            mesh_dim: as for `get_group`.

        Raises:
            As `get_group`.
        """
        # While torch simulates ranks (LocalTensor mode), its class has another method here, which
        # answers for all of them. And torch.compile can trace stock's method, but not this one.
        if not compat.is_stocks_own(StockDeviceMesh.get_local_rank) or is_dynamo_compiling():
            return StockDeviceMesh.get_local_rank(self, mesh_dim)
        try:
            universe, name = self._universe, self._name_without_use(mesh_dim)
            if name is not None and name in universe.ready_groups:
                return universe.process_groups[name].rank()
            planned = universe.planned_group(name)
            if planned is not None:
                _ = universe.groups  # raises where the group can no longer be made
                return _place_of(planned.request)
            if mesh_dim is None and len(self._shape) != 1:  # stock says what is wrong
                return StockDeviceMesh.get_local_rank(self, mesh_dim)
            return self.get_group(mesh_dim).rank()
        except RuntimeError:
            world = self._universe.world
            place = self._place_in_parent(mesh_dim) if world and world.is_of_parent else None
            if place is None:
                raise
            return place

    def _sym_get_coordinate(self, index: int) -> Any:
        # Into a graph that is compiled for all ranks, stock puts a table of the ranks to search.
        # Ours computes the coordinate. While torch simulates ranks, its method is called, as above.
        if compat.is_stocks_own(StockDeviceMesh._sym_get_coordinate):
            if not compat.is_one_graph_traced():
                coordinate = self._coordinate_on_dim
                if coordinate is not None:
                    return coordinate[index]
            else:
                traced = traced_coordinate(self.layout[index], self._universe.rank_map)
                if traced is not None:
                    return traced
        return StockDeviceMesh._sym_get_coordinate(self, index)

    def _place_in_parent(self, mesh_dim: int | str | None) -> int | None:
        """In a fork, such as a data loader's worker: the parent's rank in its group, if known."""
        name = self._name_without_use(mesh_dim)
        if name is None:
            return None
        planned = self._universe.planned_group(name)
        return compat.resolve_group(name).rank() if planned is None else _place_of(planned.request)

    def _name_without_use(self, mesh_dim: int | str | None) -> str | None:
        """The c10d name of the group along an axis, which this does not make; None if unknown."""
        mesh: StockDeviceMesh = self
        if mesh_dim is None and len(self._shape) == 1:
            mesh_dim = 0
        elif isinstance(mesh_dim, str):
            flattened = (self._root_mesh or self)._flatten_mapping.get(mesh_dim)
            own_names = self._mesh_dim_names or ()
            if flattened is not None:
                mesh, mesh_dim = flattened, 0
            elif mesh_dim in own_names:
                mesh_dim = own_names.index(mesh_dim)
        names = mesh._dim_group_names
        if not isinstance(mesh_dim, int) or not -len(names) <= mesh_dim < len(names):
            return None  # get_group says what is wrong
        # `names[mesh_dim]` would count as use of the group, and make it.
        return list.__getitem__(names, mesh_dim)


def _place_of(request: GroupRequest) -> int:
    """This rank's rank in its group. O(1) where the ranks of the mesh ascend, else O(group)."""
    assert request.position is not None
    groups = RankGroups(request.axis, request.rank_map)
    if request.keeps_order or request.rank_map.is_sorted():
        return groups.coordinate(request.position)
    mine = request.rank_map.rank_at(request.position)
    return sum(rank < mine for rank in groups.ranks_of(request.position))
