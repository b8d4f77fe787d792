"""A tiny Llama trained by a pipeline, and by one process: the losses, norms and weights of both."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from tiny_models import BATCH, batch, full, make_model, make_optimizer
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn import functional as F

from meshverse.parallel import (
    ParallelismSizes,
    create_fsdp2_device_mesh,
    fsdp2_strategy_parallelize,
    get_flat_mesh,
    pipeline_schedule,
    pipeline_stages,
)

EXACT = MixedPrecisionPolicy(param_dtype=None, reduce_dtype=torch.float32)
STEPS, MAX_NORM = 3, 0.5


def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
    """Mean loss of predicting each next token."""
    targets = tokens.roll(-1, 1)  # the last token is to be followed by the first
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def train_alone(model: nn.Module, batches: list[list[Tensor]]) -> dict[str, list[float]]:
    """Train on lists of batches, one list a step, whose gradients add up."""
    optimizer, losses, norms = make_optimizer(model), [], []
    for step in batches:
        for tokens in step:
            loss = loss_of(model(input_ids=tokens, use_cache=False).logits, tokens)
            loss.backward()
            losses.append(loss.item())
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": losses, "norms": norms}


def train_in_stages(
    stages: list[Any],
    mesh: Any,
    batches: list[list[Tensor]],
    microbatches: int,
    schedule: str | None,
) -> dict[str, list[float]]:
    """As `train_alone`, of this rank's stages on its share of each batch."""
    pipeline = pipeline_schedule(stages, mesh["pp"], loss_of, microbatches, schedule=schedule)
    parameters = [each for stage in stages for each in stage.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.2, momentum=0.9)
    data, losses, norms = get_flat_mesh(mesh, "dp_cp"), [], []
    for step in batches:
        for tokens in step:
            share = tokens.chunk(data.size())[data.get_local_rank()]
            with loss_parallel():
                given = pipeline.step(share, target=share)
            total = torch.stack(given).mean() if given else torch.zeros(())
            total = full(total).clone()
            dist.all_reduce(total, group=mesh.get_group("pp"))
            dist.all_reduce(total, group=data.get_group())
            losses.append(total.item() / data.size())
        norms.append(pipeline.clip_grad_norm_(MAX_NORM).item())
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": losses, "norms": norms}


def compare(
    sizes: dict[str, int],
    virtual: int = 1,
    schedule: str | None = None,
    accumulate: int = 1,
    settings: dict[str, Any] | None = None,
    layers_per_stage: tuple[int, ...] | None = None,
    **fields: Any,
) -> dict[str, float]:
    """The largest differences between a pipeline and one process, by what differs."""
    fields = {"num_hidden_layers": 4, "tie_word_embeddings": False, **fields}
    mesh, moe_mesh = create_fsdp2_device_mesh(ParallelismSizes(**sizes))
    alone, model = make_model(**fields), make_model(**fields)
    batches = [[batch(step * 10 + each) for each in range(accumulate)] for step in range(STEPS)]
    expected = train_alone(alone, batches)
    stages = pipeline_stages(model, mesh["pp"], virtual=virtual, layers_per_stage=layers_per_stage)
    for stage in stages:
        fsdp2_strategy_parallelize(
            stage, mesh, moe_mesh=moe_mesh, mp_policy=EXACT, **(settings or {})
        )
    share = BATCH // get_flat_mesh(mesh, "dp_cp").size()
    seen = train_in_stages(stages, mesh, batches, min(4, share), schedule)
    wanted = dict(alone.named_parameters(remove_duplicate=False))
    weights = {
        name: (full(each) - wanted[name]).abs().max().item()
        for stage in stages
        for name, each in stage.named_parameters()
    }
    assert len(weights) > 8
    return {
        "weights": max(weights.values()),
        **{
            name: max(abs(a - b) for a, b in zip(seen[name], expected[name], strict=True))
            for name in seen
        },
    }
