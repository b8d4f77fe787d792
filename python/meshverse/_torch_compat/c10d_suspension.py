"""Suspending the communicators of a process group, which torch has per backend from 2.12 on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from operator import methodcaller
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


def backends_to_suspend(group: ProcessGroup) -> list[Any]:
    """Return those of a group's backends that can be suspended."""
    return [backend for backend in _backends(group) if _stats(backend) is not None]


def suspend(backends: Sequence[Any], done: list[object]) -> None:
    """Suspend backends of a group; all ranks of the group call this.

    Args:
        backends: what `backends_to_suspend` returned, or the first ones of it.
        done: gets one entry for each backend that was suspended, also if this raises.
    """
    # All in C: so no signal handler can raise between a backend's return and its entry.
    done.extend(map(methodcaller("suspend"), backends))


def resume(backends: Sequence[Any], done: list[object]) -> None:
    """Resume backends of a group; as `suspend`."""
    done.extend(map(methodcaller("resume"), backends))


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
