"""Layers of a model, compiled one by one and in place.

Example:
    >>> compile_layers(model)  # doctest: +SKIP
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from itertools import chain
from typing import Any

from torch import Tensor, nn

from .layers import layer_lists

__all__ = ["compile_layers", "warn_of_async_tensor_parallel"]

_logger = logging.getLogger(__name__)


def compile_layers(model: nn.Module) -> None:
    """Compile the items of the outermost ModuleLists and ModuleDicts of a model, in place."""
    layers = [layer for _, layer in chain.from_iterable(layer_lists(model))]
    _wait_for_embeddings(model, layers)
    for layer in layers:
        layer.compile()


def warn_of_async_tensor_parallel() -> None:
    """Say that this setting does nothing."""
    _logger.warning(
        "enable_async_tensor_parallel has no effect: torch has no public switch for it."
    )


def _wait_for_embeddings(model: nn.Module, layers: Iterable[nn.Module]) -> None:
    """Let the embeddings outside the layers hand out tensors that are there already.

    One that is split by rows gives a tensor whose all-reduce is still under way. A compiled layer
    (seen with torch 2.13) computes the right output from it, but passes its gradient on to
    the wrong place, so that the embedding learns nothing.
    """
    inside = {id(module) for layer in layers for module in layer.modules()}
    for module in model.modules():
        if isinstance(module, nn.Embedding) and id(module) not in inside:
            module.register_forward_hook(_finished)


def _finished(module: nn.Module, arguments: Any, output: Tensor) -> Tensor:
    # A tensor under way is of a class of its own. Views of it do not wait; a copy does.
    return output if type(output) is Tensor else output.clone()
