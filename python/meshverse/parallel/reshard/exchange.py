"""One run of a `Reshard` on one rank: packs boxes (see `Transfer`), exchanges and unpacks them."""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshverse._torch_compat.dtensors import held_by

from .plan import Message, Plan, Round, Transfer
from .sides import check_kind, has_memory, local_tensor

# Elements that need no cast are copied bit by bit, as numbers of the same size.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}

_CHANGE_BACK = "Change it back and call the Reshard again, or construct a new one."

_Views = Sequence[Tensor | None]


class _Seen(NamedTuple):
    """A tensor with its layout, on which the plan depends, at the last check.

    A check first compares marks, which are cheap to read: while the mark is the same, so are the
    layout and the views of the tensor. A mark contains ids of objects; `kept` references these, so
    that no other object can get their ids.
    """

    tensor: Tensor
    mark: tuple[Any, ...]
    layout: tuple[Any, ...]
    local: Tensor
    kept: tuple[Any, ...]

    @classmethod
    def now(cls, tensor: Tensor) -> _Seen:
        """Read a tensor's current layout."""
        local = local_tensor(tensor)
        whole: tuple[Any, ...] = ()
        if isinstance(tensor, DTensor):
            whole = tuple(tensor.shape), tensor.placements, tensor.device_mesh
        layout = (tuple(local.shape), local.dtype, local.device, has_memory(local), *whole)
        return cls(tensor, _mark_of(tensor), layout, local, held_by(tensor))

    def __str__(self) -> str:
        shape, dtype, device, has_memory, *whole = self.layout
        placed = " of {} {} on {}".format(*whole) if whole else ""
        return f"{shape} {dtype} on {device}{placed}{'' if has_memory else ' without memory'}"


def _mark_of(tensor: Tensor) -> tuple[Any, ...]:
    held, spec = held_by(tensor)
    elements = held.dtype, held.shape, held.stride(), held.is_conj(), held.is_neg()
    return id(held), id(spec), held.data_ptr(), elements


class _MessageBoxes(NamedTuple):
    """Boxes of one message: views of local tensors, and their positions in the message."""

    boxes: list[Tensor]
    # For each box, a view of the message: dtype, extents, strides, offset in elements.
    at: list[tuple[torch.dtype, list[int], list[int], int]]

    def in_buffer(self, buffer: Tensor) -> list[Tensor]:
        """Return the boxes as views of a buffer that has the message."""
        typed = {dtype: buffer.view(dtype) for dtype in {dtype for dtype, *_ in self.at}}
        return [
            typed[dtype].as_strided(extents, strides, offset)
            for dtype, extents, strides, offset in self.at
        ]


_SeenTensors = dict[str, dict[str, _Seen]]  # by side and name
_Rounds = list[tuple[Round, _MessageBoxes, _MessageBoxes]]  # with the boxes sent and received


