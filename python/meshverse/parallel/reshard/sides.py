"""What one rank has of the tensors that move: said in a few numbers, and the tensors themselves."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh as StockDeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from meshverse import DeviceMesh
from meshverse import _torch_compat as compat
from meshverse._core import AxisLayout, Layout, RankMap, shard_shape
from meshverse.graphs.traced_coordinates import rank_digits

__all__ = [
    "Content",
    "Grid",
    "Side",
    "Spec",
    "digest_of",
    "has_memory",
    "layout_of",
    "local_tensor",
    "ranks_of_root",
    "read_side",
]


class Grid(NamedTuple):
    """The ranks of a mesh, from its first one on.

    Attributes:
        axes: for each axis the sizes and strides of its digits, over ranks; over `ranks` if given.
        ranks: row-major, where they follow no arithmetic.
    """

    axes: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    ranks: tuple[int, ...] | None = None


class Spec(NamedTuple):
    """What all ranks that hold a tensor say of it alike.

    Attributes:
        shape: of the whole tensor.
        dtype: such as "bfloat16".
        mesh: number of its mesh among those of the side; -1 for a plain tensor, which is whole.
        dims: by axis of the mesh, the dimension that it splits, or -1.
        factors: by axis, the split factor of a `_StridedShard`, else 1.
    """

    shape: tuple[int, ...]
    dtype: str
    mesh: int = -1
    dims: tuple[int, ...] = ()
    factors: tuple[int, ...] = ()


@dataclass
class Side:
    """One side of a move, as one rank has it.

    Attributes:
        specs: by name.
        tensors: by name.
        grids: the meshes of the tensors.
        firsts: the ranks at which these meshes begin.
        right_to_left: names of tensors that are split as only FSDP2 splits what is split already.
        left_to_right: names of those that are split as only `distribute_tensor` splits.
        roots: ranks of the meshes that these ones were derived from: all of them have to come.
    """

    specs: dict[str, Spec] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    grids: list[Grid] = field(default_factory=list)
    firsts: list[int] = field(default_factory=list)
    right_to_left: list[str] = field(default_factory=list)
    left_to_right: list[str] = field(default_factory=list)
    roots: list[Any] = field(default_factory=list)

    def placed(self, name: str) -> Any:
        """How a tensor is laid out, over which ranks."""
        spec = self.specs[name]
        if spec.mesh < 0:
            return spec
        return spec._replace(mesh=0), self.grids[spec.mesh], self.firsts[spec.mesh]

    def content(self) -> str:
        """What ranks of the same pipeline stage say alike, as JSON: all but the first ranks."""
        return json.dumps({"specs": self.specs, "grids": self.grids, "roots": self.roots})


class Content(NamedTuple):
    """What `Side.content` says; see there."""

    specs: dict[str, Spec]
    grids: list[Grid]
    roots: list[Any]

    @classmethod
    def read(cls, text: str) -> Content:
        """The content that a text says."""
        said = json.loads(text)
        specs = {
            name: Spec(tuple(shape), dtype, mesh, tuple(dims), tuple(factors))
            for name, (shape, dtype, mesh, dims, factors) in said["specs"].items()
        }
        grids = [
            Grid(
                tuple((tuple(sizes), tuple(strides)) for sizes, strides in axes),
                None if ranks is None else tuple(ranks),
            )
            for axes, ranks in said["grids"]
        ]
        return cls(specs, grids, said["roots"])


def digest_of(text: str) -> str:
    """Stands for a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def read_side(tensors: Mapping[str, Tensor] | None, what: str) -> Side | None:
    """What this rank has of one side.

    Args:
        tensors: by name; None where this rank has no part.
        what: "source" or "target", for messages.

    Returns:
        None where this rank has no part: no dict, or only DTensors of meshes it is not in.

    Raises:
        TypeError: no dict, a name that is no string, what is no tensor or of an unknown kind.
        ValueError: a placement that cannot be moved, such as `Partial`; a local tensor of another
            shape than its placements say.
    """
    if tensors is None:
        return None
    if not isinstance(tensors, Mapping):
        raise TypeError(
            f"{what}={tensors!r:.80} of type {type(tensors).__name__}: give a dict of tensors by "
            "name, such as dict(model.named_parameters()), or None."
        )
    side = Side()
    meshes: dict[int, int] = {}  # number by id
    for name, tensor in tensors.items():
        if not isinstance(name, str):
            raise TypeError(f"{what} has the name {name!r} of type {type(name).__name__}: give str")
        _add(side, meshes, name, tensor, what)
    return side if side.specs else None


