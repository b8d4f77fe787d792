"""Pipelines of a tiny Llama, and the loss that they are trained with."""

from __future__ import annotations

from typing import Any

from tiny_models import make_model
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn import functional as F

from meshverse import init_device_mesh
from meshverse.parallel import PipelineSchedule, pipeline_schedule, pipeline_stages

EXACT = MixedPrecisionPolicy()


def make(layers: int = 4, *, tied: bool = False, **fields: Any) -> nn.Module:
    """A Llama with its first weights, the same each time."""
    return make_model(num_hidden_layers=layers, tie_word_embeddings=tied, **fields)


def make_pipeline(model: nn.Module, pp_size: int = 2) -> PipelineSchedule:
    """A pipeline over the whole world, with four microbatches."""
    mesh = init_device_mesh("cpu", (pp_size,), mesh_dim_names=("pp",))
    return pipeline_schedule(pipeline_stages(model, mesh), mesh, loss_of, 4)


def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
    """Mean loss of predicting each next token."""
    targets = tokens.roll(-1, 1)  # the last token is to be followed by the first
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