class Exchange:
    """Runs a plan on this rank's tensors.

    A model has thousands of small tensors, so a run does little in Python for each box: the first
    run makes the views, later ones reuse them, and one call copies all boxes of a message.

    Args:
        plan: plan of this rank.
        device: device of the staging buffers, in which messages are packed.
        tensors: tensors of this rank, by side and name.

    Attributes:
        target_bytes: size of this rank's targets, in the dtypes in which they are sent.

    Raises:
        ValueError: a target overlaps in memory with itself, a source or another target; see
            `_check_memory`.
    """

    def __init__(
        self, plan: Plan, device: torch.device, tensors: Mapping[str, Mapping[str, Tensor]]
    ) -> None:
        self._plan, self._device = plan, device
        self._seen: _SeenTensors = {
            side: {part[0]: _Seen.now(tensors[side][part[0]]) for part in parts if part}
            for side, parts in plan.parts.items()
        }
        sources, targets = self._views(self._seen)
        _check_memory(plan.transfers, sources, targets)
        self.target_bytes = sum(
            view.numel() * transfer.dtype.itemsize
            for transfer, view in zip(plan.transfers, targets, strict=True)
            if view is not None
        )
        self._rounds: _Rounds | None = None  # views of the tensors in `_seen`; None before a run
        self._kept: tuple[list[Tensor], list[Tensor]] = [], []  # local copies: targets, sources

    def find_change(self) -> str:
        """Return a sentence about a change since construction with which no run is possible.

        Returns "" if there is none. Later runs use the current strides and memory of tensors.
        """
        try:
            changed = [
                (side, name, seen)
                for side, tensors in self._seen.items()
                for name, seen in tensors.items()
                if _mark_of(seen.tensor) != seen.mark
            ]
            if not changed:
                return ""
            all_now = {side: dict(tensors) for side, tensors in self._seen.items()}
            for side, name, seen in changed:
                now = all_now[side][name] = _Seen.now(seen.tensor)
                if now.layout != seen.layout:
                    return (
                        f"{side} {name!r} has changed since the Reshard was constructed: it was "
                        f"{seen}, and is {now} now. {_CHANGE_BACK}"
                    )
                check_kind(now.local, f"{side} {name!r}")
            _check_memory(self._plan.transfers, *self._views(all_now))
        except (RuntimeError, TypeError, ValueError) as error:  # the other ranks wait for this one
            return f"a tensor has changed since the Reshard was constructed. {error} {_CHANGE_BACK}"
        self._seen, self._rounds = all_now, None
        return ""

    def _views(self, seen: _SeenTensors) -> Iterator[list[Tensor | None]]:
        """Yield, for each side, the view that each transfer uses on this rank, or None if none."""
        for side, parts in self._plan.parts.items():
            of = seen[side]
            yield [None if part is None else part[1].of(of[part[0]].local) for part in parts]

    def _prepare(self) -> _Rounds:
        sources, targets = self._views(self._seen)
        self._kept = [], []
        for transfer, source_starts, target_starts, extents in self._plan.kept():
            target = _box(targets[transfer], target_starts, extents)
            source = _box(sources[transfer], source_starts, extents)
            if target.data_ptr() != source.data_ptr():
                self._kept[0].append(target)
                self._kept[1].append(source)
        dtypes = [transfer.dtype for transfer in self._plan.transfers]
        given, wanted = (list(map(_viewed, views, dtypes)) for views in (sources, targets))
        return [
            (
                each,
                self._message_boxes(each.sent, given),
                self._message_boxes(each.received, wanted),
            )
            for each in self._plan.rounds
        ]

    def _message_boxes(self, message: Message | None, tensors: _Views) -> _MessageBoxes:
        found = _MessageBoxes([], [])
        for transfer, first_byte, starts, extents in self._plan.boxes(message) if message else ():
            box = _box(tensors[transfer], starts, extents)
            dtype = self._plan.transfers[transfer].dtype
            if box.dtype == _BITS[dtype.itemsize]:
                dtype = box.dtype
            strides = [math.prod(extents[axis + 1 :]) for axis in range(len(extents))]
            found.boxes.append(box)
            found.at.append((dtype, extents, strides, first_byte // dtype.itemsize))
        return found

    def run(self, group: dist.ProcessGroup) -> None:
        """Copy the sources' current values into the targets, over the `Reshard`'s own group."""
        with torch.no_grad():
            rounds = self._rounds = self._rounds or self._prepare()
            _copy(*self._kept)
            self._exchange(rounds, group)

    def _exchange(self, rounds: _Rounds, group: dist.ProcessGroup) -> None:
        # Lengths in elements of 16 bytes, which is the largest alignment that a dtype can need.
        lengths = [-(-size // 16) for size in (self._plan.sent_bytes, self._plan.received_bytes)]
        free = [
            [torch.empty(length, dtype=torch.complex128, device=self._device) for length in lengths]
            for _ in range(self._plan.n_buffers)
        ]
        under_way: deque[tuple[list[dist.Work], _MessageBoxes, list[Tensor]]] = deque()

        def finish() -> None:
            works, received, buffers = under_way[0]
            for work in works:
                work.wait()
            _copy(received.boxes, received.in_buffer(buffers[1]))
            under_way.popleft()
            free.append(buffers)

        try:
            for messages, sent, received in rounds:
                if not free:
                    finish()
                buffers = free.pop()
                _copy(sent.in_buffer(buffers[0]), sent.boxes)
                ways = zip((dist.isend, dist.irecv), buffers, messages, strict=True)
                operations = [
                    dist.P2POp(way, buffer.view(torch.uint8)[: each.n_bytes], each.peer, group)
                    for way, buffer, each in ways
                    if each is not None
                ]
                works: list[dist.Work] = []
                under_way.append((works, received, buffers))
                works += dist.batch_isend_irecv(operations)
            while under_way:
                finish()
        except BaseException:
            # c10d may still write into the buffers of pending operations: keep them allocated.
            _abandoned.append(under_way)
            raise


# Buffers of failed runs, kept until the process ends.
_abandoned: list[Any] = []


def _viewed(local: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return a local tensor as numbers of the same size, if messages have its dtype; else itself.

    Conjugate and negative views are returned unchanged too: their bits are not their values.
    """
    if local is None or local.dtype != dtype or local.is_conj() or local.is_neg():
        return local
    return local.view(_BITS[dtype.itemsize])


def _copy(targets: list[Tensor], values: list[Tensor]) -> None:
    """Copy values into targets of the same shapes, by one call where possible."""
    if any(target.is_neg() or target.is_conj() for target in targets):
        for target, value in zip(targets, values, strict=True):
            target.copy_(value)
    elif targets:
        # Generators' weights may be inference tensors, which are written in inference mode only.
        is_inference = any(target.is_inference() for target in targets)
        with torch.inference_mode() if is_inference else contextlib.nullcontext():
            torch._foreach_copy_(targets, values)


def _box(local: Tensor | None, starts: Sequence[int], extents: Sequence[int]) -> Tensor:
    if local is None:
        raise AssertionError("the plan has a transfer of a tensor that this rank does not have")
    strides = local.stride()
    first = sum(start * stride for start, stride in zip(starts, strides, strict=True))
    return local.as_strided(extents, strides, local.storage_offset() + first)


def _check_memory(transfers: Sequence[Transfer], sources: _Views, targets: _Views) -> None:
    """Check that targets share no memory with sources or with each other.

    Three kinds of shared memory are allowed: a tensor may be both source and target of a transfer
    with the same sharding on both sides; a tensor may be the target of several names; and tensors
    may alternate in memory without a common element, such as blocks of columns.
    """
    used: list[tuple[int, str, Transfer, Tensor]] = []
    for side, views in (("source", sources), ("target", targets)):
        for transfer, local in zip(transfers, views, strict=True):
            if local is None or not local.numel():
                continue
            used.append((local.data_ptr(), side, transfer, local))
            if side == "target" and _folds(local):
                raise ValueError(
                    f"target {transfer.name!r} is expanded or unfolded: its elements overlap in "
                    f"memory (shape {tuple(local.shape)}, strides {local.stride()}). Give a target "
                    "whose elements have their own memory, such as the tensor that was expanded."
                )
    used.sort(key=lambda each: each[0])
    for index, (first, side, transfer, one) in enumerate(used):
        end = first + _reach(one)
        for other_first, other_side, other_transfer, other in used[index + 1 :]:
            if other_first >= end:
                break
            if side == other_side and (side == "source" or transfer.name == other_transfer.name):
                continue
            is_no_op = transfer is other_transfer and transfer.source == transfer.target
            is_tied = (side == other_side or is_no_op) and _elements(one) == _elements(other)
            if not is_tied and not _alternate(one, other):
                names = f"{side} {transfer.name!r}", f"{other_side} {other_transfer.name!r}"
                raise ValueError(
                    f"{' and '.join(sorted(names))} overlap in memory on this rank: writing a "
                    "target would change the other. For the source, pass a clone(), and copy the "
                    "current values into it before each run; of two targets, pass a new tensor for "
                    "one, and copy from it after each run."
                )


def _byte_strides(local: Tensor) -> list[tuple[int, int]]:
    """Return (stride in bytes, size) for an element's bytes, then each dimension, by stride."""
    axes = zip(local.stride(), local.shape, strict=True)
    element = local.element_size()
    return [(1, element), *sorted((stride * element, n) for stride, n in axes if n > 1)]


def _reach(local: Tensor, below: float = float("inf")) -> int:
    """Return how many bytes a tensor spans along its dimensions with a stride less than `below`."""
    return 1 + sum(stride * (n - 1) for stride, n in _byte_strides(local) if stride < below)


def _folds(local: Tensor) -> bool:
    """Whether a tensor's elements may overlap: whether smaller strides span a larger stride."""
    reach = 0
    for stride, n in _byte_strides(local) if local.numel() else ():
        if stride <= reach:
            return True
        reach += stride * (n - 1)
    return False


def _alternate(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors alternate in memory, in separate parts of each period of bytes."""
    distance = other.data_ptr() - one.data_ptr()
    strides = {stride for each in (one, other) for stride, _ in _byte_strides(each) if stride}
    for period in strides:
        start = distance % period
        if not any(stride % period for stride in strides if stride > period) and (
            _reach(one, period) <= start and start + _reach(other, period) <= period
        ):
            return True
    return False


def _elements(local: Tensor) -> tuple[Any, ...]:
    """Return a key that is equal for views of the same elements in the same order."""
    is_changed = local.is_conj(), local.is_neg()
    return local.data_ptr(), local.dtype, local.shape, local.stride(), is_changed
