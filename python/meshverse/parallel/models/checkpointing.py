"""Activation checkpointing of a model's layers, in place and without renaming their parameters."""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import nn
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

from meshverse.parallel.config import CheckpointingMode, CheckpointingScope, checkpointing_parts

from .modules import child_name, has_forward, layer_lists
from .random_states import (
    host_random_states,
    same_host_random_states,
    set_host_random_states,
)
from .selective import selective_contexts
from .shared_objects import SharedObjects, tensor_version
from .trials import OF_EVERY_MODULE, leaves_in

# Patterns in names of modules for each part of a multimodal model; other modules are language.
_PARTS = {
    "vision": re.compile("vision|visual|image|vit"),
    "audio": re.compile("audio|speech"),
    "multimodal": re.compile("multi_?modal|projector|connector|merger"),
}


# Norms that update buffers in training: refused before the model changes, others in a forward.
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

    A layer's forward must be repeatable. It raises RuntimeError if it changes a buffer or, in its
    first run, leaves a tensor with gradients in an object that layers share. Numbers from Python's
    `random` and NumPy's global generator are drawn again, if the first run drew some.

    Args:
        model: the model, changed in place.
        mode: "full" or True to keep only a layer's inputs; "selective" to keep also the results of
            its matrix products and attention.
        scope: parts of the model, found by names of modules: "all", or one or more of "language",
            "vision", "audio" and "multimodal", in any form that `FSDP2Config` takes.

    Raises:
        ValueError: the mode or scope is unknown, the model has no layers in the scope, or one is
            checkpointed already, has a random generator, or is in training mode and has a norm with
            running statistics. The model is unchanged then.

    Example:
        >>> apply_activation_checkpointing(model, "full", "language")  # doctest: +SKIP
    """
    if mode is not True and mode not in ("full", "selective"):
        raise ValueError(f"mode={mode!r} must be 'full', True or 'selective'.")
    layers = checkpointed_layers(model, scope)
    settings: dict[str, Any] = {"use_reentrant": False}
    if mode == "selective":
        settings["context_fn"] = selective_contexts
    shared = SharedObjects({name: layer} for name, layer in layers.items())
    for name, layer in layers.items():
        # A partial, not a closure: deepcopy copies it, so that a copied model calls its own layers.
        watch = _Watch(name, layer, shared)
        layer.forward = partial(_checkpointed, layer.forward, settings, watch)
    for module in model.modules():  # a multimodal model's text model has a config of its own
        config: Any = vars(module).get("config")
        if hasattr(config, "use_cache"):
            config.use_cache = False


def checkpointed_layers(model: nn.Module, scope: CheckpointingScope) -> dict[str, nn.Module]:
    """Return the layers of a model in a checkpointing scope by name, each once.

    Raises:
        ValueError: there are none; or one has no forward, is checkpointed already, has a random
            generator, or is in training mode and has a norm with running statistics.
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
    lacking = [name for name, layer in named.items() if not has_forward(layer)]
    if lacking:
        raise ValueError(
            f"Activation checkpointing would do nothing for the layers {lacking[:4]} of "
            f"{type(model).__name__}, which have no forward: the model calls their parts itself. "
            "Give them a forward that calls their parts, or turn checkpointing off."
        )
    if not named:
        what = f"layers of {sorted(by_part)} only" if by_part else "no ModuleList of layers"
        raise ValueError(
            f"Activation checkpointing of {parts} would do nothing: {type(model).__name__} has "
            f"{what}. Choose another activation_checkpointing_scope, or turn checkpointing off."
        )
    forwards = [vars(layer).get("forward") for layer in named.values()]
    if any(isinstance(each, partial) and each.func is _checkpointed for each in forwards):
        raise ValueError(
            f"Layers of {type(model).__name__} in the scope {parts} are checkpointed already, and "
            "would be recomputed within a recomputation. Turn checkpointing on only once."
        )
    for name, layer in named.items():
        for own, each in layer.named_modules():
            if isinstance(each, _WITH_STATISTICS) and each.track_running_stats and each.training:
                raise ValueError(
                    f"Activation checkpointing runs the forward of the layer {name!r} of "
                    f"{type(model).__name__} twice, and so would update the running statistics of "
                    f"its {type(each).__name__} {own!r} twice in each step. Use another scope, a "
                    "norm without running statistics (track_running_stats=False, GroupNorm), or "
                    "turn checkpointing off."
                )
        if generator := _own_generator(layer):
            raise ValueError(
                f"The layer {name!r} of {type(model).__name__} has {generator}: activation "
                "checkpointing runs its forward twice, and would draw other random numbers the "
                "second time. Draw from torch's default generator, which checkpointing restores, "
                "use another scope, or turn checkpointing off."
            )
    once = {layer: name for name, layer in named.items()}  # a layer may be in two lists
    return {name: layer for layer, name in once.items()}


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


def _own_generator(layer: nn.Module) -> str:
    """Return type and name of a generator in a layer's attributes, in words; else ""."""
    kinds: tuple[Any, ...] = (torch.Generator, random.Random)
    if numpy := sys.modules.get("numpy.random"):
        kinds += (numpy.Generator, numpy.RandomState)
    for inside, module in layer.named_modules():
        for attribute, value in vars(module).items():
            for each in leaves_in(value) if attribute not in OF_EVERY_MODULE else ():
                if isinstance(each, kinds) and each is not torch.default_generator:
                    return f"the {type(each).__name__} {child_name(inside, attribute)!r}"
    return ""


