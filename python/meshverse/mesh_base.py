"""The part of a mesh that stock's own methods read: computed by arithmetic, and only when asked."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Hashable, Mapping, Sequence
from typing import ClassVar, cast

import torch
from torch.distributed.device_mesh import DeviceMesh as StockDeviceMesh
from typing_extensions import Self

from . import _torch_compat as compat
from ._core import Layout
from .backend_override import NO_OVERRIDE, Override
from .computed import computed
from .derivation import MeshDescription
from .group_names import GroupNames, MissingGroups
from .isolation import current_tag
from .universe import Universe
from .world import World

__all__ = ["ATTRIBUTES", "MeshBase"]

# All that is set on a mesh here, for what tells it from what a subclass adds.
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

# Up to here a mesh is hashed when it is made, as stock's is prepared for it: torch will ask, and it
# takes microseconds. In larger worlds it would not, the first time.
_SMALL_WORLD = 1024


class MeshBase(StockDeviceMesh):
    """A mesh in a universe, with the attributes that stock's methods and the rest of torch read.

    It has no constructor: a subclass calls `_describe`, then `_enter`.
    """

    class_of_derived: ClassVar[type[MeshBase]]
    _dim_group_names: list[str]  # type: ignore[assignment]  # read and written by torch too

    def _describe(self, description: MeshDescription) -> None:
        self._description = description
        self._device_type = description.device_type
        self._shape = description.layout.shape
        self._mesh_dim_names = description.axis_names
        self._preserve_rank_order = description.preserve_rank_order
        self._flatten_mapping = {}

    def _enter(self, universe: Universe) -> None:
        self._universe = universe
        self._rank = universe.rank
        self._thread_id = universe.thread_id
        self._pg_registry = universe.process_groups
        self._slices: dict[object, MeshBase] = {}
        self._hash = None
        self._identity = (universe.rank_map, universe.token, self._description)
        position = universe.position
        self._coordinate_on_dim = None if position is None else self.layout.coordinate(position)
        self.take_root(universe.root)
        if universe.size <= _SMALL_WORLD:
            hash(self)

    def take_root(self, root: MeshBase | None) -> None:
        """Have this root; itself, or none yet, makes it a root."""
        self._root_mesh = None if root is self else root

    @classmethod
    def _in_universe(
        cls, universe: Universe, description: MeshDescription, group_names: Sequence[str] | None
    ) -> Self:
        """The one mesh of a universe with this description and these groups (None: without).

        Of `class_of_derived`, whatever subclass it is derived from, as in stock.
        """
        mesh = cls.class_of_derived._made(universe, description, group_names)
        return cast("Self", universe.intern(mesh))

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

    def _take_group_names(self, group_names: Sequence[str] | None) -> None:
        """Have these process groups, one an axis; or none at all."""
        self._dim_group_names = (
            MissingGroups(len(self.layout), self._refuse_groups)
            if group_names is None
            else GroupNames(group_names, self._universe.process_groups, self._before_use)
        )

    def _before_use(self, group_name: str) -> None:
        self._universe.groups.before_use(group_name)

    def _refuse_groups(self, _: str = "") -> None:
        raise RuntimeError(
            f"DeviceMesh process groups not initialized! {self} was made or loaded without "
            "them. After init_process_group(), call mesh.bind() on all its ranks."
        )

    @property
    def description(self) -> MeshDescription:
        """What this mesh is, apart from its universe and its process groups."""
        return self._description

    @property
    def has_groups(self) -> bool:
        """Whether process groups were made for this mesh; they are empty outside of it."""
        return not isinstance(self._dim_group_names, MissingGroups)

    @property
    def group_names(self) -> tuple[str, ...] | None:
        """c10d names of my groups, one an axis; none outside the mesh; None without groups."""
        return tuple(self._dim_group_names) if self.has_groups else None

    @computed
    def key_digests(self) -> list[str | None]:
        """Digests of the options keys of my groups, one an axis; none outside the mesh."""
        pairs = zip(self.layout, self.group_names or (), strict=False)
        return [self._universe.key_digest(*pair) for pair in pairs]

    @property
    def intern_key(self) -> Hashable:
        """What makes this mesh itself within its universe: description and process groups.

        One of a subclass is only itself: what it has besides, nobody knows.
        """
        if type(self) is not self.class_of_derived:
            return id(self)  # the universe keeps it, so no other mesh there will have this id
        return self._description, self.group_names

    def join(self, universe: Universe) -> None:
        """Enter a universe, for `Universe.bind`: on its groups, made where it has none."""
        self._enter(universe)
        overrides, tags = (NO_OVERRIDE,) * self.ndim, (current_tag(),) * self.ndim
        self._take_group_names(
            self._group_names_for(self.layout, self._labels(), overrides, tags, call="bind")
        )
        # What may have been read already, and depends on this process's rank or universe.
        for computed_before in ("mesh", "compile_guard", "key_digests"):
            with contextlib.suppress(AttributeError):
                delattr(self, computed_before)
        universe.intern(self)

    def _labels(self) -> Sequence[str]:
        """What to call the axes in messages: their names, or numbers where they have none."""
        return self._mesh_dim_names or [f"dim_{index}" for index in range(len(self.layout))]

    def _group_names_for(
        self,
        axes: Layout,
        names: Sequence[str],
        overrides: Sequence[Override],
        tags: Sequence[str],
        *,
        call: str,
    ) -> list[str]:
        """Names of my groups along these axes, made where needed; none outside the rank map."""
        groups = self._universe.groups.request(
            axes,
            call=call,
            axis_names=names,
            overrides=overrides,
            tags=tags,
            preserve_rank_order=self._preserve_rank_order,
        )
        return [group.name for group in groups if group.name is not None]

    def _isolated(
        self, layout: Layout, names: Sequence[str], group_names: Sequence[str] | None
    ) -> Sequence[str] | None:
        """These groups, or where an `isolate` block is open, groups like them under its tag."""
        tag = current_tag()
        if not tag or group_names is None:
            return group_names
        groups = self._universe.groups.request_tagged(layout, names, group_names, tag)
        return [group.name for group in groups if group.name is not None]

    def _root(self) -> Self:
        return cast("Self", self._get_root_mesh())

    @property
    def flattened(self) -> Mapping[str, MeshBase]:
        """The meshes that were flattened from this one or its submeshes, if it is the root."""
        return cast("Mapping[str, MeshBase]", self._flatten_mapping)

    # Stock's are read off its own layout, whose form torch needs of few meshes.
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

    # --- what stock's methods read, by arithmetic and only when asked -------------------------

    # Class attributes of stock's that are annotated as writable; torch does not write these.
    @computed
    def _layout(self) -> compat.TorchLayout:
        return compat.to_torch_layout(self.layout, flattened=self._description.flattened)

    @computed
    def _rank_map(self) -> torch.Tensor:
        return self._universe.rank_views.tensor

    @computed
    def _flatten_rank_map(self) -> tuple[int, ...]:
        return self._universe.rank_views.tuple

    @computed
    def mesh(self) -> torch.Tensor:
        """Global ranks of this mesh: int32 CPU tensor with one dimension an axis.

        A view of one tensor that the whole universe shares, so do not write to it.

        Raises:
            RuntimeError: a part of the universe, asked for on a rank outside the universe.
        """
        universe, layout = self._universe, self.layout
        if layout.size == universe.size:
            first = 0
        elif universe.position is not None:
            first = layout.base(universe.position)
        else:
            raise RuntimeError(
                f"In order to get the mesh Tensor of {self} on rank {universe.rank}, it needs to "
                "either have all its original dimensions (e.g., no slicing) or it needs to "
                f"contain the local rank; it has ranks of {universe.rank_map}."
            )
        sizes = [size for axis in layout for size in axis.sizes]
        strides = [stride for axis in layout for stride in axis.strides]
        with compat.untraced():
            return self._rank_map.as_strided(sizes, strides, first).reshape(layout.shape)

    @computed
    def compile_guard(self) -> tuple[object, ...]:
        """What must stay equal for a compiled graph to be used: all that makes meshes equal.

        Short strings, where stock's guard compares the tuple of all ranks at every call. The world
        counts, because a graph knows its process groups by names.
        """
        world = self._universe.world
        return *self._stable_key(), None if world is None else world.label

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
            self._universe.token is None,  # a decoupled mesh equals no other
        )

    # --- comparison ----------------------------------------------------------------------------

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if type(other) is not type(self):  # isinstance runs Python code of torch's metaclass
            if not isinstance(other, StockDeviceMesh):
                return False
            other = cast("StockDeviceMesh", compat.real_mesh(other))
            if not isinstance(other, MeshBase):
                return self._equals_stock(other)
        return self._identity == other._identity and self._may_be_of(other._universe.world)

    def _equals_stock(self, stock: StockDeviceMesh) -> bool:
        # A stock mesh does not know its world, so it is taken for one of this world.
        is_apart = self._universe.token is not None or not self._may_be_of(World.current())
        return not is_apart and compat.equals_stock(self, stock)

    def _may_be_of(self, world: World | None) -> bool:
        # What torch remembers of a mesh of an earlier world must not be found for one of this: its
        # groups are gone. A mesh loaded without a world may be of any. Ranks that are threads have
        # a world each.
        mine = self._universe.world
        return mine is world or mine is None or world is None

    def __hash__(self) -> int:
        # Stock's: it hashes the tuple of ranks, which remembers its hash. So equal meshes of either
        # class have equal hashes.
        return self._hash or StockDeviceMesh.__hash__(self)  # type: ignore[no-untyped-call]

    def _stable_hash(self) -> str:
        return hashlib.blake2b(repr(self._stable_key()).encode(), digest_size=16).hexdigest()
