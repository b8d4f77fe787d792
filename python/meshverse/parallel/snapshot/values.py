"""The values of a state: their names, where they are, and which of them a snapshot can hold."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, MutableMapping
from typing import Any, NamedTuple

from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import DeviceMesh as StockDeviceMesh
from torch.distributed.fsdp import FlatParameter
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parameter import is_lazy

from meshverse._torch_compat.dtensors import is_strided_shard
from meshverse._torch_compat.stock_layouts import keeps_rank_order
from meshverse.parallel.reshard.sides import check_kind, local_tensor

__all__ = ["Values"]


class _Slot(NamedTuple):
    """A value and its place in the state.

    Attributes:
        value: a tensor, or whatever is pickled.
        container: the mapping or list that has the value.
        key: its key or index there.
    """

    value: Any
    container: Any
    key: Any


class Values:
    """The values of a state on this rank.

    Values are named as in `torch.distributed.checkpoint`: by their keys in mappings and their
    indices in lists, joined by dots. A list without tensors and mappings is one value. Unlike
    torch's planners, this keeps the places of values whose keys are no strings, and never changes
    the state itself.

    Args:
        state: what `torch.distributed.checkpoint.save` takes, without Stateful objects.

    Attributes:
        by_name: the values by name.
        items: this rank's part of each, as torch's planner describes it.

    Raises:
        ValueError: two values have one name; or a tensor's values, or this rank's part of it, are
            not in memory as its shape and placements say.
        TypeError: a snapshot cannot hold a value of this kind.
    """

    def __init__(self, state: dict[str, Any]) -> None:
        self._slots: dict[str, _Slot] = {}
        for key, value in state.items():
            self._add(str(key), _Slot(value, state, key))
        self.by_name = {name: slot.value for name, slot in self._slots.items()}
        for name, slot in self._slots.items():
            if not isinstance(slot.value, Tensor):
                _check_object(name, slot)
        self._planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._planner.set_up_planner(dict(self.by_name))
        _check_tensors(self.by_name)
        self.items: list[WriteItem] = self._planner.create_local_plan().items
        for item in self.items:
            if item.type != WriteItemType.BYTE_IO:
                _check_part(item, self.by_name[item.index.fqn])

    def _add(self, name: str, slot: _Slot) -> None:
        value = slot.value
        if isinstance(value, Mapping):
            for key, each in value.items():
                self._add(f"{name}.{key}", _Slot(each, value, key))
        elif isinstance(value, list) and _is_traversed(value):
            for index, each in enumerate(value):
                self._add(f"{name}.{index}", _Slot(each, value, index))
        elif name in self._slots:
            raise ValueError(
                f"two values of the state have the name {name!r}: their keys differ only in type, "
                "or have dots. Rename one"
            )
        else:
            self._slots[name] = slot

    def tensor(self, item: WriteItem) -> Tensor:
        """Return this rank's part of a tensor."""
        part = self._planner.resolve_data(item)
        assert isinstance(part, Tensor)
        return part

    def pickled(self, item: WriteItem) -> bytes:
        """Return the pickle of a value that is no tensor."""
        pickle = self._planner.resolve_data(item)
        assert isinstance(pickle, io.BytesIO)
        return pickle.getvalue()

    def replace(self, name: str, value: object) -> None:
        """Put another value into the state, in place of one that is no tensor."""
        slot = self._slots[name]
        slot.container[slot.key] = value


def _is_traversed(values: list[Any]) -> bool:
    return any(
        isinstance(each, (Mapping, Tensor)) or (isinstance(each, list) and _is_traversed(each))
        for each in values
    )


def _check_object(name: str, slot: _Slot) -> None:
    if isinstance(slot.value, Stateful):
        raise TypeError(
            f"{name!r} is a {type(slot.value).__name__} inside of a container, where its "
            "state_dict() is not saved. Pass its state_dict(), or the object at the top level of "
            "the state"
        )
    if not isinstance(slot.container, (MutableMapping, list)):
        raise TypeError(
            f"{name!r} is in a {type(slot.container).__name__}, into which load() cannot put the "
            "saved value. Use a dict"
        )


