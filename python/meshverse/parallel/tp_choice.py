"""The plan of a Llama, under the import path that configuration files give as `tp_plan`.

Example:
    >>> FSDP2Config(  # doctest: +SKIP
    ...     sequence_parallel=True, tp_plan="meshverse.parallel.tp_choice.llama_tp_plan"
    ... )
"""

from __future__ import annotations

from .tensor_parallel.choice import llama_tp_plan

__all__ = ["llama_tp_plan"]
