"""Parallel helpers: the meshes of a trainer, sharding strategies, and collectives over a mesh.

Every mesh that it creates is a `meshverse.DeviceMesh`. Meshes that one call creates are in one
universe and share process groups. `import meshverse` does not import this package. Importing this
package does not import torch: each name is imported at its first use, because FSDP2 and tensor
parallelism alone make torch import some 600 modules.

Example:
    >>> from meshverse.parallel import MeshAxisName, ParallelismSizes
    >>> ParallelismSizes(tp_size=8).tp_size, MeshAxisName.TP == "tp"
    (8, True)
"""

from __future__ import annotations

import importlib
from typing import Any

# Public names of each module, which is imported at the first use of one of them. `__init__.pyi` has
# their types.
_NAMES = {
    "collectives.collective": "Collective SingleProcessCollective destroy_dist_connection",
    "collectives.mesh_collective": "CollectiveConfig MeshCollective Meshes build_collective",
    "config": "DDPConfig FSDP2Config MegatronFSDPConfig",
    "experts.expert_parallel": "ExpertParallel SameTokensExpertParallel apply_expert_parallelism",
    "experts.features": "ExpertFeaturesParallel",
    "experts.sharding": "clip_grad_norm_ get_total_norm",
    "losses.per_token": "LossPerToken",
    "meshes.by_strategy": "create_device_meshes",
    "meshes.create": "create_fsdp2_device_mesh create_megatron_fsdp_device_mesh create_moe_mesh",
    "meshes.degrees": "MeshAxisName MeshSpec ParallelismSizes validate_mesh_spec",
    "meshes.submesh": "get_flat_mesh get_fsdp_dp_mesh get_submesh register_flattened_axes"
    " unflatten_compat",
    "models.checkpointing": "apply_activation_checkpointing",
    "models.modules": "import_class_from_path import_classes_from_paths",
    "pipeline.schedule": "PipelineSchedule pipeline_schedule pipeline_stages",
    "pipeline.stage": "split_into_stages",
    "pretrained.load": "IncompatibleKeys initialize_weights load_pretrained",
    "pretrained.save": "save_pretrained",
    "reshard.reshard": "Reshard ReshardWork redistribute",
    "reshard.sides": "Piece",
    "snapshot.snapshot": "Snapshot",
    "strategies.context_parallel": "context_parallel",
    "strategies.fsdp2": "FSDP2Manager apply_fsdp_sharding_recursively fsdp2_strategy_parallelize"
    " unshard_fsdp2_model",
    "strategies.megatron_fsdp": "MegatronFSDPManager megatron_fsdp_strategy_parallelize",
    "styles.local_styles": "GatherTokens LocalParameters Replicated ReplicatedWithGradAllreduce"
    " SplitTokens",
    "tensor_parallel.apply": "apply_tp_plan synchronize_random_state",
    "tensor_parallel.choice": "apply_tensor_parallelism llama_tp_plan register_tp_plan",
    "tensor_parallel.hf_plan": "get_hf_tp_shard_plan translate_to_torch_parallel_style",
}
_HOME_OF = {name: home for home, names in _NAMES.items() for name in names.split()}
__all__ = sorted(_HOME_OF)  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    """Import a public name of this package at its first use."""
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)
    value = getattr(importlib.import_module(f"{__name__}.{_HOME_OF[name]}"), name)
    globals()[name] = value  # later uses find it without this function
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
