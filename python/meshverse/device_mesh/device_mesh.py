"""`DeviceMesh`: stock's, computed by arithmetic over one universe."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch.compiler import is_compiling
from torch.distributed.device_mesh import DeviceMesh as StockDeviceMesh

from meshverse import _torch_compat as compat
from meshverse._core import Layout, RankGroups, RankMap
from meshverse.layouts.derivation import (
    MeshDescription,
    axis_index,
    check_flattened_name,
    check_has_names,
    check_known_axes,
    concatenate,
    slice_axes,
    unflatten_axis,
)
from meshverse.layouts.user_input import (
    ArrayLike,
    AxisNames,
    check_axis_names,
    check_layout,
    read_groups,
    read_mesh,
    read_ranks,
)
from meshverse.options.isolation import check_tag, current_tag, merge_tags, own_tag, tag_inside
from meshverse.options.overrides import (
    NO_OVERRIDE,
    BackendOverride,
    Override,
    SingleOverride,
    normalize_override,
    normalize_overrides,
    normalize_tags,
)
from meshverse.universe.universe import Universe
from meshverse.world.world import World

from .copies import CopyableMesh
from .equal_roots import note_root
from .placed import PlacedMesh

__all__ = ["DeviceMesh"]

_NO_RANK = -1  # c10d's own word for it
_SLICES_A_FLATTENED_AXIS = (
    "Slicing a flattened dim from root mesh will be deprecated in PT 2.11. Users need to "
    "bookkeep the flattened mesh directly. "
)


class DeviceMesh(PlacedMesh, CopyableMesh):
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
        universe: a universe with the same ranks to build this mesh in; its timeout and options are
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
        check_layout(description.layout, rank_map, universe.rank_map if universe else None)
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
            labels, tags, layout = self._labels(), description.tags, description.layout
            names = self._group_names_for(layout, labels, overrides, tags, call=call, layout=layout)
        self._take_group_names(names)
        universe.intern(self)
        if is_apart:
            note_root(self)

    def _set_up_world(self) -> None:
        world = World.current()
        if world is None or self.layout.size > world.size:
            compat.set_up_device(self)  # starts the default group, or says what is wrong
            world = World.current()
        if world is not None:
            world.set_up_device(self, self._device_type)

    # --- derived meshes ------------------------------------------------------------------------

    def __getitem__(self, mesh_dim_names: str | Iterable[str]) -> DeviceMesh:
        """The submesh of the named axes; the same object each time.

        Args:
            mesh_dim_names: one name, or several as a tuple or list. Order as in the mesh. On a
                root mesh, names of flattened axes too (deprecated in torch).

        Raises:
            RuntimeError: the mesh has no names, or the axes overlap.
            KeyError: an unknown name, or names in another order than in the mesh.
        """
        if is_compiling():
            return StockDeviceMesh.__getitem__(self, mesh_dim_names)  # type: ignore[index,return-value]
        if isinstance(mesh_dim_names, (str, tuple)) and not current_tag():  # a list has no hash
            try:
                known = self._slices.get(mesh_dim_names)
            except TypeError:  # nor has a tuple of lists, which names no axes
                known = None
            if known is not None:
                return known  # type: ignore[return-value]
        return self._slice(mesh_dim_names)

    def _slice(self, mesh_dim_names: str | Iterable[str]) -> DeviceMesh:
        own = check_has_names(self._description, "slice", RuntimeError)
        names = (mesh_dim_names,) if isinstance(mesh_dim_names, str) else tuple(mesh_dim_names)
        is_isolated = bool(current_tag())
        if names == own and not is_isolated:
            return self
        try:
            indices = [own.index(name) for name in names]
        except ValueError:
            return self._slice_flattened(names)
        tags = self._description.tags and [self._description.tags[index] for index in indices]
        description = slice_axes(self._description, names, self.layout.select(indices), tags)
        group_names: Sequence[str] | None = self.group_names
        if group_names:  # None without groups, empty outside the mesh
            group_names = [group_names[index] for index in indices]
        submesh = self._derive(description, group_names)
        if isinstance(mesh_dim_names, (str, tuple)) and not is_isolated:
            self._slices[mesh_dim_names] = submesh
        return submesh

    def _slice_flattened(self, names: AxisNames) -> DeviceMesh:
        # A root mesh may also be sliced by the names of flattened meshes; torch is dropping that.
        root = self._root()
        flattened: Any = root._flatten_mapping if self == root else {}
        check_known_axes(self._description, names, flattened)
        own = self._mesh_dim_names or ()
        sources = []
        for name in names:
            if name not in own:  # before the checks that follow, as stock
                compat.warn_as_stock(_SLICES_A_FLATTENED_AXIS, StockDeviceMesh.__getitem__)
            sources.append((self, own.index(name)) if name in own else (flattened[name], 0))
        layout = Layout([mesh.layout[index] for mesh, index in sources])
        tags = [mesh.description.axis_tags[index] for mesh, index in sources]
        description = slice_axes(self._description, names, layout, tags)
        return self._derive(description, _joined_group_names(sources))

    def flatten(
        self,
        mesh_dim_name: str | None = None,
        backend_override: SingleOverride | None = None,
        *,
        isolate: str | None = None,
    ) -> DeviceMesh:
        """A one-axis mesh over all ranks of this one, in the same order.

        Args:
            mesh_dim_name: its name; by default the names of this mesh's axes joined by "_".
            backend_override: of its group, if it shall differ from the default.
            isolate: tag for a group of its own, inside those of my axes; see `meshverse.isolate`.
                Torch keeps flattened meshes by name: one that is known under this name and this
                tag already is given as it is.

        Raises:
            RuntimeError: this mesh has no names.
            ValueError: the name is an axis of the root, or another flattened mesh has it.
        """
        if not self._mesh_dim_names:
            raise RuntimeError("Cannot flatten a DeviceMesh without mesh_dim_names!")
        name = mesh_dim_name or "_".join(self._mesh_dim_names)
        block, tags = current_tag(), self._description.tags
        if block or tags or isolate is not None:
            tag = merge_tags(
                tag_inside(block, tag)
                if isolate is None
                else own_tag(tag, block, check_tag(isolate))
                for tag in self._description.axis_tags
            )
        else:
            tag = ""
        return self._flattened_under(tag, name, normalize_override(backend_override))

    def _flatten(
        self, mesh_dim_name: str | None = None, backend_override: SingleOverride | None = None
    ) -> DeviceMesh:
        if is_compiling():  # which traces stock's method
            return StockDeviceMesh._flatten(self, mesh_dim_name, backend_override)  # type: ignore[return-value,arg-type]
        return self.flatten(mesh_dim_name, backend_override)

    def _create_flatten_mesh(  # type: ignore[override]
        self, mesh_dim_name: str | None = None, backend_override: Override = NO_OVERRIDE
    ) -> DeviceMesh | None:
        # Called by stock's `_flatten`, which finds the mesh at the root; what is traced knows no
        # `isolate` blocks. 2.11 may leave the name to us.
        name = mesh_dim_name or "_".join(self._mesh_dim_names or ())
        tag = merge_tags(self._description.axis_tags)
        made = self._flattened_under(tag, name, normalize_override(backend_override))
        return made if compat.FLATTENING_GIVES_MESH else None

    def _flattened_under(self, tag: str, name: str, backend_override: Override) -> DeviceMesh:
        if self.ndim == 1 and name in (self._mesh_dim_names or ()):
            return self._derive_under((tag,), self._description, self.group_names)
        axis, universe, root = self.layout.collapse(), self._universe, self._root()
        known = cast("DeviceMesh | None", universe.roots.flattened(name, tag))
        known_axis = None if known is None else known.layout[0]
        check_flattened_name(name, axis, root._mesh_dim_names or (), known_axis, root)
        if known is None:
            description = self._description._replace(
                layout=Layout([axis]),
                axis_names=(name,),
                flattened=compat.FLATTENED_ARE_APART,
                tags=(tag,) if tag else (),
            )
            override = normalize_override(backend_override)
            group_names = None
            if self._may_have_groups:
                layout = description.layout
                overrides = () if override == NO_OVERRIDE else (override,)
                group_names = self._group_names_for(
                    *(layout, (name,), overrides, description.tags), call="flatten", layout=layout
                )
            known = self._in_universe(universe, description, group_names)
            universe.add_flattened(name, tag, known)
        is_at_root = root._flatten_mapping.get(name) is known
        if not is_at_root and tag == merge_tags(self._description.axis_tags):
            root.add_flattened(name, known, replace=True)  # where torch finds it
        return known

    def unflatten(
        self,
        dim: int | str,
        mesh_sizes: Sequence[int],
        mesh_dim_names: Sequence[str],
        backend_override: BackendOverride | None = None,
        *,
        isolate: str | Mapping[int | str, str] | None = None,
    ) -> DeviceMesh:
        """The same ranks with one axis split into several, the rightmost varying fastest.

        Args:
            dim: index or name of the axis to split.
            mesh_sizes: sizes of the new axes; their product is the size of the axis.
            mesh_dim_names: names of the new axes.
            backend_override: by name or index of the new axes, where a group shall differ.
            isolate: tags for groups of their own, inside that of the axis: one for all the new
                axes, or by name or index of the new axes; see `meshverse.isolate`.

        Raises:
            ValueError: no such axis, or sizes that do not multiply out to it.
            RuntimeError: another number of names than sizes, or a name that is taken.
        """
        return self._unflatten(dim, mesh_sizes, mesh_dim_names, backend_override, isolate)

    def _unflatten(  # type: ignore[override]
        self,
        dim: int | str,
        mesh_sizes: Sequence[int],
        mesh_dim_names: Sequence[str],
        backend_override: BackendOverride | None = None,
        isolate: str | Mapping[int | str, str] | None = None,
    ) -> DeviceMesh:
        index = axis_index(self._description, dim)
        new_axes, description = unflatten_axis(self._description, index, mesh_sizes, mesh_dim_names)
        overrides: Sequence[Override] = ()
        if backend_override is not None:
            overrides = normalize_overrides(backend_override, mesh_dim_names, len(new_axes))
        tags, end = description.tags[index : index + len(new_axes)], index + len(new_axes)
        if isolate is not None or tags or current_tag():
            tags = normalize_tags(isolate, mesh_dim_names, len(new_axes), tags)
        group_names: Sequence[str] | None = self.group_names
        if group_names is not None:
            new = self._group_names_for(
                *(new_axes, mesh_dim_names, overrides, tags),
                call="unflatten",
                layout=description.layout,
            )
            group_names = [*group_names[:index], *new, *group_names[index + 1 :]]
        if any(tags):
            before = description.axis_tags
            description = description.with_tags([*before[:index], *tags, *before[end:]])
        return self._derive(description, group_names)

    @staticmethod
    def concatenate(device_mesh_list: Sequence[StockDeviceMesh]) -> StockDeviceMesh:
        """One mesh with the axes of several, in the order given, on their process groups.

        Args:
            device_mesh_list: meshes over the same ranks whose axes do not overlap.

        Raises:
            RuntimeError: they overlap, or are over different ranks.
            TypeError: one has no names.
            IndexError: there is none.
        """
        return DeviceMesh._concatenate(device_mesh_list)

    @staticmethod
    def _concatenate(device_mesh_list: Sequence[StockDeviceMesh]) -> StockDeviceMesh:
        meshes = [mesh for mesh in device_mesh_list if isinstance(mesh, DeviceMesh)]
        if len(meshes) < len(device_mesh_list) or not meshes:
            joined = compat.stock_concatenate(list(device_mesh_list))
            for mesh in meshes:  # stock knows no lazy groups, so they are used now
                for index in range(len(mesh.group_names or ())):
                    mesh._dim_group_names[index]
            return joined
        first = meshes[0]
        for mesh in meshes:
            check_has_names(mesh._description, "concatenate", TypeError)
            if mesh._universe.rank_map != first._universe.rank_map:
                raise RuntimeError(  # with torch's own spelling
                    "Cannot concatenate DeviceMeshes derived from different device meshs: "
                    f"{first} is over {first._universe.rank_map}, {mesh} is over "
                    f"{mesh._universe.rank_map}."
                )
        description = concatenate([mesh._description for mesh in meshes], meshes)
        for mesh in meshes:
            if mesh._universe is not first._universe and mesh.group_names:
                first._universe.groups.borrow(mesh._universe.groups, mesh.group_names)
        axes = [(mesh, index) for mesh in meshes for index in range(len(mesh.layout))]
        return first._derive(description, _joined_group_names(axes))

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
            universe: of the same ranks; by default the first live one, or else a new one.

        Returns:
            This mesh, which now equals the universe's own.

        Raises:
            RuntimeError: it has process groups already, or there is no default process group.
            ValueError: the universe has other ranks.
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
        result._universe.intern(result)
        note_root(result)
        return result


CopyableMesh.class_of_derived = DeviceMesh


def _joined_group_names(axes: Iterable[tuple[DeviceMesh, int]]) -> list[str] | None:
    """Group names of axes of several meshes: None if one has no groups, [] outside the mesh."""
    joined: list[str] = []
    for mesh, index in axes:
        if not mesh.has_groups:
            return None
        joined.extend((mesh.group_names or ())[index : index + 1])
    return joined