class _Buffer(NamedTuple):
    """State of a buffer; kernels such as those of batch norm change values but not the version."""

    tensor: torch.Tensor | None = None
    version: int = 0
    value: torch.Tensor | None = None  # a copy of its bytes, if they are compared


_Buffers: TypeAlias = dict[tuple[nn.Module, str], _Buffer]  # by module and name


@dataclass(eq=False)
class _Watch:
    """Comparison of what a layer's forward must leave as it is, so that it can be repeated.

    The first forward, in which more is compared, took about 0.5 ms longer for a Llama layer, whose
    forward of 8 tokens took 2.5 ms on the same CPU.

    Args:
        name: name of the layer.
        layer: the layer.
        shared: objects that it may share with other layers.

    Attributes:
        with_buffers: modules of the layer that have buffers, once it has run; None before. Objects,
            random states, and values of buffers whose version is the same, are compared in the
            first run only: this is slow, and waits for the GPU.
        draws: whether the first run drew random numbers from Python's `random` or NumPy's global
            generator. Then backward draws the same ones again; `checkpoint` restores torch's.
    """

    name: str
    layer: nn.Module
    shared: SharedObjects
    with_buffers: list[nn.Module] | None = None
    draws: bool = False

    def state(self) -> _State:
        """Return what is compared after a forward."""
        if self.with_buffers is not None:
            random = host_random_states() if self.draws else None
            return _State(_buffers_of(self.with_buffers, with_values=False), random=random)
        buffers = _buffers_of(self.layer.modules(), with_values=True)
        return _State(buffers, self.shared.contents(), host_random_states())

    def check(self, before: _State) -> None:
        """Raise RuntimeError if a forward changed something since `before`."""
        cure = "If it only fills a cache, run the model once in torch.no_grad() first. Otherwise, "
        if changed := self._changed_buffer(before.buffers):
            what = f"changes its buffer {changed!r}"
        elif before.shared is not None and (changed := self.shared.graph_left_in(before.shared)):
            what = f"leaves a tensor with gradients in {changed}, which other layers refer to"
        else:
            if self.with_buffers is None:
                self.with_buffers = [each for each in self.layer.modules() if _own_buffers(each)]
                self.draws = before.random != host_random_states()
            return
        raise RuntimeError(
            f"The forward of the checkpointed layer {self.name!r} ({type(self.layer).__name__}) "
            f"{what}. Backward would run it again, do this once more, and might compute other "
            f"gradients. {cure}use an activation_checkpointing_scope without this layer, or turn "
            "checkpointing off."
        )

    def _changed_buffer(self, before: _Buffers) -> str:
        is_first = self.with_buffers is None
        modules = self.layer.modules() if self.with_buffers is None else self.with_buffers
        now = _buffers_of(modules, with_values=is_first)
        for key in {**before, **now}:
            if _is_changed(before.get(key, _Buffer()), now.get(key, _Buffer())):
                names = {module: name for name, module in self.layer.named_modules()}
                return child_name(names[key[0]], key[1])
        return ""


class _State(NamedTuple):
    """State of a layer and of what it shares, before a forward."""

    buffers: _Buffers
    shared: list[list[Any]] | None = None  # None if they are not compared, as `random`
    random: bytes | None = None


def _buffers_of(modules: Iterable[nn.Module], *, with_values: bool) -> _Buffers:
    return {
        (module, name): _Buffer(
            each, tensor_version(each), _value_of(each) if with_values else None
        )
        for module in modules
        for name, each in _own_buffers(module)
    }


def _own_buffers(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*module.named_buffers(recurse=False)]


def _value_of(tensor: torch.Tensor) -> torch.Tensor | None:
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or tensor.is_meta:
        return None
    whole = tensor.detach().resolve_conj().resolve_neg()
    return whole.clone(memory_format=torch.contiguous_format).flatten().view(torch.uint8)


def _is_changed(before: _Buffer, now: _Buffer) -> bool:
    if before.tensor is not now.tensor or before.version != now.version:
        return True
    if before.value is None or now.value is None:
        return False
    return not torch.equal(before.value, now.value)


def _checkpointed(
    forward: Callable[..., Any],
    settings: dict[str, Any],
    watch: _Watch,
    /,
    *arguments: Any,
    **keywords: Any,
) -> Any:
    if not torch.is_grad_enabled():
        return forward(*arguments, **keywords)
    before: _State | None = None

    def run(*arguments: Any) -> Any:
        nonlocal before
        # Code that torch.compile gets into one graph changes buffers once. It calls the rest, for
        # which torch does not compile a checkpointed layer, as if nothing was compiled.
        if torch.compiler.is_dynamo_compiling():
            return forward(*arguments, **keywords)
        if before is not None:  # backward repeats it
            if not (watch.draws and before.random):
                return forward(*arguments, **keywords)
            with same_host_random_states():
                set_host_random_states(before.random)
                return forward(*arguments, **keywords)
        before = watch.state()
        output = forward(*arguments, **keywords)
        watch.check(before)
        return output

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
