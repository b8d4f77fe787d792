"""Parallel helpers: the meshes of a trainer, sharding strategies, and collectives over a mesh.

Every mesh here is a `meshverse.DeviceMesh`, and all meshes of one build share one universe, so no
process group is made twice. `import meshverse` does not import this package.

Example:
    >>> from meshverse.parallel import MeshAxisName, ParallelismSizes
    >>> ParallelismSizes(tp_size=8).tp_size, MeshAxisName.TP == "tp"
    (8, True)
"""

from __future__ import annotations

from .collective import (
    Collective,
    CollectiveConfig,
    MeshCollective,
    Meshes,
    SingleProcessCollective,
    build_collective,
)
from .config import DDPConfig, FSDP2Config, MegatronFSDPConfig
from .experts.choice import apply_expert_parallelism
from .experts.expert_parallel import ExpertParallel, SameTokensExpertParallel
from .experts.features import ExpertFeaturesParallel
from .experts.gradients import clip_grad_norm_, get_total_norm
from .fsdp2 import FSDP2Manager
from .megatron_fsdp import (
    MegatronFSDPManager,
    megatron_fsdp_strategy_parallelize,
    nvfsdp_strategy_parallelize,
)
from .mesh_utils import (
    MeshAxisName,
    MeshSpec,
    ParallelismSizes,
    create_device_meshes,
    create_fsdp2_device_mesh,
    create_megatron_fsdp_device_mesh,
    create_moe_mesh,
    get_flat_mesh,
    get_fsdp_dp_mesh,
    get_submesh,
    register_flattened_axes,
    unflatten_compat,
    validate_mesh_spec,
)
from .parallelizer import (
    ReplicatedWithGradAllreduce,
    apply_activation_checkpointing,
    apply_fsdp_sharding_recursively,
    apply_tensor_parallelism,
    apply_tp_plan,
    destroy_dist_connection,
    fsdp2_strategy_parallelize,
    get_hf_tp_shard_plan,
    import_class_from_path,
    import_classes_from_paths,
    register_tp_plan,
    translate_to_torch_parallel_style,
    unshard_fsdp2_model,
)

__all__ = [
    "Collective",
    "CollectiveConfig",
    "DDPConfig",
    "ExpertFeaturesParallel",
    "ExpertParallel",
    "FSDP2Config",
    "FSDP2Manager",
    "MegatronFSDPConfig",
    "MegatronFSDPManager",
    "MeshAxisName",
    "MeshCollective",
    "MeshSpec",
    "Meshes",
    "ParallelismSizes",
    "ReplicatedWithGradAllreduce",
    "SameTokensExpertParallel",
    "SingleProcessCollective",
    "apply_activation_checkpointing",
    "apply_expert_parallelism",
    "apply_fsdp_sharding_recursively",
    "apply_tensor_parallelism",
    "apply_tp_plan",
    "build_collective",
    "clip_grad_norm_",
    "create_device_meshes",
    "create_fsdp2_device_mesh",
    "create_megatron_fsdp_device_mesh",
    "create_moe_mesh",
    "destroy_dist_connection",
    "fsdp2_strategy_parallelize",
    "get_flat_mesh",
    "get_fsdp_dp_mesh",
    "get_hf_tp_shard_plan",
    "get_submesh",
    "get_total_norm",
    "import_class_from_path",
    "import_classes_from_paths",
    "megatron_fsdp_strategy_parallelize",
    "nvfsdp_strategy_parallelize",
    "register_flattened_axes",
    "register_tp_plan",
    "translate_to_torch_parallel_style",
    "unflatten_compat",
    "unshard_fsdp2_model",
    "validate_mesh_spec",
]
