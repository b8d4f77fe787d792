"""DDP, replicate, FSDP1, pipelines and context parallelism on our meshes, as on stock's."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate as replicate_by_ddp
from torch.distributed._composable.replicate_with_fsdp import replicate as replicate_by_fsdp
from torch.distributed.device_mesh import DeviceMesh as StockDeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import context_parallel_unshard
from torch.distributed.tensor.experimental._context_parallel import _attention
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from helpers.crew import Crew
from helpers.sides import SIDES, mesh_class, side
from helpers.tiers import in_tiers
from helpers.training import (
    GRADIENT_TOLERANCE,
    TOLERANCE,
    WIDTH,
    batch,
    make_model,
    tensor_parallel,
    train,
    train_alone,
)

# --- data parallelism ----------------------------------------------------------------------------


def _ddp(root: StockDeviceMesh) -> tuple[nn.Module, StockDeviceMesh]:
    data = root._flatten("data")
    return DistributedDataParallel(make_model(), device_mesh=data), data


def _ddp_over_a_slice(root: StockDeviceMesh) -> tuple[nn.Module, StockDeviceMesh]:
    return DistributedDataParallel(make_model(), device_mesh=root["dp"]), root["dp"]


def _replicate_by_ddp(root: StockDeviceMesh) -> tuple[nn.Module, StockDeviceMesh]:
    return replicate_by_ddp(make_model(), device_mesh=root["dp"]), root["dp"]


def _replicate_by_fsdp(root: StockDeviceMesh) -> tuple[nn.Module, StockDeviceMesh]:
    model = make_model()
    # 2.11 spells the argument as the older `replicate` does.
    name = "mesh" if "mesh" in inspect.signature(replicate_by_fsdp).parameters else "device_mesh"
    for block in (*model, model):
        replicate_by_fsdp(block, **{name: root["dp"]})
    assert type(next(model.parameters()).device_mesh) is type(root)
    return model, root["dp"]


def _fsdp1(root: StockDeviceMesh) -> tuple[nn.Module, StockDeviceMesh]:
    model = FullyShardedDataParallel(
        make_model(),
        device_mesh=root,
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        device_id=torch.device("cpu"),
        use_orig_params=True,
    )
    return model, root._flatten("data")


def _tensor_parallel_in_ddp(root: StockDeviceMesh) -> tuple[nn.Module, StockDeviceMesh]:
    model = make_model()
    for block in model:
        tensor_parallel(block, root["tp"])
    _pre_dp_module_transform(model)  # DDP itself does not take DTensors
    return DistributedDataParallel(model, device_mesh=root["dp"]), root["dp"]


_WAYS: dict[str, Callable[[StockDeviceMesh], tuple[nn.Module, StockDeviceMesh]]] = {
    "DDP": _ddp,
    "DDP over a slice": _ddp_over_a_slice,
    "replicate by DDP": _replicate_by_ddp,
    "replicate by FSDP2": _replicate_by_fsdp,
    "FSDP1, hybrid": _fsdp1,
    "TP in DDP": _tensor_parallel_in_ddp,
}


def _losses(side_name: str, way: str) -> list[float]:
    with side(side_name) as family:
        root = family.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        assert type(root) is mesh_class(side_name)
        model, data = _WAYS[way](root)
        # FSDP1 and DDP have clipping of their own; it does not ask a mesh.
        return train(model, data, clip=False)


@pytest.mark.long
@pytest.mark.parametrize("way", in_tiers(_WAYS, ["TP in DDP"]))
def test_losses_are_those_of_one_process(crew: Crew, way: str) -> None:
    expected, _ = train_alone(clip=False)
    for name in SIDES:
        for losses in crew.run(_losses, 4, name, way):
            assert losses == pytest.approx(expected, rel=TOLERANCE), name


# --- pipelines -----------------------------------------------------------------------------------


def _schedule(
    kind: type, stage: PipelineStage, losses: list[Tensor], inputs: Tensor, targets: Tensor
) -> float | None:
    """One step on my stage; the loss where the last stage is."""
    schedule = kind(stage, n_microbatches=2, loss_fn=F.mse_loss)
    if stage.is_first:
        schedule.step(inputs)
    else:
        schedule.step(target=targets, losses=losses)
    return torch.stack(losses).mean().item() if losses else None


def _pipeline(side_name: str, kind: type) -> dict[str, Any]:
    with side(side_name) as family:
        mesh = family.init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
        pp, dp = mesh["pp"], mesh["dp"]
        part = make_model()[pp.get_local_rank()]
        fully_shard(part, mesh=dp)
        stage = PipelineStage(
            part, pp.get_local_rank(), pp.size(), torch.device("cpu"), group=mesh.get_group("pp")
        )
        inputs, targets = (half.chunk(2)[dp.get_local_rank()] for half in batch(0))
        loss = _schedule(kind, stage, [], inputs, targets)
        gradients = {
            name: p.grad.full_tensor().norm().item() for name, p in part.named_parameters()
        }
        return {
            "loss": loss,
            "gradients": gradients,
            "peers": dist.get_process_group_ranks(stage.group),
        }


@pytest.mark.parametrize("kind", in_tiers([ScheduleGPipe, Schedule1F1B], [Schedule1F1B]))
def test_pipeline_of_two_sharded_stages(crew: Crew, kind: type) -> None:
    model = make_model()
    inputs, targets = batch(0)
    loss = F.mse_loss(model(inputs), targets)
    loss.backward()
    for name in SIDES:
        answers = crew.run(_pipeline, 4, name, kind)
        for rank, answer in enumerate(answers):
            stage = rank // 2
            expected = {key: p.grad.norm().item() for key, p in model[stage].named_parameters()}
            close = pytest.approx(expected, rel=GRADIENT_TOLERANCE)
            assert answer["gradients"] == close, (name, rank)
            assert answer["peers"] == [rank % 2, rank % 2 + 2]
        losses = [answer["loss"] for answer in answers]
        assert losses[:2] == [None, None]
        assert sum(losses[2:]) / 2 == pytest.approx(loss.item(), rel=TOLERANCE)


class _Sharded(nn.Module):
    """A layer that hands on a DTensor."""

    def __init__(self, tp: StockDeviceMesh, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layer = nn.Linear(WIDTH, WIDTH, bias=False)
        parallelize_module(self.layer, tp, ColwiseParallel(use_local_output=False))

    def forward(self, hidden: DTensor) -> DTensor:
        return self.layer(hidden.redistribute(placements=[Replicate()]))


def _dtensors_between_stages(side_name: str) -> dict[str, Any]:
    asked = []
    with side(side_name) as family:
        mesh = family.init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
        tp, index = mesh["tp"], mesh.get_local_rank("pp")

        def get_mesh(names: tuple[str, ...], layout: object) -> StockDeviceMesh:
            asked.append((names, layout == tp._layout, {tp._layout: tp}[layout] is tp))
            return tp

        stage = PipelineStage(
            _Sharded(tp, index),
            index,
            2,
            torch.device("cpu"),
            group=mesh.get_group("pp"),
            get_mesh=get_mesh,
        )
        whole = batch(0)[0][:, 0]
        schedule = ScheduleGPipe(stage, n_microbatches=2)
        given = [distribute_tensor(whole, tp, [Replicate()])] if index == 0 else []
        result = schedule.step(*given)
        if index == 0:
            return {"asked": asked}
        return {
            "asked": asked,
            "result": result.full_tensor().detach().numpy(),
            "mesh": result.device_mesh is tp,
        }


@pytest.mark.skipif(
    "get_mesh" not in inspect.signature(PipelineStage).parameters,
    reason="pipelines hand on DTensors from torch 2.12 on",
)
def test_dtensors_between_the_stages_of_a_pipeline(crew: Crew) -> None:
    layers = []
    for seed in range(2):
        torch.manual_seed(seed)
        layers.append(nn.Linear(WIDTH, WIDTH, bias=False))
    expected = nn.Sequential(*layers)(batch(0)[0][:, 0]).detach().numpy()
    for name in SIDES:
        answers = crew.run(_dtensors_between_stages, 4, name)
        assert any(answer["asked"] for answer in answers)  # else no mesh crossed between stages
        for answer in answers:
            assert set(answer["asked"]) <= {(("tp",), True, True)}, name
        for answer in answers[2:]:
            assert answer["result"] == pytest.approx(expected, abs=TOLERANCE)
            assert answer["mesh"]


# --- context parallelism -------------------------------------------------------------------------

_TOKENS = 16


def _query_key_value() -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(2, 2, _TOKENS, 8, generator=generator) for _ in range(3)]


def _sequences(side_name: str) -> dict[str, Any]:
    with side(side_name) as family:
        mesh = family.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
        cp, tokens = mesh["cp"], torch.arange(float(_TOKENS)).reshape(1, _TOKENS)
        with context_parallel(cp, buffers=(tokens,), buffer_seq_dims=(1,)):
            mine = tokens.tolist()
            (back,) = context_parallel_unshard(cp, [tokens * 10], [1])
        return {"mine": mine, "back": back.tolist(), "afterwards": tokens.tolist()}


def test_context_parallel_splits_and_joins_sequences(crew: Crew) -> None:
    whole = [float(token) for token in range(_TOKENS)]
    for name in SIDES:
        for rank, answer in enumerate(crew.run(_sequences, 4, name)):
            # An even load of causal attention: from both ends.
            first, last = ((0, 12), (4, 8))[rank % 2]
            assert answer["mine"] == [whole[first : first + 4] + whole[last : last + 4]]
            assert answer["back"] == [[10 * token for token in whole]]
            assert answer["afterwards"] == [whole]


def _ring_attention(side_name: str) -> Any:
    with side(side_name) as family:
        mesh = family.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
        cp = mesh["cp"]
        near, far = cp.get_local_rank(), 3 - cp.get_local_rank()
        quarters = [whole.chunk(4, dim=2) for whole in _query_key_value()]
        mine = [torch.cat([part[near], part[far]], dim=2) for part in quarters]
        attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        attended, *_ = _attention._templated_ring_attention(
            cp.get_group(), 2, attention, *mine, is_causal=True
        )
        gathered = DTensor.from_local(attended, cp, [Shard(2)]).full_tensor()
    first, last, second, third = gathered.chunk(4, dim=2)
    return torch.cat([first, second, third, last], dim=2).numpy()


def test_ring_attention_over_our_group(crew: Crew) -> None:
    expected = F.scaled_dot_product_attention(*_query_key_value(), is_causal=True).numpy()
    for name in SIDES:
        for attended in crew.run(_ring_attention, 4, name):
            assert attended == pytest.approx(expected, abs=TOLERANCE), name


def _attention_of_a_mesh(side_name: str) -> str | None:
    with side(side_name) as family:
        cp = family.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))["cp"]
        buffers = _query_key_value()
        try:
            with context_parallel(cp, buffers=buffers, buffer_seq_dims=[2, 2, 2]):
                F.scaled_dot_product_attention(*buffers, is_causal=True)
        except NotImplementedError as error:
            return str(error)
    return None


@pytest.mark.long
def test_whole_context_parallel_attention(crew: Crew) -> None:
    reasons = {name: set(crew.run(_attention_of_a_mesh, 4, name)) for name in SIDES}
    assert reasons["ours"] == reasons["installed"] == reasons["stock"]
    if reasons["stock"] != {None}:
        pytest.skip(f"torch's context parallelism has no attention on CPU: {reasons['stock']}")
