"""Names under which programs written for NeMo Automodel import functions of this package.

Example:
    >>> from meshverse.parallel.compat import apply_fsdp2_sharding_recursively
"""

from __future__ import annotations

from .strategies.fsdp2 import apply_fsdp_sharding_recursively
from .strategies.megatron_fsdp import megatron_fsdp_strategy_parallelize

__all__ = ["apply_fsdp2_sharding_recursively", "nvfsdp_strategy_parallelize"]

apply_fsdp2_sharding_recursively = apply_fsdp_sharding_recursively
"""Name of the function in NeMo Automodel, where it has only the first four arguments."""

nvfsdp_strategy_parallelize = megatron_fsdp_strategy_parallelize
"""Name of the function when the package megatron-fsdp was called nvFSDP."""
