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
from .group_names import GroupNames, MissingGroups, PromisedGroups
from .isolation import current_tag, merge_tags, tag_inside, tag_parts
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
        if universe.rank >= 0:  # else nobody knows, as of stock's mesh for XLA without a group
            self._coordinate_on_dim = None if position is None else self.layout.coordinate(position)
        self.take_root(universe.roots.first)  # or that of my tags, when the universe takes me in
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
        mesh = object.__new__(cls.class_of_derived)
        mesh._describe(description)
        mesh._enter(universe)
        mesh._take_group_names(group_names)
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
        """Whether process groups were made for this mesh; they are empty outside of it."""
        return not isinstance(self._dim_group_names, MissingGroups)

    @property
    def group_names(self) -> tuple[str, ...] | None:
        """c10d names of my groups, one an axis; none outside the mesh; None without groups."""
        return tuple(self._dim_group_names) if self.has_groups else None

    @computed
    def key_digests(self) -> list[str | None]:
        """Digests of the options keys of my groups, one an axis; none outside the mesh."""
        if isinstance(self._dim_group_names, PromisedGroups):
            return []
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
        overrides, block = (NO_OVERRIDE,) * self.ndim, current_tag()
        tags = [tag_inside(block, tag) for tag in self._description.axis_tags]
        self._description = self._description.with_tags(tags)
        # What may have been read already, and depends on this process's rank, universe or tags.
        for computed_before in ("mesh", "compile_guard", "key_digests", "_layout"):
            with contextlib.suppress(AttributeError):
                delattr(self, computed_before)
        self._enter(universe)
        names = None
        if self._may_have_groups:
            names = self._group_names_for(
                self.layout, self._labels(), overrides, tags, call="bind", layout=self.layout
            )
        self._take_group_names(names)
        universe.intern(self)

    def _labels(self) -> Sequence[str]:
        """What to call the axes in messages: their names, or numbers where they have none."""
        return self._description.labels

    def _group_names_for(
        self,
        axes: Layout,
        names: Sequence[str],
        overrides: Sequence[Override],
        tags: Sequence[str],
        *,
        call: str,
        layout: Layout,
    ) -> list[str]:
        """Names of my groups along these axes, made where needed; none outside the rank map.

        `layout` is that of the mesh they are for.
        """
        groups = self._universe.groups.request(
            axes,
            call=call,
            layout=layout,
            axis_names=names,
            overrides=overrides,
            tags=tags,
            preserve_rank_order=self._preserve_rank_order,
        )
        return [group.name for group in groups if group.name is not None]

    # --- isolation tags ------------------------------------------------------------------------

    def _derive(self, description: MeshDescription, group_names: Sequence[str] | None) -> Self:
        """The mesh of my universe like this; where an `isolate` block is open, under its tag."""
        block = current_tag()
        if not block:
            return self._in_universe(self._universe, description, group_names)
        tags = [tag_inside(block, tag) for tag in description.axis_tags]
        return self._derive_under(tags, description, group_names)

    def _derive_under(
        self, tags: Sequence[str], description: MeshDescription, group_names: Sequence[str] | None
    ) -> Self:
        """The mesh of my universe like this, under these isolation tags."""
        group_names = self._group_names_under(tags, description, group_names)
        return self._in_universe(self._universe, description.with_tags(tags), group_names)

    def _group_names_under(
        self, tags: Sequence[str], description: MeshDescription, group_names: Sequence[str] | None
    ) -> list[str] | None:
        """Names of groups like these, where the axes shall have another tag than they have."""
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

    def under(self, tags: Sequence[str]) -> Self:
        """This mesh under other isolation tags, to be a root: its groups are made when used."""
        mesh = object.__new__(cast("type[Self]", self.class_of_derived))
        mesh._describe(self._description.with_tags(tags))
        mesh._enter(self._universe)
        mesh.take_root(None)
        if self.group_names:

            def keep_promise() -> list[str]:
                names = self._group_names_under(tags, self._description, self.group_names)
                mesh._take_group_names(names)
                return mesh._dim_group_names

            mesh._dim_group_names = PromisedGroups(self.ndim, keep_promise)
        else:
            mesh._take_group_names(self.group_names)
        return mesh

    def _get_slice_mesh_layout(self, mesh_dim_names: tuple[str, ...]) -> compat.TorchLayout:
        # Which DTensor flattens, to look for a flattened mesh of that layout at the root.
        layout = StockDeviceMesh._get_slice_mesh_layout(self, mesh_dim_names)
        return self._sliced_layout(layout, mesh_dim_names) if self._description.tags else layout

    def _sliced_layout(
        self, layout: compat.TorchLayout, names: tuple[str, ...]
    ) -> compat.TorchLayout:
        own = dict(zip(self._description.labels, self._description.axis_tags, strict=True))
        flattened = self._root().flattened
        tags = [
            own[name] if name in own else flattened[name].description.axis_tags[0] for name in names
        ]
        return compat.with_flattened_tag(layout, tags, merge_tags(tags))

    # --- the root ------------------------------------------------------------------------------

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
            replace: in place of any of the same name, not only of one under fewer tags.
        """
        known = self.flattened.get(name)
        if known is None or replace or _n_tags(flattened) > _n_tags(known):
            self._flatten_mapping[name] = flattened

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
                "In order to get the mesh Tensor of a DeviceMesh it needs to either have all its "
                "original dimensions (e.g., no slicing) or it needs to contain the local rank. "
                f"Rank {universe.rank} is not in {self}, which has ranks of {universe.rank_map}."
            )
        sizes = [size for axis in layout for size in axis.sizes]
        strides = [stride for axis in layout for stride in axis.strides]
        with compat.untraced():
            return self._rank_map.as_strided(sizes, strides, first).reshape(layout.shape)

    @computed
    def compile_guard(self) -> tuple[object, ...]:
        """What must stay equal for a compiled graph to be used: all that makes meshes equal.

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
        if self._identity != other._identity:
            return False
        mine, theirs = self._universe, other._universe
        if mine is theirs:
            return True
        # What torch remembers of a mesh whose groups have ended must not be found for a new one.
        if mine.is_over or theirs.is_over:
            return False
        return mine.world is theirs.world or self._may_be_of(theirs.world)

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
        # torch looks for compiled graphs on disk by it, which ranks of a host share. A graph knows
        # its rank's place and its groups' names, which stock's leaves out: it gives one rank the
        # graph of another. Only a graph for all ranks knows neither.
        key = self._stable_key()
        if not compat.compiles_one_graph():
            # No use of the groups: those that are left for later are not made.
            key = *key, self._universe.rank, list.copy(self._dim_group_names)
        return hashlib.blake2b(repr(key).encode(), digest_size=16).hexdigest()


def _n_tags(flattened: MeshBase) -> int:
    tags = flattened.description.tags
    return len(tag_parts(tags[0])) if tags else 0
