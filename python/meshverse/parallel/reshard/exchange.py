"""One run of a move: boxes of elements are packed, exchanged and unpacked."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .messages import Message, MovePlan

__all__ = ["Exchange"]

# Elements that are not cast are moved as integers of their size, bit by bit.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


class _Buffers(NamedTuple):
    sent: Tensor
    received: Tensor


class Exchange:
    """What runs a plan.

    Args:
        plan: of this rank.
        group: of all ranks that have a part; None if this is the only one.
        device: on which messages are packed.
    """

    def __init__(
        self, plan: MovePlan, group: dist.ProcessGroup | None, device: torch.device
    ) -> None:
        self._plan, self._group, self._device = plan, group, device

    def run(self, sources: Sequence[Tensor | None], targets: Sequence[Tensor | None]) -> None:
        """Move what the source tensors have now into the targets.

        Args:
            sources: local tensors, one a move; None where this rank has none.
            targets: the same.
        """
        with torch.no_grad():
            given = [_viewed(tensor, move.dtype) for tensor, move in self._pairs(sources)]
            wanted = [_viewed(tensor, move.dtype) for tensor, move in self._pairs(targets)]
            for kept in self._plan.kept():
                source, target = sources[kept.move], targets[kept.move]
                if source is None or target is None:
                    raise AssertionError(f"{kept} of a tensor that this rank does not have")
                to = _box(target, kept.target_starts, kept.extents)
                what = _box(source, kept.source_starts, kept.extents)
                if to.data_ptr() != what.data_ptr():
                    _write(to, what)
            self._exchange(given, wanted)

    def _pairs(self, tensors: Iterable[Tensor | None]) -> Iterable[tuple[Tensor | None, Any]]:
        return zip(tensors, self._plan.moves, strict=True)

    def _exchange(self, given: Sequence[Tensor | None], wanted: Sequence[Tensor | None]) -> None:
        plan = self._plan
        free = [
            _Buffers(self._empty(plan.sent_bytes), self._empty(plan.received_bytes))
            for _ in range(plan.n_buffers)
        ]
        under_way: deque[tuple[list[dist.Work], Message | None, _Buffers]] = deque()

        def finish() -> None:
            works, received, buffers = under_way[0]
            for work in works:
                work.wait()
            if received is not None:
                self._unpack(received, buffers.received, wanted)
            under_way.popleft()
            free.append(buffers)

        try:
            for step in plan.steps:
                if not free:
                    finish()
                buffers = free.pop()
                operations = []
                if step.sent is not None:
                    self._pack(step.sent, buffers.sent, given)
                    operations.append(self._operation(dist.isend, buffers.sent, step.sent))
                if step.received is not None:
                    operation = self._operation(dist.irecv, buffers.received, step.received)
                    operations.append(operation)
                works: list[dist.Work] = []
                under_way.append((works, step.received, buffers))
                works += dist.batch_isend_irecv(operations)
            while under_way:
                finish()
        except BaseException:
            # c10d writes into the buffers of what is still under way: they must outlive it.
            _abandoned.append(under_way)
            raise

    def _empty(self, n_bytes: int) -> Tensor:
        # Of the largest alignment that an element can need.
        return torch.empty(-(-n_bytes // 16), dtype=torch.complex128, device=self._device)

    def _operation(self, what: Any, buffer: Tensor, message: Message) -> dist.P2POp:
        content = buffer.view(torch.uint8)[: message.n_bytes]
        return dist.P2POp(what, content, message.peer, self._group)

    def _pack(self, message: Message, buffer: Tensor, given: Sequence[Tensor | None]) -> None:
        for move, first_byte, starts, extents in self._plan.boxes(message):
            source = given[move]
            if source is None:
                raise AssertionError(f"a message to rank {message.peer} needs tensor {move}")
            self._in_buffer(buffer, move, source, first_byte, extents).copy_(
                _box(source, starts, extents)
            )

    def _unpack(self, message: Message, buffer: Tensor, wanted: Sequence[Tensor | None]) -> None:
        for move, first_byte, starts, extents in self._plan.boxes(message):
            target = wanted[move]
            if target is None:
                raise AssertionError(f"a message from rank {message.peer} has tensor {move}")
            _write(
                _box(target, starts, extents),
                self._in_buffer(buffer, move, target, first_byte, extents),
            )

    def _in_buffer(
        self, buffer: Tensor, move: int, local: Tensor, first_byte: int, extents: Sequence[int]
    ) -> Tensor:
        dtype = self._plan.moves[move].dtype
        if local.dtype == _BITS[dtype.itemsize]:
            dtype = local.dtype
        strides, stride = list[int](), 1
        for extent in reversed(extents):
            strides.insert(0, stride)
            stride *= extent
        return buffer.view(dtype).as_strided(extents, strides, first_byte // dtype.itemsize)


# What failed runs left under way, for the life of the process.
_abandoned: list[Any] = []


def _viewed(local: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """A local tensor as what is copied to and from messages of a dtype."""
    if local is None or local.dtype != dtype or local.is_conj() or local.is_neg():
        return local
    return local.view(_BITS[dtype.itemsize])


def _write(target: Tensor, values: Tensor) -> None:
    if target.is_inference():  # as generators' weights are; written in inference mode only
        with torch.inference_mode():
            target.copy_(values)
    else:
        target.copy_(values)


def _box(local: Tensor, starts: Sequence[int], extents: Sequence[int]) -> Tensor:
    strides = local.stride()
    first = sum(start * stride for start, stride in zip(starts, strides, strict=True))
    return local.as_strided(extents, strides, local.storage_offset() + first)
