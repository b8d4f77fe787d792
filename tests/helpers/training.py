"""A small model, its training on one process, and on a mesh: to compare the losses."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh as StockDeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F

WIDTH = 12
BATCH = 8
STEPS = 3
# How far losses, norms and weights may be from those of one process. They are float32, and a loss
# is a mean of 384 squares behind sums of 36 products: another order of both, as on another
# processor, changes it by (384 + 36) * eps = 5e-5. Ranks that do not communicate differ by more.
TOLERANCE = 1e-4
# Of gradients: the terms of their sums cancel in part, which leaves a larger share of the errors.
GRADIENT_TOLERANCE = 10 * TOLERANCE
LARGEST_NORM = 0.5  # of the clipped gradients: below what they are, so that clipping matters


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 3 * WIDTH)
        self.down = nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(F.gelu(self.up(self.norm(hidden))))


def make_model(blocks: int = 2) -> nn.Sequential:
    """Return the model with its first weights, the same each time."""
    torch.manual_seed(11)
    return nn.Sequential(*[Block() for _ in range(blocks)])


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of a step, shape (BATCH, 4, WIDTH) each."""
    generator = torch.Generator().manual_seed(step)
    inputs, targets = (torch.randn(BATCH, 4, WIDTH, generator=generator) for _ in range(2))
    return inputs, targets


def tensor_parallel(block: nn.Module, mesh: StockDeviceMesh) -> None:
    """Split a block over a 1-D mesh: its layers by features, and what is between them by tokens."""
    tokens, whole = Shard(1), Replicate()
    plan = {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=tokens),
        "down": RowwiseParallel(output_layouts=tokens),
    }
    parallelize_module(block, mesh, plan)
    entry = PrepareModuleInput(
        input_layouts=(whole,), desired_input_layouts=(tokens,), use_local_output=True
    )
    parallelize_module(block, mesh, entry)
    exit_ = PrepareModuleOutput(output_layouts=(tokens,), desired_output_layouts=(whole,))
    parallelize_module(block, mesh, exit_)


def train(
    model: nn.Module,
    data: StockDeviceMesh | None = None,
    *,
    forward: Callable[[Tensor], Tensor] | None = None,
    clip: bool = True,
    device: str = "cpu",
) -> list[float]:
    """Train in place on the batches, on my share of each if there is a mesh to share them over.

    Args:
        model: whose parameters are trained; its gradients are averages over the mesh.
        data: 1-D mesh of the ranks that have a share each.
        forward: what to call instead of the model.
        clip: whether to clip the norm of the gradients.
        device: that the model is on.

    Returns:
        Loss over the whole batch of every step, then the norm of every step's gradients.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses, norms = [], []
    for step in range(STEPS):
        shares, mine = (1, 0) if data is None else (data.size(), data.get_local_rank())
        inputs, targets = (half.chunk(shares)[mine].to(device) for half in batch(step))
        loss = F.mse_loss((forward or model)(inputs), targets)
        loss.backward()
        if clip:
            norm = nn.utils.clip_grad_norm_(model.parameters(), LARGEST_NORM)
            norms.append((norm.full_tensor() if isinstance(norm, DTensor) else norm).item())
        optimizer.step()
        optimizer.zero_grad()
        average = loss.detach().clone()
        if data is not None:
            dist.all_reduce(average, group=data.get_group())
            average /= shares
        losses.append(average.item())
    return losses + norms


def train_alone(
    *, clip: bool = True, blocks: int = 2, device: str = "cpu"
) -> tuple[list[float], dict[str, Tensor]]:
    """Return the result of `train` for one process with the whole batches; and the last weights."""
    model = make_model(blocks).to(device)
    losses = train(model, clip=clip, device=device)
    assert losses[STEPS - 1] < losses[0] or STEPS == 1
    return losses, dict(model.state_dict())
