"""Platforms of one and the same test: NCCL with all ranks on one GPU, or a backend on the CPU."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from helpers import splitting
from helpers.crew import WORLD_TIMEOUT_SECONDS
from one_gpu import one_gpu_environment

__all__ = ["PLATFORMS", "Platform", "World", "backend_of", "world_at"]


class Platform(NamedTuple):
    """A backend, and where its tensors are.

    Attributes:
        backend: of default groups.
        mixed: a backend for each of two device types, of which one is this one.
        device: type of the tensors that it reduces.
        bound: device that a default group can be bound to, if it can.
        slowness: how much longer than on the CPU everything may take.
        compiler: backend of torch.compile.
    """

    backend: str
    mixed: str
    device: str
    bound: str | None
    slowness: int = 1
    compiler: str = "aot_eager"  # inductor takes minutes on a busy machine without a cache


PLATFORMS = {
    "gloo": Platform("gloo", "cpu:gloo", "cpu", None),
    # As strict as NCCL where groups are split, but on the CPU: see backends/splitting_backend.hpp.
    "splitting": Platform(
        splitting.NAME,
        f"cpu:gloo,{splitting.DEVICE}:{splitting.NAME}",
        "cpu",
        f"{splitting.DEVICE}:0",
    ),
    # The ranks take turns on the GPU, some milliseconds each, and a collective needs all of them.
    "nccl": Platform("nccl", "cpu:gloo,cuda:nccl", "cuda", "cuda:0", 6, "inductor"),
}


class World(NamedTuple):
    """The default group that a test wants on a platform.

    Attributes:
        platform: name of one of `PLATFORMS`.
        folder: of its own, for the store.
        library: the compiled backends of the tests.
        is_bound: whether it is bound to the device.
        is_mixed: whether it has a backend for each of two device types.
        survives: whether what fails in its groups is an error there, not the end of the process.
    """

    platform: str
    folder: str
    library: str
    is_bound: bool = False
    is_mixed: bool = False
    survives: bool = False


@contextlib.contextmanager
def world_at(wanted: World) -> Iterator[Platform]:
    """Replace the default group of a crew's process by this one, inside the block."""
    platform, rank, size = PLATFORMS[wanted.platform], dist.get_rank(), dist.get_world_size()
    dist.all_reduce(torch.zeros(1))
    dist.destroy_process_group()
    kept = dict(os.environ)
    backend = platform.mixed if wanted.is_mixed else platform.backend
    if wanted.platform == "splitting":
        splitting.start(
            wanted.library, wanted.folder, rank, size, backend, is_bound=wanted.is_bound
        )
    else:
        _start(platform, wanted, backend, rank, size)
    yield platform
    if dist.is_initialized():
        if platform.device == "cuda":
            torch.cuda.synchronize()
        if wanted.survives:  # some groups are broken, and waiting for them would take long
            dist.distributed_c10d._abort_process_group()
        else:
            dist.destroy_process_group()
    for name in os.environ.keys() - kept.keys() - one_gpu_environment(0).keys():
        del os.environ[name]
    _start(PLATFORMS["gloo"], wanted._replace(folder=wanted.folder + "/after"), "gloo", rank, size)


def _start(platform: Platform, wanted: World, backend: str, rank: int, size: int) -> None:
    if platform.device == "cuda":
        os.environ.update(one_gpu_environment(rank))
        if wanted.survives:
            # Otherwise NCCL's watchdog ends the process when an operation fails or times out.
            os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
            os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"
        torch.cuda.set_device(0)
    os.makedirs(wanted.folder, exist_ok=True)
    dist.init_process_group(
        backend,
        store=dist.FileStore(os.path.join(wanted.folder, "store"), size),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=WORLD_TIMEOUT_SECONDS * platform.slowness),
        device_id=torch.device(platform.bound) if wanted.is_bound and platform.bound else None,
    )


def backend_of(group: Any, wanted: World) -> Any:
    """Return a group's backend on the platform."""
    platform = PLATFORMS[wanted.platform]
    device = (
        platform.bound if wanted.is_bound or wanted.platform == "splitting" else platform.device
    )
    return group._get_backend(torch.device(device or platform.device))
