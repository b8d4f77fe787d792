"""Memory of one communicator: a documented estimate for each backend.

NCCL: for every channel, a connection has one receive buffer per protocol: of 4 MiB for the simple
protocol (`NCCL_BUFFSIZE` in NCCL's user guide, "Environment Variables"), and of 512 KiB and 4.7 MiB
for the two low-latency protocols (the defaults in NCCL's `src/init.cc`). So a ring over 16 channels
takes 16 x 9.2 = 147 MiB of each GPU's memory. Trees, more channels and registered user buffers take
more, and are not counted.

Gloo: no device memory. Each pair of ranks has a socket, whose buffers in the kernel are not
counted.

These estimates are meant to compare set-ups. If you have measured a communicator, pass its size:
`explain(communicator_bytes={"nccl": ...})`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_NCCL_CHANNELS = 16
_NCCL_BUFFER_BYTES = (4 << 20) + (8 * 512 * 8 * 16) + (120 * 640 * 8 * 8)

COMMUNICATOR_BYTES: Mapping[str, int] = {
    "nccl": _NCCL_CHANNELS * _NCCL_BUFFER_BYTES,
    "gloo": 0,
    "fake": 0,
}
"""Device memory of one communicator of more than one rank, on each of its ranks, in bytes."""


def with_measured(measured: Mapping[str, int] | None) -> dict[str, int]:
    """Return the bytes by backend name, with measured ones instead of estimates.

    Raises:
        ValueError: a measurement is not an int of 0 or more.
    """
    given: dict[str, Any] = dict(measured or {})
    for name, size in given.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 0:
            raise ValueError(
                f"communicator_bytes[{name!r}]={size!r}: give an int of 0 or more, in bytes."
            )
    return {**COMMUNICATOR_BYTES, **{name.lower(): size for name, size in given.items()}}


def estimate_bytes(backend: str, group_size: int, figures: Mapping[str, int]) -> int | None:
    """Return a communicator's device memory on this rank, in bytes; None for an unknown backend.

    Args:
        backend: backend name, or one name per device ("cpu:gloo,cuda:nccl"), whose sizes add up.
        group_size: number of ranks; a group of one rank has no connections.
        figures: bytes by backend name.
    """
    parts = [part.rpartition(":")[2] for part in backend.split(",")]
    if not all(part in figures for part in parts):
        return None
    return sum(figures[part] for part in parts) if group_size > 1 else 0
