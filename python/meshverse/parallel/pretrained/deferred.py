"""Tensors that are read or computed only where and when their elements are asked for.

transformers' conversions of checkpoints (stack the experts, concatenate gates and other features,
transpose) run on a `Deferred` as on any tensor, and read nothing. `read_into` then gets any box of
the result, and reads only the elements of the sources that are in it. An operation that is no
movement of elements is run on whole tensors.

Example:
    >>> rows, more = Deferred(Known(torch.arange(6).view(2, 3))), Deferred(Known(torch.ones(2, 3)))
    >>> both = torch.stack([rows, more]).transpose(1, 2)
    >>> both.shape, read(source_of(both), [(0, 1), (1, 2), (0, 2)])
    (torch.Size([2, 3, 2]), tensor([[[1., 4.]]]))
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, count
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from meshverse._torch_compat.wrapper_tensors import changes_its_inputs, tensor_without_memory

# For each dimension: the first index, and the one after the last.
Box = Sequence[tuple[int, int]]

_ATEN = torch.ops.aten
# transformers' mark of tensors that it does not initialize, as they are loaded. Some models forget
# it for a part of a parameter.
_LOADED = "_is_hf_initialized"
_COMPARED = 1 << 22  # elements of two tensors that are compared at a time


class Source(ABC):
    """Elements that can be read, a box at a time.

    Attributes:
        shape: of all elements.
        dtype: that a tensor of them has.
        computes: whether its elements are computed, and not those of its inputs.
    """

    shape: torch.Size
    dtype: torch.dtype
    computes: bool = False

    @abstractmethod
    def read_into(self, box: Box, out: Tensor) -> None:
        """Copy the elements of a box into a tensor of the box's shape, cast to its dtype."""

    def inputs(self) -> Iterable[Source]:
        """Yield the sources that this one is computed from."""
        return ()

    def leaves(self) -> Iterator[Source]:
        """Yield the sources at the beginning, those of several uses more than once."""
        inputs = list(self.inputs())
        if not inputs:
            yield self
        for each in inputs:
            yield from each.leaves()

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return math.prod(self.shape) * self.dtype.itemsize


def whole(source: Source) -> Box:
    """Return the box of all elements."""
    return [(0, size) for size in source.shape]


def read(source: Source, box: Box | None = None) -> Tensor:
    """Return the elements of a box, or all, as a tensor on the CPU."""
    box = whole(source) if box is None else box
    out = torch.empty([high - low for low, high in box], dtype=source.dtype, device="cpu")
    if out.numel():
        source.read_into(box, out)
    return out


