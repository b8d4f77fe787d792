"""The backend "splitting", written in C++, and default groups that are bound to a device of it.

c10d binds a default group to a device of an accelerator. Where there is none, a device type of the
tests' own stands for one: torch's place for device types from elsewhere, under a name. No tensor is
ever on it. A process keeps that name, so these worlds have processes of their own.
"""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from . import via_store

__all__ = ["DEVICE", "NAME", "SECONDS", "backend_of", "register", "restart", "start"]

NAME = "splitting"
DEVICE = "tester"
SECONDS = 33.0  # of the default group's operations; unlike c10d's default


def _have_accelerator(backends: ModuleType) -> None:
    if hasattr(torch, DEVICE):
        return
    backends.register_device()
    torch.utils.rename_privateuse1_backend(DEVICE)
    module: Any = ModuleType(f"torch.{DEVICE}")
    module.is_available = module.is_initialized = lambda: True
    module.device_count = lambda: 1
    module.current_device = lambda: 0
    module.set_device = lambda index: None
    torch._register_device_module(DEVICE, module)


def register(library: Path) -> ModuleType:
    """Make c10d know the backend and the device type, in this process.

    Returns:
        The compiled module.
    """
    module = via_store.load(library)
    _have_accelerator(module)

    def create(common: Any, given: Any) -> Any:
        mine = module.SplittingOptions() if given is None else given
        mine._timeout = common.timeout
        source = getattr(common, "split_from", None)
        if source is not None:  # from 2.15 on
            mine.group_name = common.group_id
            return source.split(common.store, common.global_ranks_in_group, mine)
        return module.SplittingBackend(common.store, common.group_rank, common.group_size, mine)

    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, create, extended_api=True, devices=["cpu", DEVICE])
    return module


def start(
    library: str, folder: str, rank: int, size: int, backend: str = NAME, *, is_bound: bool = True
) -> ModuleType:
    """Start a default group of this backend, bound to a device.

    Returns:
        The compiled module.
    """
    module = register(Path(library))
    dist.init_process_group(
        backend,
        store=dist.FileStore(os.path.join(folder, "store"), size),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=SECONDS),
        device_id=torch.device(DEVICE, 0) if is_bound else None,
    )
    world = dist.group.WORLD
    assert world is not None
    if "," in backend:  # as c10d does where one of several is NCCL
        world._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)
    return module


def restart(library: str, folder: str, backend: str = NAME, *, is_bound: bool = True) -> ModuleType:
    """Return the same in a crew's process, in place of the crew's own default group."""
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.all_reduce(torch.zeros(1))  # a barrier would use the accelerator
    dist.destroy_process_group()
    return start(library, folder, rank, size, backend, is_bound=is_bound)


def backend_of(group: Any, device: str = DEVICE) -> Any:
    """Return a group's backend for a device type."""
    return group._get_backend(torch.device(device))
