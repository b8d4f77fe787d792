"""Versions and environment variables of this process, for bug reports."""

from __future__ import annotations

import os
import platform
from importlib import metadata

import torch
import torch.distributed as dist

from meshverse import _core

_PACKAGES = ("numpy", "transformers", "megatron-fsdp", "rich")
_VARIABLES = ("MESHVERSE_", "NCCL_", "GLOO_", "TORCH_", "SLURM_JOB_NUM_NODES", "LOCAL_WORLD_SIZE")


def environment_report() -> dict[str, str]:
    """Return versions, the machine, and environment variables that change what c10d does."""
    backends = [name for name in ("gloo", "nccl", "mpi", "ucc", "xccl") if _is_there(name)]
    cuda = torch.version.cuda or "none"
    report = {
        "meshverse": _core.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "backends": ", ".join(backends),
        "cuda": f"{cuda}, {torch.cuda.device_count()} devices",
    }
    if dist.is_nccl_available():
        report["nccl"] = _nccl_version()
    report |= {package: _version_of(package) for package in _PACKAGES}
    shown = {name: value for name, value in os.environ.items() if name.startswith(_VARIABLES)}
    return {**report, **dict(sorted(shown.items()))}


def _version_of(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _nccl_version() -> str:
    version: tuple[int, ...] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    return ".".join(map(str, version))


def _is_there(backend: str) -> bool:
    return dist.is_available() and bool(dist.is_backend_available(backend))