def _add(
    side: Side,
    meshes: dict[int, int],
    name: str,
    tensor: Tensor,
    what: str,
) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(
            f"{what} {name!r} is a {type(tensor).__name__}: give a DTensor or a tensor."
        )
    if not isinstance(tensor, DTensor):
        _check_kind(local_tensor(tensor), f"{what} {name!r}")
        side.specs[name] = Spec(tuple(tensor.shape), _dtype_name(tensor.dtype))
        side.tensors[name] = tensor
        return
    mesh = tensor.device_mesh
    if mesh.get_coordinate() is None:
        return
    local = local_tensor(tensor)
    _check_kind(local, f"The local tensor of {what} {name!r}")
    if id(mesh) not in meshes:
        meshes[id(mesh)] = len(side.grids)
        grid, first = _grid_of(mesh)
        side.grids.append(grid)
        side.firsts.append(first)
        root = _root_of(mesh)
        if root not in side.roots:
            side.roots.append(root)
    dims, factors = _splits(tensor, f"{what} {name!r}")
    dtype = _dtype_name(tensor.dtype)
    spec = Spec(tuple(tensor.shape), dtype, meshes[id(mesh)], dims, factors)
    _check_local_shape(side, name, spec, mesh, local, f"{what} {name!r}")
    side.specs[name], side.tensors[name] = spec, tensor


def local_tensor(tensor: Tensor) -> Tensor:
    """The part of a tensor that is on this rank, without autograd."""
    with torch.no_grad():
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()
    return compat.waited(local)


def _check_kind(tensor: Tensor, what: str) -> None:
    if type(tensor) is not Tensor:
        raise TypeError(
            f"{what} is a {type(tensor).__name__}, whose data cannot be read as that of a plain "
            "tensor. Give the tensors it is made of, each under a name of its own."
        )
    kind = str(tensor.layout) if tensor.layout != torch.strided else ""
    kind = "nested" if tensor.is_nested else "quantized" if tensor.is_quantized else kind
    kind = "meta" if tensor.is_meta else kind
    if kind:
        raise TypeError(
            f"{what} is a {kind} tensor: only strided tensors with data can be moved. Convert it "
            "first, as by to_dense(), dequantize() or to_empty()."
        )
    if not has_memory(tensor):
        raise ValueError(
            f"{what} has no memory: something has freed it, as FSDP2 does with what it has put "
            "back into shards. Give the model's parameters of now."
        )


def has_memory(local: Tensor) -> bool:
    """Whether a tensor's memory is there; FSDP2 frees that of what it has put back into shards."""
    return local.untyped_storage().nbytes() > 0 or local.numel() == 0


def _splits(tensor: DTensor, what: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    pairs = [_split(placement, tensor, what) for placement in tensor.placements]
    return tuple(dim for dim, _ in pairs), tuple(factor for _, factor in pairs)


def _split(placement: Placement, tensor: DTensor, what: str) -> tuple[int, int]:
    if type(placement) is Replicate:
        return -1, 1
    if type(placement) is Shard or compat.is_strided_shard(placement):
        dim: int = placement.dim  # type: ignore[attr-defined]
        factor = int(getattr(placement, "split_factor", 1))
        return dim % max(tensor.ndim, 1), factor
    cure = (
        "redistribute it to Replicate() or Shard() first, which sums its parts."
        if placement.is_partial()
        else "only Replicate and Shard say which elements a rank has."
    )
    raise ValueError(f"{what} has the placement {placement}, which cannot be moved: {cure}")


def _check_local_shape(
    side: Side, name: str, spec: Spec, mesh: StockDeviceMesh, local: Tensor, what: str
) -> None:
    coordinates, sizes = list(mesh.get_coordinate() or ()), list(mesh.shape)
    shapes = [
        shard_shape(spec.shape, spec.dims, spec.factors, right_to_left, sizes, coordinates)
        for right_to_left in (False, True)
    ]
    found = tuple(local.shape)
    if found not in shapes:
        raise ValueError(
            f"{what} of shape {spec.shape} has a local tensor of shape {found} on this rank, but "
            f"its placements on a mesh of shape {tuple(sizes)} say {shapes[0]}. A DTensor that "
            "was made of unequal parts needs placements that say so."
        )
    if shapes[0] != shapes[1]:
        (side.left_to_right if found == shapes[0] else side.right_to_left).append(name)


def _grid_of(mesh: StockDeviceMesh) -> tuple[Grid, int]:
    if isinstance(mesh, DeviceMesh) and mesh.universe.rank_map.is_identity:
        return Grid(_digits(mesh.layout)), mesh.layout.base(dist.get_rank())
    ranks = mesh.mesh.flatten().tolist()
    found = rank_digits(RankMap.from_ranks(ranks))
    if found is None:
        return Grid(_digits(Layout.from_shape(mesh.shape)), tuple(ranks)), 0
    return Grid(_digits(Layout([found.layout]).unflatten(0, mesh.shape))), found.first


def _root_of(mesh: StockDeviceMesh) -> Any:
    root = compat.root_of(mesh)
    grid, first = _grid_of(root)
    return [first, grid.axes] if grid.ranks is None else [list(grid.ranks)]


def ranks_of_root(root: Any) -> list[int]:
    """The ranks that `Side.roots` lists in one of its items. O(ranks)."""
    if len(root) == 1:
        return list(root[0])
    first, axes = root
    positions = layout_of(axes).collapse()
    return [first + positions(index) for index in range(positions.size)]


def _digits(layout: Layout) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]:
    return tuple((tuple(axis.sizes), tuple(axis.strides)) for axis in layout)


def layout_of(axes: Any) -> Layout:
    """The layout of the axes of a `Grid`."""
    return Layout([AxisLayout(list(sizes), list(strides)) for sizes, strides in axes])


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
