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

from meshverse import DeviceMesh
from meshverse._torch_compat.dtensors import held_by, is_strided_shard, waited
from meshverse._torch_compat.stock_layouts import keeps_rank_order
from meshverse.parallel.models.trials import leaves_in
from meshverse.parallel.reshard.sides import check_kind

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
            elif is_lazy(slot.value):
                raise TypeError(f"{name!r} is uninitialized: run the module once, and save it then")
            elif isinstance(slot.value, DTensor) and any(
                placement.is_partial() for placement in slot.value.placements
            ):
                raise ValueError(
                    f"{name!r} has the placements {slot.value.placements}: redistribute it to "
                    "Replicate() or Shard() first"
                )
        self._planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._planner.set_up_planner(dict(self.by_name))
        self.items: list[WriteItem] = self._planner.create_local_plan().items
        checked: set[tuple[int, object, object]] = set()  # mesh, placements and shape of DTensors
        for item in self.items:
            if item.type != WriteItemType.BYTE_IO:
                _check_tensor(item, self.by_name[item.index.fqn], checked)

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
    if any(isinstance(each, DTensor) for each in leaves_in(slot.value)):
        raise TypeError(
            f"{name!r} is a {type(slot.value).__name__} with DTensors, which would be loaded by "
            "ranks of the same mesh only. Use a dict or a list"
        )
    if not isinstance(slot.container, (MutableMapping, list)):
        raise TypeError(
            f"{name!r} is in a {type(slot.container).__name__}, into which load() cannot put the "
            "saved value. Use a dict"
        )


def _check_tensor(item: WriteItem, value: Tensor, checked: set[tuple[int, object, object]]) -> None:
    name = item.index.fqn
    is_part = item.type == WriteItemType.SHARD and not isinstance(value, DTensor)
    is_flat = isinstance(value, FlatParameter)  # whose class is Parameter
    if is_part or is_flat:
        kind = "FlatParameter" if is_flat else type(value).__name__
        raise TypeError(
            f"{name!r} is a {kind}, whose parts are loaded by ranks of the same mesh only: "
            "Snapshot takes DTensors. Use fully_shard (FSDP2) in place of "
            "FullyShardedDataParallel (FSDP1)"
        )
    if isinstance(value, DTensor):
        local = waited(held_by(value)[0])  # to_local takes 10 us, and a state has thousands
        check_kind(local, f"The local tensor of {name!r}")
        known = id(value.device_mesh), value.placements, value.shape
        if known not in checked:
            _check_placements(name, value)
            checked.add(known)
    else:
        local = value.detach()
        check_kind(local, repr(name))
    assert item.tensor_data is not None
    shape, sizes = tuple(local.shape), tuple(item.tensor_data.chunk.sizes)
    # The shape of an empty local tensor is not compared: FSDP2 may use another one.
    if shape != sizes and (local.numel() or math.prod(sizes)):
        raise ValueError(
            f"this rank's part of {name!r} has shape {shape}, but its placements say {sizes}: it "
            "was created by from_local() with parts of other sizes. Redistribute it"
        )
    if any(size > 1 and stride == 0 for size, stride in zip(shape, local.stride(), strict=True)):
        raise ValueError(
            f"{name!r} is expanded (its strides are {local.stride()}), so nothing can be loaded "
            "into it. Pass its clone()"
        )


def _check_placements(name: str, tensor: DTensor) -> None:
    """Check that every rank's part of a DTensor is one block, at the place of its coordinate.

    All ranks of the mesh raise, or none: what is read of the tensor is the same on all of them.
    """
    mesh, placements = tensor.device_mesh, tensor.placements
    said = f"{name!r} of shape {tuple(tensor.shape)} has the placements {placements}"
    for axis, placement in enumerate(placements):
        is_strided = is_strided_shard(placement)
        if not isinstance(placement, Shard) and not is_strided:
            continue
        if not _is_in_group_order(mesh, axis):
            raise ValueError(
                f"{said} on {mesh}, whose ranks do not ascend along axis {axis}: torch gives "
                "ranks their shards in ascending order, which a snapshot does not record. "
                "Create the mesh with meshverse.init_device_mesh(ranks=), which keeps the order"
            )
        if is_strided:
            _check_strides(said, tensor, axis)


def _check_strides(said: str, tensor: DTensor, axis: int) -> None:
    mesh, placements = tensor.device_mesh, tensor.placements
    dim: int = getattr(placements[axis], "dim")  # noqa: B009  (of a private class)
    factor: int = getattr(placements[axis], "split_factor")  # noqa: B009
    later = math.prod(
        mesh.size(other)
        for other in range(axis + 1, mesh.ndim)
        if getattr(placements[other], "dim", None) == dim
    )
    pieces = mesh.size(axis) * later
    if later != factor or tensor.shape[dim] % pieces:
        raise ValueError(
            f"{said} on {mesh}: dimension {dim} of size {tensor.shape[dim]} is not split into "
            f"{pieces} equal blocks, one for each rank, so no snapshot can be loaded on another "
            "mesh. Use sizes that divide, or redistribute it to Shard() first"
        )


def _is_in_group_order(mesh: StockDeviceMesh, axis: int) -> bool:
    """Whether the coordinates along an axis are the ranks in its groups.

    O(number of ranks) for torch's meshes, and for ours whose ranks do not ascend.
    """
    if mesh.size(axis) == 1 or keeps_rank_order(mesh):
        return True
    if isinstance(mesh, DeviceMesh) and mesh.universe.rank_map.is_sorted():
        return mesh.layout.axes[axis].is_sorted()
    return bool((mesh.mesh.diff(dim=axis) > 0).all())
