"""What `import meshverse.parallel` brings along, and where its names are found."""

from __future__ import annotations

import ast
import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

import meshverse.parallel as parallel

_FOLDER = Path(parallel.__file__).parent
_COSTLY = {"torch.distributed.fsdp", "torch.distributed.tensor.parallel"}

# Import paths that the documentation gives, or gave: programs and configuration files have them.
_DOCUMENTED = {
    "collective": [
        "Collective",
        "CollectiveConfig",
        "MeshCollective",
        "Meshes",
        "SingleProcessCollective",
        "build_collective",
    ],
    "config": ["DDPConfig", "FSDP2Config", "MegatronFSDPConfig", "default_mixed_precision"],
    "fsdp2": ["FSDP2Manager"],
    "megatron_fsdp": [
        "MegatronFSDPManager",
        "megatron_fsdp_strategy_parallelize",
        "nvfsdp_strategy_parallelize",
    ],
    "mesh_utils": [
        "MeshAxisName",
        "MeshSpec",
        "ParallelismSizes",
        "create_device_meshes",
        "create_fsdp2_device_mesh",
        "create_megatron_fsdp_device_mesh",
        "create_moe_mesh",
        "get_flat_mesh",
        "get_fsdp_dp_mesh",
        "get_submesh",
        "register_flattened_axes",
        "unflatten_compat",
        "validate_mesh_spec",
    ],
    "parallelizer": [
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
    ],
    "tp_choice": ["llama_tp_plan"],
}
_OF_EXPERTS = {
    "ExpertFeaturesParallel",
    "ExpertParallel",
    "SameTokensExpertParallel",
    "apply_expert_parallelism",
    "clip_grad_norm_",
    "get_total_norm",
}
_OF_PIPELINES = {
    "PipelineSchedule",
    "pipeline_schedule",
    "pipeline_stages",
    "split_into_stages",
}
_ONLY_BY_PATH = {"default_mixed_precision", "llama_tp_plan"}


def _imported_by(program: str) -> set[str]:
    """The modules that a program imports, in a fresh process, beyond `import torch, meshverse`."""
    script = (
        "import json, sys, torch, meshverse\n"
        "before = set(sys.modules)\n"
        f"{program}\n"
        "print(json.dumps([*(set(sys.modules) - before)]))"
    )
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script],
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    return set(json.loads(run.stdout))


def test_the_package_alone_imports_nothing() -> None:
    assert _imported_by("import meshverse.parallel") == {"meshverse.parallel"}


@pytest.mark.parametrize(
    "names",
    [
        "ParallelismSizes, create_fsdp2_device_mesh, get_submesh, get_fsdp_dp_mesh",
        "CollectiveConfig, build_collective, MeshCollective",
        "import_class_from_path, destroy_dist_connection",
    ],
)
def test_what_needs_no_sharding_does_not_import_it(names) -> None:
    imported = _imported_by(f"from meshverse.parallel import {names}")
    assert not imported & _COSTLY
    assert imported > {"meshverse.parallel"}


def test_what_shards_imports_what_it_uses() -> None:
    assert _imported_by("from meshverse.parallel import fsdp2_strategy_parallelize") > _COSTLY


_OF_MOVES = {"Reshard", "ReshardWork", "redistribute"}


def test_documented_names_are_where_they_are_documented() -> None:
    for module_name, names in _DOCUMENTED.items():
        module = importlib.import_module(f"meshverse.parallel.{module_name}")
        assert sorted(module.__all__) == sorted(names)
        for name in set(names) - _ONLY_BY_PATH:
            assert getattr(module, name) is getattr(parallel, name)
    documented = {name for names in _DOCUMENTED.values() for name in names}
    assert set(parallel.__all__) == (
        (documented - _ONLY_BY_PATH) | _OF_EXPERTS | _OF_PIPELINES | _OF_MOVES
    )


def test_names_of_experts_come_from_the_package() -> None:
    for name in _OF_EXPERTS:
        assert getattr(parallel, name).__module__.startswith("meshverse.parallel.experts.")


def test_documented_modules_are_attributes_of_the_package() -> None:
    found = "assert all(getattr(meshverse.parallel, name).__all__ for name in names)"
    _imported_by(f"import meshverse.parallel\nnames = {[*_DOCUMENTED]}\n{found}")


def test_what_type_checkers_see_is_what_there_is() -> None:
    tree = ast.parse((_FOLDER / "__init__.py").read_text())
    seen = {
        alias.name: node.module
        for block in tree.body
        if isinstance(block, ast.If)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert seen == parallel._HOME_OF
    assert sorted(seen) == sorted(parallel.__all__)
    assert {*seen, *_DOCUMENTED} <= set(dir(parallel))


def test_an_unknown_name() -> None:
    with pytest.raises(AttributeError, match=r"'meshverse\.parallel' has no attribute 'no_such'"):
        parallel.no_such  # noqa: B018
    with pytest.raises(ImportError, match="no_such"):
        from meshverse.parallel import no_such  # noqa: F401


def test_no_import_is_hidden_elsewhere() -> None:
    """Under TYPE_CHECKING a cycle of imports would go unseen."""
    hiding = [path for path in _FOLDER.rglob("*.py") if "TYPE_CHECKING" in path.read_text()]
    assert hiding == [_FOLDER / "__init__.py"]
