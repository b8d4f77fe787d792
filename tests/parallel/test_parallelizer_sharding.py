"""Which modules FSDP2 shards, and which layers forget their activations."""

from __future__ import annotations

import copy
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import meshverse
from helpers.crew import Crew
from meshverse.parallel.parallelizer import (
    apply_activation_checkpointing,
    apply_fsdp_sharding_recursively,
    unshard_fsdp2_model,
)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.calls = 0

    def forward(self, hidden: Tensor) -> Tensor:
        self.calls += 1
        return self.linear(hidden).sin()


class Tower(nn.Module):
    def __init__(self, layers: nn.ModuleList | nn.ModuleDict) -> None:
        super().__init__()
        self.layers = layers
        self.norm = nn.LayerNorm(4)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.vision_tower = Tower(nn.ModuleList([Block(), Block()]))
        self.language_model = Tower(nn.ModuleDict({"a": Block(), "b": Block()}))
        self.stages = nn.ModuleList([nn.ModuleList([Block()]), nn.ModuleList([Block(), Block()])])


def mesh(ranks: int) -> meshverse.DeviceMesh:
    return meshverse.init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",))


def sharded(model: nn.Module) -> set[str]:
    return {name for name, each in model.named_modules() if isinstance(each, FSDPModule)}


BLOCKS = {
    "vision_tower.layers.0",
    "vision_tower.layers.1",
    "language_model.layers.a",
    "language_model.layers.b",
    "stages.0.0",
    "stages.1.0",
    "stages.1.1",
}


@pytest.mark.usefixtures("world")
def test_items_of_lists_and_dictionaries_are_sharded() -> None:
    model = Model()
    apply_fsdp_sharding_recursively(model, mesh(8), None)
    assert sharded(model) == BLOCKS


@pytest.mark.usefixtures("world")
def test_items_of_a_list_itself_are_sharded() -> None:
    layers = nn.ModuleList([Block(), Block()])
    apply_fsdp_sharding_recursively(layers, mesh(8), None)
    assert sharded(layers) == {"0", "1"}
    assert [settings_of(block)[0] for block in layers] == [True, False]


def settings_of(module: Any) -> tuple[bool, list[Any], list[Any]]:
    state = module._get_fsdp_state()
    after = state._fsdp_param_group.post_forward_mesh_info is not None
    return after, state._states_to_forward_prefetch, state._states_to_backward_prefetch


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize(
    ("asked", "expected"), [(None, [True, True, False]), (True, [True] * 3), (False, [False] * 3)]
)
def test_all_but_the_last_reshard(asked: bool | None, expected: list[bool]) -> None:
    model = nn.Sequential(nn.ModuleList([Block() for _ in range(3)]))
    apply_fsdp_sharding_recursively(model, mesh(8), None, reshard_after_forward=asked)
    assert [settings_of(block)[0] for block in model[0]] == expected


@pytest.mark.usefixtures("world")
def test_prefetches_are_chained() -> None:
    model = nn.Sequential(nn.ModuleList([Block() for _ in range(4)]))
    apply_fsdp_sharding_recursively(model, mesh(8), None, prefetch_depths=(2, 1))
    states = [block._get_fsdp_state() for block in model[0]]
    ahead = [[states.index(each) for each in settings_of(block)[1]] for block in model[0]]
    behind = [[states.index(each) for each in settings_of(block)[2]] for block in model[0]]
    assert ahead == [[1], [2], [3], []]
    assert behind == [[], [0], [1, 0], [2, 1]]


def unsharded() -> tuple[list[bool], list[bool]]:
    model = Model()
    apply_fsdp_sharding_recursively(model, mesh(2), None)
    whole = dict(Model().named_parameters())

    def whole_now() -> list[bool]:
        return [
            not isinstance(each, DTensor) and each.shape == whole[name].shape
            for name, each in model.named_parameters()
            if "linear" in name
        ]

    def look_and_fail() -> None:
        with unshard_fsdp2_model(model):
            inside.extend(whole_now())
            raise KeyError

    inside: list[bool] = []
    with pytest.raises(KeyError):
        look_and_fail()
    return inside, whole_now()


