"""A small transformer, its training on one process, and on a (dp_shard, tp) mesh of several.

Both ways train the same model from the same seed on the same batches, so that their losses can be
compared step by step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F

__all__ = ["Recipe", "Transformer", "parallelize", "train"]


@dataclass(frozen=True)
class Recipe:
    """Settings of the training: the model and its length. Sizes divide by the mesh's degrees.

    Attributes:
        batch: sequences in a global batch.
        learning_rate: of AdamW.
    """

    vocabulary: int = 256
    width: int = 64
    heads: int = 4
    blocks: int = 3
    sequence: int = 32
    batch: int = 8
    steps: int = 12
    learning_rate: float = 3e-3
    seed: int = 20

    def global_batch(self, step: int) -> Tensor:
        """Token ids of one step, shape (batch, sequence + 1).

        Each sequence starts with a random token, and a fixed rule gives the next one from the one
        before: there is something to learn, so the loss falls.
        """
        generator = torch.Generator().manual_seed(self.seed + step)
        tokens = [torch.randint(self.vocabulary, (self.batch,), generator=generator)]
        for _ in range(self.sequence):
            tokens.append((tokens[-1] * 5 + 3) % self.vocabulary)
        return torch.stack(tokens, dim=1)

    def make_model(self) -> Transformer:
        """Return the model with its first weights, the same each time."""
        torch.manual_seed(self.seed)
        return Transformer(self)


class Attention(nn.Module):
    """Causal self-attention; with tensor parallelism each rank has some of the heads."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_width = width // heads
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        query, key, value = (
            projection(hidden).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for projection in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(hidden)))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.feed_forward_norm = nn.LayerNorm(width)
        self.feed_forward = FeedForward(width)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.attention(self.attention_norm(hidden))
        return hidden + self.feed_forward(self.feed_forward_norm(hidden))


class Transformer(nn.Module):
    """Tokens and those that follow them, both of shape (batch, sequence), to their mean loss."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.embedding = nn.Embedding(recipe.vocabulary, recipe.width)
        self.blocks = nn.ModuleList(Block(recipe.width, recipe.heads) for _ in range(recipe.blocks))
        self.norm = nn.LayerNorm(recipe.width)
        self.head = nn.Linear(recipe.width, recipe.vocabulary, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(self.norm(hidden))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def parallelize(model: Transformer, mesh: DeviceMesh) -> None:
    """Tensor and sequence parallelism along `tp`, then FSDP2 along `dp_shard`, in place."""
    sequence, whole = Shard(1), Replicate()
    parallelize_module(
        model,
        mesh["tp"],
        {
            "embedding": RowwiseParallel(input_layouts=whole, output_layouts=sequence),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=sequence, output_layouts=whole),
        },
    )
    for block in model.blocks:
        gather = PrepareModuleInput(input_layouts=(sequence,), desired_input_layouts=(whole,))
        parallelize_module(
            block,
            mesh["tp"],
            {
                "attention_norm": SequenceParallel(),
                "attention": gather,
                "attention.query": ColwiseParallel(),
                "attention.key": ColwiseParallel(),
                "attention.value": ColwiseParallel(),
                "attention.out": RowwiseParallel(output_layouts=sequence),
                "feed_forward_norm": SequenceParallel(),
                "feed_forward": gather,
                "feed_forward.up": ColwiseParallel(),
                "feed_forward.down": RowwiseParallel(output_layouts=sequence),
            },
        )
        fully_shard(block, mesh=mesh["dp_shard"])
    fully_shard(model, mesh=mesh["dp_shard"])


def train(
    recipe: Recipe,
    model: Transformer,
    report: Callable[[int, float], None],
    mesh: DeviceMesh | None = None,
) -> list[float]:
    """Train with AdamW on the recipe's batches.

    Args:
        recipe: what to train on.
        model: trained in place.
        report: called with each step and its loss.
        mesh: with a `dp_shard` axis, this rank trains on its share of every batch; without a mesh,
            on all of it.

    Returns:
        The loss of each step, averaged over the global batch.
    """
    shares = 1 if mesh is None else mesh["dp_shard"].size()
    mine = 0 if mesh is None else mesh["dp_shard"].get_local_rank()
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate)
    losses = []
    for step in range(recipe.steps):
        tokens = recipe.global_batch(step).chunk(shares)[mine]
        loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

        average = loss.detach().clone()
        if mesh is not None:  # shares are equal, so the average of averages is the average
            dist.all_reduce(average, group=mesh.get_group("dp_shard"))
            average /= shares
        losses.append(average.item())
        report(step, losses[-1])
    return losses


if __name__ == "__main__":
    print("A module, not a program: examples/demo.py imports it.")
