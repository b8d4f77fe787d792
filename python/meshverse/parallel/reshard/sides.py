"""One side (source or target) of a `Reshard` on one rank: its tensors, checked and described."""

from __future__ import annotations

import hashlib
import operator
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh as StockDeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

import meshverse
from meshverse import DeviceMesh
from meshverse._core import Layout, shard_shape
from meshverse._torch_compat.c10d_groups import group_ranks_of
from meshverse._torch_compat.dtensors import is_strided_shard, waited
from meshverse._torch_compat.stock_layouts import keeps_rank_order
from meshverse._torch_compat.tracing import base_of

Window = tuple[tuple[int, int], ...]  # start and length along each dimension


@dataclass(frozen=True, eq=False)
class Piece:
    """A part of a tensor: `length` elements from `start` along one dimension.

    Slicing a DTensor along a sharded dimension makes a copy. A piece refers to the tensor's own
    memory, on all ranks that hold some of these elements: `Reshard` reads or writes it in place.

    Args:
        tensor: a DTensor, a plain tensor, or another piece.
        dim: dimension along which the part is taken; a negative one counts from the end.
        start: index of the part's first element, in `tensor`.
        length: number of elements along the dimension.

    Example:
        >>> from torch import zeros
        >>> Piece(zeros(8, 4), 0, 2, 3).shape
        (3, 4)
    """

    tensor: Tensor | Piece
    dim: int
    start: int
    length: int

    def __post_init__(self) -> None:
        if not isinstance(self.tensor, (Tensor, Piece)):
            raise TypeError(
                f"Piece({type(self.tensor).__name__}, ...): give a DTensor, plain tensor or Piece."
            )
        shape = tuple(self.tensor.shape)
        for name in ("dim", "start", "length"):
            object.__setattr__(self, name, operator.index(getattr(self, name)))
        if not -len(shape) <= self.dim < len(shape):
            raise IndexError(f"{self!r}: the tensor has no such dimension.")
        object.__setattr__(self, "dim", self.dim % len(shape))
        last = shape[self.dim] - 1
        if self.start < 0 or self.length < 0 or self.start + self.length > last + 1:
            raise IndexError(f"{self!r} must be within elements 0 to {last} of its dimension.")

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the piece."""
        shape = tuple(self.tensor.shape)
        return (*shape[: self.dim], self.length, *shape[self.dim + 1 :])

    @property
    def whole(self) -> Tensor:
        """The tensor that the piece is part of; for a piece of a piece, the outermost tensor."""
        return self.tensor.whole if isinstance(self.tensor, Piece) else self.tensor

    @property
    def window(self) -> Window:
        """Start and length along each dimension of `whole`."""
        if isinstance(self.tensor, Piece):
            around = list(self.tensor.window)
        else:
            around = [(0, size) for size in self.tensor.shape]
        around[self.dim] = (around[self.dim][0] + self.start, self.length)
        return tuple(around)

    def __repr__(self) -> str:
        given = f"dim={self.dim}, start={self.start}, length={self.length}"
        return f"Piece(tensor of shape {tuple(self.tensor.shape)}, {given})"


Rename: TypeAlias = Mapping[str, str] | Callable[[str], str]

_Tensor = TypeVar("_Tensor")

_LEAST_BUFFER_BYTES = 1024  # for two rounds, each with a message to send and one to receive


class Grid(NamedTuple):
    """Ranks of a mesh, as strides from its first rank or, if there are no such strides, as a list.

    With strides, a grid does not contain the first rank. So meshes of one shape at different first
    ranks, such as those of pipeline stages, have equal grids.
    """

    # Sizes and strides of the axes. Strides count ranks if `ranks` is None, else indices of it.
    layout: Layout
    ranks: tuple[int, ...] | None = None  # row-major, if constant strides cannot describe them


class Spec(NamedTuple):
    """Shape, dtype and placements of a tensor, the same on all ranks that hold it."""

    shape: tuple[int, ...]
    dtype: str
    window: Window  # the part that is transferred: the piece, or all of the tensor
    # Index of the DTensor's mesh in the side's `grids`; -1 for a plain tensor, which is not split.
    mesh: int = -1
    # For each axis of the mesh: the dimension that it splits, or -1 if it replicates.
    dims: tuple[int, ...] = ()
    # For each axis of the mesh: the split factor of a `_StridedShard`; 1 for other placements.
    factors: tuple[int, ...] = ()


class Content(NamedTuple):
    """Specs and grids of one side. Those of all ranks of a pipeline stage are equal: sent once."""

    specs: dict[str, Spec]
    grids: list[Grid]


@dataclass
class Side:
    """Tensors of one side on one rank, with their specs and meshes."""

    specs: dict[str, Spec] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    grids: list[Grid] = field(default_factory=list)
    # For each mesh in `grids`, its first rank; 0 for a grid that lists its ranks.
    firsts: list[int] = field(default_factory=list)
    # Local shapes can differ by the order in which axes split a dimension, for which these are
    # torch's terms. Right to left, as in FSDP2 after tensor parallelism: strided splits are applied
    # after plain ones. Left to right, as in `distribute_tensor`: in the order of the axes.
    right_to_left: list[str] = field(default_factory=list)  # names that fit only this order
    left_to_right: list[str] = field(default_factory=list)  # names that fit only this order


class SideDescription(NamedTuple):
    """Description of one side on one rank: digests of contents that other ranks may have too."""

    content: str  # digest of `Content`
    orders: str  # digest of `right_to_left` and `left_to_right`
    firsts: list[int]  # as in `Side`


class Description(NamedTuple):
    """Description of one rank's tensors and settings, short enough to send to all ranks."""

    sides: dict[str, SideDescription]  # by "source" or "target"; without sides that have no tensors
    device_types: list[str]  # of all tensors of the rank
    buffer_bytes: int
    node_size: int  # ranks on each node; 1 if unknown
    nodes: str  # digest of the list of every rank's node, or of None without a topology

    @property
    def digests(self) -> set[str]:
        """Digests of all contents that this description refers to."""
        return {self.nodes}.union(*(side[:2] for side in self.sides.values()))


