"""Other names of functions here, as programs written for NeMo Automodel import them.

Example:
    >>> from meshverse.parallel.compat import apply_fsdp2_sharding_recursively
"""

from __future__ import annotations

from .strategies.fsdp2 import apply_fsdp_sharding_recursively
from .strategies.megatron_fsdp import megatron_fsdp_strategy_parallelize

__all__ = ["apply_fsdp2_sharding_recursively", "nvfsdp_strategy_parallelize"]

apply_fsdp2_sharding_recursively = apply_fsdp_sharding_recursively
"""Name in today's NeMo Automodel, whose function has only the first four arguments of ours."""

nvfsdp_strategy_parallelize = megatron_fsdp_strategy_parallelize
"""The name that Megatron-FSDP's helper had when the package was called nvFSDP."""
