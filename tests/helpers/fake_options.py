"""Options of the fake backend whose effect on a process group can be seen."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeProcessGroup

__all__ = ["fake_options", "raises"]


def fake_options(*, raises: bool = True, seconds: float | None = None) -> FakeProcessGroup.Options:
    """Options with which collectives raise, and with a timeout where one is given."""
    options = FakeProcessGroup.Options()
    options.error_on_collective = raises
    if seconds is not None:
        options._timeout = timedelta(seconds=seconds)
    return options


def raises(group: dist.ProcessGroup) -> bool:
    """Whether a group was created with such options."""
    try:
        dist.all_reduce(torch.ones(1), group=group)
    except RuntimeError:
        return True
    return False
