"""How a transformers model runs its layers: found by running it once with empty layers.

Example:
    >>> structure = describe(model)  # doctest: +SKIP
    >>> structure.layers, structure.before, structure.after  # doctest: +SKIP
    ('layers', ('embed_tokens',), ('norm',))
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from .trial import Trial

__all__ = ["Structure", "describe"]


@dataclass(frozen=True)
class Structure:
    """What a stage must know of a model.

    Attributes:
        inner: name of the module that runs the layers, empty for the model itself.
        layers: name of their list in it.
        count: of the layers.
        before: children of the inner module that run before the layers and have parameters.
        after: children of it that run after the layers and have parameters.
        in_tuples: whether a layer gives a tuple, of which the hidden states are the first.
    """

    inner: str
    layers: str
    count: int
    before: tuple[str, ...]
    after: tuple[str, ...]
    in_tuples: bool


def describe(model: nn.Module) -> Structure:
    """How a model runs its layers.

    Raises:
        ValueError: it cannot be split into stages, with the reason. The model is as it was.
    """
    config: Any = getattr(model, "config", None)
    inner_name, layers = _find_layers(model, config)
    inner = model.get_submodule(inner_name)
    if layers is None:
        raise _refusal(
            model,
            f"{type(inner).__name__} has no list of as many layers as its config says, as language "
            "models of transformers have",
        )
    if reason := _needs_all_layers(config):
        raise _refusal(model, reason)
    trials = [Trial(inner, layers, in_tuples=each) for each in (False, True)]
    for trial in trials:
        if trial.run():
            before, after = trial.sides()
            return Structure(inner_name, layers, trial.count, before, after, trial.in_tuples)
    # Of a trial that gave what the model does not take, only the first layer ran.
    raise _refusal(model, max(reversed(trials), key=lambda trial: trial.layers_run).reason)


def _refusal(model: nn.Module, reason: str) -> ValueError:
    return ValueError(
        f"{type(model).__name__} cannot be split into pipeline stages: {reason}. Train it without "
        "pipeline parallelism (pp_size=1), or split it by hand with torch.distributed.pipelining."
    )


def _find_layers(model: nn.Module, config: Any) -> tuple[str, str | None]:
    """Name of the module that runs the decoder layers, and of their list in it."""
    prefix = getattr(model, "base_model_prefix", "")
    children = dict(model.named_children())
    for name in (prefix, "model", ""):
        inner = model if name == "" else children.get(name)
        layers = None if inner is None or config is None else _layers(inner, config)
        if layers is not None:
            return name, layers
    return prefix if prefix in children else "", None


def _layers(inner: nn.Module, config: Any) -> str | None:
    count = getattr(config, "num_hidden_layers", None)
    lists = {
        name: child for name, child in inner.named_children() if isinstance(child, nn.ModuleList)
    }
    fitting = [name for name, child in lists.items() if len(child) == count]
    return "layers" if "layers" in lists else next(iter(fitting), None)


def _needs_all_layers(config: Any) -> str:
    """What layers hand to each other beside hidden states, and losses over all layers."""
    shared = getattr(config, "num_kv_shared_layers", None)
    if shared:
        return f"its last {shared} layers (num_kv_shared_layers) use the keys of earlier ones"
    if getattr(config, "output_router_logits", False):
        return (
            "config.output_router_logits=True adds a loss over the routers of all layers, and a "
            "stage has some of them"
        )
    return ""
