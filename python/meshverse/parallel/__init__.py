"""Parallel helpers: the meshes of a trainer, sharding strategies, and collectives over a mesh.

Every mesh here is a `meshverse.DeviceMesh`, and all meshes of one build share one universe, so no
process group is made twice. `import meshverse` does not import this package, and importing this
package imports nothing of torch: each name brings what it needs when it is first asked for. FSDP2
and tensor parallelism alone cost torch some 600 modules.

Example:
    >>> from meshverse.parallel import MeshAxisName, ParallelismSizes
    >>> ParallelismSizes(tp_size=8).tp_size, MeshAxisName.TP == "tp"
    (8, True)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for type checkers and editors, which cannot see what `__getattr__` finds
    from .collective import CollectiveConfig, build_collective
    from .collectives.base import Collective, SingleProcessCollective
    from .collectives.group import Meshes
    from .collectives.mesh import MeshCollective
    from .collectives.teardown import destroy_dist_connection
    from .config import DDPConfig, FSDP2Config, MegatronFSDPConfig
    from .experts.choice import apply_expert_parallelism
    from .experts.expert_parallel import ExpertParallel, SameTokensExpertParallel
    from .experts.features import ExpertFeaturesParallel
    from .experts.gradients import clip_grad_norm_, get_total_norm
    from .meshes.by_strategy import create_device_meshes
    from .meshes.create import (
        create_fsdp2_device_mesh,
        create_megatron_fsdp_device_mesh,
        create_moe_mesh,
    )
    from .meshes.degrees import ParallelismSizes
    from .meshes.spec import MeshAxisName, MeshSpec, validate_mesh_spec
    from .meshes.submesh import (
        get_flat_mesh,
        get_fsdp_dp_mesh,
        get_submesh,
        register_flattened_axes,
        unflatten_compat,
    )
    from .models.checkpointing import apply_activation_checkpointing
    from .models.import_paths import import_class_from_path, import_classes_from_paths
    from .pipeline.schedule import PipelineSchedule, pipeline_schedule, pipeline_stages
    from .pipeline.stage import split_into_stages
    from .reshard.redistribute import redistribute
    from .reshard.reshard import Reshard
    from .reshard.runs import ReshardWork
    from .strategies.context_parallel import context_parallel
    from .strategies.fsdp2 import fsdp2_strategy_parallelize, unshard_fsdp2_model
    from .strategies.fsdp2_manager import FSDP2Manager
    from .strategies.fsdp2_sharding import apply_fsdp_sharding_recursively
    from .strategies.megatron_fsdp import (
        MegatronFSDPManager,
        megatron_fsdp_strategy_parallelize,
        nvfsdp_strategy_parallelize,
    )
    from .styles.local_styles import ReplicatedWithGradAllreduce
    from .tensor_parallel.apply import apply_tp_plan
    from .tensor_parallel.choice import apply_tensor_parallelism, register_tp_plan
    from .tensor_parallel.hf_plan import get_hf_tp_shard_plan
    from .tensor_parallel.hf_styles import translate_to_torch_parallel_style

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
    "PipelineSchedule",
    "ReplicatedWithGradAllreduce",
    "Reshard",
    "ReshardWork",
    "SameTokensExpertParallel",
    "SingleProcessCollective",
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
    "megatron_fsdp_strategy_parallelize",
    "nvfsdp_strategy_parallelize",
    "pipeline_schedule",
    "pipeline_stages",
    "redistribute",
    "register_flattened_axes",
    "register_tp_plan",
    "split_into_stages",
    "translate_to_torch_parallel_style",
    "unflatten_compat",
    "unshard_fsdp2_model",
    "validate_mesh_spec",
]

# The same names by the module to import at the first use of one of them.
_HOMES = {
    "collective": ("CollectiveConfig", "build_collective"),
    "collectives.base": ("Collective", "SingleProcessCollective"),
    "collectives.group": ("Meshes",),
    "collectives.mesh": ("MeshCollective",),
    "collectives.teardown": ("destroy_dist_connection",),
    "config": ("DDPConfig", "FSDP2Config", "MegatronFSDPConfig"),
    "experts.choice": ("apply_expert_parallelism",),
    "experts.expert_parallel": ("ExpertParallel", "SameTokensExpertParallel"),
    "experts.features": ("ExpertFeaturesParallel",),
    "experts.gradients": ("clip_grad_norm_", "get_total_norm"),
    "meshes.by_strategy": ("create_device_meshes",),
    "meshes.create": (
        "create_fsdp2_device_mesh",
        "create_megatron_fsdp_device_mesh",
        "create_moe_mesh",
    ),
    "meshes.degrees": ("ParallelismSizes",),
    "meshes.spec": ("MeshAxisName", "MeshSpec", "validate_mesh_spec"),
    "meshes.submesh": (
        "get_flat_mesh",
        "get_fsdp_dp_mesh",
        "get_submesh",
        "register_flattened_axes",
        "unflatten_compat",
    ),
    "models.checkpointing": ("apply_activation_checkpointing",),
    "models.import_paths": ("import_class_from_path", "import_classes_from_paths"),
    "pipeline.schedule": ("PipelineSchedule", "pipeline_schedule", "pipeline_stages"),
    "pipeline.stage": ("split_into_stages",),
    "reshard.redistribute": ("redistribute",),
    "reshard.reshard": ("Reshard",),
    "reshard.runs": ("ReshardWork",),
    "strategies.context_parallel": ("context_parallel",),
    "strategies.fsdp2": ("fsdp2_strategy_parallelize", "unshard_fsdp2_model"),
    "strategies.fsdp2_manager": ("FSDP2Manager",),
    "strategies.fsdp2_sharding": ("apply_fsdp_sharding_recursively",),
    "strategies.megatron_fsdp": (
        "MegatronFSDPManager",
        "megatron_fsdp_strategy_parallelize",
        "nvfsdp_strategy_parallelize",
    ),
    "tensor_parallel.apply": ("apply_tp_plan",),
    "tensor_parallel.choice": ("apply_tensor_parallelism", "register_tp_plan"),
    "tensor_parallel.hf_plan": ("get_hf_tp_shard_plan",),
    "tensor_parallel.hf_styles": ("translate_to_torch_parallel_style",),
    "styles.local_styles": ("ReplicatedWithGradAllreduce",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

_MODULES = frozenset(
    ("collective", "config", "fsdp2", "megatron_fsdp", "mesh_utils", "parallelizer", "tp_choice")
)
"""What programs import by path; also attributes of this package without an import of their own."""


def __getattr__(name: str) -> Any:
    """A public name of this package, imported when it is first asked for."""
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)
    value = getattr(importlib.import_module(f"{__name__}.{_HOME_OF[name]}"), name)
    globals()[name] = value  # the next use does not come here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})
