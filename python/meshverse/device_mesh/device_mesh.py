"""`DeviceMesh`: stock's, computed by arithmetic over one universe."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh as StockDeviceMesh

from meshverse import _torch_compat as compat
from meshverse._core import Layout, RankGroups, RankMap
from meshverse.layouts.derivation import (
    MeshDescription,
)
from meshverse.layouts.user_input import (
    ArrayLike,
    check_axis_names,
    check_layout,
    read_groups,
    read_mesh,
    read_ranks,
)
from meshverse.mesh.membership import MemberMesh
from meshverse.options.overrides import (
    BackendOverride,
    Override,
    normalize_overrides,
    normalize_tags,
)
from meshverse.universe.universe import Universe
from meshverse.world.world import World

from .equal_roots import note_root
from .reshaping import ReshapedMesh

__all__ = ["DeviceMesh"]

_NO_RANK = -1  # c10d's own word for it


class DeviceMesh(ReshapedMesh):
    """A drop-in `torch.distributed.DeviceMesh` whose cost does not grow with the job.

    Construct it as stock: from a tensor or array of global ranks, or with `init_device_mesh`. All
    of stock's methods are there with the same results. Derived meshes are interned (`m["tp"] is
    m["tp"]`) and share process groups through `universe`.

    Args:
        device_type: "cpu", "cuda", ... without an index.
        mesh: global ranks, one axis a dimension; every rank at most once.
        mesh_dim_names: one name an axis, each once.
        backend_override: one (backend, options) pair an axis, or a mapping from axis index or
            name as for `init_device_mesh`.
        preserve_rank_order: group ranks follow the order of `mesh` instead of ascending ranks.
        universe: a universe that has these ranks to build this mesh in; its timeout and options are
            those of the groups.
        isolate: tags for groups of their own: one for all axes, or by axis index or name; see
            `meshverse.isolate`.

    Raises:
        ValueError: repeated or negative ranks, a rank outside the world, a bad override.
        RuntimeError: a mesh larger than the world; names that repeat or do not match the axes.
        TypeError: neither `mesh` nor torch's private arguments, or names that are no strings.

    The arguments that begin with an underscore are those of torch's own code.
    """

    # Where users import it from; pickles and graphs know it by this name.
    __module__ = __package__

    def __init__(
        self,
        device_type: str,
        mesh: torch.Tensor | ArrayLike | None = None,
        *,
        mesh_dim_names: Sequence[str] | None = None,
        backend_override: BackendOverride | Sequence[Override] | None = None,
        preserve_rank_order: bool = False,
        universe: Universe | None = None,
        isolate: str | Mapping[int | str, str] | None = None,
        _init_backend: bool = True,
        _rank: int | None = None,
        _layout: compat.TorchLayout | None = None,
        _rank_map: torch.Tensor | None = None,
        _root_mesh: StockDeviceMesh | None = None,
    ) -> None:
        tags_before: tuple[str, ...] = ()
        if mesh is not None:
            if _layout is not None or _rank_map is not None:
                raise TypeError("Cannot provide _layout and/or _rank_map if passing explicit mesh")
            layout, rank_map = read_mesh(mesh)
        elif _layout is None or _rank_map is None:
            raise TypeError("The mesh argument is required except for PRIVATE USAGE ONLY!")
        else:
            layout, tags_before = compat.from_torch_layout(_layout), compat.tags_of(_layout)
            if isinstance(_root_mesh, DeviceMesh):
                universe = _root_mesh.universe
            rank_map = universe.rank_map if universe else read_ranks(_rank_map)
            check_layout(layout, rank_map)
        names = check_axis_names(mesh_dim_names, len(layout))
        tags = normalize_tags(isolate, names, len(layout), tags_before)
        if _root_mesh is not None and not _init_backend:  # torch adds groups that it has already
            tags = tags_before
        self._build(
            MeshDescription(device_type, layout, names, preserve_rank_order).with_tags(tags),
            rank_map,
            overrides=normalize_overrides(backend_override, names, len(layout)),
            call="DeviceMesh",
            universe=universe,
            init_backend=_init_backend,
            rank=_rank,
        )

    def _build(
        self,
        description: MeshDescription,
        rank_map: RankMap,
        *,
        overrides: Sequence[Override],
        call: str,
        universe: Universe | None = None,
        make_universe: Callable[..., Universe] = Universe,
        init_backend: bool = True,
        rank: int | None = None,
    ) -> None:
        if universe is not None and rank_map != universe.rank_map:
            make_universe, universe = universe.part, universe.known_part(rank_map)
        if universe is not None:
            universe.roots.check_names(description)
        self._describe(description)
        if not self._may_have_groups:
            init_backend = False
            if World.current() is None and rank is None:
                rank = _NO_RANK
        if init_backend:
            self._set_up_world()
        is_apart = universe is None
        universe = universe or make_universe(rank_map, rank=rank)
        self._enter(universe)
        names = None
        if init_backend:
            names = self._group_names_for(
                *(description.layout, description.labels, overrides, description.tags), call=call
            )
        self._take_group_names(names)
        universe.keep(self)
        if is_apart:
            note_root(self)
        else:
            universe.roots.note_names(description)

    def _set_up_world(self) -> None:
        world = World.current()
        if world is None or self.layout.size > world.size:
            compat.set_up_device(self)  # starts the default group, or says what is wrong
            world = World.current()
        if world is not None:
            world.set_up_device(self, self._device_type)

    def abort(self) -> None:
        """End the process groups of this mesh's universe at once, where their backend can.

        For ranks that are left waiting when another one has died; they need not all call it. Where
        an axis is on the default group, that ends too, and with it all groups of this process.

        Raises:
            RuntimeError: this is no root mesh.
        """
        if self._root_mesh is not None:
            raise RuntimeError(
                f"abort() is not supported on a submesh, such as {self}: call it on the root mesh, "
                f"{self._root_mesh}, whose groups all end together."
            )
        self._universe.abort()

    def bind(self, universe: Universe | None = None) -> DeviceMesh:
        """Give a mesh that was loaded without process groups those of a universe.

        All meshes that were loaded with it are bound too. Missing groups are made with default
        options, so all ranks of the mesh call this.

        Args:
            universe: that has these ranks; by default the first live one of the same ranks, or
                else a new one.

        Returns:
            This mesh, which now equals the universe's own.

        Raises:
            RuntimeError: it has process groups already, or there is no default process group.
            ValueError: the universe has not all these ranks.
        """
        mine = self._universe
        if universe is None:
            universe = Universe.find(mine.rank_map, mine.serial) or Universe(mine.rank_map)
        mine.bind(universe)
        return self

    def _get_all_submeshes(  # type: ignore[override]
        self, mesh_dim_name: str
    ) -> list[DeviceMesh]:
        index = self._get_mesh_dim_by_name(mesh_dim_name)
        universe = self._universe
        groups = RankGroups(self.layout[index], universe.rank_map)
        mine = None if universe.position is None else groups.group_index(universe.position)
        submeshes = []
        for group_index, ranks in enumerate(groups.all().tolist()):
            submesh = object.__new__(DeviceMesh)
            submesh._build(
                MeshDescription(
                    self._device_type,
                    Layout.from_shape((len(ranks),)),
                    (mesh_dim_name,),
                    self._preserve_rank_order,
                ).with_tags(self._description.axis_tags[index : index + 1]),
                RankMap.from_ranks(ranks),
                overrides=(),
                call="_get_all_submeshes",
                init_backend=False,
                rank=universe.rank,
            )
            own = (self.group_names or ())[index : index + 1] if group_index == mine else ()
            submesh._take_group_names(own)
            submeshes.append(submesh)
        return submeshes

    @staticmethod
    def from_group(
        group: compat.ProcessGroup | list[compat.ProcessGroup],
        device_type: str,
        mesh: torch.Tensor | ArrayLike | None = None,
        *,
        mesh_dim_names: Sequence[str] | None = None,
    ) -> DeviceMesh:
        """A mesh on process groups that exist already, one an axis.

        Args:
            group: the group of a 1-D mesh, or one group for each axis.
            device_type: "cpu", "cuda", ... without an index.
            mesh: global ranks; needed with a list of groups.
            mesh_dim_names: one name an axis; needed with a list of groups.

        Raises:
            ValueError: `mesh` is not the ranks of the one group; or with several groups, `mesh` or
                `mesh_dim_names` is missing, or `mesh` has another number of axes than groups.
        """
        groups, ranks = read_groups(group, mesh, mesh_dim_names)
        result = DeviceMesh(device_type, ranks, mesh_dim_names=mesh_dim_names, _init_backend=False)
        result._take_group_names(
            [
                result._universe.groups.adopt(axis, name, given)
                for axis, name, given in zip(result.layout, result._labels(), groups, strict=True)
            ]
        )
        result._universe.keep(result)
        note_root(result)
        return result


MemberMesh.class_of_derived = DeviceMesh
