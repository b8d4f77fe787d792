"""What a pipeline can train on: checked on every rank, before anything is sent.

A rank that refuses a batch in the middle of a step leaves the others waiting for it.

Example:
    >>> batches = Batches(n_microbatches=2, n_stages=2)
    >>> tokens = torch.zeros(4, 6, dtype=torch.int64)
    >>> batches.check(tokens, tokens)
    >>> for_all = {"position_ids": torch.arange(6)[None]}
    >>> for_each_sequence(for_all, tokens)["position_ids"].shape
    torch.Size([4, 6])
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from torch.utils._pytree import tree_map

__all__ = ["Batches", "for_each_sequence"]


class Batches:
    """The batches of one schedule of torch, which all have the shape of the first.

    Args:
        n_microbatches: parts that a batch is split into.
        n_stages: of the model; one alone receives nothing, and takes any shapes.
    """

    def __init__(self, n_microbatches: int, n_stages: int) -> None:
        self._n_microbatches = n_microbatches
        self._has_peers = n_stages > 1
        self._first: tuple[torch.Size, torch.dtype] | None = None

    def check(self, inputs: Tensor, target: Tensor) -> None:
        """Check a batch. The same on all ranks of the pipeline.

        Raises:
            ValueError: the microbatches do not divide it, or its shape or dtype is another than
                that of the first batch.
        """
        if inputs.ndim < 2 or not target.ndim:
            raise ValueError(
                f"Inputs of shape {tuple(inputs.shape)} and targets of shape "
                f"{tuple(target.shape)}: expected inputs of shape (batch, tokens), and targets "
                "whose first dimension is the batch's. One sequence is inputs[None]."
            )
        batch, count = inputs.size(0), self._n_microbatches
        if not batch or batch % count or target.size(0) != batch:
            raise ValueError(
                f"A batch of {batch} sequences with {target.size(0)} targets does not divide into "
                f"{count} microbatches. Choose n_microbatches that divides the batch of this rank."
            )
        if self._first is not None and self._first != (inputs.shape, inputs.dtype):
            shape, dtype = self._first
            raise ValueError(
                f"A batch of shape {tuple(inputs.shape)}, {inputs.dtype}, after a first one of "
                f"shape {tuple(shape)}, {dtype}: torch's stages receive one shape and dtype. Pad "
                "batches to one length and drop the last of an epoch if it is smaller, or make "
                "another pipeline_schedule for them."
            )

    def has_run(self, inputs: Tensor) -> None:
        """Note a batch with which the stages have prepared what they receive."""
        if self._first is None and self._has_peers:
            self._first = (inputs.shape, inputs.dtype)


def for_each_sequence(keywords: Mapping[str, Any], inputs: Tensor) -> dict[str, Any]:
    """Keywords whose tensors all have the batch as their first dimension: torch splits them by it.

    Args:
        keywords: tensors among them, or in lists or dictionaries that they are, are for each
            sequence or, with a first dimension of 1, the same for all.
        inputs: shape (batch, tokens) or (batch, tokens, features).

    Raises:
        ValueError: a tensor has another first dimension, or one dimension that may be either that
            of the sequences or that of the tokens.
    """
    return {
        name: tree_map(
            partial(_expanded, name, inputs),
            value,
            is_leaf=lambda each: isinstance(each, BlockMask),
        )
        for name, value in keywords.items()
    }


def _expanded(name: str, inputs: Tensor, value: Any) -> Any:
    batch, tokens = inputs.shape[:2]
    if isinstance(value, BlockMask):  # torch takes 1 for all sequences here
        _check_first(name, tuple(value.shape), (1, batch), batch)
    if not isinstance(value, Tensor):
        return value
    if value.ndim == 1 and value.size(0) == batch == tokens:
        raise ValueError(
            f"{name} has {batch} elements, and the batch has {batch} sequences of {tokens} tokens: "
            f"one for each sequence, or for each token? Give {name}[None] for the tokens of all "
            f"sequences, or {name}[:, None] for the sequences."
        )
    allowed = (batch,) if value.ndim == 1 else (1, batch)
    _check_first(name, tuple(value.shape), allowed, batch)
    return value if value.size(0) == batch else value.expand(batch, *value.shape[1:])


def _check_first(name: str, shape: tuple[int, ...], allowed: tuple[int, ...], batch: int) -> None:
    if not shape or shape[0] not in allowed:
        raise ValueError(
            f"{name} has the shape {shape}, and the batch has {batch} sequences: tensors are split "
            "by sequences, in their first dimension. What is the same for all sequences needs a "
            f"first dimension of 1, as {name}[None]; a single number is no tensor, as "
            f"{name}.item()."
        )
