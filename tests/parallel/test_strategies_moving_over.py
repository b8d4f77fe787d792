"""Keywords and values that programs written for NeMo Automodel give."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
from expert_models import Model
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from helpers.worlds import fake_world
from meshverse.parallel import (
    FSDP2Config,
    FSDP2Manager,
    MegatronFSDPConfig,
    MegatronFSDPManager,
    ParallelismSizes,
    Replicated,
    create_device_meshes,
    create_fsdp2_device_mesh,
    fsdp2_strategy_parallelize,
)
from meshverse.parallel.experts import sharding as experts
from meshverse.parallel.strategies import fsdp2, megatron_fsdp

_PLAN = {
    "layers.*.up": ColwiseParallel(),
    "layers.*.down": RowwiseParallel(),
    **dict.fromkeys(("layers.*.norm", "layers.*.mlp"), Replicated()),
}


def _offload_policies(monkeypatch: pytest.MonkeyPatch, policy: OffloadPolicy | None) -> list[Any]:
    """Return the offload policies that FSDP2 gets, of every module that it shards."""
    seen: list[Any] = []

    def spy_on(module: ModuleType) -> None:
        shard = module.fully_shard

        def spy(*arguments: Any, **keywords: Any) -> Any:
            seen.append(keywords["offload_policy"])
            return shard(*arguments, **keywords)

        monkeypatch.setattr(module, "fully_shard", spy)

    for module in (fsdp2, experts):
        spy_on(module)
    with fake_world(8):
        config = FSDP2Config(offload_policy=policy)
        meshes = create_device_meshes(config, ParallelismSizes(ep_size=2))
        FSDP2Manager(config, *meshes).parallelize(Model())
    return seen


@pytest.mark.parametrize(
    "policy",
    [
        CPUOffloadPolicy(pin_memory=False),
        *[pytest.param(each, marks=pytest.mark.long) for each in (None, OffloadPolicy())],
    ],
)
def test_the_offload_policy_is_passed_on(
    monkeypatch: pytest.MonkeyPatch, policy: OffloadPolicy | None
) -> None:
    # The root, two layers, and the experts of each.
    assert _offload_policies(monkeypatch, policy) == [policy] * 5


def test_what_is_trained_is_said_anew_between_splitting_and_sharding() -> None:
    seen: list[tuple[bool, bool]] = []

    def freeze(model: nn.Module) -> None:
        split: Any = model.layers[0].up.weight
        seen.append((isinstance(split, DTensor), isinstance(model, FSDPModule)))
        model.last.requires_grad_(False)

    with fake_world(8):
        mesh, _ = create_fsdp2_device_mesh(ParallelismSizes(tp_size=2))
        for model in (Model(), Model(), Model()):
            if len(seen) < 1:
                fsdp2_strategy_parallelize(
                    model, mesh, tp_shard_plan=_PLAN, reapply_trainability=freeze
                )
            else:
                config = FSDP2Config(tp_plan=_PLAN)
                here = mesh if len(seen) < 2 else None
                FSDP2Manager(config, here).parallelize(model, reapply_trainability=freeze)
            assert not model.last.weight.requires_grad
            assert model.layers[0].up.weight.requires_grad
    assert seen == [(True, False), (True, False), (False, False)]


def test_megatron_fsdp_says_it_anew_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def freeze(model: nn.Module) -> None:
        model.last.requires_grad_(False)

    model = Model()
    manager = MegatronFSDPManager(MegatronFSDPConfig(), None)
    assert manager.parallelize(model, reapply_trainability=freeze) == (model, None)
    assert not model.last.weight.requires_grad
    model = Model()
    monkeypatch.setattr(megatron_fsdp, "apply_tensor_parallelism", _split_nothing)
    with fake_world(2):
        config = MegatronFSDPConfig()
        mesh, _ = create_device_meshes(config, ParallelismSizes(tp_size=2))
        with pytest.warns(UserWarning, match="'dp' has size 1"):
            MegatronFSDPManager(config, mesh).parallelize(model, reapply_trainability=freeze)
    assert not model.last.weight.requires_grad


def _split_nothing(*_: Any, **__: Any) -> None:
    """For a model without a plan."""


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")  # torch's own use
@pytest.mark.parametrize("asked", [False, pytest.param(True, marks=pytest.mark.long)])
def test_layers_are_compiled_by_the_function_too(asked: bool) -> None:
    with fake_world(8):
        mesh, _ = create_fsdp2_device_mesh(ParallelismSizes())
        model = fsdp2_strategy_parallelize(Model(), mesh, enable_compile=asked)
    assert [layer._compiled_call_impl is not None for layer in model.layers] == [asked] * 2
