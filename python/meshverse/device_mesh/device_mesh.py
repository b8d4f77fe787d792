"""`DeviceMesh`: stock's, computed by arithmetic over one universe."""

from __future__ import annotations

import contextlib
import copy
import copyreg
import functools
import hashlib
from collections.abc import Hashable, Iterable, Mapping, Sequence
from html import escape
from typing import Any, ClassVar, cast

import torch
from torch.compiler import is_dynamo_compiling
from torch.distributed.device_mesh import DeviceMesh as StockDeviceMesh
from typing_extensions import Self

from meshverse import _torch_compat as compat
from meshverse._core import Layout, RankGroups, RankMap
from meshverse.graphs.traced_coordinates import traced_coordinate
from meshverse.layouts.computed import computed
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
from meshverse.options.group_options import (
    NO_OVERRIDE,
    BackendOverride,
    Override,
    SingleOverride,
    normalize_override,
    normalize_overrides,
)
from meshverse.options.isolation import (
    check_tag,
    current_tag,
    merge_tags,
    normalize_tags,
    own_tag,
    tag_inside,
    tag_parts,
)
from meshverse.pictures import Picture
from meshverse.universe.registry import find_universe
from meshverse.universe.universe import Universe
from meshverse.wording import did_you_mean
from meshverse.world.world import World

from .drawing import draw
from .group_names import GroupNames, MissingGroups, PromisedGroups
from .logged_once import note_order, note_root

_NO_RANK = -1  # c10d's own word for it

# A mesh over at most this many ranks is hashed when it is made: torch will read the hash, and it
# takes microseconds. Over more ranks the first hash takes longer, and waits until it is read.
_SMALL_WORLD = 1024

_SLICES_A_FLATTENED_AXIS = (
    "Slicing a flattened dim from root mesh will be deprecated in PT 2.11. Users need to "
    "bookkeep the flattened mesh directly. "
)


class _CheckedCoordinate:
    """Descriptor that computes the coordinate on each read, for meshes whose rank may change.

    It is put on the class when the first mesh needs it: CPython reads an attribute 10 ns faster
    where the class has none of its name.
    """

    def __get__(self, mesh: DeviceMesh | None, owner: type) -> Any:
        return self if mesh is None else mesh._find_coordinate()


