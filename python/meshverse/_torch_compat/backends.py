"""Backends of c10d: their names and options, and how process groups of each are created.

By which ranks groups are created, by a split or not, blocking or not:

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
from datetime import timedelta
from types import FunctionType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from meshverse._core import fresh_like

from .private_names import BackendOptions, ProcessGroup, c10d, c10d_core

# 2.13 and newer can split only the backends of some devices.
_SPLITS_SOME_DEVICES = "device_types" in (dist.ProcessGroup.split_group.__doc__ or "")
# When a group is split, 2.14 and newer give each of its backends its own options. Older versions
# give the options of one backend to all: gloo ignores them with a warning, other backends raise.
_SPLITS_WITH_OWN_OPTIONS = hasattr(c10d_core.Backend, "split")
# 2.15 and newer split the default group for its own backend only.
_SPLITS_SAME_ONLY = "requested_backend" in inspect.signature(c10d._get_split_source).parameters
# 2.15 and newer give torchcomms the rank and the size of a group, so its members can create it.
_TORCHCOMMS_BY_MEMBERS = hasattr(c10d, "_create_torchcomms_backend")

# Fields of options objects that c10d itself sets for each group (`split_*` on NCCL's options), or
# that an options key already contains separately (`_timeout`, `backend`). 2.11-2.15.
IGNORED_OPTION_FIELDS = frozenset(
    {
        "_timeout",
        "backend",
        "global_ranks_in_group",
        "group_name",
        "split_color",
        "split_from",
    }
)
_NOT_CPP = (FunctionType, type(None))  # types of an `__init__` in Python, and of a missing one


# --- names ----------------------------------------------------------------------------------------


def default_backend(group: ProcessGroup) -> str:
    """Return the backend string of a group, such as "gloo" or "cpu:gloo,cuda:nccl"."""
    return str(c10d._world.pg_map[group][0])


def canonical_backend(backend: str) -> str:
    """Return a backend string in c10d's spelling, which is in lower case."""
    return str(dist.Backend(backend))


def ensure_registered(backend: str) -> None:
    """Let c10d register a backend by this name, if it does so at a backend's first use. 2.14."""
    register = getattr(dist.Backend, "_ensure_backend_registered", None)
    if register is not None:
        register(backend)


def check_backend(backend: str) -> None:
    """Raise ValueError if c10d has no such backend, before anything is created.

    Args:
        backend: backend string: one name ("gloo"), or one per device type ("cpu:gloo,cuda:nccl").
    """
    names = [part.rpartition(":")[2].lower() for part in backend.split(",")]
    for name in names:
        ensure_registered(name)
    known = [name for name in dist.Backend.backend_list if name != dist.Backend.UNDEFINED]
    for name in names:
        if name not in known:
            raise ValueError(
                f"Unknown backend {name!r} in {backend!r}: torch.distributed knows {known}. "
                "Use one of these, or register yours with torch.distributed.Backend."
                "register_backend first."
            )


def check_is_built(backend: str) -> None:
    """Raise ValueError if this torch was built without a backend, such as NCCL."""
    for name in sorted(_names(backend)):
        if not dist.is_backend_available(name):
            raise ValueError(
                f"Backend {name!r} of {backend!r} is not available: this torch was built without "
                "it. Pass another one, or install a torch with it."
            )


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


def _names(backend: str) -> set[str]:
    """Return the names in a backend string, which has one backend or one per device type."""
    return {part.rpartition(":")[2] for part in backend.split(",")}


# --- options objects and timeouts -----------------------------------------------------------------


def is_backend_options(value: object) -> bool:
    """Whether the value is an options object of c10d, such as `ProcessGroupNCCL.Options`."""
    return isinstance(value, c10d_core.Backend.Options)


def options_timeout(options: BackendOptions | None) -> timedelta | None:
    """Return the timeout of an options object, or None if it has none."""
    return getattr(options, "_timeout", None)


def set_timeout(options: BackendOptions, timeout: timedelta) -> None:
    """Set the timeout of an options object of c10d; leave other objects as they are."""
    if is_backend_options(options):
        options._timeout = timeout


def options_of(backend: Any) -> BackendOptions | None:
    """Return the options that a backend was created with; None if it does not keep them.

    MPI, UCC and C++ backends without `getBackendOptions` keep none: the attribute is missing, or
    raises RuntimeError behind c10d's debug wrapper. 2.11-2.15.
    """
    try:
        return backend.options
    except (AttributeError, RuntimeError):
        return None


def explicit_timeout_of(options: BackendOptions | None) -> timedelta | None:
    """Return the timeout that the user set on an options object; None if it is the default."""
    timeout = options_timeout(options)
    if options is None or timeout == options_timeout(fresh_like(options)):
        return None
    return timeout


def new_like(value: Any) -> Any | None:
    """Return a new object of the same type, without running its Python constructor.

    So it has no Python attributes. None if its C++ base class cannot be constructed: this calls it
    without arguments and, for c10d's options, with a backend and a timeout. 2.11-2.15.
    """
    kind = type(value)
    base: Any = next(
        base for base in kind.__mro__ if not isinstance(vars(base).get("__init__"), _NOT_CPP)
    )
    arguments: list[tuple[Any, ...]] = [()]
    if is_backend_options(value):
        arguments.append((value.backend, value._timeout))
    for given in arguments:
        try:
            new = base.__new__(kind)
            base.__init__(new, *given)
        except TypeError:
            continue
        return new
    return None


def default_timeout(backend: str, default_group: ProcessGroup) -> timedelta:
    """Return the timeout of groups of this backend for which the user sets none.

    If the user passed `init_process_group` a timeout that is not c10d's default, it is that one,
    which torch itself does not use for other groups. Otherwise it is c10d's default for `backend`.
    """
    usual = c10d._get_default_timeout
    default_name = default_backend(default_group)
    given = timeout_of(default_group)
    if given is not None and given != usual(dist.Backend(default_name)):
        return given
    return usual(dist.Backend(backend))


def timeout_of(group: ProcessGroup) -> timedelta | None:
    """Return the timeout of a group; None if none of its backends keeps options to read it from.

    All backends of a group have the same timeout.
    """
    backends = (group._get_backend(device) for device in group._device_types)
    timeouts = (options_timeout(options_of(backend)) for backend in backends)
    return next((timeout for timeout in timeouts if timeout is not None), None)


# --- how groups are created -----------------------------------------------------------------------


class HowCreated(NamedTuple):
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


def bound_to_device(group: ProcessGroup) -> bool:
    """Whether the group is bound to a device (`device_id=`), and so connects eagerly."""
    return getattr(group, "bound_device_id", None) is not None


def _uses_torchcomms(backend: str) -> bool:
    if not getattr(torch.distributed.config, "use_torchcomms", False):
        return False
    # Before 2.14, torchcomms creates all backends.
    handles = getattr(c10d, "_torchcomms_handles_backend", None)
    return handles is None or bool(handles(backend))


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
    default_group = dist.GroupMember.WORLD
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


def needs_own_world_group(group: ProcessGroup) -> bool:
    """Whether torch creates a new group for an axis over the whole world.

    Otherwise the axis uses the default group.
    """
    return torch.cuda.is_available() and dist.get_backend(group) == "gloo"
