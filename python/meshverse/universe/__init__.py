"""One list of ranks, and every process group and mesh over it."""

from __future__ import annotations

from .universe import Universe

__all__ = ["Universe"]
