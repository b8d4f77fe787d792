"""Stages of this rank, and a schedule of torch over them.

Example:
    >>> stages = pipeline_stages(model, mesh["pp"])  # doctest: +SKIP
    >>> for stage in stages:  # doctest: +SKIP
    ...     fsdp2_strategy_parallelize(stage, mesh)
    >>> pipeline = pipeline_schedule(stages, mesh["pp"], loss_of, 4)  # doctest: +SKIP
    >>> losses = pipeline.step(tokens, target=targets)  # doctest: +SKIP
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleLoopedBFS,
)

from meshverse.parallel.experts.gradients import get_total_norm, scale_gradients
from meshverse.parallel.meshes.degrees import is_degree
from meshverse.parallel.models.stages import StageOf, stage_of

from .batches import Batches, for_each_sequence
from .layout import stages_of_rank
from .stage import check_keywords, split_into_stages
from .tied import TiedParameter

__all__ = ["PipelineSchedule", "pipeline_schedule", "pipeline_stages"]

_Model = TypeVar("_Model", bound=nn.Module)
Loss = Callable[[Tensor, Tensor], Tensor]

_ONE_STAGE = {"1F1B": Schedule1F1B, "GPipe": ScheduleGPipe}
_SEVERAL_STAGES = {"Interleaved1F1B": ScheduleInterleaved1F1B, "LoopedBFS": ScheduleLoopedBFS}


def pipeline_stages(
    model: _Model,
    pp_mesh: DeviceMesh,
    *,
    virtual: int = 1,
    layers_per_stage: Sequence[int] | None = None,
) -> list[_Model]:
    """The stages of a model that this rank has, to be parallelized one by one.

    Args:
        model: as for `split_into_stages`.
        pp_mesh: 1-D, of all ranks of the pipeline: `mesh["pp"]`.
        virtual: stages a rank, for interleaved schedules: rank r has the stages r, r + pp size, ...
        layers_per_stage: one number for each stage of the model; by default as even as can be.

    Raises:
        ValueError: as `split_into_stages`, or `virtual` is no int above 0.
    """
    _check_mesh(pp_mesh)
    size = pp_mesh.size()
    return [
        split_into_stages(model, size * virtual, index, layers_per_stage=layers_per_stage)
        for index in stages_of_rank(pp_mesh.get_local_rank(), size, virtual=virtual)
    ]


def pipeline_schedule(
    stages: Sequence[nn.Module],
    pp_mesh: DeviceMesh,
    loss_function: Loss,
    n_microbatches: int,
    *,
    schedule: str | None = None,
) -> PipelineSchedule:
    """A schedule of torch over this rank's stages. All ranks of the pipeline call this.

    Args:
        stages: as `pipeline_stages` gave them, parallelized.
        pp_mesh: the mesh they were made with.
        loss_function: of the logits and the targets of a microbatch; a mean over both.
        n_microbatches: parts that a batch is split into.
        schedule: torch's name for it: "1F1B" or "GPipe" for one stage a rank, "Interleaved1F1B" or
            "LoopedBFS" for several; by default 1F1B, interleaved for several stages.

    Raises:
        ValueError: the schedule is unknown, is for another number of stages, or cannot do with
            this number of microbatches; these are not this rank's stages of a model; or a tied
            embedding and its head are split in different ways, or one of them is frozen.
    """
    _check_mesh(pp_mesh)
    owned = _check_stages(stages, pp_mesh)
    name = schedule or ("1F1B" if len(owned) == 1 else "Interleaved1F1B")
    _check_schedule(name, owned, n_microbatches, pp_mesh.size())
    return PipelineSchedule(stages, pp_mesh, loss_function, n_microbatches, name)


class PipelineSchedule:
    """Trains the stages of a rank. All ranks of a pipeline make the same calls.

    Made by `pipeline_schedule`.

    Attributes:
        schedule: torch's.
        stages: of this rank.
    """

    def __init__(
        self,
        stages: Sequence[nn.Module],
        pp_mesh: DeviceMesh,
        loss_function: Loss,
        n_microbatches: int,
        name: str,
    ) -> None:
        self.stages = tuple(stages)
        self._group = pp_mesh.get_group()
        self._device = _device(pp_mesh.device_type)
        self._n_microbatches = n_microbatches
        self._tied = TiedParameter(stages, pp_mesh)
        self._name = name
        # torch would divide all of the gradients, those of earlier steps too.
        self._settings: dict[str, Any] = {
            "loss_fn": partial(_share_of_loss, loss_function, n_microbatches),
            "scale_grads": False,
        }
        owned = _owned(stages)
        self._has_first = any(own.is_first for own in owned)
        self._batches = Batches(n_microbatches, owned[0].count)
        self.schedule = self._make()
        # Its own: some versions of torch cannot train with what they have evaluated with.
        self._evaluation: Any = None
        self._evaluated = Batches(n_microbatches, owned[0].count)

    def _make(self) -> Any:
        made = [
            PipelineStage(stage, own.index, own.count, self._device, group=self._group)
            for stage, own in zip(self.stages, _owned(self.stages), strict=True)
        ]
        if self._name in _ONE_STAGE:
            return _ONE_STAGE[self._name](made[0], self._n_microbatches, **self._settings)
        return _SEVERAL_STAGES[self._name](made, self._n_microbatches, **self._settings)

    def step(self, inputs: Tensor, *, target: Tensor, **keywords: Any) -> list[Tensor]:
        """Forward and backward of a batch. Gradients add to those that are there.

        They are those of the mean of the microbatches' losses.

        Args:
            inputs: tokens, shape (batch, tokens); the same on all ranks of the pipeline, and of
                the same shape in each call.
            target: whose first dimension is the batch's.
            keywords: for the forward of every stage, such as attention_mask; tensors are split by
                the batch as well, and those with a first dimension of 1 are for all sequences.

        Returns:
            The microbatches' losses, on the rank that has the last stage; elsewhere nothing.

        Raises:
            TypeError: a keyword needs all layers of the model, such as use_cache.
            ValueError: the microbatches do not divide the batch, its shape or dtype is not that of
                the first call, or a keyword cannot be split by the batch. All ranks raise these,
                and nothing has been sent.
        """
        with self._tied.summed():
            return self._run(self.schedule.step, self._batches, inputs, target, keywords)

    @torch.no_grad()
    def eval(self, inputs: Tensor, *, target: Tensor, **keywords: Any) -> list[Tensor]:
        """Losses of a batch, without gradients; otherwise as `step`.

        The batches may have another shape than those of `step`, one for all of them.
        """
        if self._evaluation is None:
            self._evaluation = self._make()
        parameters = [each for stage in self.stages for each in stage.parameters()]
        gradients = [each.grad for each in parameters]
        losses = self._run(self._evaluation.eval, self._evaluated, inputs, target, keywords)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient  # torch drops them where it tries out a stage
        return losses

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale the gradients of all stages by their norm together, tied ones counted once.

        Args:
            max_norm: of the gradients of the whole model.
            norm_type: of the p-norm, above 0; infinity is allowed.

        Returns:
            The norm before, a plain tensor in fp32, the same on all ranks of the pipeline.

        Raises:
            ValueError: norm_type is no number above 0.
        """
        norm_type = float(norm_type)  # of "inf" too, as in torch
        if not norm_type > 0:
            raise ValueError(
                f"norm_type={norm_type}: expected a number above 0. Others are no norms, and a "
                "stage without gradients would change them."
            )
        parameters = [
            each for stage in self.stages for each in stage.parameters() if each.grad is not None
        ]
        twice = self._tied.counted_elsewhere
        own = get_total_norm(
            [each.grad for each in parameters if each is not twice and each.grad is not None],
            norm_type,
        )
        total = _norm_of_all(own.to(self._device, torch.float32), norm_type, self._group)
        scale_gradients(parameters, max_norm, total)
        return total

    def _run(
        self,
        run: Callable[..., Any],
        batches: Batches,
        inputs: Tensor,
        target: Tensor,
        keywords: dict[str, Any],
    ) -> list[Tensor]:
        check_keywords(self.stages[0], keywords)
        batches.check(inputs, target)
        split = for_each_sequence(keywords, inputs)
        losses: list[Tensor] = []
        arguments = (inputs,) if self._has_first else ()
        run(*arguments, target=target, losses=losses, return_outputs=False, **split)
        batches.has_run(inputs)
        return [loss.detach() * self._n_microbatches for loss in losses]