class Known(Source):
    """Elements of a tensor in memory."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.shape, self.dtype = tensor.shape, tensor.dtype

    def read_into(self, box: Box, out: Tensor) -> None:
        """Copy the elements of a box."""
        out.copy_(self.tensor[tuple(slice(*each) for each in box)])


class _View(Source):
    """Part of a source, with its dimensions in another order.

    Args:
        source: of the elements.
        dims: for each dimension, that of the source; None for a new one of size 1. Dimensions of
            the source that are left out have one element.
        starts: for each dimension of the source, its first element.
        sizes: for each dimension, its size.
    """

    def __init__(
        self,
        source: Source,
        dims: Sequence[int | None],
        starts: Sequence[int],
        sizes: Sequence[int],
    ) -> None:
        self._source, self._dims, self._starts = source, dims, starts
        self.shape, self.dtype = torch.Size(sizes), source.dtype

    def inputs(self) -> Iterable[Source]:
        return (self._source,)

    def read_into(self, box: Box, out: Tensor) -> None:
        inner = [(start, start + 1) for start in self._starts]
        kept: list[int] = []
        for own, dim in reversed([*enumerate(self._dims)]):
            if dim is None:
                out = out.squeeze(own)
                continue
            kept.insert(0, dim)
            low, high = box[own]
            inner[dim] = self._starts[dim] + low, self._starts[dim] + high
        out = out.permute([kept.index(dim) for dim in sorted(kept)])
        for dim in range(len(self._starts)):
            if dim not in kept:
                out = out.unsqueeze(dim)
        self._source.read_into(inner, out)


class _Concatenation(Source):
    def __init__(self, sources: Sequence[Source], dim: int) -> None:
        self._sources, self._dim = sources, dim
        sizes = list(sources[0].shape)
        sizes[dim] = sum(each.shape[dim] for each in sources)
        self.shape, self.dtype = torch.Size(sizes), sources[0].dtype
        for each in sources[1:]:
            self.dtype = torch.promote_types(self.dtype, each.dtype)

    def inputs(self) -> Iterable[Source]:
        return self._sources

    def read_into(self, box: Box, out: Tensor) -> None:
        first, last = box[self._dim]
        begin = 0
        for source in self._sources:
            end = begin + source.shape[self._dim]
            low, high = max(first, begin), min(last, end)
            if low < high:
                inner = list(box)
                inner[self._dim] = low - begin, high - begin
                source.read_into(inner, out.narrow(self._dim, low - first, high - low))
            begin = end


class _Cast(Source):
    """Source in another dtype. Elements are cast once, to the dtype in which they are read."""

    def __init__(self, source: Source, dtype: torch.dtype) -> None:
        self._source, self.shape, self.dtype = source, source.shape, dtype

    def inputs(self) -> Iterable[Source]:
        return (self._source,)

    def read_into(self, box: Box, out: Tensor) -> None:
        self._source.read_into(box, out)


class _Reshaped(Source):
    """Source in another shape. Of dimensions that are split or merged, all elements are read."""

    def __init__(self, source: Source, shape: Sequence[int]) -> None:
        self._source, self.shape, self.dtype = source, torch.Size(shape), source.dtype

    def inputs(self) -> Iterable[Source]:
        return (self._source,)

    def read_into(self, box: Box, out: Tensor) -> None:
        inner: list[tuple[int, int]] = []
        sizes, left = [], []  # of the outer dimensions once they are read, and what is left of them
        for before, after in _matched(self._source.shape, self.shape):
            own = box[after.start : after.stop]
            if len(before) == len(after) == 1:
                inner += own
                left += [(0, high - low) for low, high in own]
                sizes += [high - low for low, high in own]
            else:
                inner += [(0, self._source.shape[dim]) for dim in before]
                left += own
                sizes += [self.shape[dim] for dim in after]
        out.copy_(read(self._source, inner).view(sizes)[tuple(slice(*each) for each in left)])


def _matched(before: Sequence[int], after: Sequence[int]) -> Iterator[tuple[range, range]]:
    """Yield the shortest runs of dimensions of two shapes that have as many elements."""
    i = j = 0
    while i < len(before) or j < len(after):
        first, second = i, j
        left = right = 1
        if i < len(before) and j < len(after):
            left, right, i, j = before[i], after[j], i + 1, j + 1
        while left != right or (i == len(before)) != (j == len(after)):
            if i < len(before) and (left < right or j == len(after)):
                left, i = left * before[i], i + 1
            else:
                right, j = right * after[j], j + 1
        yield range(first, i), range(second, j)


class _Result(Source):
    """One output of an operation that is run on whole tensors each time a box of it is read."""

    computes = True

    def __init__(self, call: Callable[[], Any], inputs: list[Source], index: int, like: Tensor):
        self._call, self._inputs, self._index = call, inputs, index
        self.shape, self.dtype = like.shape, like.dtype

    def inputs(self) -> Iterable[Source]:
        return self._inputs

    def read_into(self, box: Box, out: Tensor) -> None:
        result = [each for each in tree_leaves(self._call()) if isinstance(each, Tensor)]
        out.copy_(result[self._index][tuple(slice(*each) for each in box)])


class Deferred(Tensor):
    """Tensor without memory. Operations on it return others, and read nothing."""

    _source: Source

    @staticmethod
    def __new__(cls, source: Source) -> Deferred:  # noqa: D102, PYI034
        tensor: Deferred = tensor_without_memory(cls, source.shape, source.dtype)
        tensor._source = source
        return tensor

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Deferred(shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, operator: Any, types: Any, arguments: Any = (), keywords: Any = None
    ) -> Any:
        first: Any = arguments[0] if arguments else None
        is_loaded = getattr(first, _LOADED, False)
        if is_loaded and changes_its_inputs(operator):
            return first
        rule = _RULES.get(operator)
        result = rule(*arguments, **(keywords or {})) if rule else None
        if result is None:
            return _call(operator, arguments, keywords or {})

        def deferred(each: Any) -> Any:
            if not isinstance(each, Source):
                return each
            made = cls(each)
            if is_loaded:
                setattr(made, _LOADED, True)
            return made

        return tree_map(deferred, result)


def source_of(tensor: Tensor) -> Source:
    """Return the source of a deferred tensor; of another one, its elements."""
    return tensor._source if isinstance(tensor, Deferred) else Known(tensor)


def _call(operator: Any, arguments: Any, keywords: Any) -> Any:
    """Return the deferred results of an operation on whole tensors."""
    if changes_its_inputs(operator):
        raise NotImplementedError(
            f"{operator} would change a tensor that is not read yet: a conversion must return new "
            "tensors."
        )

    def without_memory(each: Any) -> Any:
        is_tensor = isinstance(each, Tensor)
        return torch.empty(each.shape, dtype=each.dtype, device="meta") if is_tensor else each

    def in_memory(each: Any) -> Any:
        return read(each._source) if isinstance(each, Deferred) else each

    on_meta = {**keywords, "device": torch.device("meta")} if "device" in keywords else keywords
    like = operator(*tree_map(without_memory, arguments), **tree_map(without_memory, on_meta))
    inputs = [
        each._source for each in tree_leaves((arguments, keywords)) if isinstance(each, Deferred)
    ]
    numbers = count()

    def call() -> Any:
        return operator(*tree_map(in_memory, arguments), **tree_map(in_memory, keywords))

    def deferred(each: Any) -> Any:
        is_tensor = isinstance(each, Tensor)
        return Deferred(_Result(call, inputs, next(numbers), each)) if is_tensor else each

    return tree_map(deferred, like)


# --- Movements of elements: operators of torch, as sources of their results ----------------------


def _same(tensor: Tensor, **_: Any) -> Source:
    return source_of(tensor)


def _cast(tensor: Tensor, *, dtype: torch.dtype | None = None, **_: Any) -> Source:
    source = source_of(tensor)
    return source if dtype in (None, source.dtype) else _Cast(source, dtype)


def _part(source: Source, dim: int, start: int, size: int) -> Source:
    starts, sizes = [0] * len(source.shape), list(source.shape)
    starts[dim], sizes[dim] = start, size
    return _View(source, range(len(sizes)), starts, sizes)


def _slice(
    tensor: Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Source | None:
    source = source_of(tensor)
    first, last, _ = slice(start, end).indices(source.shape[dim])
    return _part(source, dim, first, max(0, last - first)) if step == 1 else None


def _select(tensor: Tensor, dim: int, index: int) -> Source:
    source = source_of(tensor)
    size = source.shape[dim]
    return _without_dims(_part(source, dim, index % size, 1), [dim])


def _split(tensor: Tensor, sizes: int | Sequence[int], dim: int = 0) -> list[Source]:
    source = source_of(tensor)
    size = source.shape[dim]
    if isinstance(sizes, int):
        sizes = [min(sizes, size - start) for start in range(0, size, sizes)] or [0]
    starts = accumulate(sizes, initial=0)
    return [_part(source, dim, start, each) for start, each in zip(starts, sizes, strict=False)]


def _unbind(tensor: Tensor, dim: int = 0) -> list[Source]:
    return [_select(tensor, dim, index) for index in range(tensor.shape[dim])]


def _permute(tensor: Tensor, dims: Sequence[int]) -> Source:
    source = source_of(tensor)
    dims = [dim % len(dims) for dim in dims]
    sizes = [source.shape[dim] for dim in dims]
    return _View(source, dims, [0] * len(dims), sizes)


def _transpose(tensor: Tensor, first: int, second: int) -> Source:
    dims = list(range(tensor.ndim))
    dims[first], dims[second] = dims[second], dims[first]
    return _permute(tensor, dims)


def _t(tensor: Tensor) -> Source:
    return _transpose(tensor, 0, 1) if tensor.ndim == 2 else source_of(tensor)


def _without_dims(source: Source, dims: Iterable[int]) -> Source:
    """Return a source without those of these dimensions that have the size 1."""
    shape = source.shape
    left_out = {dim % len(shape) for dim in dims if shape[dim] == 1}
    kept = [dim for dim in range(len(shape)) if dim not in left_out]
    return _View(source, kept, [0] * len(shape), [shape[dim] for dim in kept])


def _squeeze(tensor: Tensor, dims: int | Sequence[int] | None = None) -> Source:
    dims = range(tensor.ndim) if dims is None else [dims] if isinstance(dims, int) else dims
    return _without_dims(source_of(tensor), dims)


def _unsqueeze(tensor: Tensor, dim: int) -> Source:
    source = source_of(tensor)
    rank = len(source.shape)
    dim %= rank + 1
    dims: list[int | None] = [*range(dim), None, *range(dim, rank)]
    sizes = [*source.shape[:dim], 1, *source.shape[dim:]]
    return _View(source, dims, [0] * rank, sizes)


def _cat(tensors: Sequence[Tensor], dim: int = 0) -> Source:
    return _Concatenation([source_of(each) for each in tensors], dim % tensors[0].ndim)


def _stack(tensors: Sequence[Tensor], dim: int = 0) -> Source:
    sources = [_unsqueeze(each, dim) for each in tensors]
    return _Concatenation(sources, dim % len(sources[0].shape))


def _reshape(tensor: Tensor, shape: Sequence[int]) -> Source:
    source = source_of(tensor)
    known = math.prod(size for size in shape if size != -1)
    left = math.prod(source.shape) // known if known else 0
    return _Reshaped(source, [left if size == -1 else size for size in shape])


def _new(operator: Any) -> Callable[..., Tensor]:
    """Return a rule for an operator that makes a tensor like another, and reads no elements."""

    def make(tensor: Tensor, *arguments: Any, **keywords: Any) -> Tensor:
        like = torch.empty((), dtype=tensor.dtype, device="cpu").expand(tensor.shape)
        made: Tensor = operator(like, *arguments, **keywords)
        return made.contiguous()

    return make


def _equal(one: Tensor, other: Tensor) -> bool:
    """Compare two tensors, some rows at a time."""
    left, right = source_of(one), source_of(other)
    if left.shape != right.shape:
        return False
    n_rows = left.shape[0] if left.shape else 1
    step = max(1, _COMPARED // max(1, math.prod(left.shape[1:])))
    for low in range(0, n_rows, step):
        box = [(low, min(n_rows, low + step)), *whole(left)[1:]] if left.shape else []
        if not torch.equal(read(left, box), read(right, box)):
            return False
    return True


_RULES: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys([_ATEN.detach.default, _ATEN.alias.default, _ATEN.clone.default], _same),
    _ATEN.lift_fresh.default: _same,
    _ATEN._to_copy.default: _cast,
    _ATEN.slice.Tensor: _slice,
    _ATEN.select.int: _select,
    **dict.fromkeys([_ATEN.split.Tensor, _ATEN.split_with_sizes.default], _split),
    _ATEN.unbind.int: _unbind,
    _ATEN.permute.default: _permute,
    _ATEN.transpose.int: _transpose,
    _ATEN.t.default: _t,
    **dict.fromkeys([_ATEN.squeeze.default, _ATEN.squeeze.dim, _ATEN.squeeze.dims], _squeeze),
    _ATEN.unsqueeze.default: _unsqueeze,
    _ATEN.cat.default: _cat,
    _ATEN.stack.default: _stack,
    **dict.fromkeys([_ATEN.view.default, _ATEN._unsafe_view.default], _reshape),
    _ATEN.equal.default: _equal,
    **{
        operator: _new(operator)
        for packet in (
            *(_ATEN.empty_like, _ATEN.zeros_like, _ATEN.ones_like, _ATEN.full_like),
            *(_ATEN.new_empty, _ATEN.new_zeros, _ATEN.new_ones, _ATEN.new_full),
        )
        for operator in [packet.default]
    },
}
