"""`DeviceMesh`: a subclass of torch's class that computes ranks by arithmetic within a universe."""

from __future__ import annotations

import contextlib
import copy
import copyreg
import functools
import hashlib
from collections.abc import Hashable, Iterable, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch.compiler import is_dynamo_compiling
from torch.distributed.device_mesh import DeviceMesh as StockDeviceMesh
from typing_extensions import Self

from meshverse._core import Layout, RankGroups, RankMap
from meshverse._torch_compat.c10d_groups import (
    lacks_a_group,
    resolve_group,
    set_up_world_and_device,
)
from meshverse._torch_compat.one_graph import compiles_one_graph, is_one_graph_traced
from meshverse._torch_compat.private_names import ProcessGroup, TorchLayout
from meshverse._torch_compat.stock_layouts import (
    FLATTENED_ARE_DISTINCT,
    FLATTENING_GIVES_MESH,
    equals_stock,
    from_torch_layout,
    hash_as_stock,
    tag_layout,
    tags_of,
    to_torch_layout,
    with_flattened_tag,
)
from meshverse._torch_compat.tracing import (
    is_stocks_own,
    outside_torch_modes,
    real_mesh,
    stock_concatenate,
    warn_as_stock,
)
from meshverse.coordinate_op import traced_coordinate
from meshverse.descriptors import assignable, computed
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
    warn_of_suspicious_input,
)
from meshverse.options.group_options import (
    NO_OVERRIDE,
    BackendOverride,
    Override,
    SingleOverride,
    normalize_override,
    normalize_overrides,
)
from meshverse.options.isolation_tags import (
    check_tag,
    current_tag,
    merge_tags,
    normalize_tags,
    own_tag,
    tag_inside,
    tag_parts,
)
from meshverse.universe.universe import Universe, check_universe
from meshverse.universe.world_universes import find_universe
from meshverse.wording import did_you_mean
from meshverse.world import World

from .fsdp2_meshes import note_source, source_of, universe_of_default_mesh
from .group_names import DeferredGroupNames, GroupNames, NoGroupNames, prepare_for_graph

if TYPE_CHECKING:
    from meshverse.tools.pictures import Picture

_NO_RANK = -1  # as in c10d

# If a mesh's universe has at most this many ranks, the mesh computes its hash when it is created:
# that takes microseconds, and torch will read the hash. The first hash over more ranks takes
# longer, so it is computed only when it is read.
_SMALL_UNIVERSE = 1024
_OF_ENDED_WORLD = -1  # `_thread_id` of no thread

_SLICES_A_FLATTENED_AXIS = (
    "Slicing a flattened dim from root mesh will be deprecated in PT 2.11. Users need to "
    "bookkeep the flattened mesh directly. "
)


class _CheckedCoordinate:
    """Descriptor that computes the coordinate on each read, as this process's rank may change.

    Installed on `DeviceMesh` only once a mesh needs it: while the class has no attribute of that
    name, reading the instance attribute is 10 ns faster.
    """

    def __get__(self, mesh: DeviceMesh | None, owner: type) -> Any:
        return self if mesh is None else mesh._find_coordinate()