def _norm_of_all(own: Tensor, norm_type: float, group: dist.ProcessGroup) -> Tensor:
    """The norm over all stages, of each one's own in fp32, whatever dtype its gradients have."""
    norms = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(norms, own, group=group)
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    return total


def _share_of_loss(function: Loss, count: int, output: Tensor, target: Tensor) -> Tensor:
    return function(output, target) / count


def _device(device_type: str) -> torch.device:
    if device_type == "cpu":
        return torch.device("cpu")
    return torch.device(device_type, torch.get_device_module(device_type).current_device())


def _check_mesh(pp_mesh: DeviceMesh) -> None:
    if pp_mesh.ndim != 1:
        raise ValueError(
            f"{pp_mesh} has {pp_mesh.ndim} axes: give that of the pipeline, mesh['pp']."
        )


def _owned(stages: Sequence[nn.Module]) -> list[StageOf]:
    return [own for stage in stages if (own := stage_of(stage)) is not None]


def _check_stages(stages: Sequence[nn.Module], pp_mesh: DeviceMesh) -> list[StageOf]:
    owned = _owned(stages)
    expected = [pp_mesh.get_local_rank() + pp_mesh.size() * each for each in range(len(owned))]
    indices = [own.index for own in owned]
    counts = {own.count for own in owned}
    if (
        not owned
        or len(owned) < len(stages)
        or indices != expected
        or counts != {pp_mesh.size() * len(owned)}
    ):
        raise ValueError(
            f"Stages {indices} of {sorted(counts)}, among {len(stages)} modules, for rank "
            f"{pp_mesh.get_local_rank()} of {pp_mesh.size()} of the pipeline: give all that "
            "pipeline_stages made for this rank with this mesh, in its order."
        )
    return owned


def _check_schedule(name: str, owned: Sequence[StageOf], n_microbatches: int, pp_size: int) -> None:
    known = _ONE_STAGE if len(owned) == 1 else _SEVERAL_STAGES
    if name not in known:
        raise ValueError(
            f"schedule={name!r} for {len(owned)} stages a rank: expected one of {sorted(known)}. "
            f"{sorted(_ONE_STAGE)} run one stage a rank (virtual=1), {sorted(_SEVERAL_STAGES)} "
            "several."
        )
    if not is_degree(n_microbatches):
        raise ValueError(f"n_microbatches={n_microbatches!r}: expected an int above 0.")
    if name == "1F1B" and n_microbatches < pp_size:
        raise ValueError(
            f"n_microbatches={n_microbatches} for {pp_size} stages: 1F1B needs one microbatch a "
            "stage or more. Split the batch further, or use schedule='GPipe'."
        )
    rounds = max(1, n_microbatches // pp_size)
    if name == "Interleaved1F1B" and n_microbatches % rounds:
        raise ValueError(
            f"n_microbatches={n_microbatches} over {pp_size} ranks run in {rounds} rounds, which "
            f"do not divide them. Choose a multiple of {pp_size}."
        )