def describe(
    sides: Mapping[str, Side | None], buffer_bytes: int, nodes: tuple[int, ...] | None
) -> tuple[Description, dict[str, Any]]:
    """Return the description of this rank, and by digest the contents that it refers to."""
    if isinstance(buffer_bytes, bool) or not isinstance(buffer_bytes, int):
        raise TypeError(f"buffer_bytes={buffer_bytes!r} must be an int.")
    if buffer_bytes < _LEAST_BUFFER_BYTES:
        raise ValueError(f"buffer_bytes={buffer_bytes} must be at least {_LEAST_BUFFER_BYTES}.")
    contents: dict[str, Any] = {}

    def digest(content: object) -> str:
        # Hash the repr: pickles of equal objects can differ.
        found = hashlib.sha256(repr(content).encode()).hexdigest()[:32]
        contents[found] = content
        return found

    described = {}
    for name, side in sides.items():
        if side is not None:
            orders = tuple(side.right_to_left), tuple(side.left_to_right)
            content = Content(side.specs, side.grids)
            described[name] = SideDescription(digest(content), digest(orders), side.firsts)
    types = {each.device.type for side in sides.values() if side for each in side.tensors.values()}
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    node_size = int(local) if local.isdecimal() and nodes is None else 1
    settings = buffer_bytes, max(node_size, 1), digest(nodes)
    return Description(described, sorted(types), *settings), contents


