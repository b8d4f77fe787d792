# Types of the names that `__init__.py` imports at their first use; its table has them too.

from .collectives.collective import Collective, SingleProcessCollective, destroy_dist_connection
from .collectives.mesh_collective import CollectiveConfig, MeshCollective, Meshes, build_collective
from .config import DDPConfig, FSDP2Config, MegatronFSDPConfig
from .experts.expert_parallel import (
    ExpertParallel,
    SameTokensExpertParallel,
    apply_expert_parallelism,
)
from .experts.features import ExpertFeaturesParallel
from .experts.sharding import clip_grad_norm_, get_total_norm
from .losses.per_token import LossPerToken
from .meshes.by_strategy import create_device_meshes
from .meshes.create import (
    create_fsdp2_device_mesh,
    create_megatron_fsdp_device_mesh,
    create_moe_mesh,
)
from .meshes.degrees import MeshAxisName, MeshSpec, ParallelismSizes, validate_mesh_spec
from .meshes.submesh import (
    get_flat_mesh,
    get_fsdp_dp_mesh,
    get_submesh,
    register_flattened_axes,
    unflatten_compat,
)
from .models.checkpointing import apply_activation_checkpointing
from .models.modules import import_class_from_path, import_classes_from_paths
from .pipeline.schedule import PipelineSchedule, pipeline_schedule, pipeline_stages
from .pipeline.stage import split_into_stages
from .pretrained.load import IncompatibleKeys, initialize_weights, load_pretrained
from .pretrained.save import save_pretrained
from .reshard.reshard import Reshard, ReshardWork, redistribute
from .reshard.sides import Piece
from .snapshot.snapshot import Snapshot
from .strategies.context_parallel import context_parallel
from .strategies.fsdp2 import (
    FSDP2Manager,
    apply_fsdp_sharding_recursively,
    fsdp2_strategy_parallelize,
    unshard_fsdp2_model,
)
from .strategies.megatron_fsdp import MegatronFSDPManager, megatron_fsdp_strategy_parallelize
from .styles.local_styles import (
    GatherTokens,
    LocalParameters,
    Replicated,
    ReplicatedWithGradAllreduce,
    SplitTokens,
)
from .tensor_parallel.apply import apply_tp_plan, synchronize_random_state
from .tensor_parallel.choice import apply_tensor_parallelism, llama_tp_plan, register_tp_plan
from .tensor_parallel.hf_plan import get_hf_tp_shard_plan, translate_to_torch_parallel_style

__all__ = [
    "Collective",
    "CollectiveConfig",
    "DDPConfig",
    "ExpertFeaturesParallel",
    "ExpertParallel",
    "FSDP2Config",
    "FSDP2Manager",
    "GatherTokens",
    "IncompatibleKeys",
    "LocalParameters",
    "LossPerToken",
    "MegatronFSDPConfig",
    "MegatronFSDPManager",
    "MeshAxisName",
    "MeshCollective",
    "MeshSpec",
    "Meshes",
    "ParallelismSizes",
    "Piece",
    "PipelineSchedule",
    "Replicated",
    "ReplicatedWithGradAllreduce",
    "Reshard",
    "ReshardWork",
    "SameTokensExpertParallel",
    "SingleProcessCollective",
    "Snapshot",
    "SplitTokens",
    "apply_activation_checkpointing",
    "apply_expert_parallelism",
    "apply_fsdp_sharding_recursively",
    "apply_tensor_parallelism",
    "apply_tp_plan",
    "build_collective",
    "clip_grad_norm_",
    "context_parallel",
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
    "initialize_weights",
    "llama_tp_plan",
    "load_pretrained",
    "megatron_fsdp_strategy_parallelize",
    "pipeline_schedule",
    "pipeline_stages",
    "redistribute",
    "register_flattened_axes",
    "register_tp_plan",
    "save_pretrained",
    "split_into_stages",
    "synchronize_random_state",
    "translate_to_torch_parallel_style",
    "unflatten_compat",
    "unshard_fsdp2_model",
    "validate_mesh_spec",
]
