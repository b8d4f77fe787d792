"""Where, when and with what a benchmark ran."""

from __future__ import annotations

import os
import platform
from datetime import datetime, timezone
from pathlib import Path

import torch

from meshverse.tools.commit import version_and_commit

__all__ = ["circumstances"]


def circumstances(command: str) -> dict[str, str]:
    """Return the circumstances that every report states beside its figures."""
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "command": f"`{command}`",
        "machine": f"{_processor()}, {os.cpu_count()} cores, {_memory_gb()} GB, "
        f"{platform.system()}",
        "load average at the end": "{:.1f}, {:.1f}, {:.1f}".format(*os.getloadavg()),
        "versions": f"Meshverse {version_and_commit()}, torch {torch.__version__}, "
        f"Python {platform.python_version()}",
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def _memory_gb() -> int:
    return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9)