def test_unsharding_ends_also_after_a_failure(four: Crew) -> None:
    for inside, after in four.run(unsharded, 2):
        assert all(inside)
        assert not any(after)


def calls(model: Model) -> dict[str, int]:
    """How often each block ran for one forward and backward."""
    for name in BLOCKS:
        block = model.get_submodule(name)
        block(torch.ones(2, 4, requires_grad=True)).sum().backward()
    return {name: model.get_submodule(name).calls for name in BLOCKS}


@pytest.mark.parametrize("mode", [True, "full", "selective"])
def test_layers_run_again_in_backward(mode: Any) -> None:
    model = Model()
    names = list(model.state_dict())
    apply_activation_checkpointing(model, mode)
    assert calls(model) == dict.fromkeys(BLOCKS, 2)
    assert list(model.state_dict()) == names


def test_a_copy_of_a_checkpointed_model_has_its_own_layers() -> None:
    model = nn.Sequential(nn.ModuleList([Block()]))
    apply_activation_checkpointing(model, "selective")
    given = torch.ones(1, 4, requires_grad=True)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        nn.init.zeros_(copied[0][0].linear.weight)
        nn.init.zeros_(copied[0][0].linear.bias)
        assert not copied[0][0](given).any()
    assert model[0][0](given).any()


@pytest.mark.parametrize(
    ("scope", "again"),
    [
        ("vision", {name for name in BLOCKS if "vision" in name}),
        (["language", "audio"], {name for name in BLOCKS if "vision" not in name}),
        ("language,audio", {name for name in BLOCKS if "vision" not in name}),
        ("multimodal", set()),
        (None, set(BLOCKS)),
        ("auto", set(BLOCKS)),
    ],
)
def test_scope_chooses_layers(scope: Any, again: set[str]) -> None:
    model = Model()
    apply_activation_checkpointing(model, "full", scope)
    assert {name for name, count in calls(model).items() if count == 2} == again


@pytest.mark.parametrize(
    ("name", "scope"),
    [
        ("vision_tower", "vision"),
        ("visual", "vision"),
        ("audio_tower", "audio"),
        ("multi_modal_projector", "multimodal"),
        ("language_model", "language"),
        ("model", "language"),
    ],
)
def test_parts_of_multimodal_models(name: str, scope: str) -> None:
    for asked in ("vision", "audio", "multimodal", "language"):
        model = nn.Module()
        model.add_module(name, Tower(nn.ModuleList([Block()])))
        apply_activation_checkpointing(model, "full", asked)
        layer = model.get_submodule(f"{name}.layers.0")
        assert ("forward" in vars(layer)) == (asked == scope)


def test_selective_keeps_matrix_products() -> None:
    products = []

    class Count(TorchDispatchMode):
        def __torch_dispatch__(
            self, operator: Any, types: Any, arguments: Any = (), kwargs: Any = None
        ) -> Any:
            products.append(operator is torch.ops.aten.addmm.default)
            return operator(*arguments, **kwargs or {})

    counts = []
    for mode in ("full", "selective"):
        model = nn.Sequential(nn.ModuleList([Block()]))
        apply_activation_checkpointing(model, mode)
        products.clear()
        output = model[0][0](torch.ones(2, 4, requires_grad=True)).sum()
        with Count():
            output.backward()
        counts.append(sum(products))
    assert counts == [1, 0]


def test_cache_is_off_and_unknown_modes_are_refused() -> None:
    model = Model()
    model.config = SimpleNamespace(use_cache=True)
    with pytest.raises(ValueError, match="mode='some': expected 'full', True or 'selective'"):
        apply_activation_checkpointing(model, "some")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="activation_checkpointing_scope='smell'"):
        apply_activation_checkpointing(model, "full", "smell")
    assert model.config.use_cache
    assert calls(model) == dict.fromkeys(BLOCKS, 1)
    apply_activation_checkpointing(model)
    assert not model.config.use_cache
