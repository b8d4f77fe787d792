"""`meshverse.parallel` on NCCL: models of transformers, Megatron-FSDP, copies and snapshots.

Each is compared with one process. What differs between devices is here: kernels of attention and
of experts, streams, and communication that the host does not wait for.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn import functional as F

from helpers.at_platforms import at
from helpers.platforms import World, world_at
from helpers.training import TOLERANCE, make_model
from meshverse import init_device_mesh
from meshverse.parallel import (
    FSDP2Config,
    FSDP2Manager,
    MegatronFSDPConfig,
    MegatronFSDPManager,
    ParallelismSizes,
    Reshard,
    Snapshot,
    clip_grad_norm_,
    context_parallel,
    create_device_meshes,
    get_flat_mesh,
)

needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)
# torch's ring attention in float32 needs parts of sequences, two for each rank of cp, of a multiple
# of 32 tokens.
_VOCABULARY, _BATCH, _LENGTH, _STEPS = 64, 8, 128, 3
_SIZES = {
    "vocab_size": _VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "attn_implementation": "sdpa",
}
_EXPERTS = {
    "moe_intermediate_size": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "head_dim": 16,
}
_EXACT = FSDP2Config(mp_policy=MixedPrecisionPolicy())


def _llama(**changed: Any) -> nn.Module:
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(LlamaConfig(**{**_SIZES, **changed}))


def _qwen3_moe() -> nn.Module:
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(Qwen3MoeConfig(**_SIZES, **_EXPERTS))


_MODELS = {"llama": _llama, "qwen3_moe": _qwen3_moe}


def _tokens(step: int, device: str) -> Tensor:
    """Token ids of a step, shape (_BATCH, _LENGTH + 1): each follows from the one before."""
    generator = torch.Generator().manual_seed(step)
    first = torch.randint(_VOCABULARY, (_BATCH, 1), generator=generator)
    return ((first + torch.arange(_LENGTH + 1)) % _VOCABULARY).to(device)


def _loss(model: nn.Module, inputs: Tensor, labels: Tensor, positions: Tensor) -> Tensor:
    logits = model(inputs, position_ids=positions, use_cache=False).logits
    if isinstance(logits, DTensor):
        logits = logits.full_tensor()
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def _train(model: nn.Module, device: str, data: Any = None) -> list[float]:
    """Return the losses of whole batches, then the norms, of training on my share of each batch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    shares, mine = (1, 0) if data is None else (data.size(), data.get_local_rank())
    losses, norms = [], []
    positions = torch.arange(_LENGTH, device=device)[None]
    for step in range(_STEPS):
        tokens = _tokens(step, device).chunk(shares)[mine]
        loss = _loss(model, tokens[:, :-1], tokens[:, 1:], positions)
        loss.backward()
        norms.append(clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
        optimizer.zero_grad()
        whole = loss.detach().clone()
        if data is not None:
            dist.all_reduce(whole, group=data.get_group())
        losses.append(whole.item() / shares)
    return losses + norms


def _trained(wanted: World, name: str, sizes: dict[str, int]) -> tuple[list[float], list[float]]:
    with world_at(wanted) as platform:
        alone = _train(_MODELS[name]().to(platform.device), platform.device)
        mesh, moe_mesh = create_device_meshes(_EXACT, ParallelismSizes(**sizes))
        assert mesh.device_type == platform.device
        model = _MODELS[name]().to(platform.device)
        FSDP2Manager(_EXACT, mesh, moe_mesh).parallelize(model)
        return alone, _train(model, platform.device, get_flat_mesh(mesh, "dp_cp"))


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("llama", {"tp_size": 2}),
        ("llama", {"dp_replicate_size": 2}),
        ("qwen3_moe", {"ep_size": 2}),
    ],
)
@needs_transformers
@at("nccl", "nccl bound")
def test_a_model_of_transformers_trains_as_on_one_process(
    world: World, run: Callable[..., list[Any]], name: str, sizes: dict[str, int]
) -> None:
    for alone, losses in run(_trained, 4, world, name, sizes):
        assert alone[_STEPS - 1] < alone[0]
        assert losses == pytest.approx(alone, rel=10 * TOLERANCE)


def _split_sequences(
    wanted: World, sizes: dict[str, int], dtype: torch.dtype, key_heads: int
) -> list[float]:
    """Return the relative errors of the loss and the gradients, against one process."""
    with world_at(wanted) as platform:

        def make() -> nn.Module:
            return _llama(num_key_value_heads=key_heads).to(platform.device, dtype)

        tokens = _tokens(0, platform.device)
        positions = torch.arange(_LENGTH, device=platform.device)[None].clone()
        batch = [tokens[:, :-1].clone(), tokens[:, 1:].clone(), positions]
        alone, model = make(), make()
        expected = _loss(alone, *batch)
        expected.backward()
        mesh, _ = create_device_meshes(_EXACT, ParallelismSizes(**sizes))
        FSDP2Manager(_EXACT, mesh, None).parallelize(model)
        with context_parallel(mesh, buffers=batch, buffer_seq_dims=[1, 1, 1]):
            own = _loss(model, *batch)
            own.backward()
        mean = own.detach().clone()
        dist.all_reduce(mean, group=mesh["cp"].get_group())
        mean /= mesh["cp"].size()
        errors = [abs(float(mean / expected) - 1)]
        for theirs, mine in zip(alone.parameters(), model.parameters(), strict=True):
            apart = mine.grad.full_tensor() - theirs.grad
            errors.append(float(apart.norm() / theirs.grad.norm()))
        return errors


