"""How groups of a backend are created: by which ranks, by a split or not, blocking or not.

| property of the backend or of torch | how groups are created |
|---|---|
| the default group is bound to a device, and its backends support splitting | all ranks split it |
| otherwise, c10d itself would split the default group | all ranks take part |
| the backend is MPI, or the default group creates its own subgroups | all ranks take part |
| torchcomms before torch 2.15 | all ranks take part |
| none of the above | the members alone create the group |
| the backend's creator is known to return without connecting | creation does not block |
| nothing is known about the creator | members first have a rendezvous, as creation may block |
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from .groups import current_default_group, default_backend, ensure_registered
from .options import options_of
from .private_names import BackendOptions, ProcessGroup, c10d, c10d_core

# 2.13 and newer can split only the backends of some devices.
_SPLITS_SOME_DEVICES = "device_types" in (dist.ProcessGroup.split_group.__doc__ or "")
# When a group is split, 2.15 and newer give each of its backends its own options. Older versions
# give the options of one backend to all: gloo ignores them with a warning, other backends raise.
_SPLITS_WITH_OWN_OPTIONS = hasattr(c10d_core.Backend, "split")
# 2.15 and newer split the default group for its own backend only.
_SPLITS_SAME_ONLY = "requested_backend" in inspect.signature(c10d._get_split_source).parameters
# 2.15 and newer give torchcomms the rank and the size of a group, so its members can create it.
_TORCHCOMMS_BY_MEMBERS = hasattr(c10d, "_create_torchcomms_backend")


class Creation(NamedTuple):
    """How groups of a backend are created.

    Attributes:
        splits: whether they are split off the default group.
        all_ranks_reason: why all ranks must create them together, if they are not split off; None
            if the members of a group can create it alone.
        blocks: whether creating a group may block until all its members call.
    """

    splits: bool
    all_ranks_reason: str | None
    blocks: bool


def creation_of(default_group: ProcessGroup, backend: str) -> Creation:
    """Return how groups of this backend are created beside this default group."""
    return Creation(
        can_split(default_group, backend),
        all_ranks_reason(default_group, backend),
        creation_blocks(backend),
    )


def bound_to_device(group: ProcessGroup) -> bool:
    """Whether the group is bound to a device (`device_id=`), and so connects eagerly."""
    return getattr(group, "bound_device_id", None) is not None


def _uses_torchcomms(backend: str) -> bool:
    if not getattr(torch.distributed.config, "use_torchcomms", False):
        return False
    # Before 2.15, torchcomms creates all backends.
    handles = getattr(c10d, "_torchcomms_handles_backend", None)
    return handles is None or bool(handles(backend))


def by_device(backend: str) -> Mapping[str, str]:
    """Return the backend of each device type."""
    return c10d.BackendConfig(dist.Backend(backend)).get_device_backend_map()


def backend_for(device_type: str, backend: str) -> str | None:
    """Return the backend that a group of this backend string has for a device type, or None."""
    return by_device(backend).get(device_type)


def backend_in_words(backend: str) -> str:
    """Return the backend of a group as users write it.

    After `init_process_group()` without a backend, c10d reports "undefined". This returns the
    backends that it stands for, such as "cpu:gloo,cuda:nccl".
    """
    if backend != dist.Backend.UNDEFINED:
        return backend
    return ",".join(f"{device}:{name}" for device, name in by_device(backend).items())


def split_devices(group: ProcessGroup, backend: str) -> dict[str, list[torch.device]] | None:
    """Return the devices of each backend, if groups of `backend` are split off the default group.

    None if they are created in another way. torch checks less, and raises an error if a backend
    cannot be split.
    """
    bound = group.bound_device_id
    if bound is None or _uses_torchcomms(backend):
        return None
    registered = {device.type for device in group._device_types}
    there = {d: name for d, name in by_device(default_backend(group)).items() if d in registered}
    wanted = {d: name for d, name in by_device(backend).items() if d in registered}
    if bound.type not in wanted or any(there.get(d) != name for d, name in wanted.items()):
        return None
    devices: dict[str, list[torch.device]] = {}
    for device in sorted(wanted, key=lambda device: device != "cpu"):  # as in c10d, "cpu" first
        devices.setdefault(wanted[device], []).append(torch.device(device))
    if not (_SPLITS_SOME_DEVICES or len(wanted) == len(there) == len(devices)):
        return None
    if devices.keys() - {wanted[bound.type], "gloo"} and not _SPLITS_WITH_OWN_OPTIONS:
        return None
    can = all(group._get_backend(each[0]).supports_splitting for each in devices.values())
    return devices if can else None


def can_split(group: ProcessGroup, backend: str) -> bool:
    """Whether groups of this backend are split off this default group."""
    return split_devices(group, backend) is not None


def split_options(group: ProcessGroup) -> BackendOptions | None:
    """Return the options that are inherited by groups split off this default group.

    These are the options of the backend for the bound device. Other backends also pass on their own
    options, which cannot be set for a single group.
    """
    assert group.bound_device_id is not None  # as the group can be split
    return options_of(group._get_backend(group.bound_device_id))


def all_ranks_reason(group: ProcessGroup, backend: str) -> str | None:
    """Return why all ranks must create a group of this backend; None if its members can alone."""
    if _uses_torchcomms(backend) and not _TORCHCOMMS_BY_MEMBERS:
        return "torchcomms"
    if "mpi" in _names(backend):
        return "MPI"
    if callable(getattr(group, "new_group", None)):
        return "the default group makes its own subgroups"
    if os.environ.get("TORCH_DIST_INIT_BARRIER", "0") == "1":
        return "TORCH_DIST_INIT_BARRIER=1"
    if _is_made_by_splitting(group, backend):
        return "c10d splits the default group for it, which is bound to a device"
    return None


def _is_made_by_splitting(group: ProcessGroup, backend: str) -> bool:
    """Whether c10d creates a group of this backend by splitting the default group."""
    if not bound_to_device(group) or _uses_torchcomms(backend):
        return False
    split_source: Any = c10d._get_split_source
    if _SPLITS_SAME_ONLY:
        return split_source(group, backend) is not None
    # Before 2.15, c10d splits for its own NCCL backend only; for others, it creates a new group.
    return "nccl" in _names(backend) and split_source(group) is not None


def creation_blocks(backend: str) -> bool:
    """Whether creating a group of this backend may block until all members call.

    If not, only the group's first use waits for them. Under TORCH_DISTRIBUTED_DEBUG=DETAIL, c10d
    also creates a gloo group for each backend that it wraps: all except those that are process
    groups themselves, such as "threaded". 2.11-2.15.
    """
    wrapped = dist.get_debug_level() == dist.DebugLevel.DETAIL and dist.is_gloo_available()
    default_group = current_default_group()
    connects = default_group is not None and bound_to_device(default_group)
    return not all(
        name == "threaded"
        or (not wrapped and (name == "fake" or (not connects and _is_classic_nccl(name))))
        for name in _names(backend)
    )


def _is_classic_nccl(name: str) -> bool:
    """Whether c10d's backend of this name is the NCCL that connects at its first collective.

    2.15 registers several NCCL backends. By default, "nccl" is one that connects when it is
    created.
    """
    ensure_registered(name)
    registered = dist.Backend._plugins.get(name.upper())
    if registered is None:
        return name == "nccl" and not hasattr(c10d, "_create_nccl_process_group")
    return registered.creator_fn is getattr(c10d, "_create_nccl_process_group", None)


def _names(backend: str) -> set[str]:
    """Return the names in a backend string, which has one backend or one per device type."""
    return {part.rpartition(":")[2] for part in backend.split(",")}


def needs_own_world_group(group: ProcessGroup) -> bool:
    """Whether torch creates a new group for an axis over the whole world.

    Otherwise the axis uses the default group.
    """
    return torch.cuda.is_available() and dist.get_backend(group) == "gloo"
