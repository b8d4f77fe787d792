"""Suspending the communicators of a process group, which torch has per backend from 2.12 on."""

from __future__ import annotations

from collections import Counter
from typing import Any

from .private_names import ProcessGroup


def memory_stats(group: ProcessGroup) -> dict[str, int] | None:
    """Return the sum of the memory counters of a group's backends; None if no backend has any.

    Backends with counters are also those that can be suspended: c10d implements both or neither.
    """
    counters = [stats for backend in _backends(group) if (stats := _stats(backend)) is not None]
    if not counters:
        return None
    total: Counter[str] = Counter()
    for stats in counters:
        total.update(stats)
    return dict(total)


def suspend(group: ProcessGroup) -> None:
    """Suspend those of a group's backends that support it; all ranks of the group call this."""
    for backend in _backends(group):
        if _stats(backend) is not None:
            backend.suspend()


def resume(group: ProcessGroup) -> None:
    """Resume the backends that `suspend` suspended; all ranks of the group call this."""
    for backend in _backends(group):
        if _stats(backend) is not None:
            backend.resume()


def _stats(backend: Any) -> dict[str, int] | None:
    try:
        return dict(backend.memory_stats())
    except (AttributeError, RuntimeError):  # before 2.12; a backend without counters
        return None


def _backends(group: ProcessGroup) -> list[Any]:
    """Return a group's backends, each once, in the same order on all ranks."""
    devices = sorted(group._device_types, key=lambda device: device.type)
    found = (group._get_backend(device) for device in devices)
    return list(dict.fromkeys(found))
