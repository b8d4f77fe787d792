"""Tensor parallelism and FSDP2 for a model: what programs import, from the rooms below.

Example:
    >>> import_class_from_path("torch.nn.Linear")
    <class 'torch.nn.modules.linear.Linear'>
"""

from __future__ import annotations

from .collectives.teardown import destroy_dist_connection
from .models.checkpointing import apply_activation_checkpointing
from .models.import_paths import import_class_from_path, import_classes_from_paths
from .strategies.context_parallel import context_parallel
from .strategies.fsdp2 import fsdp2_strategy_parallelize, unshard_fsdp2_model
from .strategies.fsdp2_sharding import apply_fsdp_sharding_recursively
from .styles.local_styles import ReplicatedWithGradAllreduce
from .tensor_parallel.apply import apply_tp_plan
from .tensor_parallel.choice import apply_tensor_parallelism, register_tp_plan
from .tensor_parallel.hf_plan import get_hf_tp_shard_plan
from .tensor_parallel.hf_styles import translate_to_torch_parallel_style

__all__ = [
    "ReplicatedWithGradAllreduce",
    "apply_activation_checkpointing",
    "apply_fsdp_sharding_recursively",
    "apply_tensor_parallelism",
    "apply_tp_plan",
    "context_parallel",
    "destroy_dist_connection",
    "fsdp2_strategy_parallelize",
    "get_hf_tp_shard_plan",
    "import_class_from_path",
    "import_classes_from_paths",
    "register_tp_plan",
    "translate_to_torch_parallel_style",
    "unshard_fsdp2_model",
]
