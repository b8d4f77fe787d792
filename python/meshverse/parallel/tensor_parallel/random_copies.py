"""Copies of modules with random weights, on which a trial runs their forwards."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from math import prod
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from meshverse._torch_compat.module_hooks import remove_forward_hooks
from meshverse.parallel.models.dropout import WithoutDropout
from meshverse.parallel.models.random_states import same_random_state

LARGE, _STEP = 1_000_000, 61  # elements of a large weight; random numbers from row to row of it


class Other(NamedTuple):
    """A copy, in float32, of a tensor that requires a gradient and is registered elsewhere.

    Attributes:
        copied: the copy.
        original: id of the tensor.
        dtype: of the tensor.
    """

    copied: Tensor
    original: int
    dtype: torch.dtype


class RandomCopies:
    """Copies of modules with random weights in float32, in training mode, without hooks.

    Attributes:
        others: tensors that the copied modules refer to.
    """

    def __init__(self, module: nn.Module) -> None:
        self._generator = torch.Generator().manual_seed(0)
        device = next(module.parameters()).device
        self.device = torch.device("cpu") if device.type == "meta" else device
        self._numbers: dict[float, Tensor] = {}  # of large weights, by their scale
        self._n_large = 0
        self.others: list[Other] = []

    def copy(self, module: nn.Module) -> nn.Module:
        """Return a copy of a module.

        Raises:
            TypeError: a forward would run the module itself.
            Exception: an attribute cannot be copied.
        """
        for inside in module.modules():
            forward = vars(inside).get("forward")
            if isinstance(forward, FunctionType) and forward.__closure__:
                raise TypeError(f"A copy would run {forward.__qualname__}, of the module itself.")
        memo: dict[int, Any] = {}
        for each in module.parameters():
            scale = each.shape[-1] ** -0.5 if each.ndim > 1 else 1.0
            memo[id(each)] = nn.Parameter(self._weight(each.shape, scale))
        for buffer in module.buffers():
            if buffer.is_meta:
                values = self.random(*buffer.shape)
                is_float = buffer.is_floating_point()
                memo[id(buffer)] = values if is_float else values.zero_().to(buffer.dtype)
        registered = {*map(id, memo.values())}
        copied = copy.deepcopy(module, memo)
        for key, each in memo.items():
            if isinstance(each, Tensor) and each.requires_grad and id(each) not in registered:
                self.others.append(Other(each, key, each.dtype))
                each.data = each.data.float()
        for buffer in copied.buffers():
            if buffer.is_floating_point():
                buffer.data = buffer.data.float()
        for inside in copied.modules():  # hooks of the user's are none of a trial's business
            remove_forward_hooks(inside)
        return copied.train()

    def random(self, *shape: int) -> Tensor:
        """Return normally distributed numbers."""
        given = torch.randn(shape, generator=self._generator, dtype=torch.float32, device="cpu")
        return given.to(self.device)

    def _weight(self, shape: torch.Size, scale: float) -> Tensor:
        """Return random numbers; for a large shape, a view in which they occur several times."""
        if prod(shape) < LARGE:
            return self.random(*shape) * scale
        *lead, last = shape
        offset = self._n_large % 997  # so that no two weights are equal
        self._n_large += 1
        step = min(last, _STEP)
        needed = offset + (prod(lead) - 1) * step + last
        if scale not in self._numbers or len(self._numbers[scale]) < needed:
            self._numbers[scale] = self.random(needed + 997) * scale
        strides = [prod(lead[dim + 1 :]) * step for dim in range(len(lead))]
        return self._numbers[scale].as_strided(shape, [*strides, 1], offset)

    @contextlib.contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Run with gradients, in full precision, and leave random states as they are."""
        with (
            torch.inference_mode(False),
            torch.enable_grad(),
            torch.autocast(self.device.type, enabled=False),
            self.device,
            WithoutDropout(),
            self.same_random_state(),
        ):
            yield

    def same_random_state(self) -> contextlib.AbstractContextManager[None]:
        """Set random states back on leaving: the next run draws the same numbers."""
        return same_random_state(self.device)
