"""Real NCCL worlds of several ranks on one GPU, for the tests and the benchmarks.

NCCL refuses two ranks of one host on one GPU. It knows hosts by `NCCL_HOSTID`: with another one for
each process, the ranks are hosts to it that talk over the loopback network.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

__all__ = ["one_gpu_environment", "why_no_gpu"]


def one_gpu_environment(rank: int) -> dict[str, str]:
    """Return variables that let NCCL have several ranks on one GPU; set before a communicator."""
    return {
        "NCCL_HOSTID": f"meshverse-{rank}",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_P2P_DISABLE": "1",
        "NCCL_SHM_DISABLE": "1",
    }


def why_no_gpu() -> str | None:
    """Return why there can be no such world here; None if there can."""
    if not dist.is_nccl_available():
        return f"needs a torch with NCCL: torch {torch.__version__} has none"
    if not torch.cuda.is_available():
        return f"needs a CUDA device: torch {torch.__version__} finds none"
    return None


if __name__ == "__main__":
    print("A module, not a program: the tests and benchmarks of NCCL import it (make gpu).")