class DeviceMesh(StockDeviceMesh):
    """A drop-in subclass of `torch.distributed.DeviceMesh` that shares process groups.

    Create it with `init_device_mesh`, or as in torch from a tensor or array of global ranks. It has
    all methods of torch's class, with the same results. The meshes that are derived from a mesh are
    in the same `universe`: axes with the same ranks and options share one process group, and the
    same slice is the same object (`mesh["tp"] is mesh["tp"]`).

    Args:
        device_type: "cpu", "cuda", ... without an index.
        mesh: global ranks, each at most once; one dimension per axis.
        mesh_dim_names: one name per axis, each at most once.
        backend_override: one (backend, options) pair per axis, or a mapping from axis index or name
            as for `init_device_mesh`.
        preserve_rank_order: whether the ranks of a group keep their order in `mesh`. By default
            they ascend, as in torch.
        universe: existing universe to create this mesh in. It has these ranks, and sets the timeout
            and options of the groups. If it also has other ranks, the mesh is in a part of it.
        isolate: tags, for groups that are shared only with meshes under the same tag: one tag for
            all axes, or tags by axis index or name; see `meshverse.isolate`.

    Raises:
        ValueError: ranks repeat, are negative or outside the world or `universe`; or an override is
            not valid.
        RuntimeError: the mesh is larger than the world, or names repeat or do not match the axes.
        TypeError: a name is not a string; or both `mesh` and torch's private arguments are missing.

    Arguments that begin with an underscore are for torch's own code.
    """

    # Users import it from there, and pickles and graphs refer to it by that name.
    __module__ = __package__

    decouple_backend_at_save: ClassVar[bool] = False
    """Whether a saved mesh is independent of this world when it is loaded: without process groups,
    and unequal to live meshes, until `bind()`. Otherwise it is loaded into its live universe."""

    # All attributes that this package sets on a mesh; any other was set by a user or a subclass.
    # torch reads those that its own class has too.
    _description: MeshDescription
    _device_type: str
    _mesh_dim_names: tuple[str, ...] | None
    _preserve_rank_order: bool
    _shape: tuple[int, ...]
    _flatten_mapping: dict[str, DeviceMesh]  # type: ignore[assignment]
    _universe: Universe
    _rank: int
    _thread_id: int | None
    _pg_registry: dict[str, ProcessGroup]
    _slices: dict[object, DeviceMesh]  # by the argument of `__getitem__`
    _hash: int | None
    _identity: tuple[object, ...]  # equal for equal meshes
    _root_mesh: StockDeviceMesh | None
    _dim_group_names: list[str]  # type: ignore[assignment]  # torch writes it too
    _coordinate_on_dim: Any  # set if this rank cannot change; otherwise see `_CheckedCoordinate`

    # --- creating a mesh ------------------------------------------------------------------------

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
        _layout: TorchLayout | None = None,
        _rank_map: torch.Tensor | None = None,
        _root_mesh: StockDeviceMesh | None = None,
    ) -> None:
        from meshverse._torch_compat.callers import name_of_constructor

        tags_before: tuple[str, ...] = ()
        check_universe(universe)
        if mesh is not None:
            if _layout is not None or _rank_map is not None:
                raise TypeError("Cannot provide _layout and/or _rank_map if passing explicit mesh")
            layout, rank_map = read_mesh(mesh)
            source = None if universe is not None else source_of(mesh)
            if source is not None:
                universe = source._universe
                tags_before = (merge_tags(source._description.axis_tags),) * len(layout)
        elif _layout is None or _rank_map is None:
            raise TypeError("The mesh argument is required except for PRIVATE USAGE ONLY!")
        else:
            layout, tags_before = from_torch_layout(_layout), tags_of(_layout)
            if isinstance(_root_mesh, DeviceMesh):
                universe = _root_mesh._universe
            rank_map = universe.rank_map if universe else read_ranks(_rank_map)
            check_layout(layout, rank_map)
            if _root_mesh is None and universe is None and not backend_override:
                universe = universe_of_default_mesh(layout, rank_map)
        names = check_axis_names(mesh_dim_names or None, len(layout))  # torch accepts () too
        if _root_mesh is None:
            warn_of_suspicious_input(device_type, mesh_dim_names, len(layout), stacklevel=2)
        tags = normalize_tags(isolate, names, len(layout), tags_before)
        if _root_mesh is not None and not _init_backend:
            # torch is deriving a mesh, to which it will give existing groups. So an `isolate` block
            # around the call must not tag it.
            tags = tags_before
        self._build(
            MeshDescription(device_type, layout, names, preserve_rank_order).with_tags(tags),
            rank_map,
            overrides=normalize_overrides(backend_override, names, len(layout)),
            call=name_of_constructor(),
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
        """Initialize this object as a root mesh, in a new or an existing universe.

        Args:
            description: description of the mesh.
            rank_map: ranks of the mesh.
            overrides: one per axis; empty if no axis has one.
            call: name of the function that the user called, for messages.
            universe: existing universe that has these ranks; None for a new one.
            settings: further arguments of `Universe` or `Universe.part`, if this creates one.
            init_backend: whether the mesh has process groups.
            rank: global rank of this process; None for its rank in the default group.
        """
        known = None if universe is None else universe.known_part(rank_map)
        if known is not None:
            known.meshes.check_names(description)
        self._set_description(description)
        if not self._may_have_groups:
            init_backend = False
            is_passed = universe is not None and universe.rank_was_passed
            if World.current() is None and rank is None and not is_passed:
                rank = _NO_RANK
        if init_backend:
            self._start_world()
        if known is None:
            new_universe = Universe if universe is None else universe.part
            known, is_new = new_universe(rank_map, rank=rank, **(settings or {})), True
        else:
            is_new = False
        try:
            self._join_universe(known)
            names = None
            if init_backend:
                names = self._request_groups(
                    description.layout, description.labels, overrides, description.tags, call=call
                )
            self._take_group_names(names)
            known.meshes.add(self)
            if is_new:
                _register_root(self)
            else:
                known.meshes.note_names(description)
        except BaseException:
            # A new part that stayed would refuse the settings of a second call. It has meshes if
            # another thread has used it meanwhile.
            if universe is None or (is_new and not known.meshes):
                known.groups.give_up()
            raise

    def _start_world(self) -> None:
        world = World.current()
        if world is None or self._description.layout.size > world.size:
            set_up_world_and_device(self)  # starts the default group, or raises
            world = World.current()
        if world is not None:
            world.choose_device(self, self._device_type)

    @staticmethod
    def from_group(
        group: ProcessGroup | list[ProcessGroup],
        device_type: str,
        mesh: torch.Tensor | ArrayLike | None = None,
        *,
        mesh_dim_names: Sequence[str] | None = None,
    ) -> DeviceMesh:
        """Create a mesh on existing process groups, one per axis.

        Args:
            group: the group of a 1-D mesh, or a list with one group per axis.
            device_type: "cpu", "cuda", ... without an index.
            mesh: global ranks; required with a list of groups.
            mesh_dim_names: one name per axis; required with a list of groups.

        Raises:
            ValueError: with a single group, `mesh` differs from its ranks; with a list of groups,
                `mesh` or `mesh_dim_names` is missing, the number of axes is not the number of
                groups, or a group has other ranks than this rank's axis (torch accepts that).
        """
        groups, ranks = read_groups(group, mesh, mesh_dim_names)
        layout, rank_map = read_mesh(ranks)
        names = check_axis_names(mesh_dim_names or None, len(layout))  # torch accepts () too
        warn_of_suspicious_input(device_type, mesh_dim_names, len(layout), stacklevel=2)
        description = MeshDescription(device_type, layout, names, preserve_rank_order=False)
        description = description.with_tags(normalize_tags(None, names, len(layout)))
        universe = Universe(rank_map)
        axes = zip(layout, description.labels, groups, strict=True)
        result = DeviceMesh._create(
            universe, description, [universe.groups.adopt(*axis) for axis in axes]
        )
        universe.meshes.add(result)
        _register_root(result)
        return result

    @classmethod
    def _create(
        cls, universe: Universe, description: MeshDescription, group_names: Sequence[str] | None
    ) -> Self:
        """Create a mesh of this class without interning it in the universe."""
        mesh = object.__new__(cls)
        mesh._set_description(description)
        mesh._join_universe(universe)
        mesh._take_group_names(group_names)
        return mesh

    @staticmethod
    def _get_or_create(
        universe: Universe, description: MeshDescription, group_names: Sequence[str] | None
    ) -> DeviceMesh:
        """Return a universe's mesh of this description and these groups (None for no groups)."""
        key = description, None if group_names is None else tuple(group_names)
        known = universe.meshes.find(key)
        if known is not None:
            return known
        return universe.meshes.intern(DeviceMesh._create(universe, description, group_names), key)

    def _set_description(self, description: MeshDescription) -> None:
        self._description = description
        # One step is faster than reading the fields by name.
        self._device_type, layout, self._mesh_dim_names, self._preserve_rank_order, _, _ = (
            description
        )
        self._shape = layout.shape
        self._flatten_mapping = {}

    def _join_universe(self, universe: Universe) -> None:
        self._universe = universe
        self._rank = universe.rank
        self._thread_id = universe.thread_id
        self._pg_registry = universe.process_groups
        self._slices = {}
        self._hash = None
        self._identity = (universe.rank_map, universe.decoupled_token, self._description)
        if universe.meshes.stores_coordinates:
            self._store_coordinate()
        elif universe.meshes.world_has_ended:
            self._note_world_end()
        else:
            _check_coordinates()
        # `UniverseMeshes.intern` changes it for a universe's first mesh, and for one with tags.
        root = universe.meshes.root
        self._root_mesh = None if root is self else root
        if universe.size <= _SMALL_UNIVERSE:
            # It stores the hash, which torch will read. A subclass's own one may need what its
            # `__init__` sets later.
            DeviceMesh.__hash__(self)

    # --- properties -----------------------------------------------------------------------------

    @assignable
    def universe(self) -> Universe:
        """The universe of this mesh, with its ranks, process groups and related meshes."""
        return self._universe

    @assignable
    def description(self) -> MeshDescription:
        """Device type, axes and tags of this mesh, without its universe and groups."""
        return self._description

    @assignable
    def layout(self) -> Layout:
        """Layout of each axis over the positions of the universe's rank map."""
        return self._description.layout

    @assignable
    def flattened(self) -> Mapping[str, DeviceMesh]:
        """Flattened meshes by name: those that the root of this mesh has."""
        return self._root()._flatten_mapping

    # torch's versions of these three read `_layout`. Ours do not, so `_layout` is computed only if
    # torch itself reads it.
    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self._shape)

    @property
    def shape(self) -> tuple[int, ...]:
        """Size of every axis."""
        return self._shape

    def size(self, mesh_dim: int | None = None) -> int:
        """Return the number of ranks of this mesh, or along one axis.

        Args:
            mesh_dim: index of the axis; None for the whole mesh.

        Raises:
            IndexError: there is no axis of this index.
            TypeError: `mesh_dim` is no integer, but for example a name.
        """
        if mesh_dim is None:
            return self._description.layout.size
        try:
            return self._shape[mesh_dim]
        except IndexError:
            raise self._no_axis(mesh_dim) from None
        except TypeError:
            raise TypeError(
                f"mesh.size({mesh_dim!r}) with an axis of type {type(mesh_dim).__name__}: pass the "
                f"index of an axis. By name, mesh[name].size() is that of one of "
                f"{self._description.labels}."
            ) from None

    def _no_axis(self, mesh_dim: int) -> IndexError:
        labels = self._description.labels
        return IndexError(
            f"The mesh has no axis {mesh_dim}: its axes are {labels}, with the indices "
            f"{-len(labels)} to {len(labels) - 1}."
            if labels
            else f"The mesh has no axis {mesh_dim}, as it has no axes."
        )

    def draw(
        self, axis: str | int | Sequence[str | int] | None = None, *, node_size: int | None = None
    ) -> Picture:
        """Draw the ranks of this mesh by node, colored by process group, with this rank outlined.

        `print()` shows the picture as text, `.show()` in color (with rich) and a notebook as SVG.
        `.to_svg()` and `.to_html()` return documents as strings. Along the axes of a submesh, all
        groups of its universe are drawn. Drawing creates no process group; showing the picture
        takes O(number of ranks) time.

        Args:
            axis: name or index of an axis, name of a flattened axis, or a sequence of these, each
                drawn as a panel; by default all axes of this mesh.
            node_size: number of ranks per node, in order of rank. By default torchrun's
                `LOCAL_WORLD_SIZE`; without that, ranks are drawn in lines of eight.

        Raises:
            KeyError: there is no axis of this name.
            IndexError: there is no axis of this index.
            ValueError: the node size is not positive.
        """
        from meshverse.tools.pictures.of_mesh import draw

        flattened = {
            name: mesh._description for name, mesh in dict(self._root()._flatten_mapping).items()
        }
        return draw(self._description, self._universe, flattened, axis, node_size)

    def __repr__(self) -> str:
        # A mesh without a tag and with all its groups prints as in torch. Others print more, so
        # that an error about two meshes does not show the same text twice.
        text, tags = self._repr_as_stock(), self._description.tags
        if not text.endswith(")"):
            return text
        more = ""
        if tags:
            pairs = zip(self._description.labels, tags, strict=True)
            shown = tags[0] if len(set(tags)) == 1 else {name: tag for name, tag in pairs if tag}
            more = f", isolate={shown!r}"
        destroyed = self._destroyed_axes()
        if destroyed:
            more += f", destroyed={(destroyed[0] if len(destroyed) == 1 else destroyed)!r}"
        if (ended := self._universe.groups.ended) is not None:
            more += f", universe={ended!r}"
        return f"{text[:-1]}{more})"

    def _repr_as_stock(self) -> str:
        # With TORCH_DISTRIBUTED_DEBUG=DETAIL, torch's method also prints the ranks. On a process
        # outside the mesh, a slice has no ranks to print; in torch, creating it raises.
        universe, layout = self._universe, self._description.layout
        if universe.position is not None or layout.size == universe.size:
            return StockDeviceMesh.__repr__(self)
        names = self._mesh_dim_names or ()
        axes = f"({', '.join(map('{}={}'.format, names, self._shape))})" if names else self._shape
        strides = tuple(
            axis.strides[0] if len(axis.strides) == 1 else axis.strides for axis in layout
        )
        return f"DeviceMesh({axes}, '{self._device_type}', stride={strides})"

    def _repr_html_(self) -> str:  # in a notebook
        return f"<p><code>{escape(repr(self))}</code></p>{DeviceMesh.draw(self)._repr_html_()}"

    # --- slices and concatenated meshes, on existing groups ---------------------------------------

    def __getitem__(self, mesh_dim_names: str | Iterable[str]) -> DeviceMesh:
        """Return the submesh of the named axes; the same object each time.

        Args:
            mesh_dim_names: one name, or a tuple or list of names in the order of the mesh. On a
                root mesh, also names of flattened axes (deprecated in torch).

        Raises:
            RuntimeError: the mesh has no axis names, or the axes overlap.
            KeyError: a name is unknown, or the names are in another order than in the mesh.
        """
        if is_dynamo_compiling():
            return StockDeviceMesh.__getitem__(self, mesh_dim_names)  # type: ignore[index,return-value]
        if isinstance(mesh_dim_names, (str, tuple)) and not current_tag():
            try:
                known = self._slices.get(mesh_dim_names)
            except TypeError:  # a tuple that contains a list cannot be hashed; `_slice` raises
                known = None
            if known is not None:
                if type(known._dim_group_names) is not list:
                    prepare_for_graph()
                return known
        sliced = self._slice(mesh_dim_names)
        if type(sliced._dim_group_names) is not list:
            prepare_for_graph()
        return sliced

    def _slice(self, mesh_dim_names: str | Iterable[str]) -> DeviceMesh:
        own = self._mesh_dim_names or check_has_names(self._description, "slice", RuntimeError)
        names = (
            (mesh_dim_names,) if isinstance(mesh_dim_names, str) else self._names(mesh_dim_names)
        )
        is_isolated = bool(current_tag())
        if names == own and not is_isolated:
            return self
        if any(name not in own for name in names):
            return self._slice_flattened(names)
        indices = list(map(own.index, names))
        mesh = self._description
        tags = mesh.tags and list(map(mesh.tags.__getitem__, indices))
        description = slice_axes(mesh, names, mesh.layout, indices, tags)
        group_names: Sequence[str] | None = self._names_of_groups
        if group_names:
            group_names = list(map(group_names.__getitem__, indices))
        if is_isolated:
            return self._derive(description, group_names)
        submesh = self._get_or_create(self._universe, description, group_names)
        if isinstance(mesh_dim_names, (str, tuple)):
            self._slices[mesh_dim_names] = submesh
        return submesh

    def _names(self, given: Iterable[str]) -> AxisNames:
        try:
            return tuple(given)
        except TypeError:
            raise TypeError(
                f"mesh[{given!r}] with a key of type {type(given).__name__}: slice a mesh by the "
                f"names of axes, such as mesh[{self._mesh_dim_names[0]!r}]. This mesh has the axes "  # type: ignore[index]
                f"{self._mesh_dim_names}; get_group() and size() take indices too."
            ) from None

    def _slice_flattened(self, names: AxisNames) -> DeviceMesh:
        # Slicing a root mesh by names of flattened meshes, which torch deprecates.
        flattened = self._root()._flatten_mapping if self == self._root() else {}
        check_known_axes(self._description, names, flattened)
        own = self._mesh_dim_names or ()
        sources = []
        for name in names:
            if name not in own:  # torch too warns before it checks
                warn_as_stock(_SLICES_A_FLATTENED_AXIS, StockDeviceMesh.__getitem__)
            sources.append((self, own.index(name)) if name in own else (flattened[name], 0))
        layout = Layout([mesh._description.layout[index] for mesh, index in sources])
        tags = [mesh._description.axis_tags[index] for mesh, index in sources]
        description = slice_axes(self._description, names, layout, range(len(names)), tags)
        return self._derive(description, _joined_group_names(sources))

    @staticmethod
    def concatenate(device_mesh_list: Sequence[StockDeviceMesh]) -> StockDeviceMesh:
        """Return a mesh with the axes of several meshes, in this order, on their process groups.

        Args:
            device_mesh_list: meshes of universes with the same ranks, whose axes do not overlap.

        Raises:
            RuntimeError: the axes overlap, or the universes have different ranks.
            TypeError: a mesh has no axis names.
            IndexError: the list is empty.
        """
        return DeviceMesh._concatenate(device_mesh_list)

    @staticmethod
    def _concatenate(device_mesh_list: Sequence[StockDeviceMesh]) -> StockDeviceMesh:
        meshes = [mesh for mesh in device_mesh_list if isinstance(mesh, DeviceMesh)]
        if not device_mesh_list:
            raise IndexError("concatenate() got no meshes: pass a list with at least one.")
        if len(meshes) < len(device_mesh_list) or not meshes:
            joined = stock_concatenate(list(device_mesh_list))
            for mesh in meshes:  # a mesh of torch's class cannot create lazy groups at first use
                for index in range(len(mesh._names_of_groups or ())):
                    mesh._dim_group_names[index]  # creates the group
            return joined
        first = meshes[0]
        for mesh in meshes:
            check_has_names(mesh._description, "concatenate", TypeError)
            if mesh._universe.rank_map != first._universe.rank_map:
                raise RuntimeError(  # "meshs" is torch's spelling
                    "Cannot concatenate DeviceMeshes derived from different device meshs: "
                    f"{first} is over {first._universe.rank_map}, {mesh} is over "
                    f"{mesh._universe.rank_map}."
                )
        description = concatenate([mesh._description for mesh in meshes], meshes)
        for mesh in meshes:
            if mesh._universe is not first._universe and mesh._names_of_groups:
                first._universe.groups.list_groups_of(mesh._universe.groups, mesh._names_of_groups)
        axes = [(mesh, index) for mesh in meshes for index in range(len(mesh._description.layout))]
        return first._derive(description, _joined_group_names(axes))

    def _get_all_submeshes(  # type: ignore[override]
        self, mesh_dim_name: str
    ) -> list[DeviceMesh]:
        index = self._get_mesh_dim_by_name(mesh_dim_name)
        universe = self._universe
        groups = RankGroups(self._description.layout[index], universe.rank_map)
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
                rank=universe.rank if universe.rank_was_passed or not World.current() else None,
            )
            own = (self._names_of_groups or ())[index : index + 1] if group_index == mine else ()
            submesh._take_group_names(own)
            submeshes.append(submesh)
        return submeshes

    # --- flattened and unflattened meshes, which may need new groups ------------------------------

    def flatten(
        self,
        mesh_dim_name: str | None = None,
        backend_override: SingleOverride | None = None,
        *,
        isolate: str | None = None,
    ) -> DeviceMesh:
        """Return a one-axis mesh over all ranks of this one, in the same order.

        If these ranks were already flattened under the same name and tag, this returns the existing
        mesh, and ignores `backend_override`. If its group was destroyed, a new mesh replaces it.

        Args:
            mesh_dim_name: name of the new axis; by default the names of this mesh's axes, joined
                by "_".
            backend_override: backend name, options object or a pair of both for the group; by
                default those of the universe.
            isolate: tag, for a group that is shared only under the same tag; see
                `meshverse.isolate`. It is added to the tags of this mesh's axes.

        Raises:
            RuntimeError: this mesh has no axis names.
            TypeError: the new name is no string.
            ValueError: an axis of the root mesh, or another flattened axis, has this name.
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
        if is_dynamo_compiling():  # torch.compile can trace torch's method, but not ours
            return StockDeviceMesh._flatten(self, mesh_dim_name, backend_override)  # type: ignore[return-value,arg-type]
        prepare_for_graph()
        return DeviceMesh.flatten(self, mesh_dim_name, backend_override)

    def _create_flatten_mesh(  # type: ignore[override]
        self, mesh_dim_name: str | None = None, backend_override: Override = NO_OVERRIDE
    ) -> DeviceMesh | None:
        # torch's `_flatten` calls this while torch.compile traces it, and then reads the mesh from
        # the root's `_flatten_mapping`. Traced code ignores `isolate` blocks. torch 2.11 may pass
        # None as the name.
        name = mesh_dim_name or "_".join(self._mesh_dim_names or ())
        tag = merge_tags(self._description.axis_tags)
        made = self._flattened_under(tag, name, normalize_override(backend_override))
        return made if FLATTENING_GIVES_MESH else None

    def _flattened_under(self, tag: str, name: str, backend_override: Override) -> DeviceMesh:
        if not isinstance(name, str):
            raise TypeError(
                f"mesh_dim_name={name!r} of type {type(name).__name__}: the name of an axis is a "
                f"string. Leave it out for {'_'.join(self._mesh_dim_names or ())!r}."
            )
        if self.ndim == 1 and name in (self._mesh_dim_names or ()):
            return self._derive_under((tag,), self._description, self._names_of_groups)
        axis, universe, root = self._description.layout.collapse(), self._universe, self._root()
        registered = known = universe.meshes.flattened(name, tag)
        known_axis = None if known is None else known._description.layout[0]
        check_flattened_name(name, axis, root._mesh_dim_names or (), known_axis, root)
        universe.meshes.check_flattened_name(name, axis)
        if known is not None and known._preserve_rank_order != self._preserve_rank_order:
            raise ValueError(
                f"{name} already exists in the universe of {root}: a flattened mesh with "
                f"preserve_rank_order={known._preserve_rank_order}, whose groups have their ranks "
                f"in another order. Choose another name, or give {self} a universe of its own."
            )
        if known is not None and known._device_type != self._device_type:
            known = None  # a mesh on the same groups, which only the other one's root has by name
        if known is None or any(map(universe.groups.was_destroyed, known._names_of_groups or ())):
            description = MeshDescription(
                self._device_type,
                Layout([axis]),
                (name,),
                self._preserve_rank_order,
                flattened=FLATTENED_ARE_DISTINCT,
                tags=(tag,) if tag else (),
            )
            group_names = None
            if self._may_have_groups:
                overrides = () if backend_override == NO_OVERRIDE else (backend_override,)
                group_names = self._request_groups(
                    description.layout, (name,), overrides, description.tags, call="flatten"
                )
            known = self._get_or_create(universe, description, group_names)
            if registered is not None and registered._device_type != known._device_type:
                return known
            universe.meshes.add_flattened(name, tag, known)
        is_at_root = root._flatten_mapping.get(name) is known
        if not is_at_root and tag == merge_tags(self._description.axis_tags):
            root._flatten_mapping[name] = known  # torch looks it up there
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
        """Return this mesh with one axis split into several, of which the last varies fastest.

        Args:
            dim: index or name of the axis to split.
            mesh_sizes: sizes of the new axes; their product is the size of the split axis. One may
                be -1: it gets what the others leave.
            mesh_dim_names: names of the new axes.
            backend_override: backends and options of new axes, by axis name or index among the new
                axes, as for `init_device_mesh`.
            isolate: tags, for groups that are shared only under the same tag: one tag for all new
                axes, or tags by name or index of the new axes; see `meshverse.isolate`. They are
                added to the tag of the split axis.

        Raises:
            ValueError: there is no such axis, a size is 0 or below -1, or the product of the sizes
                is not its size.
            RuntimeError: the number of names is not that of the sizes, or a name is taken.
            TypeError: this mesh has no axis names.
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
        group_names: Sequence[str] | None = self._names_of_groups
        if group_names is not None:
            new = self._request_groups(
                description.layout,
                mesh_dim_names,
                overrides,
                tags,
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
        """Return this universe's mesh of this description and these groups.

        Inside an `isolate` block, the mesh has the block's tag, and groups under that tag.
        """
        block = current_tag()
        if not block:
            return self._get_or_create(self._universe, description, group_names)
        tags = [tag_inside(block, tag) for tag in description.axis_tags]
        return self._derive_under(tags, description, group_names)

    def _derive_under(
        self, tags: Sequence[str], description: MeshDescription, group_names: Sequence[str] | None
    ) -> DeviceMesh:
        """Return this universe's mesh of this description, under these isolation tags."""
        group_names = self._request_groups_under(tags, description, group_names)
        return self._get_or_create(self._universe, description.with_tags(tags), group_names)

    # --- process groups -------------------------------------------------------------------------

    # Meshverse itself reads `_has_groups` and `_names_of_groups`: programs and subclasses may use
    # the public names for something else.
    @property
    def _has_groups(self) -> bool:
        return not isinstance(self._dim_group_names, NoGroupNames)

    @property
    def _names_of_groups(self) -> tuple[str, ...] | None:
        # Everywhere in this file: None if the mesh has no process groups; empty on a rank outside
        # the mesh; else one name per axis.
        names = self._dim_group_names
        return None if isinstance(names, NoGroupNames) else tuple(names)

    @assignable
    def has_groups(self) -> bool:
        """Whether this mesh has process groups, lazy ones included; the same on all ranks."""
        return self._has_groups

    @assignable
    def group_names(self) -> tuple[str, ...] | None:
        """c10d names of this rank's process groups, one per axis; None if the mesh has no groups.

        Empty on a rank outside the mesh. Reading the names creates no lazy group. Those of a root
        under another isolation tag are requested only now.
        """
        return self._names_of_groups

    def get_group(self, mesh_dim: int | str | None = None) -> ProcessGroup:
        """Return this rank's process group along one axis; creates it now if it is lazy.

        Args:
            mesh_dim: index or name of the axis, or name of a flattened axis. May be omitted if the
                mesh has one axis.

        Raises:
            RuntimeError: the mesh has no process groups, or its groups have ended; or the mesh has
                several axes and `mesh_dim` is omitted.
            KeyError: there is no axis of this name.
            IndexError: there is no axis of this index, or this rank is outside the mesh.
        """
        if is_dynamo_compiling():  # torch.compile can trace torch's method, but not ours
            return StockDeviceMesh.get_group(self, mesh_dim)
        try:
            name: str | None
            if mesh_dim is None and len(self._shape) == 1:
                name = self._dim_group_names[0]
            elif isinstance(mesh_dim, int):
                name = self._dim_group_names[mesh_dim]
            else:
                name = self._name_of_named_group(mesh_dim)
            if name is None:  # torch's method raises
                self._check_groups()
                return StockDeviceMesh.get_group(self, mesh_dim)
            return resolve_group(name)
        except IndexError:
            self._check_groups()
            if self._names_of_groups and isinstance(mesh_dim, int):
                raise self._no_axis(mesh_dim) from None
            rank, ranks = self._universe.rank, self._universe.rank_map
            raise IndexError(
                f"Rank {rank} is not in {self} over {ranks}, so it has no process group of this "
                "mesh. On ranks outside a mesh, get_coordinate() returns None: check that first."
            ) from None

    def _name_of_named_group(self, mesh_dim: Any) -> str | None:
        root = self if self._root_mesh is None else self._root_mesh
        try:
            flattened = root._flatten_mapping.get(mesh_dim)
        except TypeError:  # it cannot be hashed, so it is not a name
            return None
        if flattened is not None:  # as in torch, it comes before an axis of the same name
            return flattened._dim_group_names[0]
        names = self._mesh_dim_names or ()
        return self._dim_group_names[names.index(mesh_dim)] if mesh_dim in names else None

    def bind(self, universe: Universe | None = None) -> DeviceMesh:
        """Attach a universe's process groups to this mesh, which was loaded or created without any.

        All other meshes without groups in its universe are bound too. This creates missing groups,
        with the default options of the target universe, so all ranks of the meshes must call it.

        Args:
            universe: target universe, which has these ranks. By default this mesh's own, if it has
                one on the current default group. Else a live universe over the same ranks: the one
                whose serial number the mesh was saved with, or the oldest that has created groups.
                If there is none, a new universe.

        Returns:
            This mesh. It now equals the universe's own mesh.

        Raises:
            RuntimeError: the mesh has process groups already, or there is no default process group.
            ValueError: `universe` lacks some of these ranks, or has a flattened mesh with the name
                of an axis of these meshes and another layout.
        """
        mine = self._universe
        if universe is None:
            universe = find_universe(mine.rank_map, mine.serial) or Universe(mine.rank_map)
        mine.bind(universe)
        return self

    def abort(self) -> None:
        """Abort the process groups of this mesh's universe, with running collectives (NCCL).

        Call it on ranks that wait for a rank that has died; not all ranks need to call it. If an
        axis uses the default group, that is aborted too, and with it all groups of this process.

        Raises:
            RuntimeError: this is not a root mesh.
        """
        if self._root_mesh is not None:
            raise RuntimeError(
                f"abort() is not supported on a submesh, such as {self}: call it on the root mesh, "
                f"{self._root_mesh}. It aborts all groups of the universe."
            )
        self._universe.abort()

    @property
    def _may_have_groups(self) -> bool:
        return self._device_type != "xla"  # as in torch

    def _check_groups(self) -> None:
        if not self._has_groups:
            self._refuse_groups()

    def _refuse_groups(self) -> None:
        why = (
            "was created or loaded without them. After init_process_group(), call mesh.bind() on "
            "all its ranks."
            if self._may_have_groups
            else "is for XLA, whose compiler communicates without process groups."
        )
        raise RuntimeError(f"DeviceMesh process groups not initialized! {self} {why}")

    def _request_groups(
        self,
        layout: Layout,
        names: Sequence[str],
        overrides: Sequence[Override],
        tags: Sequence[str],
        *,
        call: str,
        first: int = 0,
    ) -> list[str]:
        """Return the c10d names of this rank's groups along some axes; creates missing groups.

        Lazy groups are planned and get a name, but are not created. On a rank outside the universe,
        the list is empty.

        Args:
            layout: layout of a mesh with these axes.
            names: names of the axes.
            overrides: one per axis; empty if no axis has one.
            tags: isolation tags, one per axis; empty if no axis has one.
            call: name of the function that the user called, for messages.
            first: index in `layout` of the first of the axes, which are consecutive.
        """
        universe, preserve_rank_order = self._universe, self._preserve_rank_order
        if not (overrides or tags or preserve_rank_order):
            known = universe.groups.request_known(layout, names, first)
            if known is not None:
                return known
        made = universe.groups.get_or_make(
            layout,
            names,
            overrides,
            tags,
            preserve_rank_order=preserve_rank_order,
            call=call,
            first=first,
        )
        if not preserve_rank_order and not (layout.is_sorted() and universe.rank_map.is_sorted()):
            from .mesh_warnings import warn_of_sorted_ranks

            warn_of_sorted_ranks(self, layout.axes[first : first + len(names)], names)
        return [group.name for group in made if group.name is not None]

    def _request_groups_under(
        self, tags: Sequence[str], description: MeshDescription, group_names: Sequence[str] | None
    ) -> list[str] | None:
        """Return names of groups with the same ranks and options, under these isolation tags."""
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
        """Set the process groups of this mesh, one per axis; None for a mesh without groups."""
        if group_names is None:
            self._dim_group_names = NoGroupNames(len(self._shape), self._refuse_groups)
            return
        universe = self._universe
        # A plain list if possible: torch.compile rejects a mesh that is created inside a graph if
        # its list is of another class.
        if universe.meshes.has_plain_names and all(
            name in universe.process_groups for name in group_names
        ):
            self._dim_group_names = list(group_names)
        else:
            self._dim_group_names = names = GroupNames(group_names)
            names.universe = universe

    # --- this rank's coordinate -------------------------------------------------------------------

    def get_local_rank(self, mesh_dim: int | str | None = None) -> int:
        """Return this rank's number within its process group along one axis; lazy groups stay lazy.

        Args:
            mesh_dim: as for `get_group`.

        Raises:
            RuntimeError, KeyError, IndexError: in the same cases as `get_group`.
        """
        # LocalTensor mode, which simulates several ranks, replaces this method of torch's class by
        # one that returns a number for each of them. And torch.compile can trace torch's method,
        # but not ours.
        if not is_stocks_own(StockDeviceMesh.get_local_rank) or is_dynamo_compiling():
            return StockDeviceMesh.get_local_rank(self, mesh_dim)
        try:
            universe, name = self._universe, self._name_without_use(mesh_dim)
            if name is not None and name in universe.ready_groups:
                handle = universe.process_groups.get(name)  # another thread may have ended it
                if handle is not None:
                    return handle.rank()
            planned = universe.groups.find_planned(name)
            if planned is not None:
                universe.groups.check_usable()
                return planned.request.my_rank()
            if mesh_dim is None and len(self._shape) != 1:  # torch's method raises
                return StockDeviceMesh.get_local_rank(self, mesh_dim)
            return self.get_group(mesh_dim).rank()
        except RuntimeError:
            world = self._universe.world
            rank = self._local_rank_in_parent(mesh_dim) if world and world.is_of_parent else None
            if rank is None:
                raise
            return rank

    def _local_rank_in_parent(self, mesh_dim: int | str | None) -> int | None:
        """Return the rank that the parent process of this fork has in its group; None if unknown.

        Forks such as data loaders' workers may read it, although they cannot use the group.
        """
        name = self._name_without_use(mesh_dim)
        if name is None:
            return None
        planned = self._universe.groups.find_planned(name)
        return resolve_group(name).rank() if planned is None else planned.request.my_rank()

    def _name_without_use(self, mesh_dim: int | str | None) -> str | None:
        """Return the c10d name of the group along an axis without creating it; None if unknown."""
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
            return None  # get_group raises
        # `names[mesh_dim]` would count as use of the group, and create it.
        return list.__getitem__(names, mesh_dim)

    def _find_coordinate(self) -> tuple[int, ...] | None:
        """Return this rank's coordinate, or None if it is outside the mesh.

        Raises:
            AttributeError: this process has no rank, as with torch's XLA mesh without a default
                group.
            RuntimeError: this process's rank or the number of ranks has changed since the mesh was
                created.
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
        # In a graph that is compiled for all ranks, torch's method searches a table of all ranks;
        # this one computes the coordinate. For LocalTensor mode, see `get_local_rank`.
        if is_stocks_own(StockDeviceMesh._sym_get_coordinate):
            if not is_one_graph_traced():
                coordinate = self._coordinate_on_dim
                if coordinate is not None:
                    return coordinate[index]
            else:
                traced = traced_coordinate(self._description.layout[index], self._universe.rank_map)
                if traced is not None:
                    return traced
        return StockDeviceMesh._sym_get_coordinate(self, index)

    # --- attributes that torch reads, computed at their first read --------------------------------

    # torch's class declares these as attributes that can be written, but torch does not write them.
    @computed
    def _layout(self) -> TorchLayout:
        layout = to_torch_layout(self._description.layout, flattened=self._description.flattened)
        tags = self._description.tags
        return tag_layout(layout, tags, merge_tags(tags)) if tags else layout

    @computed
    def _rank_map(self) -> torch.Tensor:
        return self._universe.rank_views.tensor

    @computed
    def _flatten_rank_map(self) -> tuple[int, ...]:
        return self._universe.rank_views.tuple

    @computed
    def mesh(self) -> torch.Tensor:
        """Global ranks of this mesh: int32 CPU tensor with one dimension per axis.

        Each mesh has its own copy, so writing to it changes no other mesh.

        Raises:
            RuntimeError: the mesh has only some ranks of its universe, and this rank is outside the
                universe, or its number has changed since the mesh was created.
        """
        universe, layout = self._universe, self._description.layout
        if layout.size == universe.size:
            first = 0
        elif universe.position is not None:
            if universe.world is not None and not universe.rank_was_passed:
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
        with outside_torch_modes():
            ranks = self._rank_map.as_strided(sizes, strides, first)
            own = ranks.clone(memory_format=torch.contiguous_format)
            note_source(own, self)
            return own.view(layout.shape)

    def _get_mesh_dim_by_name(self, mesh_dim_name: str) -> int:
        try:
            return StockDeviceMesh._get_mesh_dim_by_name(self, mesh_dim_name)
        except KeyError as error:
            if mesh_dim_name in self._root()._flatten_mapping:
                hint = f"It is a flattened axis: mesh[{mesh_dim_name!r}] returns its mesh."
            else:
                known = [*(self._mesh_dim_names or ()), *self._root()._flatten_mapping]
                hint = did_you_mean(mesh_dim_name, known)
            if not hint:
                raise
            raise KeyError(*error.args, hint.strip()) from None

    def _get_root_mesh_dim(self) -> int | None:
        # torch looks the axis up in the mesh's root. All meshes of a universe have the first root
        # mesh as root. It lacks the axes of later root meshes, so the universe stores their
        # indices.
        dim = self._universe.meshes.later_dim(self._description)
        return StockDeviceMesh._get_root_mesh_dim(self) if dim is None else dim

    def _get_slice_mesh_layout(self, mesh_dim_names: tuple[str, ...]) -> TorchLayout:
        # DTensor flattens this layout, and searches the root's flattened meshes for the result.
        layout = StockDeviceMesh._get_slice_mesh_layout(self, mesh_dim_names)
        if not self._description.tags:
            return layout
        own = dict(zip(self._description.labels, self._description.axis_tags, strict=True))
        tags = [
            own[name]
            if name in own
            else self._root()._flatten_mapping[name]._description.axis_tags[0]
            for name in mesh_dim_names
        ]
        return with_flattened_tag(layout, tags, merge_tags(tags))

    def _is_current_rank_part_of_mesh(self) -> bool:
        # DTensor calls this before each redistribution. So its module is imported by now, which
        # `import meshverse` does not do (0.4 s), and the check is there before it is needed.
        from meshverse._torch_compat.merged_steps import check_merged_steps

        check_merged_steps(DeviceMesh, DeviceMesh._may_merge)
        return StockDeviceMesh._is_current_rank_part_of_mesh(self)

    def _may_merge(
        self, axes: Sequence[int], flattened: StockDeviceMesh, order_matters: bool
    ) -> bool:
        """Return whether a collective over several axes may run on their flattened mesh.

        All meshes of a universe find the same flattened meshes. So this one may have been made for
        another view: with other options, or with its ranks in another order than this mesh has.

        Args:
            axes: indices of the axes.
            flattened: mesh of these axes flattened.
            order_matters: whether the order of the ranks in its group matters.
        """
        if not isinstance(flattened, DeviceMesh) or flattened._device_type != self._device_type:
            return False
        groups = self._universe.groups
        # torch sorts the ranks of a group, unless its mesh preserves their order.
        axis = flattened._description.layout[0]
        preserve_rank_order = flattened._preserve_rank_order or groups.ascends(axis)
        if order_matters and not preserve_rank_order:
            return False
        # Reading a name by its index would create a lazy group.
        name, *others = (
            list.__getitem__(mesh._dim_group_names, axis)
            for mesh, axis in [(flattened, 0), *((self, axis) for axis in axes)]
        )
        return groups.can_stand_for(name, others, self._device_type)

    # --- equality: meshes of one world with the same ranks and the same description are equal -----

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if type(other) is not type(self):  # isinstance runs Python code of torch's metaclass
            if not isinstance(other, StockDeviceMesh):
                return False
            other = cast("StockDeviceMesh", real_mesh(other))
            if not isinstance(other, DeviceMesh):
                return self._equals_stock(other)
        if self._identity != other._identity:
            return False
        # torch's caches are keyed by meshes. A new mesh must not find an entry of a mesh whose
        # groups have ended.
        names, other_names = self._dim_group_names, other._dim_group_names
        # Plain lists mean that all groups are live.
        if not (type(names) is type(other_names) is list or list.__eq__(names, other_names)) and (
            self._destroyed_axes() or other._destroyed_axes()
        ):
            return False
        mine, theirs = self._universe, other._universe
        if mine is theirs:
            return True
        if mine.is_over or theirs.is_over:
            return False
        if mine.world is theirs.world or self._may_be_of(theirs.world):
            return True
        return theirs.rank_was_passed and not other._has_groups

    def _equals_stock(self, stock: StockDeviceMesh) -> bool:
        # A stock mesh does not know its world; this assumes the current one.
        is_separate = (
            self._universe.decoupled_token is not None
            or bool(self._description.tags)
            or self._universe.is_over
            or not self._may_be_of(World.current())
            or self._destroyed_axes()
        )
        return (
            not is_separate
            and equals_stock(self, stock)
            and not lacks_a_group(stock, self._ranks_by_axis())
        )

    def _destroyed_axes(self) -> list[str]:
        """Return the axes whose process group the program has destroyed."""
        names = getattr(self, "_dim_group_names", None)  # None while this mesh is being made
        if names is None or type(names) is list or isinstance(names, NoGroupNames):
            return []
        was_destroyed = self._universe.groups.was_destroyed
        pairs = zip(self._description.labels, list.__iter__(names), strict=False)
        return [axis for axis, name in pairs if name and was_destroyed(name)]

    def _ranks_by_axis(self) -> list[list[int]]:
        """Return the global ranks of this rank's group along each axis, in ascending order."""
        universe = self._universe
        if universe.position is None:
            return []
        return [
            sorted(RankGroups(axis, universe.rank_map).ranks_of(universe.position))
            for axis in self._description.layout
        ]

    def _may_be_of(self, world: World | None) -> bool:
        # In torch's caches, a mesh of this world must not find an entry of a mesh of an earlier
        # world, whose groups no longer exist, and in which this process may have had another rank.
        # Two kinds of meshes may belong to any world: those created without a world, and those
        # without groups whose rank was passed, which torch too uses in several worlds. Under
        # torch's threaded test backend, each thread is a rank and has its own world, so meshes of
        # different threads are not equal.
        universe = self._universe
        if universe.world is world or universe.world is None or world is None:
            return True
        return universe.rank_was_passed and not self._has_groups

    def __hash__(self) -> int:
        # Equal meshes of either class have equal hashes.
        return self._hash or self._compute_hash()

    def _compute_hash(self) -> int:
        universe = self._universe
        if universe.size <= _SMALL_UNIVERSE:
            return int(StockDeviceMesh.__hash__(self))  # type: ignore[no-untyped-call]
        # torch's method would create the tuple of all ranks; this needs only the tuple's hash.
        self._hash = hash_as_stock(self, universe.rank_views.hashed)
        return self._hash

    def _stable_hash(self) -> str:
        # torch finds compiled graphs on disk by this hash, and the ranks of a host share the disk.
        # A graph contains its rank's coordinate and the names of its groups. torch's hash includes
        # neither, so one rank can load the graph of another. A graph that one rank compiles for all
        # ranks contains neither.
        key = self._stable_key()
        if not compiles_one_graph():
            # Reading the names creates no lazy group.
            key = *key, self._universe.rank, self._names_of_groups
        return hashlib.blake2b(repr(key).encode(), digest_size=16).hexdigest()

    @property
    def _compile_guard(self) -> tuple[object, ...]:
        """Values that must stay equal for a compiled graph to be reused: those that `==` compares.

        They include the world, how many of its universes had ended, and how many of its groups the
        program has destroyed, because a graph refers to its process groups by name. They are
        short, whereas torch's guard compares the tuple of all ranks at every call.
        """
        n_destroyed = self._universe.groups.registry.n_destroyed
        return *self._fixed_guard, n_destroyed, n_destroyed > 0 and bool(self._destroyed_axes())

    @computed
    def _fixed_guard(self) -> tuple[object, ...]:
        world, generation = self._universe.world, self._universe.n_ended_before
        return *self._stable_key(), generation, None if world is None else world.label

    def _stable_key(self) -> tuple[object, ...]:
        # Equal for equal meshes of one world, and the same in every process.
        description = self._description
        return (
            self._universe.rank_map.fingerprint,
            str(description.layout),
            description.device_type,
            description.axis_names,
            description.preserve_rank_order,
            description.flattened,
            description.tags,
            self._universe.decoupled_token is None,  # a decoupled mesh equals no other
        )

    # --- copies and pickles -----------------------------------------------------------------------

    # Copying a plain `DeviceMesh` returns the mesh itself, as a universe has each mesh once. A mesh
    # of a user's subclass is copied, as in torch, with the attributes that the subclass or its user
    # set. The subpackage `saved_mesh` registers the function that pickles meshes in `copyreg`.

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
        """Return a copy without the attributes that a subclass adds.

        A plain `DeviceMesh` is returned itself, unless `decouple_backend_at_save` is set.
        """
        if self.decouple_backend_at_save:
            load, arguments, *_ = self._reduced()
            return cast("Self", load(*arguments))
        if type(self) is DeviceMesh:
            return self
        twin = self._create(self._universe, self._description, self._names_of_groups)
        if twin._has_groups:
            self._universe.meshes.note(twin)
        else:  # so that bind() finds it
            self._universe.meshes.add(twin)
        return twin

    def _reduced(self) -> Any:
        reduce: Any = copyreg.dispatch_table[DeviceMesh]
        return reduce(self)

    # pickle calls this for subclasses only; for a plain `DeviceMesh`, it finds the function in
    # `copyreg`.
    def __reduce_ex__(self, protocol: Any) -> Any:
        if type(self).__reduce__ is not object.__reduce__:  # the subclass defines its own
            return self.__reduce__()
        return self._reduced()

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes that a subclass or its user set on this mesh.

        `saved_mesh.save_mesh` saves the others.
        """
        own = _own_attributes(type(self))
        return {name: value for name, value in vars(self).items() if name not in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Set attributes that `__getstate__` returned.

        Raises:
            ValueError: one of them is an attribute that Meshverse itself sets on each mesh.
        """
        own = sorted(_own_attributes(type(self)) & set(state))
        if own:
            raise ValueError(
                f"A saved {type(self).__name__} sets {own}, which every DeviceMesh has: a subclass "
                "may save only attributes that it adds."
            )
        vars(self).update(state)

    @computed
    def _key_digests(self) -> list[str | None]:
        """Digests of the options keys of this rank's groups, one per axis; empty outside the mesh.

        Also empty for a root mesh made by `_root_with_tags`, until all its groups were requested.
        """
        names = self._dim_group_names
        if isinstance(names, DeferredGroupNames) and not names.are_all_known:
            return []
        pairs = zip(self._description.layout, self._names_of_groups or (), strict=False)
        return [self._universe.groups.key_digest(*pair) for pair in pairs]

    # --- methods that the universe calls --------------------------------------------------------

    @property
    def _intern_key(self) -> Hashable:
        """Key of this mesh within its universe: its description and its process groups.

        For a mesh of a user's subclass, its id: equal meshes may have different attributes.
        """
        if type(self) is not DeviceMesh:
            return id(self)  # the universe keeps the mesh, so no later mesh can get this id
        return self._description, self._names_of_groups

    def _root(self) -> DeviceMesh:
        return cast("DeviceMesh", self._root_mesh or self)

    def _take_root(self, root: StockDeviceMesh | None) -> None:
        """Set the root of this mesh. None, or the mesh itself, makes it a root."""
        self._root_mesh = None if root is self else root

    def _add_flattened(self, name: str, flattened: DeviceMesh) -> None:
        """Register a flattened mesh at this root, by name.

        It replaces a mesh of this name that is equal (its group was destroyed) or has fewer tags;
        any other one stays.
        """
        known = self._flatten_mapping.get(name)
        replaces_equal = known is not None and known._description == flattened._description
        if known is None or replaces_equal or _n_tags(flattened) > _n_tags(known):
            self._flatten_mapping[name] = flattened

    def _store_coordinate(self) -> None:
        """Compute this rank's coordinate now, for all later reads."""
        position = self._universe.position
        layout = self._description.layout
        self._coordinate_on_dim = None if position is None else layout.coordinate(position)

    def _forget_coordinate(self) -> None:
        """Drop the stored coordinate, so that the next read computes it and checks the rank.

        It also drops the stored `mesh` tensor of a mesh with only some ranks of its universe: which
        ranks these are depends on the coordinate.
        """
        _check_coordinates()
        names = ["_coordinate_on_dim"]
        if self._description.layout.size != self._universe.size:
            names.append("mesh")
        for name in names:
            with contextlib.suppress(AttributeError):
                delattr(self, name)

    def _note_world_end(self) -> None:
        """Forget the coordinate; be unequal to meshes of torch's classes, with the same hash.

        `__eq__` knows that the world has ended. But torch's own method compares a program's
        subclass of torch's class with this mesh, and reads only attributes.
        """
        self._forget_coordinate()
        DeviceMesh.__hash__(self)  # now, as it includes what changes
        self._thread_id = _OF_ENDED_WORLD

    def _on_revive(self) -> None:
        """Undo `_note_world_end`."""
        self._thread_id = self._universe.thread_id
        if self._universe.meshes.stores_coordinates:
            self._store_coordinate()

    def _renew_group_names(self) -> None:
        """Replace the list of group names by a plain list or a `GroupNames`, whichever fits now."""
        names = getattr(self, "_dim_group_names", None)  # None while this mesh is being made
        if names is not None and type(names) in (list, GroupNames):
            self._take_group_names(list(names))

    def _root_with_tags(self, tags: Sequence[str]) -> DeviceMesh:
        """Return a root mesh like this under other tags; requests each group at its first use."""
        names = None if self._names_of_groups is None else ()
        mesh = self._create(self._universe, self._description.with_tags(tags), names)
        mesh._take_root(None)
        self._universe.meshes.note(mesh)
        if self._names_of_groups:

            def request(index: int) -> str:
                with contextlib.suppress(AttributeError):
                    del mesh._key_digests  # if it was read before, it is empty
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

            mesh._dim_group_names = promised = DeferredGroupNames(self.ndim, request)
            promised.universe = self._universe
        return mesh

    def _move_to(self, universe: Universe) -> None:
        """Enter a universe, for `Universe.bind`: use its groups, and create those it lacks.

        If it cannot, the mesh stays as it was.
        """
        left, description, left_names = self._universe, self._description, self._dim_group_names
        block = current_tag()
        tags = [tag_inside(block, tag) for tag in description.axis_tags]
        try:
            self._description = description.with_tags(tags)
            # These may have been computed for another rank, universe or tags.
            self._forget_coordinate()
            for computed_before in ("mesh", "_fixed_guard", "_key_digests", "_layout"):
                with contextlib.suppress(AttributeError):
                    delattr(self, computed_before)
            self._join_universe(universe)
            names = None
            if self._may_have_groups:
                labels = self._description.labels
                names = self._request_groups(description.layout, labels, (), tags, call="bind")
            self._take_group_names(names)
        except BaseException:
            self._description, self._dim_group_names = description, left_names
            self._join_universe(left)
            raise
        universe.meshes.add(self)


def _check_coordinates() -> None:
    """Make meshes without a stored coordinate compute it on each read."""
    if "_coordinate_on_dim" not in vars(DeviceMesh):
        DeviceMesh._coordinate_on_dim = _CheckedCoordinate()


def _joined_group_names(axes: Iterable[tuple[DeviceMesh, int]]) -> list[str] | None:
    """Return the group names of axes of several meshes.

    None if one of the meshes has no groups; empty on a rank outside them.
    """
    joined: list[str] = []
    for mesh, index in axes:
        if not mesh._has_groups:
            return None
        joined.extend((mesh._names_of_groups or ())[index : index + 1])
    return joined


def _n_tags(flattened: DeviceMesh) -> int:
    tags = flattened._description.tags
    return len(tag_parts(tags[0])) if tags else 0


@functools.cache
def _own_attributes(mesh_class: type) -> frozenset[str]:
    """Return the names of the attributes that Meshverse sets on a mesh."""
    members = [item for base in mesh_class.__mro__ for item in vars(base).items()]
    lazily = [name for name, value in members if isinstance(value, computed)]
    declared = [
        name for name, kind in DeviceMesh.__annotations__.items() if "ClassVar" not in str(kind)
    ]
    return frozenset((*declared, *lazily))


def _register_root(mesh: DeviceMesh) -> None:
    from .mesh_warnings import register_root  # not loaded by `import meshverse`

    register_root(mesh)
