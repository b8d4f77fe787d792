"""`FSDP2Manager`, under the path that programs import it from."""

from __future__ import annotations

from .strategies.fsdp2_manager import FSDP2Manager

__all__ = ["FSDP2Manager"]
