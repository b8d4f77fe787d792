"""FSDP2 on our meshes: the losses of one process, one root for all its meshes, and its state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh as StockDeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from helpers.crew import Crew
from helpers.observation import Family
from helpers.sides import SIDES, mesh_class, side
from helpers.tiers import in_tiers
from helpers.training import (
    GRADIENT_TOLERANCE,
    TOLERANCE,
    batch,
    make_model,
    tensor_parallel,
    train,
    train_alone,
)


class Wrapped(NamedTuple):
    """A model sharded over meshes of one root."""

    model: nn.Module
    root: StockDeviceMesh
    data: StockDeviceMesh  # the ranks with different data: 1-D


def _wrap(
    root: StockDeviceMesh,
    shard: StockDeviceMesh,
    data: StockDeviceMesh,
    tensor: StockDeviceMesh | None = None,
) -> Wrapped:
    model = make_model()
    for block in model:
        if tensor is not None:
            tensor_parallel(block, tensor)
        fully_shard(block, mesh=shard)
    fully_shard(model, mesh=shard)
    return Wrapped(model, root, data)


def _one_axis(family: Family) -> Wrapped:
    mesh = family.init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    return _wrap(mesh, mesh, mesh)


def _hybrid(family: Family) -> Wrapped:
    mesh = family.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return _wrap(mesh, mesh, mesh._flatten("dp"))


def _with_tensor_parallel(family: Family) -> Wrapped:
    mesh = family.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    return _wrap(mesh, mesh["dp"], mesh["dp"], mesh["tp"])


def _hybrid_with_tensor_parallel(family: Family) -> Wrapped:
    names = ("replicate", "shard", "tp")
    mesh = family.init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=names)
    data = mesh["replicate", "shard"]
    return _wrap(mesh, data, data._flatten("dp"), mesh["tp"])


def _flattened(family: Family) -> Wrapped:
    mesh = family.init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("dp", "cp", "tp"))
    data = mesh["dp", "cp"]._flatten("dp_cp")
    return _wrap(mesh, data, data, mesh["tp"])


def _views_of_one_world(family: Family) -> Wrapped:
    world = family.init_device_mesh("cpu", (4,), mesh_dim_names=("world",))
    dense = world._unflatten(0, (1, 2, 2), ("replicate", "fsdp", "tp"))
    return _wrap(world, dense["replicate", "fsdp"], dense["fsdp"], dense["tp"])


_WAYS: dict[str, Callable[[Family], Wrapped]] = {
    "one axis": _one_axis,
    "hybrid": _hybrid,
    "with tensor parallel": _with_tensor_parallel,
    "hybrid with tensor parallel": _hybrid_with_tensor_parallel,
    "over a flattened axis": _flattened,
    "views of one world": _views_of_one_world,
}


def _prefetch(model: nn.Module) -> None:
    first, *others = model
    model.set_modules_to_forward_prefetch([first])
    first.set_modules_to_forward_prefetch(others)
    others[-1].set_modules_to_backward_prefetch([first])


def _losses(side_name: str, way: str, prefetch: bool) -> dict[str, Any]:
    with side(side_name) as family:
        wrapped = _WAYS[way](family)
        if prefetch:
            _prefetch(wrapped.model)
        losses = train(wrapped.model, wrapped.data)
        parameters = list(wrapped.model.parameters())
        meshes = {id(mesh): mesh for mesh in (p.device_mesh for p in parameters)}.values()
        weights = {name: p.full_tensor() for name, p in wrapped.model.named_parameters()}
        return {
            "losses": losses,
            "weights": {name: weight.detach().numpy() for name, weight in weights.items()},
            "locals": [p.to_local().shape for p in parameters],
            "placements": [str(p.placements) for p in parameters],
            "classes": {type(mesh) for mesh in meshes},
            "one root": all(mesh._get_root_mesh() is wrapped.root for mesh in meshes),
            "shares": wrapped.data.size(),
        }


@pytest.mark.parametrize("way", in_tiers(_WAYS, ["with tensor parallel"], [*_WAYS][::2]))
def test_losses_are_those_of_one_process(crew: Crew, way: str) -> None:
    losses, weights = train_alone()
    answers = {name: crew.run(_losses, 4, name, way, False) for name in SIDES}
    for name in SIDES:
        for rank, answer in enumerate(answers[name]):
            assert answer["losses"] == pytest.approx(losses, rel=TOLERANCE), (name, rank)
            for key, weight in weights.items():
                assert answer["weights"][key] == pytest.approx(weight.numpy(), abs=TOLERANCE)
            assert answer["classes"] == {mesh_class(name)}
            assert answer["one root"]
            stock = answers["stock"][rank]
            assert answer["losses"] == pytest.approx(stock["losses"], rel=TOLERANCE)
            for key in ("locals", "placements", "shares"):
                assert answer[key] == stock[key]


@pytest.mark.long
@pytest.mark.parametrize("way", ["one axis", "hybrid", "with tensor parallel"])
def test_with_prefetch(crew: Crew, way: str) -> None:
    losses, _ = train_alone()
    for answer in crew.run(_losses, 4, "ours", way, True):
        assert answer["losses"] == pytest.approx(losses, rel=TOLERANCE)


def _inside_fsdp(way: str) -> list[bool]:
    with side("ours") as family:
        wrapped = _WAYS[way](family)
        wrapped.model(batch(0)[0]).sum().backward()
        seen = []
        for module in wrapped.model.modules():
            if not isinstance(module, FSDPModule):
                continue
            state = module._get_fsdp_state()
            # One group of parameters a module; from 2.12 on there may be several.
            groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
            for group in filter(None, groups):
                mesh = group.mesh_info.mesh
                seen.append(mesh._get_root_mesh() is wrapped.root)
                seen.append(type(mesh) is mesh_class("ours"))
                seen.append(group.mesh_info.shard_process_group in mesh.get_all_groups())
                seen.extend(_is_of(parameter, wrapped.root) for parameter in group.fsdp_params)
        return seen


def _is_of(parameter: Any, root: StockDeviceMesh) -> bool:
    mesh = parameter.sharded_param.device_mesh
    return mesh._get_root_mesh() is root and mesh.universe is root.universe


@pytest.mark.parametrize(
    "way", in_tiers(_WAYS, ["hybrid with tensor parallel", "over a flattened axis"])
)
def test_fsdp_sees_one_root(crew: Crew, way: str) -> None:
    for answer in crew.run(_inside_fsdp, 4, way):
        assert len(answer) > 15
        assert all(answer)


# --- other ways to drive it ----------------------------------------------------------------------


def _accumulated() -> list[float]:
    with side("ours") as family:
        wrapped = _hybrid(family)
    model, rank = wrapped.model, wrapped.data.get_local_rank()
    inputs, targets = (half.chunk(4)[rank] for half in batch(0))
    for turn, (some, wanted) in enumerate(zip(inputs.split(1), targets.split(1), strict=True)):
        model.set_requires_gradient_sync(turn == len(inputs) - 1)
        (nn.functional.mse_loss(model(some), wanted) / len(inputs)).backward()
    return [parameter.grad.full_tensor().norm().item() for parameter in model.parameters()]


def test_accumulated_gradients(crew: Crew) -> None:
    model = make_model()
    inputs, targets = batch(0)
    nn.functional.mse_loss(model(inputs), targets).backward()
    expected = [parameter.grad.norm().item() for parameter in model.parameters()]
    assert crew.run(_accumulated, 4) == [pytest.approx(expected, rel=GRADIENT_TOLERANCE)] * 4


def _unsharded_by_hand() -> list[bool]:
    with side("ours") as family:
        _, mesh, _ = wrapped = _with_tensor_parallel(family)
    block = wrapped.model[0]
    sharded = block.up.weight.device_mesh
    block.unshard()
    unsharded = block.up.weight.device_mesh
    block.reshard()
    return [
        sharded is mesh["dp", "tp"],
        unsharded is mesh["tp"],
        block.up.weight.device_mesh is sharded,
    ]


def test_unshard_and_reshard_move_between_our_meshes(crew: Crew) -> None:
    assert crew.run(_unsharded_by_hand, 4) == [[True] * 3] * 4


# --- state ---------------------------------------------------------------------------------------

_WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


def _state_moves_on(way: str, other_way: str) -> dict[str, Any]:
    """Train, take the state, put it into a model sharded another way, and train both on."""
    with side("ours") as family:
        first, second = _WAYS[way](family), _WAYS[other_way](family)
    optimizers = [torch.optim.AdamW(w.model.parameters(), lr=0.01) for w in (first, second)]
    _step(first, optimizers[0], 0)
    whole = get_model_state_dict(first.model, options=_WHOLE)
    sharded = get_model_state_dict(first.model)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(second.model, dict(whole), options=options)
    moments = get_optimizer_state_dict(first.model, optimizers[0], options=_WHOLE)
    set_optimizer_state_dict(second.model, optimizers[1], moments, options=options)
    losses = [
        _step(w, optimizer, 1) for w, optimizer in zip((first, second), optimizers, strict=True)
    ]
    meshes = [value.device_mesh for value in sharded.values()]
    return {
        "losses": losses,
        "keys": (set(whole), set(sharded)),
        "ours": {type(mesh) for mesh in meshes} == {mesh_class("ours")},
        "one root": all(mesh._get_root_mesh() is first.root for mesh in meshes),
    }


def _step(wrapped: Wrapped, optimizer: torch.optim.Optimizer, step: int) -> float:
    shares, mine = wrapped.data.size(), wrapped.data.get_local_rank()
    inputs, targets = (half.chunk(shares)[mine] for half in batch(step))
    loss = nn.functional.mse_loss(wrapped.model(inputs), targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    total = loss.detach().clone()
    torch.distributed.all_reduce(total, group=wrapped.data.get_group())
    return total.item() / shares


@pytest.mark.long
@pytest.mark.parametrize(
    ("way", "other_way"),
    in_tiers(
        [
            ("with tensor parallel", "hybrid"),
            ("hybrid", "one axis"),
            ("one axis", "views of one world"),
        ],
        [("one axis", "views of one world")],
    ),
)
def test_state_moves_between_ways_of_sharding(crew: Crew, way: str, other_way: str) -> None:
    losses, _ = train_alone(clip=False)
    names = set(make_model().state_dict())
    for rank, answer in enumerate(crew.run(_state_moves_on, 4, way, other_way)):
        assert answer["losses"] == pytest.approx([losses[1]] * 2, rel=TOLERANCE)
        assert answer["keys"] == (names if rank == 0 else set(), names)
        assert (answer["ours"], answer["one root"]) == (True, True)
