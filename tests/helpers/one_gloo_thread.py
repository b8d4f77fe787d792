"""gloo groups with one worker thread: two of them can corrupt the heap, in torch 2.11 to 2.15.

The threads of a `ProcessGroupGloo` write the name of the last operation to one string
(`lastCompletedWorkName`, in `runLoop`) without the lock. If a name is longer than 15 characters, as
in `ALLGATHER_COALESCED`, one thread can write to memory that the other has freed. DTensor's
collectives have such names. In their tests, a process died of it in one of some 1,500 worlds,
wherever it next allocated memory. This program dies within seconds:

    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    whole, part = torch.zeros(1), torch.zeros(1)
    while True:
        group = dist.group.WORLD
        works = [group.allgather_into_tensor_coalesced([whole], [part]) for _ in range(64)]
        for work in works:
            work.wait()

So groups have one thread in all processes of the tests but those that `subprocess` starts, until a
release of torch survives this program.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

_Gloo: Any = dist.ProcessGroupGloo


class _IsAnyGloo(type(_Gloo)):  # type: ignore[misc]
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _Gloo)


class _OneThread(_Gloo, metaclass=_IsAnyGloo):  # type: ignore[misc]
    def __init__(
        self, store: dist.Store, rank: int, size: int, timeout: timedelta, **since_2_14: Any
    ) -> None:
        options = _Gloo._Options()
        options._threads = 1
        options._timeout = timeout
        for name, value in since_2_14.items():
            setattr(options, name, value)
        names = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")
        options._devices = [
            _Gloo.create_device(interface=name) if name else _Gloo.create_default_device()
            for name in names
        ]
        super().__init__(store, rank, size, options)


_OneThread.__name__ = _Gloo.__name__


def use_one_thread() -> None:
    """From now on, c10d creates gloo groups with one worker thread in this process."""
    c10d.ProcessGroupGloo = _OneThread  # type: ignore[misc]


def use_torchs_own() -> None:
    """Let c10d create gloo groups as always, in a program in whose stack nothing else may be."""
    c10d.ProcessGroupGloo = _Gloo  # type: ignore[misc]