def nodes_of(topology: meshverse.Topology | None, size: int) -> tuple[int, ...] | None:
    """Return the node of each rank from a topology of `size` ranks; None without a topology.

    Raises:
        TypeError: `topology` is not a `Topology`.
        ValueError: the topology has no level "node", or its number of ranks is not `size`.
    """
    if topology is None:
        return None
    if not isinstance(topology, meshverse.Topology):
        raise TypeError(
            f"topology={topology!r:.80} of type {type(topology).__name__} must be a "
            "meshverse.Topology."
        )
    level = topology.level("node")
    if level is None or topology.world_size != size:
        raise ValueError(
            f"topology={topology!r} of {topology.world_size} ranks must have a level 'node' and "
            f"all {size} ranks of the world or connection."
        )
    return tuple(level.of_rank.tolist())


def renamed(
    source: Mapping[str, _Tensor] | None, rename: Rename | None
) -> Mapping[str, _Tensor] | None:
    """Return the sources by the names that they have in the target, which must be distinct."""
    if source is None or rename is None or not isinstance(source, Mapping):
        return source
    if not isinstance(rename, Mapping) and not callable(rename):
        raise TypeError(
            f"rename={rename!r:.80} of type {type(rename).__name__} must be a dict or a function."
        )
    old_names: dict[str, str] = {}
    for old in source:
        new = rename(old) if callable(rename) else rename.get(old, old)
        if not isinstance(new, str):
            raise TypeError(f"rename gives {new!r} for source {old!r}: it must give a str.")
        if new in old_names:
            raise ValueError(
                f"rename gives {new!r} for source {old!r} and for {old_names[new]!r}: the new "
                "names must be distinct."
            )
        old_names[new] = old
    return {new: source[old] for new, old in old_names.items()}


def read_side(
    tensors: Mapping[str, Tensor | Piece] | None,
    what: str,
    rank_of: Callable[[int], int] | None = None,
) -> Side | None:
    """Check and describe the tensors of one side that are on this rank.

    Args:
        tensors: the tensors by name, or None.
        what: name of the side for messages, "source" or "target".
        rank_of: function from a rank of this world to its rank in the connection, if there is one.

    Returns:
        The side, or None if this rank holds no part of the tensors.
    """
    if tensors is None:
        return None
    if not isinstance(tensors, Mapping):
        raise TypeError(
            f"{what}={tensors!r:.80} of type {type(tensors).__name__} must be a dict of tensors by "
            "name, such as dict(model.named_parameters()), or None."
        )
    side = Side()
    meshes: dict[int, int] = {}  # index in `side.grids` by the mesh's id
    for name, tensor in tensors.items():
        if not isinstance(name, str):
            raise TypeError(f"{what} name {name!r} of type {type(name).__name__} must be a str.")
        _add(side, meshes, name, tensor, f"{what} {name!r}")
    if rank_of is not None:
        pairs = [_renumbered(*pair, rank_of) for pair in zip(side.grids, side.firsts, strict=True)]
        side.grids, side.firsts = [grid for grid, _ in pairs], [first for _, first in pairs]
    return side if side.specs else None


def _renumbered(grid: Grid, first: int, rank_of: Callable[[int], int]) -> tuple[Grid, int]:
    """Return a grid and its first rank with every rank replaced by `rank_of(rank)`.

    If `rank_of` adds one constant to all ranks, only the first rank changes.
    """
    ranks = grid.ranks
    if ranks is None:
        positions = grid.layout.collapse()
        ranks = tuple(first + positions(index) for index in range(positions.size))
    renumbered = tuple(rank_of(rank) for rank in ranks)
    offset = renumbered[0] - ranks[0]
    if grid.ranks is None and all(
        new - old == offset for new, old in zip(renumbered, ranks, strict=True)
    ):
        return grid, first + offset
    return Grid(Layout.from_shape(grid.layout.shape), renumbered), 0


