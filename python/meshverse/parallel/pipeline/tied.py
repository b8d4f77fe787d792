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
        ValueError: the two stages have it in different shapes, dtypes or placements, or one has it
            frozen.
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
                self._check(own.tied, self._parameter)

    @property
    def counted_elsewhere(self) -> nn.Parameter | None:
        """The parameter where its gradient is that of another rank as well, which counts it."""
        return None if self._is_first else self._parameter

    @contextlib.contextmanager
    def summed(self) -> Iterator[None]:
        """What is added to the gradient within the block is summed over the two stages."""
        parameter = self._parameter
        if parameter is None or not parameter.requires_grad:  # as on the other stage
            yield
            return
        before = _local_gradient(parameter)
        before = None if before is None else before.clone()
        yield
        if parameter.grad is None:  # this stage did not use it: it was given embeddings
            parameter.grad = torch.zeros_like(parameter)
        after = _local_gradient(parameter)
        assert after is not None
        added = after if before is None else after - before
        others = torch.empty_like(added)
        _exchange(added.contiguous(), others, self._group, self._peer)
        # In this order, so that the two stages round alike.
        total = others.add_(added)
        after.copy_(total if before is None else total.add_(before))

    def _check(self, name: str, parameter: nn.Parameter) -> None:
        own, theirs = _description(parameter), [""]
        if self._is_first:  # one of the two speaks first
            dist.send_object_list([own], group=self._group, group_dst=self._peer)
        dist.recv_object_list(theirs, group=self._group, group_src=self._peer)
        if not self._is_first:
            dist.send_object_list([own], group=self._group, group_dst=self._peer)
        if theirs[0] != own:
            raise ValueError(
                f"{name} is tied to a parameter of another pipeline stage, and they differ: {own} "
                f"here and {theirs[0]} there. Give both the same tensor-parallel style, the same "
                "mesh of FSDP2 and the same requires_grad, or untie them."
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


def _description(parameter: nn.Parameter) -> str:
    trained = "trained" if parameter.requires_grad else "frozen"
    value: Tensor = parameter
    if isinstance(value, DTensor):
        return f"{tuple(value.to_local().shape)} of {value.placements}, {value.dtype}, {trained}"
    return f"{tuple(value.shape)}, {value.dtype}, {trained}"