class DeviceMesh(StockDeviceMesh):
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

    decouple_backend_at_save: ClassVar[bool] = False
    """Whether meshes that are saved come back apart from this world: without its process groups,
    and unequal to its meshes, until `bind()`. Otherwise a loaded mesh finds its universe again."""

    # All attributes that this package sets on a mesh; a user or a subclass set any other. torch
    # reads those that it has too.
    _description: MeshDescription
    _device_type: str
    _mesh_dim_names: tuple[str, ...] | None
    _preserve_rank_order: bool
    _shape: tuple[int, ...]
    _flatten_mapping: dict[str, DeviceMesh]  # type: ignore[assignment]
    _universe: Universe
    _rank: int
    _thread_id: int | None
    _pg_registry: dict[str, compat.ProcessGroup]
    _slices: dict[object, DeviceMesh]  # by what they were requested with
    _hash: int | None
    _identity: tuple[object, ...]  # what makes meshes equal
    _root_mesh: StockDeviceMesh | None
    _dim_group_names: list[str]  # type: ignore[assignment]  # torch writes it too
    _coordinate_on_dim: Any  # of meshes whose rank cannot change; else see `_CheckedCoordinate`

    # --- making one -----------------------------------------------------------------------------

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
        names = check_axis_names(mesh_dim_names or None, len(layout))  # () as stock
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
        settings: Mapping[str, Any] | None = None,
        init_backend: bool = True,
        rank: int | None = None,
    ) -> None:
        """Become a root mesh, in a universe of its own or in a given one.

        Args:
            description: of the mesh.
            rank_map: the ranks that it is over.
            overrides: one an axis; empty where no axis has one.
            call: what the user called, for messages.
            universe: which has these ranks; None for a new one.
            settings: arguments of `Universe`, if it is still to be made.
            init_backend: whether the mesh has process groups.
            rank: this process's, where it is not that in the default group.
        """
        known = None if universe is None else universe.known_part(rank_map)
        if known is not None:
            known.meshes.check_names(description)
        self._describe(description)
        if not self._may_have_groups:
            init_backend = False
            if World.current() is None and rank is None:
                rank = _NO_RANK
        if init_backend:
            self._set_up_world()
        if known is None:
            make = Universe if universe is None else universe.part
            known, is_apart = make(rank_map, rank=rank, **(settings or {})), True
        else:
            is_apart = False
        self._enter(known)
        names = None
        if init_backend:
            names = self._group_names_for(
                *(description.layout, description.labels, overrides, description.tags), call=call
            )
        self._take_group_names(names)
        known.meshes.keep(self)
        if is_apart:
            note_root(self)
        else:
            known.meshes.note_names(description)

    def _set_up_world(self) -> None:
        world = World.current()
        if world is None or self.layout.size > world.size:
            compat.set_up_device(self)  # starts the default group, or says what is wrong
            world = World.current()
        if world is not None:
            world.set_up_device(self, self._device_type)

    @staticmethod
    def from_group(
        group: compat.ProcessGroup | list[compat.ProcessGroup],
        device_type: str,
        mesh: torch.Tensor | ArrayLike | None = None,
        *,
        mesh_dim_names: Sequence[str] | None = None,
    ) -> DeviceMesh:
        """Create a mesh on process groups that exist already, one an axis.

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
        labels = result._description.labels
        result._take_group_names(
            [
                result._universe.groups.adopt(axis, name, given)
                for axis, name, given in zip(result.layout, labels, groups, strict=True)
            ]
        )
        result._universe.meshes.keep(result)
        note_root(result)
        return result

    @classmethod
    def _made(
        cls, universe: Universe, description: MeshDescription, group_names: Sequence[str] | None
    ) -> Self:
        """Create a mesh of this class, which the universe does not intern."""
        mesh = object.__new__(cls)
        mesh._fill(universe, description, group_names)
        return mesh

    def _fill(
        self, universe: Universe, description: MeshDescription, group_names: Sequence[str] | None
    ) -> None:
        self._describe(description)
        self._enter(universe)
        self._take_group_names(group_names)

    @staticmethod
    def _in_universe(
        universe: Universe, description: MeshDescription, group_names: Sequence[str] | None
    ) -> DeviceMesh:
        """Return the mesh of a universe with this description and these groups (None: without)."""
        key = description, None if group_names is None else tuple(group_names)
        known = universe.meshes.find(key)
        if known is not None:
            return known
        return universe.meshes.intern(DeviceMesh._made(universe, description, group_names), key)

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
        self._slices = {}
        self._hash = None
        self._identity = (universe.rank_map, universe.token, self._description)
        if universe.meshes.keeps_coordinates:
            self._keep_coordinate()
        else:
            _check_coordinates()
        # If this mesh has isolation tags, `UniverseMeshes.intern` may give it another root.
        root = universe.meshes.root
        self._root_mesh = None if root is self else root
        if universe.size <= _SMALL_WORLD:
            hash(self)

    # --- what it is -----------------------------------------------------------------------------

    @property
    def universe(self) -> Universe:
        """The universe this mesh belongs to: its ranks, process groups and related meshes."""
        return self._universe

    @property
    def description(self) -> MeshDescription:
        """The device type, axes and tags of this mesh, without its universe and groups."""
        return self._description

    @property
    def layout(self) -> Layout:
        """The axis layouts of this mesh over the positions of its universe's rank map."""
        return self._description.layout

    @property
    def flattened(self) -> Mapping[str, DeviceMesh]:
        """The flattened meshes that this mesh finds by name, those of its root."""
        return self._root()._flatten_mapping

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

    def draw(
        self, axis: str | int | Sequence[str | int] | None = None, *, node_size: int | None = None
    ) -> Picture:
        """Draw this mesh: the ranks by node, coloured by group, mine outlined.

        `print()` shows it as text, `.show()` in colours (with rich), a notebook as SVG; `.to_svg()`
        and `.to_html()` give it to write to a file. Of a submesh, all groups of its universe along
        these axes are drawn. No group is made for it. O(ranks), when it is shown.

        Args:
            axis: name or index of the axis, or name of a flattened axis, or several of them, a
                panel each; by default all axes of this mesh.
            node_size: ranks 0 to n-1 are on the first node, and so on. By default what torchrun
                says (`LOCAL_WORLD_SIZE`); where nothing does, ranks are drawn in lines of eight.

        Raises:
            KeyError: no such name.
            IndexError: no such index.
            ValueError: a node size that is not positive.
        """
        flattened = {name: mesh.description for name, mesh in dict(self.flattened).items()}
        return draw(self._description, self._universe, flattened, axis, node_size)

    def __repr__(self) -> str:
        # With TORCH_DISTRIBUTED_DEBUG=DETAIL stock prints the ranks too. A rank outside a slice has
        # none to print; stock has no such slices.
        universe, layout = self._universe, self.layout
        if universe.position is not None or layout.size == universe.size:
            return StockDeviceMesh.__repr__(self)
        names = self._mesh_dim_names or ()
        axes = f"({', '.join(map('{}={}'.format, names, self._shape))})" if names else self._shape
        strides = tuple(
            axis.strides[0] if len(axis.strides) == 1 else axis.strides for axis in layout
        )
        return f"DeviceMesh({axes}, '{self._device_type}', stride={strides})"

    def _repr_html_(self) -> str:  # in a notebook
        return f"<pre>{escape(repr(self))}</pre>{self.draw().to_svg()}"

    # --- slices, and meshes combined of the axes of several: on the groups that are there ---------

    def __getitem__(self, mesh_dim_names: str | Iterable[str]) -> DeviceMesh:
        """Return the submesh of the named axes; the same object each time.

        Args:
            mesh_dim_names: one name, or several as a tuple or list. Order as in the mesh. On a
                root mesh, names of flattened axes too (deprecated in torch).

        Raises:
            RuntimeError: the mesh has no names, or the axes overlap.
            KeyError: an unknown name, or names in another order than in the mesh.
        """
        if is_dynamo_compiling():
            return StockDeviceMesh.__getitem__(self, mesh_dim_names)  # type: ignore[index,return-value]
        if isinstance(mesh_dim_names, (str, tuple)) and not current_tag():  # a list has no hash
            try:
                known = self._slices.get(mesh_dim_names)
            except TypeError:  # a tuple of lists has no hash either; `_slice` says what is wrong
                known = None
            if known is not None:
                return known
        return self._slice(mesh_dim_names)

    def _slice(self, mesh_dim_names: str | Iterable[str]) -> DeviceMesh:
        own = self._mesh_dim_names or check_has_names(self._description, "slice", RuntimeError)
        names = (mesh_dim_names,) if isinstance(mesh_dim_names, str) else tuple(mesh_dim_names)
        is_isolated = bool(current_tag())
        if names == own and not is_isolated:
            return self
        try:
            indices = list(map(own.index, names))
        except ValueError:
            return self._slice_flattened(names)
        mesh = self._description
        tags = mesh.tags and list(map(mesh.tags.__getitem__, indices))
        description = slice_axes(mesh, names, mesh.layout, indices, tags)
        group_names: Sequence[str] | None = self.group_names
        if group_names:  # None without groups, empty outside the mesh
            group_names = list(map(group_names.__getitem__, indices))
        if is_isolated:
            return self._derive(description, group_names)
        submesh = self._in_universe(self._universe, description, group_names)
        if isinstance(mesh_dim_names, (str, tuple)):
            self._slices[mesh_dim_names] = submesh
        return submesh

    def _slice_flattened(self, names: AxisNames) -> DeviceMesh:
        # As in torch, which deprecates it: slicing a root mesh by names of flattened meshes.
        flattened = self.flattened if self == self._root() else {}
        check_known_axes(self._description, names, flattened)
        own = self._mesh_dim_names or ()
        sources = []
        for name in names:
            if name not in own:  # before the checks that follow, as stock
                compat.warn_as_stock(_SLICES_A_FLATTENED_AXIS, StockDeviceMesh.__getitem__)
            sources.append((self, own.index(name)) if name in own else (flattened[name], 0))
        layout = Layout([mesh.layout[index] for mesh, index in sources])
        tags = [mesh.description.axis_tags[index] for mesh, index in sources]
        description = slice_axes(self._description, names, layout, range(len(names)), tags)
        return self._derive(description, _joined_group_names(sources))

    @staticmethod
    def concatenate(device_mesh_list: Sequence[StockDeviceMesh]) -> StockDeviceMesh:
        """Return a mesh with the axes of several, in the order given, on their process groups.

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
                rank=universe.rank if universe.has_own_rank or not World.current() else None,
            )
            own = (self.group_names or ())[index : index + 1] if group_index == mine else ()
            submesh._take_group_names(own)
            submeshes.append(submesh)
        return submeshes

    # --- flattened and unflattened meshes: on groups that may have to be made ---------------------

    def flatten(
        self,
        mesh_dim_name: str | None = None,
        backend_override: SingleOverride | None = None,
        *,
        isolate: str | None = None,
    ) -> DeviceMesh:
        """Return a one-axis mesh over all ranks of this one, in the same order.

        Args:
            mesh_dim_name: its name; by default the names of this mesh's axes joined by "_".
            backend_override: of its group, if it shall differ from the default.
            isolate: tag for a group of its own, inside those of my axes; see `meshverse.isolate`.
                Torch keeps flattened meshes by name: one that is known under this name and this
                tag already is given as it is, unless its group was destroyed.

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
        if is_dynamo_compiling():  # which traces stock's method
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
        known = universe.meshes.flattened(name, tag)
        known_axis = None if known is None else known.layout[0]
        check_flattened_name(name, axis, root._mesh_dim_names or (), known_axis, root)
        universe.meshes.check_flattened_name(name, axis)
        if known is None or any(map(universe.groups.was_destroyed, known.group_names or ())):
            description = MeshDescription(
                *(self._device_type, Layout([axis]), (name,), self._preserve_rank_order),
                flattened=compat.FLATTENED_ARE_DISTINCT,
                tags=(tag,) if tag else (),
            )
            group_names = None
            if self._may_have_groups:
                overrides = () if backend_override == NO_OVERRIDE else (backend_override,)
                group_names = self._group_names_for(
                    *(description.layout, (name,), overrides, description.tags), call="flatten"
                )
            known = self._in_universe(universe, description, group_names)
            universe.meshes.add_flattened(name, tag, known)
        is_at_root = root._flatten_mapping.get(name) is known
        if not is_at_root and tag == merge_tags(self._description.axis_tags):
            root._flatten_mapping[name] = known  # where torch finds it
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
        """Return the mesh with one axis split into several, the rightmost varying fastest.

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
        index = axis_index(self._description, len(self._shape), dim)
        description = unflatten_axis(self._description, index, mesh_sizes, mesh_dim_names)
        n_new = len(mesh_dim_names)
        overrides: Sequence[Override] = ()
        if backend_override is not None:
            overrides = normalize_overrides(backend_override, mesh_dim_names, n_new)
        end = index + n_new
        tags = description.tags[index:end]
        if isolate is not None or tags or current_tag():
            tags = normalize_tags(isolate, mesh_dim_names, n_new, tags)
        group_names: Sequence[str] | None = self.group_names
        if group_names is not None:
            new = self._group_names_for(
                *(description.layout, mesh_dim_names, overrides, tags),
                call="unflatten",
                first=index,
            )
            group_names = [*group_names[:index], *new, *group_names[index + 1 :]]
        if any(tags):
            before = description.axis_tags
            description = description.with_tags([*before[:index], *tags, *before[end:]])
        return self._derive(description, group_names)

    def _derive(
        self, description: MeshDescription, group_names: Sequence[str] | None
    ) -> DeviceMesh:
        """Return the mesh of my universe with this description and these groups.

        Inside an `isolate` block it is that mesh under the block's tag.
        """
        block = current_tag()
        if not block:
            return self._in_universe(self._universe, description, group_names)
        tags = [tag_inside(block, tag) for tag in description.axis_tags]
        return self._derive_under(tags, description, group_names)

    def _derive_under(
        self, tags: Sequence[str], description: MeshDescription, group_names: Sequence[str] | None
    ) -> DeviceMesh:
        """Return the mesh of my universe with this description, under these isolation tags."""
        group_names = self._group_names_under(tags, description, group_names)
        return self._in_universe(self._universe, description.with_tags(tags), group_names)

    # --- process groups -------------------------------------------------------------------------

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

    def get_group(self, mesh_dim: int | str | None = None) -> compat.ProcessGroup:
        """Return this rank's process group along one axis.

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
            ValueError: the universe lacks some of these ranks.
        """
        mine = self._universe
        if universe is None:
            universe = find_universe(mine.rank_map, mine.serial) or Universe(mine.rank_map)
        mine.bind(universe)
        return self

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

    @property
    def _may_have_groups(self) -> bool:
        return self._device_type != "xla"  # whose meshes have none in stock

    def _check_groups(self) -> None:
        if not self.has_groups:
            self._refuse_groups()

    def _refuse_groups(self) -> None:
        why = (
            "was made or loaded without them. After init_process_group(), call mesh.bind() on all "
            "its ranks."
            if self._may_have_groups
            else "is for XLA, whose compiler communicates without process groups."
        )
        raise RuntimeError(f"DeviceMesh process groups not initialized! {self} {why}")

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
        """Return names of my groups along some axes, made where needed; none outside the ranks.

        `layout` is that of the mesh they are for, `names` are those of its axes from `first` on.
        Overrides and tags have one entry per axis, or are empty if no axis has one.
        """
        universe, keeps_order = self._universe, self._preserve_rank_order
        if not (overrides or tags or keeps_order):
            known = universe.groups.known_names(layout, names, first)
            if known is not None:
                return known
        made = universe.groups.get_or_make(
            *(layout, names, overrides, tags),
            preserve_rank_order=keeps_order,
            call=call,
            first=first,
        )
        if not keeps_order and not (layout.is_sorted() and universe.rank_map.is_sorted()):
            note_order(self, layout.axes[first : first + len(names)], names)
        return [group.name for group in made if group.name is not None]

    def _group_names_under(
        self, tags: Sequence[str], description: MeshDescription, group_names: Sequence[str] | None
    ) -> list[str] | None:
        """Return names of groups like these, for axes that shall have another tag."""
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

    def _take_group_names(self, group_names: Sequence[str] | None) -> None:
        """Use these process groups, one per axis; None for a mesh without process groups."""
        if group_names is None:
            self._dim_group_names = MissingGroups(len(self._shape), self._refuse_groups)
            return
        universe = self._universe
        # torch.compile cannot take in a mesh that is made within a graph with a list of another
        # class.
        if universe.meshes.has_plain_names and all(
            name in universe.process_groups for name in group_names
        ):
            self._dim_group_names = list(group_names)
        else:
            self._dim_group_names = names = GroupNames(group_names)
            names.universe = universe

    # --- this rank's coordinate -------------------------------------------------------------------

    def get_local_rank(self, mesh_dim: int | str | None = None) -> int:
        """Return my rank in the process group along one axis. It makes no lazy group.

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
            planned = universe.groups.planned(name)
            if planned is not None:
                universe.groups.check_usable()
                return planned.request.my_rank()
            if mesh_dim is None and len(self._shape) != 1:  # stock says what is wrong
                return StockDeviceMesh.get_local_rank(self, mesh_dim)
            return self.get_group(mesh_dim).rank()
        except RuntimeError:
            world = self._universe.world
            rank = self._local_rank_in_parent(mesh_dim) if world and world.is_of_parent else None
            if rank is None:
                raise
            return rank

    def _local_rank_in_parent(self, mesh_dim: int | str | None) -> int | None:
        """Return the parent's rank in its group in a fork, such as a data loader's worker."""
        name = self._name_without_use(mesh_dim)
        if name is None:
            return None
        planned = self._universe.groups.planned(name)
        return compat.resolve_group(name).rank() if planned is None else planned.request.my_rank()

    def _name_without_use(self, mesh_dim: int | str | None) -> str | None:
        """Return the c10d name of the group along an axis, without making it; None if unknown."""
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

    def _find_coordinate(self) -> tuple[int, ...] | None:
        """Return this rank's coordinate, or None outside of the mesh.

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

    # --- what stock's methods and the rest of torch read: computed when it is first read ----------

    # Stock annotates these as attributes that can be written; torch does not write them.
    @computed
    def _layout(self) -> compat.TorchLayout:
        layout = compat.to_torch_layout(self.layout, flattened=self._description.flattened)
        tags = self._description.tags
        return compat.tag_layout(layout, tags, merge_tags(tags)) if tags else layout

    @computed
    def _rank_map(self) -> torch.Tensor:
        return self._universe.rank_views.tensor

    @computed
    def _flatten_rank_map(self) -> tuple[int, ...]:
        return self._universe.rank_views.tuple

    @computed
    def mesh(self) -> torch.Tensor:
        """Global ranks of this mesh: int32 CPU tensor with one dimension per axis.

        A copy of this mesh's own: to write to it changes no other mesh.

        Raises:
            RuntimeError: a part of the universe, read on a rank outside the universe, or in a
                process that is another rank now than the one that made the mesh.
        """
        universe, layout = self._universe, self.layout
        if layout.size == universe.size:
            first = 0
        elif universe.position is not None:
            if universe.world is not None and not universe.has_own_rank:
                universe.world.check_rank()
            first = layout.base(universe.position)
        else:
            raise RuntimeError(
                "In order to get the mesh Tensor of a DeviceMesh it needs to either have all its "
                "original dimensions (e.g., no slicing) or it needs to contain the local rank. "
                f"Rank {universe.rank} is not in {self}, of the universe of {universe.rank_map}."
            )
        sizes = [size for axis in layout for size in axis.sizes]
        strides = [stride for axis in layout for stride in axis.strides]
        with compat.untraced():
            ranks = self._rank_map.as_strided(sizes, strides, first)
            return ranks.clone(memory_format=torch.contiguous_format).view(layout.shape)

    def _get_mesh_dim_by_name(self, mesh_dim_name: str) -> int:
        try:
            return StockDeviceMesh._get_mesh_dim_by_name(self, mesh_dim_name)
        except KeyError as error:
            if mesh_dim_name in self.flattened:
                hint = f"It is a flattened axis, of the mesh that mesh[{mesh_dim_name!r}] gives."
            else:
                known = [*(self._mesh_dim_names or ()), *self.flattened]
                hint = did_you_mean(mesh_dim_name, known)
            if not hint:
                raise
            raise KeyError(*error.args, hint.strip()) from None

    def _get_root_mesh_dim(self) -> int | None:
        # The root of all meshes here is the first one; in stock, a slice of another root has that.
        dim = self._universe.meshes.later_dim(self._description)
        return StockDeviceMesh._get_root_mesh_dim(self) if dim is None else dim

    def _get_slice_mesh_layout(self, mesh_dim_names: tuple[str, ...]) -> compat.TorchLayout:
        # DTensor flattens this layout, and looks for a flattened mesh with the result at the root.
        layout = StockDeviceMesh._get_slice_mesh_layout(self, mesh_dim_names)
        if not self._description.tags:
            return layout
        own = dict(zip(self._description.labels, self._description.axis_tags, strict=True))
        tags = [
            own[name] if name in own else self.flattened[name].description.axis_tags[0]
            for name in mesh_dim_names
        ]
        return compat.with_flattened_tag(layout, tags, merge_tags(tags))

    # --- equality: of all meshes of a world with the same ranks, axes, names and tags -------------

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if type(other) is not type(self):  # isinstance runs Python code of torch's metaclass
            if not isinstance(other, StockDeviceMesh):
                return False
            other = cast("StockDeviceMesh", compat.real_mesh(other))
            if not isinstance(other, DeviceMesh):
                return self._equals_stock(other)
        if self._identity != other._identity:
            return False
        mine, theirs = self._universe, other._universe
        if mine is theirs:
            return True
        # torch's caches are keyed by meshes. What they hold for a mesh whose groups have ended must
        # not be found for a new mesh.
        if mine.is_over or theirs.is_over:
            return False
        if mine.world is theirs.world or self._may_be_of(theirs.world):
            return True
        return theirs.has_own_rank and not other.has_groups

    def _equals_stock(self, stock: StockDeviceMesh) -> bool:
        # A stock mesh does not know its world, so it is taken for one of this world.
        is_apart = (
            self._universe.token is not None
            or bool(self._description.tags)
            or self._universe.is_over
            or not self._may_be_of(World.current())
        )
        return not is_apart and compat.equals_stock(self, stock)

    def _may_be_of(self, world: World | None) -> bool:
        # What torch's caches hold for a mesh of an earlier world must not be found for one of this
        # world: the earlier groups are gone, and this process may be another rank. A mesh without a
        # world may be of any, as may one without groups whose rank was given: torch keeps those.
        # Under torch's threaded test backend, each thread is a rank and has a world of its own.
        universe = self._universe
        if universe.world is world or universe.world is None or world is None:
            return True
        return universe.has_own_rank and not self.has_groups

    def __hash__(self) -> int:
        # Equal meshes of either class have equal hashes.
        return self._hash or self._compute_hash()

    def _compute_hash(self) -> int:
        universe = self._universe
        if universe.size <= _SMALL_WORLD:
            return int(StockDeviceMesh.__hash__(self))  # type: ignore[no-untyped-call]
        # Without the tuple of all ranks, which stock's reads.
        self._hash = compat.hash_as_stock(self, universe.rank_views.hashed)
        return self._hash

    def _stable_hash(self) -> str:
        # torch finds compiled graphs on disk by this hash, and the ranks of a host share the disk.
        # A graph contains its rank's coordinate and the names of its groups. Stock's hash leaves
        # both out, so one rank can get the graph of another. A graph that one rank compiles for
        # all ranks contains neither.
        key = self._stable_key()
        if not compat.compiles_one_graph():
            # These names do not count as use of the groups, so lazy groups stay lazy.
            key = *key, self._universe.rank, self.group_names
        return hashlib.blake2b(repr(key).encode(), digest_size=16).hexdigest()

    @computed
    def _compile_guard(self) -> tuple[object, ...]:
        """Values that must stay equal for a compiled graph to be used: all that makes meshes equal.

        Short strings, where stock's guard compares the tuple of all ranks at every call. The world
        counts, and which universes of it had ended, because a graph knows its process groups by
        names.
        """
        world, generation = self._universe.world, self._universe.generation
        return *self._stable_key(), generation, None if world is None else world.label

    def _stable_key(self) -> tuple[object, ...]:
        # What makes meshes equal in one world, the same in every process.
        description = self._description
        return (
            self._universe.rank_map.fingerprint,
            str(description.layout),
            description.device_type,
            description.axis_names,
            description.preserve_rank_order,
            description.flattened,
            description.tags,
            self._universe.token is None,  # a decoupled mesh equals no other
        )

    # --- copies and pickles: a copy is the same object, as a universe has each mesh once ----------

    # A mesh of a user's subclass is really copied, as in stock, with the attributes that the
    # subclass or its user set. Pickle finds how a mesh is saved in its dispatch table, where
    # `saved_mesh` puts it.

    def __copy__(self) -> Self:
        copied = self._twin()
        if copied is not self:
            copied.__setstate__(self.__getstate__())
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        copied = memo[id(self)] = self._twin()
        if copied is not self:
            copied.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return copied

    def _twin(self) -> Self:
        """Return this mesh without what a subclass adds; the same object if it is interned."""
        if self.decouple_backend_at_save:
            load, arguments, *_ = self._reduced()
            return cast("Self", load(*arguments))
        if type(self) is DeviceMesh:
            return self
        twin = self._made(self._universe, self._description, self.group_names)
        if twin.has_groups:
            self._universe.meshes.note(twin)
        else:  # so that bind() finds it
            self._universe.meshes.keep(twin)
        return twin

    def _reduced(self) -> Any:
        reduce: Any = copyreg.dispatch_table[DeviceMesh]
        return reduce(self)

    # Called for subclasses only: pickle finds our class itself in its dispatch table.
    def __reduce_ex__(self, protocol: Any) -> Any:
        if type(self).__reduce__ is not object.__reduce__:  # the subclass defines its own way
            return self.__reduce__()
        return self._reduced()

    def __getstate__(self) -> dict[str, Any]:
        """Attributes that a subclass or its user set on this mesh; `save_mesh` saves all else."""
        own = _own_attributes(type(self))
        return {name: value for name, value in vars(self).items() if name not in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take what `__getstate__` gave.

        Raises:
            ValueError: it holds what a mesh of ours has itself, which is not saved in this way.
        """
        own = sorted(_own_attributes(type(self)) & set(state))
        if own:
            raise ValueError(
                f"A saved {type(self).__name__} sets {own}, which the mesh has itself: a subclass "
                "may save attributes of its own only."
            )
        vars(self).update(state)

    @computed
    def _key_digests(self) -> list[str | None]:
        """Digests of the options keys of my groups, one per axis; empty outside the mesh."""
        names = self._dim_group_names
        if isinstance(names, PromisedGroups) and not names.are_all_known:
            return []
        pairs = zip(self.layout, self.group_names or (), strict=False)
        return [self._universe.groups.key_digest(*pair) for pair in pairs]

    # --- what its universe calls ----------------------------------------------------------------

    @property
    def _intern_key(self) -> Hashable:
        """The key of this mesh within its universe: its description and its process groups.

        A mesh of a user's subclass is identified by its id: it may have other attributes besides.
        """
        if type(self) is not DeviceMesh:
            return id(self)  # the universe keeps it, so no other mesh there will have this id
        return self._description, self.group_names

    def _root(self) -> DeviceMesh:
        return cast("DeviceMesh", self._root_mesh or self)

    def _take_root(self, root: StockDeviceMesh | None) -> None:
        """Set the root of this mesh. None, or the mesh itself, makes it a root."""
        self._root_mesh = None if root is self else root

    def _add_flattened(self, name: str, flattened: DeviceMesh) -> None:
        """Note a flattened mesh at this root, unless another has as many tags."""
        known = self._flatten_mapping.get(name)
        is_anew = known is not None and known.description == flattened.description
        if known is None or is_anew or _n_tags(flattened) > _n_tags(known):
            self._flatten_mapping[name] = flattened

    def _keep_coordinate(self) -> None:
        """Compute this rank's coordinate now, for all later reads."""
        position = self._universe.position
        layout = self._description.layout
        self._coordinate_on_dim = None if position is None else layout.coordinate(position)

    def _forget_coordinate(self) -> None:
        """Compute this rank's coordinate, and the ranks of a part of the mesh, at the next read."""
        _check_coordinates()
        names = ["_coordinate_on_dim"]
        if self._description.layout.size != self._universe.size:
            names.append("mesh")
        for name in names:
            with contextlib.suppress(AttributeError):
                delattr(self, name)

    def _renew_group_names(self) -> None:
        """Give torch a plain list of names of groups, or one that looks at each use."""
        names: list[str] = vars(self).get("_dim_group_names", MissingGroups)
        if type(names) in (list, GroupNames):
            self._take_group_names(list(names))

    def _under(self, tags: Sequence[str]) -> DeviceMesh:
        """Return this mesh under other isolation tags, as a root: its groups are made when used."""
        names = None if self.group_names is None else ()
        mesh = self._made(self._universe, self._description.with_tags(tags), names)
        mesh._take_root(None)
        self._universe.meshes.note(mesh)
        if self.group_names:

            def request(index: int) -> str:
                with contextlib.suppress(AttributeError):
                    del mesh._key_digests  # of no groups, if they were read before
                axis, description = slice(index, index + 1), self._description
                if description.axis_tags[index] == tags[index]:
                    return str(self._dim_group_names[index])
                made = self._universe.groups.request_tagged(
                    description.layout.select([index]),
                    description.labels[axis],
                    list.__getitem__(self._dim_group_names, axis),
                    tags[axis],
                )
                return str(made[0].name)

            mesh._dim_group_names = promised = PromisedGroups(self.ndim, request)
            promised.universe = self._universe
        return mesh

    def _join(self, universe: Universe) -> None:
        """Enter a universe, for `Universe.bind`: on its groups, made where it has none."""
        block = current_tag()
        tags = [tag_inside(block, tag) for tag in self._description.axis_tags]
        self._description = self._description.with_tags(tags)
        # These may have been computed already, for another rank, universe or tags.
        self._forget_coordinate()
        for computed_before in ("mesh", "_compile_guard", "_key_digests", "_layout"):
            with contextlib.suppress(AttributeError):
                delattr(self, computed_before)
        self._enter(universe)
        names = None
        if self._may_have_groups:
            description = self._description
            names = self._group_names_for(
                description.layout, description.labels, (), tags, call="bind"
            )
        self._take_group_names(names)
        universe.meshes.keep(self)


def _check_coordinates() -> None:
    """Make meshes that keep no coordinate compute it on each read."""
    if "_coordinate_on_dim" not in vars(DeviceMesh):
        DeviceMesh._coordinate_on_dim = _CheckedCoordinate()


def _joined_group_names(axes: Iterable[tuple[DeviceMesh, int]]) -> list[str] | None:
    """Group names of axes of several meshes: None if one has no groups, [] outside the mesh."""
    joined: list[str] = []
    for mesh, index in axes:
        if not mesh.has_groups:
            return None
        joined.extend((mesh.group_names or ())[index : index + 1])
    return joined


def _n_tags(flattened: DeviceMesh) -> int:
    tags = flattened.description.tags
    return len(tag_parts(tags[0])) if tags else 0


@functools.cache
def _own_attributes(mesh_class: type) -> frozenset[str]:
    """Names of all that a mesh has itself."""
    members = [item for base in mesh_class.__mro__ for item in vars(base).items()]
    lazily = [name for name, value in members if isinstance(value, computed)]
    declared = [
        name for name, kind in DeviceMesh.__annotations__.items() if "ClassVar" not in str(kind)
    ]
    return frozenset((*declared, *lazily))
