"""Which modules FSDP2 shards."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from towers import BLOCKS, Block, Model

import meshverse
from helpers.crew import Crew
from meshverse.parallel import (
    apply_fsdp_sharding_recursively,
    unshard_fsdp2_model,
)


def mesh(ranks: int) -> meshverse.DeviceMesh:
    return meshverse.init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",))


def sharded(model: nn.Module) -> set[str]:
    return {name for name, each in model.named_modules() if isinstance(each, FSDPModule)}


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


def test_unsharding_ends_also_after_a_failure(crew: Crew) -> None:
    for inside, after in crew.run(unsharded, 2):
        assert all(inside)
        assert not any(after)


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"mp_policy": "bf16"}, TypeError),
        ({"mp_policy": None, "prefetch_depths": (0, -1)}, ValueError),
        ({"mp_policy": None, "reshard_after_forward": 2}, TypeError),
    ],
)
def test_wrong_values_leave_the_module_as_it_was(settings: Any, error: type[Exception]) -> None:
    model = Model()
    with pytest.raises(error):
        apply_fsdp_sharding_recursively(model, mesh(8), **settings)
    assert not sharded(model)


@pytest.mark.usefixtures("world")
def test_an_item_that_is_sharded_already_is_refused_before_the_others() -> None:
    layers = nn.ModuleList([Block(), Block()])
    fully_shard(layers[1], mesh=mesh(8))
    with pytest.raises(ValueError, match="is sharded already, at '1'"):
        apply_fsdp_sharding_recursively(layers, mesh(8), None)
    assert sharded(layers) == {"1"}