def _check_tensors(by_name: Mapping[str, Any]) -> None:
    sorted_axes: dict[tuple[int, int], bool] = {}
    for name, value in by_name.items():
        if not isinstance(value, Tensor):
            continue
        if is_lazy(value):
            raise TypeError(f"{name!r} is uninitialized: run the module once, and save it then")
        # The class of a FlatParameter is Parameter. A ShardedTensor is no DTensor either.
        is_flat = isinstance(value, FlatParameter)
        if is_flat or hasattr(value, "local_shards"):
            kind = "FlatParameter" if is_flat else type(value).__name__
            raise TypeError(
                f"{name!r} is a {kind}, whose parts are loaded by ranks of the same mesh only: "
                "Snapshot takes DTensors. Use fully_shard (FSDP2) in place of "
                "FullyShardedDataParallel (FSDP1)"
            )
        if not isinstance(value, DTensor):
            check_kind(value.detach(), repr(name))
        elif value.device_mesh.get_coordinate() is not None:
            check_kind(local_tensor(value), f"The local tensor of {name!r}")
            _check_placements(name, value, sorted_axes)


def _check_placements(name: str, tensor: DTensor, sorted_axes: dict[tuple[int, int], bool]) -> None:
    """Check that every rank's part of a DTensor is one block, at the place of its coordinate.

    All ranks of the mesh raise, or none: what is read of the tensor is the same on all of them.
    """
    mesh, placements = tensor.device_mesh, tensor.placements
    said = f"{name!r} of shape {tuple(tensor.shape)} has the placements {placements}"
    for axis, placement in enumerate(placements):
        if placement.is_partial():
            raise ValueError(f"{said}: redistribute it to Replicate() or Shard() first")
        if not isinstance(placement, Shard) and not is_strided_shard(placement):
            continue
        known = (id(mesh), axis)
        if known not in sorted_axes:
            sorted_axes[known] = _is_in_group_order(mesh, axis)
        if not sorted_axes[known]:
            raise ValueError(
                f"{said} on {mesh}, whose ranks do not ascend along axis {axis}: torch gives "
                "ranks their shards in ascending order, which a snapshot does not record. "
                "Create the mesh with meshverse.init_device_mesh(ranks=), which keeps the order"
            )
    for axis, placement in enumerate(placements):
        if not is_strided_shard(placement):
            continue
        dim: int = getattr(placement, "dim")  # noqa: B009  (of a private class)
        factor: int = getattr(placement, "split_factor")  # noqa: B009
        later = [
            mesh.size(other)
            for other in range(axis + 1, mesh.ndim)
            if getattr(placements[other], "dim", None) == dim
        ]
        pieces = mesh.size(axis) * math.prod(later)
        if math.prod(later) != factor or tensor.shape[dim] % pieces:
            raise ValueError(
                f"{said} on {mesh}: dimension {dim} of size {tensor.shape[dim]} is not split into "
                f"{pieces} equal blocks, one for each rank, so no snapshot can be loaded on "
                "another mesh. Use sizes that divide, or redistribute it to Shard() first"
            )


def _is_in_group_order(mesh: StockDeviceMesh, axis: int) -> bool:
    """Whether the coordinates along an axis are the ranks in its groups. O(number of ranks)."""
    if mesh.size(axis) == 1 or keeps_rank_order(mesh):
        return True
    return bool((mesh.mesh.diff(dim=axis) > 0).all())


def _check_part(item: WriteItem, value: Tensor) -> None:
    assert item.tensor_data is not None
    local, sizes = local_tensor(value), tuple(item.tensor_data.chunk.sizes)
    name = item.index.fqn
    # The shape of an empty local tensor is not compared: FSDP2 may use another one.
    if tuple(local.shape) != sizes and (local.numel() or math.prod(sizes)):
        raise ValueError(
            f"this rank's part of {name!r} has shape {tuple(local.shape)}, but its placements say "
            f"{sizes}: it was created by from_local() with parts of other sizes. Redistribute it"
        )
    if any(
        size > 1 and stride == 0 for size, stride in zip(local.shape, local.stride(), strict=True)
    ):
        raise ValueError(
            f"{name!r} is expanded (its strides are {local.stride()}), so nothing can be loaded "
            "into it. Pass its clone()"
        )
