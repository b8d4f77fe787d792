"""The gradient of an embedding that is tied to the head, where they are in different stages.

Either stage has the parameter, and a gradient of its own part of the model. What one training step
adds to both is summed, so that the two stay one.

Example:
    >>> tied = TiedParameter(stages, mesh["pp"])  # doctest: +SKIP
    >>> with tied.summed():  # doctest: +SKIP
    ...     schedule.step(tokens)
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from meshverse.parallel.models.stages import stage_of

__all__ = ["TiedParameter"]


class TiedParameter:
    """The parameter that the first and the last stage share, if the model is tied.

    All ranks of the pipeline make this, and use it together.

    Args:
        stages: of this rank, parallelized.
        pp_mesh: 1-D, of all ranks of the pipeline.

    Raises:
        ValueError: the two stages have it in different shapes or placements.
    """

    def __init__(self, stages: Sequence[nn.Module], pp_mesh: DeviceMesh) -> None:
        self._group = pp_mesh.get_group()
        self._parameter: nn.Parameter | None = None
        self._is_first = False
        self._peer = -1
        for stage in stages:
            own = stage_of(stage)
            if own is not None and own.tied is not None:
                self._parameter = stage.get_parameter(own.tied)
                self._is_first = own.is_first
                self._peer = pp_mesh.size() - 1 if own.is_first else 0
                self._check(own.tied)

    @property
    def counted_elsewhere(self) -> nn.Parameter | None:
        """The parameter where its gradient is that of another rank as well, which counts it."""
        return None if self._is_first else self._parameter

    @contextlib.contextmanager
    def summed(self) -> Iterator[None]:
        """What is added to the gradient within the block is summed over the two stages."""
        before = None if self._parameter is None else _local_gradient(self._parameter)
        before = None if before is None else before.clone()
        yield
        if self._parameter is None:
            return
        after = _local_gradient(self._parameter)
        if after is None:
            raise RuntimeError(
                "The embedding that is tied to the head has no gradient in one of the two stages, "
                "and its sum is not to be had. Freeze both or none."
            )
        added = after if before is None else after - before
        others = torch.empty_like(added)
        _exchange(added.contiguous(), others, self._group, self._peer)
        after.add_(others)

    def _check(self, name: str) -> None:
        own, theirs = _description(self._parameter), [""]
        if self._is_first:  # one of the two speaks first
            dist.send_object_list([own], group=self._group, group_dst=self._peer)
        dist.recv_object_list(theirs, group=self._group, group_src=self._peer)
        if not self._is_first:
            dist.send_object_list([own], group=self._group, group_dst=self._peer)
        if theirs[0] != own:
            raise ValueError(
                f"{name} is tied to a parameter of another pipeline stage, and they are split in "
                f"different ways: {own} here and {theirs[0]} there. Give both the same "
                "tensor-parallel style and the same mesh of FSDP2, or untie them."
            )


def _exchange(mine: Tensor, theirs: Tensor, group: dist.ProcessGroup, peer: int) -> None:
    operations = [
        dist.P2POp(dist.isend, mine, group=group, group_peer=peer),
        dist.P2POp(dist.irecv, theirs, group=group, group_peer=peer),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()


def _local_gradient(parameter: nn.Parameter) -> Tensor | None:
    gradient = parameter.grad
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def _description(parameter: nn.Parameter | None) -> str:
    value: Tensor | None = parameter
    if isinstance(value, DTensor):
        return f"{tuple(value.to_local().shape)} of {value.placements}, {value.dtype}"
    return "nothing" if value is None else f"{tuple(value.shape)}, {value.dtype}"
