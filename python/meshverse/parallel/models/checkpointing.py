"""Activation checkpointing of a model's layers, in place and without renaming their parameters.

Example:
    >>> apply_activation_checkpointing(model, "full", "language")  # doctest: +SKIP
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from meshverse.parallel.config import CheckpointingScope, checkpointing_parts

from .layers import layer_lists

__all__ = ["apply_activation_checkpointing"]

# By what modules are called in multimodal models; anything else is language.
_PARTS = {
    "vision": re.compile("vision|visual|image|vit"),
    "audio": re.compile("audio|speech"),
    "multimodal": re.compile("multi_?modal|projector|connector|merger"),
}

# Costly to compute again for what they take to keep.
_KEPT = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
}


def apply_activation_checkpointing(
    model: nn.Module,
    mode: Literal[True, "full", "selective"] = "full",
    scope: CheckpointingScope = "all",
) -> None:
    """Let each layer of a model forget its activations, and compute them again in backward.

    Layers are the items of the outermost ModuleLists and ModuleDicts. Their `forward` is replaced;
    names in the state dict stay. A transformers model's `config.use_cache` becomes False, because
    a layer that runs twice would fill its cache twice.

    Args:
        model: in place.
        mode: "full" or True keeps a layer's inputs only, "selective" the results of its matrix
            products too.
        scope: which parts of the model: "all", or of "language", "vision", "audio" and
            "multimodal", by the names of the modules around the layers; in all forms that
            `FSDP2Config` takes.

    Raises:
        ValueError: an unknown mode or scope. Nothing is changed then.
    """
    if mode is not True and mode not in ("full", "selective"):
        raise ValueError(f"mode={mode!r}: expected 'full', True or 'selective'.")
    parts = checkpointing_parts(scope)
    settings: dict[str, Any] = {"use_reentrant": False}
    if mode == "selective":
        settings["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
    for name, layer in chain.from_iterable(layer_lists(model)):
        if "all" in parts or _part(name) in parts:
            # Not a closure: a copy of the model must call its own layers, not those of this one.
            layer.forward = partial(_checkpointed, layer.forward, settings)
    config: Any = getattr(model, "config", None)
    if hasattr(config, "use_cache"):
        config.use_cache = False


def _checkpointed(
    forward: Callable[..., Any], settings: dict[str, Any], *arguments: Any, **keywords: Any
) -> Any:
    if not torch.is_grad_enabled():
        return forward(*arguments, **keywords)
    return checkpoint(forward, *arguments, **settings, **keywords)


def _policy(context: Any, operator: Any, *arguments: Any, **keywords: Any) -> CheckpointPolicy:
    if operator in _KEPT:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def _part(name: str) -> str:
    return next((part for part, words in _PARTS.items() if words.search(name)), "language")