def _add(side: Side, meshes: dict[int, int], name: str, given: Tensor | Piece, what: str) -> None:
    window = given.window if isinstance(given, Piece) else None
    tensor = given.whole if isinstance(given, Piece) else given
    if not isinstance(tensor, Tensor):
        raise TypeError(
            f"{what} is a {type(tensor).__name__}: it must be a DTensor, a plain tensor or a Piece."
        )
    mesh = tensor.device_mesh if isinstance(tensor, DTensor) else None
    if mesh is not None and mesh.get_coordinate() is None:
        return
    local = local_tensor(tensor)
    check_kind(local, what if mesh is None else f"The local tensor of {what}")
    side.tensors[name] = tensor
    shape = tuple(tensor.shape)
    window = window or tuple((0, size) for size in shape)
    side.specs[name] = spec = Spec(shape, str(tensor.dtype).removeprefix("torch."), window)
    if not isinstance(tensor, DTensor) or mesh is None:
        return
    _check_is_no_copy(tensor, local, what)
    if id(mesh) not in meshes:
        meshes[id(mesh)] = len(side.grids)
        grid, first = _grid_of(mesh)
        side.grids.append(grid)
        side.firsts.append(first)
    splits = [_split(placement, tensor, what) for placement in tensor.placements]
    dims, factors = tuple(dim for dim, _ in splits), tuple(factor for _, factor in splits)
    side.specs[name] = spec._replace(mesh=meshes[id(mesh)], dims=dims, factors=factors)
    _check_local_shape(side, name, local, what)


def local_tensor(tensor: Tensor) -> Tensor:
    """Return the local tensor on this rank, detached from autograd."""
    with torch.no_grad():
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()
    return waited(local)


def check_kind(tensor: Tensor, what: str) -> None:
    """Check that a local tensor's values can be copied as they are in memory.

    Raises:
        TypeError: it is a subclass of torch.Tensor, or has no plain values in memory.
        ValueError: its memory was freed.
    """
    if type(tensor) is not Tensor:
        raise TypeError(
            f"{what} is a {type(tensor).__name__}, whose data cannot be copied like a plain "
            "tensor's. Give the plain tensors that it contains, each under its own name."
        )
    kind = str(tensor.layout) if tensor.layout != torch.strided else ""
    kind = "nested" if tensor.is_nested else "quantized" if tensor.is_quantized else kind
    kind = "meta" if tensor.is_meta else kind
    if kind:
        raise TypeError(
            f"{what} is a {kind} tensor: only strided tensors with data can be transferred. "
            "Convert it first, for example by to_dense(), dequantize() or to_empty()."
        )
    if not has_memory(tensor):
        raise ValueError(
            f"{what} has no memory: it was freed, as FSDP2 frees unsharded parameters. Give the "
            "model's current parameters."
        )


def _check_is_no_copy(tensor: DTensor, local: Tensor, what: str) -> None:
    base = base_of(tensor)
    if not isinstance(base, DTensor):
        return
    if local_tensor(base).untyped_storage().data_ptr() != local.untyped_storage().data_ptr():
        raise ValueError(
            f"{what} is a copy of a part of a DTensor (shape {tuple(base.shape)}, placements "
            f"{base.placements}), because slicing along a sharded dimension copies. Give "
            "meshverse.parallel.Piece(tensor, dim, start, length) instead of the slice."
        )


def has_memory(local: Tensor) -> bool:
    """Whether a tensor's memory is allocated. FSDP2 frees the memory of unsharded parameters."""
    return local.untyped_storage().nbytes() > 0 or local.numel() == 0


def _split(placement: Placement, tensor: DTensor, what: str) -> tuple[int, int]:
    if type(placement) is Replicate:
        return -1, 1
    if type(placement) is Shard or is_strided_shard(placement):
        dim: int = placement.dim  # type: ignore[attr-defined]
        factor = int(getattr(placement, "split_factor", 1))
        return dim % max(tensor.ndim, 1), factor
    cure = "it must be Replicate or Shard. Redistribute it first."
    if placement.is_partial():
        cure = "redistribute it to Replicate() or Shard() first, which sums the partial values."
    raise ValueError(f"{what} has the placement {placement}, which cannot be transferred: {cure}")


