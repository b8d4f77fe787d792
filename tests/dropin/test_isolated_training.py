"""Models trained on isolated meshes, on real processes: gloo counts in which groups.

Each program is first run on the same axes without the tag, so that whatever torch remembers by mesh
is there to be taken by mistake; and both must come to the losses of one process.
"""

from __future__ import annotations

import io
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from helpers.crew import Crew
from helpers.groups_used import groups_used
from helpers.sides import side
from helpers.tiers import in_tiers
from helpers.training import TOLERANCE, make_model, tensor_parallel, train, train_alone
from meshverse import DeviceMesh, init_device_mesh, isolate

_AXES = ("dp", "tp")


def _with_fsdp(data: DeviceMesh, tensor: DeviceMesh | None) -> nn.Module:
    model = make_model()
    for block in model:
        if tensor is not None:
            tensor_parallel(block, tensor)
        fully_shard(block, mesh=data)
    return fully_shard(model, mesh=data)


def _replicated(data: DeviceMesh, tensor: DeviceMesh | None) -> nn.Module:
    return DistributedDataParallel(make_model(), device_mesh=data)


def _compiled(data: DeviceMesh, tensor: DeviceMesh | None) -> nn.Module:
    model = _with_fsdp(data, tensor)
    for block in model:
        block.compile(backend="aot_eager")
    return model


def _slices(mesh: DeviceMesh, names: tuple[str, str | None]) -> tuple[DeviceMesh, Any]:
    data, tensor = names
    return mesh[data], None if tensor is None else mesh[tensor]


def _all_isolated(mesh: DeviceMesh, data: Any, tensor: Any) -> tuple[DeviceMesh, Any]:
    with isolate("x"):
        return _slices(mesh, (data, tensor))


def _data_isolated(mesh: DeviceMesh, data: Any, tensor: Any) -> tuple[DeviceMesh, Any]:
    return _all_isolated(mesh, data, None)[0], mesh[tensor]


def _by_argument(mesh: DeviceMesh, data: Any, tensor: Any) -> tuple[DeviceMesh, Any]:
    # A root of its own in the universe, with one axis under the tag.
    own = init_device_mesh(
        "cpu", (2, 2), mesh_dim_names=_AXES, universe=mesh.universe, isolate={"dp": "x"}
    )
    return _slices(own, (data, tensor))


# How to make the model; with tensor parallelism?; how to isolate; tags of the groups it uses.
_WAYS: dict[str, tuple[Callable[..., nn.Module], bool, Callable[..., Any], set[str]]] = {
    "FSDP2": (_with_fsdp, False, _all_isolated, {"x"}),
    "FSDP2 with tensor parallelism": (_with_fsdp, True, _all_isolated, {"x"}),
    "its data axis alone": (_with_fsdp, True, _data_isolated, {"x", ""}),
    "one axis of a root": (_with_fsdp, True, _by_argument, {"x", ""}),
    "compiled": (_compiled, True, _all_isolated, {"x"}),
    "DDP": (_replicated, False, _all_isolated, {"x"}),
}


def _trained(way: str) -> dict[str, Any]:
    make, has_tensor, choose, _ = _WAYS[way]
    names = ("dp", "tp" if has_tensor else None)
    with side("ours"):  # clears DTensor's caches
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=_AXES)
        mesh.flatten("all")
        data, tensor = _slices(mesh, names)
        losses = [train(make(data, tensor), data, clip=has_tensor or make is _with_fsdp)]
        own_data, own_tensor = choose(mesh, *names)
        with groups_used() as used:
            model = make(own_data, own_tensor)
            losses.append(train(model, own_data, clip=has_tensor or make is _with_fsdp))
        groups = mesh.universe.explain().groups
        return {
            "losses": losses,
            "tags": {group.tag for group in groups if group.name in used},
            "data group": own_data.get_group().group_name in used,
            "shared data group": data.get_group().group_name in used,
            "roots": [each._get_root_mesh() is mesh for each in (data, own_data)],
        }


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("way", in_tiers(_WAYS, ["FSDP2 with tensor parallelism"], [*_WAYS][::3]))
def test_training_is_on_the_groups_of_the_tag(crew: Crew, way: str) -> None:
    expected, _ = train_alone(clip=way != "DDP")
    for answer in crew.run(_trained, 4, way):
        for losses in answer["losses"]:
            assert losses == pytest.approx(expected, rel=TOLERANCE)
        assert answer["tags"] == _WAYS[way][-1]
        assert answer["data group"]
        assert not answer["shared data group"]
        assert answer["roots"] == [True, False]


# --- its state -----------------------------------------------------------------------------------


def _full_state(model: nn.Module, other: nn.Module) -> None:
    options = StateDictOptions(full_state_dict=True)
    set_model_state_dict(other, get_model_state_dict(model, options=options), options=options)


def _sharded_checkpoint(model: nn.Module, other: nn.Module) -> None:
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    dcp.save(get_model_state_dict(model), checkpoint_id=folder[0])
    state = get_model_state_dict(other)
    dcp.load(state, checkpoint_id=folder[0])
    set_model_state_dict(other, state)


def _saved_tensors(model: nn.Module, other: nn.Module) -> None:
    file = io.BytesIO()
    torch.save(get_model_state_dict(model), file)
    file.seek(0)
    loaded: dict[str, DTensor] = torch.load(file, weights_only=False)  # 2.11 has no strided shards
    meshes = {name: parameter.device_mesh for name, parameter in model.named_parameters()}
    assert all(tensor.device_mesh is meshes[name] for name, tensor in loaded.items())
    set_model_state_dict(other, loaded)


_STATES = {
    "whole": _full_state,
    "sharded": _sharded_checkpoint,
    "torch.save": _saved_tensors,
}


def _state_moves(way: str) -> dict[str, Any]:
    with side("ours"):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=_AXES)
        mesh.flatten("all")
        shared = [_with_fsdp(mesh["dp"], mesh["tp"]) for _ in range(2)]
        _STATES[way](*shared)
        with isolate("x"):
            one, other = (_with_fsdp(mesh["dp"], mesh["tp"]) for _ in range(2))
        with torch.no_grad():
            for parameter in one.parameters():
                parameter.mul_(2)
        with groups_used() as used:
            _STATES[way](one, other)
            pairs = zip(one.parameters(), other.parameters(), strict=True)
            same = all(torch.equal(a.full_tensor(), b.full_tensor()) for a, b in pairs)
        groups = mesh.universe.explain().groups
        # The default group is for torch's own exchange of plans.
        default = dist.group.WORLD.group_name
        return {
            "same": same,
            "tags": {g.tag for g in groups if g.name in used and g.name != default},
        }


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("way", in_tiers(_STATES, ["sharded"]))
def test_state_of_an_isolated_model_moves_in_its_groups(crew: Crew, way: str) -> None:
    for answer in crew.run(_state_moves, 4, way):
        assert answer == {"same": True, "tags": {"x"}}
