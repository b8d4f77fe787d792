"""Memory of one communicator: a documented estimate for each backend.

NCCL: a connection has a receive buffer for every channel, of 4 MiB (`NCCL_BUFFSIZE` in NCCL's user
guide, "Environment Variables") and, for the two low-latency protocols, of 512 KiB and 4.7 MiB (the
defaults in NCCL's `src/init.cc`). A ring over 16 channels so takes 16 x 9.2 = 147 MiB of each GPU's
memory. Trees, more channels and registered user buffers come on top.

Gloo: no device memory. In the host's, each pair of ranks is a socket with its buffers, which the
kernel holds: not counted.

These are estimates, to compare set-ups by. Where you have measured yours, say so:
`explain(communicator_bytes={"nccl": ...})`.
"""

from __future__ import annotations

from collections.abc import Mapping

_NCCL_CHANNELS = 16
_NCCL_BUFFER_BYTES = (4 << 20) + (8 * 512 * 8 * 16) + (120 * 640 * 8 * 8)

COMMUNICATOR_BYTES: Mapping[str, int] = {
    "nccl": _NCCL_CHANNELS * _NCCL_BUFFER_BYTES,
    "gloo": 0,
    "fake": 0,
}
"""Device memory of one communicator of more than one rank, on each of its ranks, in bytes."""


def estimate_bytes(backend: str, group_size: int, figures: Mapping[str, int]) -> int | None:
    """Return a communicator's device memory on this rank, in bytes; None for an unknown backend.

    Args:
        backend: a name, or a list for devices ("cpu:gloo,cuda:nccl"), whose parts add up.
        group_size: number of ranks; a group of one rank has nobody to keep buffers for.
        figures: bytes by backend name.
    """
    parts = [part.rpartition(":")[2] for part in backend.split(",")]
    if not all(part in figures for part in parts):
        return None
    return sum(figures[part] for part in parts) if group_size > 1 else 0
