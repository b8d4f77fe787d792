"""Tiny causal language models of several families, and their training on a share of each batch."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from rounding import rounding
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

VOCABULARY, BATCH, LENGTH, STEPS = 64, 8, 6, 2

# Models in float64 compute their norms, and `loss_of` its losses, in float32. Logits are summed
# over the vocabulary, gradients over the fewer tokens of a batch. Up to five layers, of about a
# dozen operations each, are gone through forward and backward in each step.
BOUND = rounding(torch.float32, terms=VOCABULARY, steps=5 * 12 * 2 * STEPS)  # about 2e-3

_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "pad_token_id": None,
}
FAMILIES = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {"head_dim": 8}),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", {"head_dim": 8, "sliding_window": 4}),
}


def make_model(family: str = "llama", **changed: Any) -> nn.Module:
    """A model with its first weights, the same each time.

    Args:
        family: one of `FAMILIES`.
        changed: fields of its config that shall be others.
    """
    import transformers

    config_name, model_name, own = FAMILIES[family]
    fields = {**_SIZES, **own, "attn_implementation": "eager", **changed}
    config = getattr(transformers, config_name)(**fields)
    config.use_cache = False
    torch.manual_seed(17)
    return getattr(transformers, model_name)(config).train()


def batch(step: int) -> Tensor:
    """Token ids of a step, shape (BATCH, LENGTH): each follows from the one before it."""
    generator = torch.Generator().manual_seed(step)
    first = torch.randint(VOCABULARY, (BATCH, 1), generator=generator)
    return (first + torch.arange(LENGTH)) % VOCABULARY


def full(tensor: Tensor) -> Tensor:
    """The whole of a tensor, which may be a DTensor."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """Mean loss of predicting each next token."""
    logits = full(model(input_ids=tokens, use_cache=False).logits)
    return nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten()
    )


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)


def train(model: nn.Module, data: Any = None, *, steps: range = range(STEPS)) -> list[float]:
    """Train in place on my share of each batch.

    Args:
        model: whose gradients are averages over the shares.
        data: 1-D mesh of the ranks that have a share each; None for whole batches.
        steps: which.

    Returns:
        Loss of the whole batch in each step.
    """
    optimizer, losses = make_optimizer(model), []
    shares, mine = (1, 0) if data is None else (data.size(), data.get_local_rank())
    for step in steps:
        loss = loss_of(model, batch(step).chunk(shares)[mine])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        whole = loss.detach().clone()
        if data is not None:
            dist.all_reduce(whole, group=data.get_group())
        losses.append(whole.item() / shares)
    return losses


def full_weights(model: nn.Module) -> dict[str, Tensor]:
    """Whole weights by name, without the names that wrappers put in between."""
    return {
        name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", ""): (
            full(weight).detach().clone()
        )
        for name, weight in model.named_parameters()
    }
