"""Megatron-FSDP's manager and its function, under the path that programs import them from."""

from __future__ import annotations

from .strategies.megatron_fsdp import (
    MegatronFSDPManager,
    megatron_fsdp_strategy_parallelize,
    nvfsdp_strategy_parallelize,
)

__all__ = [
    "MegatronFSDPManager",
    "megatron_fsdp_strategy_parallelize",
    "nvfsdp_strategy_parallelize",
]
