"""Activation checkpointing of a model's layers, in place and without renaming their parameters."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Any, Literal

import torch
from torch import nn
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

from meshverse.parallel.config import CheckpointingMode, CheckpointingScope, checkpointing_parts

from .modules import has_forward, layer_lists
from .selective import selective_contexts

# Patterns in names of modules for each part of a multimodal model; other modules are language.
_PARTS = {
    "vision": re.compile("vision|visual|image|vit"),
    "audio": re.compile("audio|speech"),
    "multimodal": re.compile("multi_?modal|projector|connector|merger"),
}


# Norms that may update buffers in their forward.
_WITH_STATISTICS = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
)


def apply_activation_checkpointing(
    model: nn.Module,
    mode: Literal[True, "full", "selective"] = "full",
    scope: CheckpointingScope = "all",
) -> None:
    """Make each layer of a model drop its activations and recompute them in backward.

    Layers are the items of the outermost ModuleLists and ModuleDicts. Their `forward` is replaced;
    names in the state dict are unchanged. In the configs of a transformers model and of all its
    parts, `use_cache` becomes False, because a layer that runs twice would fill its cache twice.

    Args:
        model: the model, changed in place.
        mode: "full" or True to keep only a layer's inputs; "selective" to keep also the results of
            its matrix products and attention.
        scope: parts of the model, found by names of modules: "all", or one or more of "language",
            "vision", "audio" and "multimodal", in any form that `FSDP2Config` takes.

    Raises:
        ValueError: the mode or scope is unknown, the model has no layers in the scope, or one is
            checkpointed already, or keeps running statistics. The model is unchanged then.

    Example:
        >>> apply_activation_checkpointing(model, "full", "language")  # doctest: +SKIP
    """
    if mode is not True and mode not in ("full", "selective"):
        raise ValueError(f"mode={mode!r} must be 'full', True or 'selective'.")
    layers = checkpointed_layers(model, scope)
    settings: dict[str, Any] = {"use_reentrant": False}
    if mode == "selective":
        settings["context_fn"] = selective_contexts
    for layer in layers:
        # A partial, not a closure: deepcopy copies it, so that a copied model calls its own layers.
        layer.forward = partial(_checkpointed, layer.forward, settings)
    for module in model.modules():  # a multimodal model's text model has a config of its own
        config: Any = vars(module).get("config")
        if hasattr(config, "use_cache"):
            config.use_cache = False


def checkpointed_layers(model: nn.Module, scope: CheckpointingScope) -> list[nn.Module]:
    """Return the layers of a model in a checkpointing scope, each once.

    Raises:
        ValueError: there are none; or one has no forward, is checkpointed already, or keeps running
            statistics.
    """
    parts = checkpointing_parts(scope)
    by_part: dict[str, dict[str, nn.Module]] = {}
    for name, layer in chain.from_iterable(layer_lists(model)):
        part = next((part for part, words in _PARTS.items() if words.search(name)), "language")
        by_part.setdefault(part, {})[name] = layer
    chosen = by_part if "all" in parts else by_part.keys() & set(parts)
    named = {
        n: each for part, some in by_part.items() if part in chosen for n, each in some.items()
    }
    layers = list(named.values())
    lacking = [name for name, layer in named.items() if not has_forward(layer)]
    if lacking:
        raise ValueError(
            f"Activation checkpointing would do nothing for the layers {lacking[:4]} of "
            f"{type(model).__name__}, which have no forward: the model calls their parts itself. "
            "Give them a forward that calls their parts, or turn checkpointing off."
        )
    if not layers:
        what = f"layers of {sorted(by_part)} only" if by_part else "no ModuleList of layers"
        raise ValueError(
            f"Activation checkpointing of {parts} would do nothing: {type(model).__name__} has "
            f"{what}. Choose another activation_checkpointing_scope, or turn checkpointing off."
        )
    forwards = [vars(layer).get("forward") for layer in layers]
    if any(isinstance(each, partial) and each.func is _checkpointed for each in forwards):
        raise ValueError(
            f"Layers of {type(model).__name__} in the scope {parts} are checkpointed already, and "
            "would be recomputed within a recomputation. Turn checkpointing on only once."
        )
    for name, layer in named.items():
        for own, each in layer.named_modules():
            if isinstance(each, _WITH_STATISTICS) and each.track_running_stats:
                raise ValueError(
                    f"Activation checkpointing runs the forward of the layer {name!r} of "
                    f"{type(model).__name__} twice, and so would update the running statistics of "
                    f"its {type(each).__name__} {own!r} twice in each step. Use another scope, a "
                    "norm without running statistics (track_running_stats=False, GroupNorm), or "
                    "turn checkpointing off."
                )
    return list(dict.fromkeys(layers))  # a layer may be in two lists


def prepare(
    model: nn.Module,
    mode: CheckpointingMode,
    scope: CheckpointingScope,
    reapply_trainability: Callable[[nn.Module], None] | None,
) -> None:
    """Apply activation checkpointing, if `mode` is set, then call `reapply_trainability`.

    Strategies call this after they split a model and before they shard it.
    """
    if mode:
        apply_activation_checkpointing(model, mode, scope)
    if reapply_trainability is not None:
        reapply_trainability(model)


def _checkpointed(
    forward: Callable[..., Any], settings: dict[str, Any], /, *arguments: Any, **keywords: Any
) -> Any:
    if not torch.is_grad_enabled():
        return forward(*arguments, **keywords)

    def run(*arguments: Any) -> Any:
        return forward(*arguments, **keywords)

    # Keywords in a closure: `checkpoint` would take those that have the names of its own settings.
    output = checkpoint(run, *arguments, **settings)
    if "context_fn" in settings and torch.compiler.is_dynamo_compiling():
        return tree_map_only(torch.Tensor, _copied, output)
    return output


def _copied(output: torch.Tensor) -> torch.Tensor:
    """Return a copy of a compiled layer's output, which the compiler keeps apart from products.

    A compiled layer does not notice when code outside it changes a product that it keeps. Inductor
    drops `clone` and merges memory again, but fuses this with what computes the output.
    """
    if not output.is_floating_point():
        return output.clone()
    return torch.maximum(output, output)