def _check_local_shape(side: Side, name: str, local: Tensor, what: str) -> None:
    spec = side.specs[name]
    grid = side.grids[spec.mesh]
    sizes, coordinates = list(grid.layout.shape), _coordinates(grid, side.firsts[spec.mesh])
    shapes = [
        shard_shape(spec.shape, spec.dims, spec.factors, right_to_left, sizes, coordinates)
        for right_to_left in (False, True)
    ]
    found = tuple(local.shape)
    # The shape of an empty local tensor is not compared: FSDP2 may use another one.
    fits = [found == shape or (not local.numel() and 0 in shape) for shape in shapes]
    if not any(fits):
        raise ValueError(
            f"{what} of shape {spec.shape} has a local tensor of shape {found} on this rank, but "
            f"its placements on a mesh of shape {tuple(sizes)} say {shapes[0]}. They must agree: "
            "correct the placements or the local tensor."
        )
    if fits[0] != fits[1]:
        (side.left_to_right if fits[0] else side.right_to_left).append(name)


def shard_coordinates(mesh: StockDeviceMesh) -> list[int]:
    """Return, for each axis of a mesh, the index of this rank's shard: its rank in the group."""
    return _coordinates(*_grid_of(mesh))


def _coordinates(grid: Grid, first: int) -> list[int]:
    rank = dist.get_rank()
    position = rank - first if grid.ranks is None else grid.ranks.index(rank)
    return list(grid.layout.coordinate(position))


def _grid_of(mesh: StockDeviceMesh) -> tuple[Grid, int]:
    """Return the grid and first rank of a mesh, with coordinates that are DTensor's shard indices.

    DTensor gives a rank the shard of its rank in the axis's group, which can differ from its
    coordinate in the mesh: torch sorts the ranks of groups by default.

    Raises:
        ValueError: several ranks of the mesh have the same rank in every group.
    """
    groups = group_ranks_of(mesh)
    has_groups = mesh.has_groups if isinstance(mesh, DeviceMesh) else bool(groups)
    are_sorted = all(ranks == sorted(ranks) for ranks in groups)
    by_group = has_groups and are_sorted and not keeps_rank_order(mesh)
    if isinstance(mesh, DeviceMesh) and mesh.universe.rank_map.is_identity:
        layout = Layout(mesh.layout.ascending) if by_group else mesh.layout
        return Grid(layout), mesh.layout.base(dist.get_rank())
    ranks: list[int] = (_by_group_ranks(mesh.mesh) if by_group else mesh.mesh).flatten().tolist()
    rows = Layout.from_shape(mesh.shape)
    # With constant strides, the grid need not list ranks; see `Grid`.
    steps = [ranks[axis(1)] - ranks[0] if axis.size > 1 else 0 for axis in rows]
    if min(steps, default=0) >= 0:
        layout = Layout.from_shape(rows.shape, steps)
        positions = layout.collapse()
        if layout.is_orthogonal() and ranks == [ranks[0] + positions(p) for p in range(len(ranks))]:
            return Grid(layout), ranks[0]
    return Grid(rows, tuple(ranks)), 0


def _by_group_ranks(ranks: Tensor) -> Tensor:
    """Return a mesh's ranks, reordered so that coordinates are ranks in sorted groups."""
    shards = torch.zeros_like(ranks, dtype=torch.int64)  # row-major index of each rank's shard
    for axis, size in enumerate(ranks.shape):
        shards = shards * size + ranks.argsort(dim=axis).argsort(dim=axis)
    if len(torch.unique(shards)) < shards.numel():
        raise ValueError(
            f"The mesh {ranks.tolist()} has several ranks for one shard, because torch sorts the "
            "ranks of groups. Each shard must have one rank: create the mesh with "
            "preserve_rank_order=True, or with meshverse.init_device_mesh(..., ranks=...)."
        )
    flat = torch.empty_like(ranks).flatten()
    return flat.scatter(0, shards.flatten(), ranks.flatten()).view(ranks.shape)
