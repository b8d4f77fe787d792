"""Suspending the communicators of a process group. torch has this per backend, from 2.12 on."""

from __future__ import annotations

from collections import Counter
from typing import Any

from .private_names import ProcessGroup


def memory_stats(group: ProcessGroup) -> dict[str, int] | None:
    """Return the memory counters of a group's backends, summed up; None if no backend has any.

    A backend with counters can be suspended too: c10d implements both for the same backends.
    """
    counters = [stats for backend in _backends(group) if (stats := _stats(backend)) is not None]
    if not counters:
        return None
    total: Counter[str] = Counter()
    for stats in counters:
        total.update(stats)
    return dict(total)


def suspend(group: ProcessGroup) -> None:
    """Suspend those of a group's backends that can be; all its ranks call this."""
    for backend in _backends(group):
        if _stats(backend) is not None:
            backend.suspend()


def resume(group: ProcessGroup) -> None:
    """Reverse `suspend`; all its ranks call this."""
    for backend in _backends(group):
        if _stats(backend) is not None:
            backend.resume()


def _stats(backend: Any) -> dict[str, int] | None:
    try:
        return dict(backend.memory_stats())
    except (AttributeError, RuntimeError):  # before 2.12; a backend that cannot
        return None


def _backends(group: ProcessGroup) -> list[Any]:
    """Return a group's backends, each once, in an order that all ranks share."""
    devices = sorted(group._device_types, key=lambda device: device.type)
    found = (group._get_backend(device) for device in devices)
    return list(dict.fromkeys(found))
