"""Selective checkpointing that is right for layers that change kept results in place.

torch's own notices a change only through the version of the result itself. `_unsafe_view`, which
follows the `mm` or `bmm` of every 3-D product, gives its result a version of its own. So torch then
computes gradients from the changed product. Here, a product that was changed is computed again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from meshverse._torch_compat.dispatch import (
    DispatchMode,
    argument_of,
    detached,
    is_traced,
    plain_tensors,
    tensors_in,
    version_of,
    written_by,
)

# Operators whose results are kept: computing them again costs much for the memory saved.
_ATTENTION = [f"{kind}_attention" for kind in ("flash", "efficient", "cudnn")]
_ATTENTION += ["flash_attention_for_cpu"]
_KEPT = {
    getattr(torch.ops.aten, name).default
    for name in ("mm", "addmm", "bmm", *(f"_scaled_dot_product_{each}" for each in _ATTENTION))
}


def selective_contexts() -> tuple[Any, Any]:
    """Return the contexts of a layer's forward and of its recomputation, for `checkpoint`.

    While torch.compile traces, they are torch's, which mark the operators of a graph. A graph has
    no changes in place.
    """
    if is_traced():
        contexts: tuple[Any, Any] = create_selective_checkpoint_contexts(_policy)  # type: ignore[no-untyped-call]
        return contexts
    results: list[_Result] = []
    return _Keeping(results), _Reusing(results)


def _policy(context: Any, operator: Any, *arguments: Any, **keywords: Any) -> CheckpointPolicy:
    if operator in _KEPT:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


class _Result:
    """The result of one call of an operator, until it is changed or used.

    Args:
        operator: what was called.
        value: its result, and None if that cannot be kept.
    """

    def __init__(self, operator: Any, value: Any) -> None:
        self.operator = operator
        self.is_used = False
        # Detached, as the value itself will refer to the graph, which refers to this.
        self._value = _detached(value)
        # A storage is the same object for all its tensors, as long as that object is referred to.
        self.storages = [each.untyped_storage() for each in _plain_tensors(value)]
        self._versions: list[tuple[torch.Tensor, int]] = []
        self.watch(value)

    def watch(self, value: Any) -> None:
        """Note a value in the memory of this result: a change of it changes the result."""
        for each in _plain_tensors(value):
            alias = detached(each)
            self._versions.append((alias, version_of(alias)))

    def drop(self) -> None:
        self._value = None
        self.storages.clear()
        self._versions.clear()

    def take(self) -> Any:
        """Return the value and drop it; None if it was changed or could not be kept."""
        is_changed = any(version_of(each) != then for each, then in self._versions)
        value = None if is_changed else self._value
        self.is_used = True
        self.drop()
        return value


class _Keeping(DispatchMode):  # type: ignore[misc]
    """Runs a layer's forward, and keeps the results of some operators."""

    supports_higher_order_operators = True

    def __init__(self, results: list[_Result]) -> None:
        super().__init__()
        self._results = results
        self._by_storage: dict[int, _Result] = {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(
        self, operator: Any, types: Any, arguments: Any = (), keywords: Any = None
    ) -> Any:
        keywords = keywords or {}
        for written in written_by(operator, arguments, keywords):
            for result in self._results_in(written):
                result.drop()
        value = operator(*arguments, **keywords)
        if operator in _KEPT:
            can_be_kept = _can_be_kept(operator, value, arguments, keywords)
            result = _Result(operator, value if can_be_kept else None)
            self._results.append(result)
            self._by_storage.update((id(each), result) for each in result.storages)
        else:
            for result in self._results_in(value):
                result.watch(value)
        return value

    def _results_in(self, value: Any) -> Iterator[_Result]:
        """Yield the kept results in whose memory a value is."""
        for each in _plain_tensors(value):
            storage = each.untyped_storage()
            result = self._by_storage.get(id(storage))
            # A result that was dropped no longer holds its storage: this may be a new one.
            if result is not None and result.storages:
                yield result


class _Reusing(DispatchMode):  # type: ignore[misc]
    """Runs a layer's forward again, with the results that were kept."""

    supports_higher_order_operators = True

    def __init__(self, results: list[_Result]) -> None:
        super().__init__()
        self._results = results
        self._place = 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __enter__(self) -> Any:
        self._place = 0
        super().__enter__()
        return self

    def __torch_dispatch__(
        self, operator: Any, types: Any, arguments: Any = (), keywords: Any = None
    ) -> Any:
        keywords = keywords or {}
        if operator not in _KEPT:
            return operator(*arguments, **keywords)
        result = self._results[self._place] if self._place < len(self._results) else None
        self._place += 1
        if result is None or result.operator is not operator:
            kept = result.operator if result else "nothing"
            raise RuntimeError(
                f"A checkpointed layer computes other products in backward: product {self._place} "
                f"is {operator}, but was {kept} in forward. A layer must run the same operators "
                "each time; otherwise turn its activation checkpointing off."
            )
        if result.is_used:
            raise RuntimeError(
                "A second backward through a layer needs results that the first one used. Call "
                'backward once for each forward, or use activation_checkpointing="full".'
            )
        value = result.take()
        return operator(*arguments, **keywords) if value is None else value


def _can_be_kept(operator: Any, value: Any, arguments: Any, keywords: Any) -> bool:
    # Later random numbers would be others, if those of dropout were not drawn again. Inference
    # tensors have no versions.
    return not argument_of(operator, "dropout_p", arguments, keywords) and not any(
        each.is_inference() for each in tensors_in(value)
    )


def _detached(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(_detached(each) for each in value)
    return detached(value) if isinstance(value, torch.Tensor) else value


def _plain_tensors(value: Any) -> Iterator[torch.Tensor]:
    for tensor in tensors_in(value):
        yield from plain_tensors(tensor)
