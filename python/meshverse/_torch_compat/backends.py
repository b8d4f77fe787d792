"""Ways in which groups of a backend are made: by whom, whether ranks wait, and what is split.

| what a backend or torch says | what follows |
|---|---|
| the default group is bound to a device, and its backends there support splitting | a split |
| c10d's own way to make the group would split the default group | all ranks take part |
| the backend is MPI, or the default group makes its own subgroups | all ranks take part |
| torchcomms, where torch has it split the default group | all ranks take part |
| none of the above | the members make the group |
| its creator is known to return at once, and nothing is connected for it | nobody waits |
| nothing is known of its creator | members wait for each other, after a rendezvous |
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from .groups import current_default_group, default_backend
from .options import options_of
from .private_names import BackendOptions, ProcessGroup, c10d, c10d_core

# 2.13 and newer can split only the backends of some devices.
_SPLITS_SOME_DEVICES = "device_types" in (dist.ProcessGroup.split_group.__doc__ or "")
# When a group is split, 2.15 and newer give each of its backends its own options. Older versions
# give all of them the options of one: gloo ignores them with a warning, other backends refuse.
_SPLITS_WITH_OWN_OPTIONS = hasattr(c10d_core.Backend, "split")
# 2.15 and newer split the default group for its own backend only.
_SPLITS_SAME_ONLY = "requested_backend" in inspect.signature(c10d._get_split_source).parameters
# 2.15 and newer give torchcomms the rank and the size of a group, so its members can make it.
_TORCHCOMMS_BY_MEMBERS = hasattr(c10d, "_create_torchcomms_backend")


def bound_to_device(group: ProcessGroup) -> bool:
    """Whether the group was initialised eagerly, with its device bound (`device_id=`)."""
    return getattr(group, "bound_device_id", None) is not None


def _uses_torchcomms(backend: str) -> bool:
    if not getattr(torch.distributed.config, "use_torchcomms", False):
        return False
    handles = getattr(c10d, "_torchcomms_handles_backend", None)  # 2.15; before, it takes them all
    return handles is None or bool(handles(backend))


def by_device(backend: str) -> Mapping[str, str]:
    """Return the backend of each device type."""
    return c10d.BackendConfig(dist.Backend(backend)).get_device_backend_map()


def backend_in_words(backend: str) -> str:
    """Return the backend of a group as people know it.

    "undefined", which c10d says after `init_process_group()` without a backend, becomes the
    backends that it stands for, such as "cpu:gloo,cuda:nccl".
    """
    if backend != dist.Backend.UNDEFINED:
        return backend
    return ",".join(f"{device}:{name}" for device, name in by_device(backend).items())


def split_devices(group: ProcessGroup, backend: str) -> dict[str, list[torch.device]] | None:
    """Return the devices of each backend, if a group of `backend` is a split of the default group.

    None if it is made in another way. Stock checks less, and fails if a backend cannot be split.
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
    for device in sorted(wanted, key=lambda device: device != "cpu"):  # c10d asks for it first
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
    """Return the options that groups inherit which are split off this default group.

    They are those of the backend of the device it is bound to. Its other backends, if any, hand on
    their own options, which cannot be set for a single group.
    """
    assert group.bound_device_id is not None  # it can be split
    return options_of(group._get_backend(group.bound_device_id))


def why_all_ranks(group: ProcessGroup, backend: str) -> str | None:
    """Return why all ranks must make a group of this backend, or None if its members suffice."""
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
    """Whether c10d, where it makes a group of this backend, splits the default group for it."""
    if not bound_to_device(group) or _uses_torchcomms(backend):
        return False
    split_source: Any = c10d._get_split_source
    if _SPLITS_SAME_ONLY:
        return split_source(group, backend) is not None
    # Before 2.15 c10d passes a group to split to its own NCCL only; other backends make a new one.
    return "nccl" in _names(backend) and split_source(group) is not None


def creation_blocks(backend: str) -> bool:
    """Whether making a group of this backend waits for its members, rather than its first use.

    Under TORCH_DISTRIBUTED_DEBUG=DETAIL, c10d makes a gloo group beside each backend that it wraps:
    all but those that are process groups themselves, such as "threaded". 2.11-2.15.
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
    """Whether c10d makes a backend of this name as the NCCL that connects at its first collective.

    2.15 registers NCCLs under several names: "nccl" is by default one that connects when it is
    created.
    """
    register = getattr(dist.Backend, "_ensure_backend_registered", None)  # 2.15
    if register is not None:
        register(name)
    registered = dist.Backend._plugins.get(name.upper())
    if registered is None:
        return name == "nccl" and not hasattr(c10d, "_create_nccl_process_group")
    return registered.creator_fn is getattr(c10d, "_create_nccl_process_group", None)


def _names(backend: str) -> set[str]:
    """Return the names in a backend string: of one backend, or one a device type."""
    return {part.rpartition(":")[2] for part in backend.split(",")}


def needs_own_world_group(group: ProcessGroup) -> bool:
    """Whether stock makes a new group for an axis over the whole world, rather than reuse it."""
    return torch.cuda.is_available() and dist.get_backend(group) == "gloo"