@pytest.mark.parametrize("sizes", [{"cp_size": 2}, {"cp_size": 2, "tp_size": 2}])
@pytest.mark.parametrize(
    ("dtype", "key_heads", "bound"),
    [
        pytest.param(torch.float32, 4, 10 * TOLERANCE, id="float32"),
        # torch's kernels for grouped queries take half precision only.
        pytest.param(torch.bfloat16, 2, 0.1, id="grouped-bfloat16"),
    ],
)
@needs_transformers
@at("nccl", "nccl bound")
def test_context_parallelism_equals_one_process(
    world: World,
    run: Callable[..., list[Any]],
    sizes: dict[str, int],
    dtype: torch.dtype,
    key_heads: int,
    bound: float,
) -> None:
    for errors in run(_split_sequences, 4, world, sizes, dtype, key_heads):
        assert max(errors) < bound


def _megatron(wanted: World, stage: int) -> tuple[list[float], list[float], int, int]:
    with world_at(wanted) as platform, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the package's own
        alone = make_model().to(platform.device)
        expected = _steps(alone, torch.optim.AdamW(alone.parameters(), lr=0.01), platform.device)
        config = MegatronFSDPConfig(
            zero_dp_strategy=stage, megatron_fsdp_unit_modules=[f"{_BLOCK.__module__}.Block"]
        )
        mesh, _ = create_device_meshes(config, ParallelismSizes())
        model = make_model().to(platform.device)
        whole = sum(each.numel() for each in model.parameters())
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        wrapped, optimizer = MegatronFSDPManager(config, mesh).parallelize(model, optimizer)
        losses = _steps(wrapped, optimizer, platform.device, dist.get_world_size(), dist.get_rank())
        held = sum(each.to_local().numel() for each in wrapped.parameters()) if stage == 3 else 0
        return expected, losses, held, whole


_BLOCK = type(make_model()[0])


def _steps(
    model: nn.Module, optimizer: Any, device: str, shares: int = 1, mine: int = 0
) -> list[float]:
    losses = []
    for step in range(_STEPS):
        generator = torch.Generator().manual_seed(step)
        inputs, targets = torch.randn(2, 8, 4, 12, generator=generator).to(device)
        loss = F.mse_loss(model(inputs.chunk(shares)[mine]), targets.chunk(shares)[mine])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item() / shares)
    return losses


@pytest.mark.skipif(
    importlib.util.find_spec("megatron_fsdp") is None, reason="megatron-fsdp is not installed"
)
@pytest.mark.filterwarnings("ignore:Transformer Engine and Apex")
@pytest.mark.parametrize("stage", [1, 3])
@at("nccl", "nccl bound")
def test_megatron_fsdp_trains_as_one_process(
    world: World, run: Callable[..., list[Any]], stage: int
) -> None:
    answers = run(_megatron, 2, world, stage)
    total = [sum(losses) for losses in zip(*(each[1] for each in answers), strict=True)]
    expected, _, held, whole = answers[0]
    assert total == pytest.approx(expected, rel=10 * TOLERANCE)
    assert held < whole


def _copied(wanted: World) -> bool:
    with world_at(wanted) as platform:
        rows = init_device_mesh(platform.device, (4,), mesh_dim_names=("dp",))
        square = init_device_mesh(platform.device, (2, 2), mesh_dim_names=("dp", "tp"))
        whole = torch.arange(12.0 * 20, device=platform.device).view(12, 20)
        source = distribute_tensor(whole.clone(), rows, [Shard(0)])
        target = distribute_tensor(torch.zeros_like(whole), square, [Shard(1), Shard(0)])
        reshard = Reshard({"weight": source}, {"weight": target})
        reshard()
        first = torch.equal(target.full_tensor(), whole)
        # The kernel that changes the source may still run when the next run begins.
        source.to_local().mul_(2)
        work = reshard(async_op=True)
        work.wait()
        second = torch.equal(target.full_tensor(), 2 * whole)
        reshard.close()
        return first and second


@at("gloo", "nccl", "nccl bound", "nccl bound mixed")
def test_reshard_copies_between_meshes(world: World, run: Callable[..., list[Any]]) -> None:
    assert all(run(_copied, 4, world))


class _Job:
    """A model under FSDP2 and its optimizer: what a snapshot keeps."""

    def __init__(self, device: str) -> None:
        self.mesh, _ = create_device_meshes(_EXACT, ParallelismSizes(tp_size=2))
        self.device, self.model = device, _llama().to(device)
        FSDP2Manager(_EXACT, self.mesh, None).parallelize(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        parts = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
        set_state_dict(self.model, self.optimizer, **parts)

    def step(self, number: int) -> float:
        data = get_flat_mesh(self.mesh, "dp_cp")
        tokens = _tokens(number, self.device).chunk(data.size())[data.get_local_rank()]
        positions = torch.arange(_LENGTH, device=self.device)[None]
        loss = _loss(self.model, tokens[:, :-1], tokens[:, 1:], positions)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


def _kept(wanted: World, folder: Path) -> tuple[list[float], int | None, list[float]]:
    with world_at(wanted) as platform:
        job, snapshot = _Job(platform.device), Snapshot(folder, copies=0)
        assert snapshot.load({"job": job}) is None
        losses = []
        for step in range(4):
            losses.append(job.step(step))
            if step == 1:
                snapshot.save(step, {"job": job})
        again = _Job(platform.device)
        step = Snapshot(folder, copies=0).load({"job": again})
        return losses, step, [again.step(number) for number in (2, 3)]


@needs_transformers
@at("gloo", "nccl mixed", "nccl bound mixed", gloo_is_long=True)
def test_a_snapshot_brings_back_the_state(
    world: World, run: Callable[..., list[Any]], tmp_path: Path
) -> None:
    for losses, step, later in run(_kept, 4, world, tmp_path / "kept"):
        assert step == 1
        assert later == pytest.approx(losses[2:], rel=TOLERANCE)
