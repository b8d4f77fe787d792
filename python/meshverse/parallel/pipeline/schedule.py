"""Stages of this rank, a schedule of torch over them, and what the first and the last share.

Example:
    >>> stages = pipeline_stages(model, mesh["pp"])  # doctest: +SKIP
    >>> for stage in stages:  # doctest: +SKIP
    ...     fsdp2_strategy_parallelize(stage, mesh)
    >>> pipeline = pipeline_schedule(stages, mesh["pp"], loss_of, 4)  # doctest: +SKIP
    >>> losses = pipeline.step(tokens, target=targets)  # doctest: +SKIP
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from torch.distributed.tensor import DTensor
from torch.nn.attention.flex_attention import BlockMask
from torch.utils._pytree import tree_map

from meshverse.parallel.experts.sharding import get_total_norm, scale_gradients
from meshverse.parallel.meshes.degrees import is_degree
from meshverse.parallel.models.modules import stage_of

from .stage import check_keywords, split_into_stages

_Model = TypeVar("_Model", bound=nn.Module)
Loss = Callable[[Tensor, Tensor], Tensor]

_ONE = {"1F1B": Schedule1F1B, "GPipe": ScheduleGPipe}  # one stage a rank
_SEVERAL = {"Interleaved1F1B": ScheduleInterleaved1F1B, "LoopedBFS": ScheduleLoopedBFS}


def pipeline_stages(
    model: _Model,
    pp_mesh: DeviceMesh,
    *,
    virtual: int = 1,
    layers_per_stage: Sequence[int] | None = None,
) -> list[_Model]:
    """Return the stages of a model that this rank has, to be parallelized one by one.

    Args:
        model: as for `split_into_stages`.
        pp_mesh: 1-D, of all ranks of the pipeline: `mesh["pp"]`.
        virtual: stages a rank, for interleaved schedules: rank r has the stages r, r + pp size, ...
        layers_per_stage: one number for each stage of the model; by default as even as can be.

    Raises:
        ValueError: as `split_into_stages`; or `virtual` is no int above 0, or above 1 where the
            pipeline has one rank.
    """
    _check_mesh(pp_mesh)
    rank, size = pp_mesh.get_local_rank(), pp_mesh.size()
    if not is_degree(virtual) or (virtual > 1 and size == 1):
        raise ValueError(
            f"virtual={virtual!r} stages a rank for {size} ranks of pp: expected an int above 0, "
            "and 1 where pp has one rank."
        )
    return [
        split_into_stages(model, size * virtual, index, layers_per_stage=layers_per_stage)
        for index in range(rank, size * virtual, size)
    ]


def pipeline_schedule(
    stages: Sequence[nn.Module],
    pp_mesh: DeviceMesh,
    loss_function: Loss,
    n_microbatches: int,
    *,
    schedule: str | None = None,
) -> PipelineSchedule:
    """Make a schedule of torch over this rank's stages. All ranks of the pipeline call this.

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
    rank, size, stages = pp_mesh.get_local_rank(), pp_mesh.size(), tuple(stages)
    owned = [own for own in map(stage_of, stages) if own is not None]
    count = len(owned)
    indices, counts = [own.index for own in owned], {own.count for own in owned}
    expected = list(range(rank, size * count, size))
    if not owned or count < len(stages) or indices != expected or counts != {size * count}:
        raise ValueError(
            f"Stages {indices} of {sorted(counts)}, among {len(stages)} modules, for rank {rank} "
            f"of {size} of the pipeline: give all that pipeline_stages made for this rank with "
            "this mesh, in its order."
        )
    name = schedule or ("1F1B" if count == 1 else "Interleaved1F1B")
    _check_schedule(name, count, n_microbatches, size)
    kind = pp_mesh.device_type
    local = [] if kind == "cpu" else [torch.get_device_module(kind).current_device()]
    device, group = torch.device(kind, *local), pp_mesh.get_group()

    def share_of_loss(output: Tensor, target: Tensor) -> Tensor:
        return loss_function(output, target) / n_microbatches

    def make() -> Any:
        made = [
            PipelineStage(stage, own.index, own.count, device, group=group)
            for stage, own in zip(stages, owned, strict=True)
        ]
        make_schedule: Any = (_ONE | _SEVERAL)[name]
        # torch would scale all of the gradients, those of earlier steps too.
        settings = {"loss_fn": share_of_loss, "scale_grads": False}
        return make_schedule(made[0] if count == 1 else made, n_microbatches, **settings)

    return PipelineSchedule(stages, pp_mesh, device, n_microbatches, make)


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
        device: torch.device,
        n_microbatches: int,
        make: Callable[[], Any],
    ) -> None:
        self.stages = tuple(stages)
        self._owned = [own for own in map(stage_of, stages) if own is not None]
        self._group, self._device = pp_mesh.get_group(), device
        self._n_microbatches = n_microbatches
        self._tied = TiedParameter(stages, pp_mesh)
        self._batches, self._evaluated = (
            _Batches(n_microbatches, self._owned[0].count) for _ in range(2)
        )
        self.schedule, self._make = make(), make
        # Its own: some versions of torch cannot train with what they have evaluated with.
        self._evaluation: Any = None

    def step(self, inputs: Tensor, *, target: Tensor, **keywords: Any) -> list[Tensor]:
        """Run forward and backward of a batch. Gradients add to those that are there.

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
        """Return the losses of a batch, without gradients; otherwise as `step`.

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
        every = [each for stage in self.stages for each in stage.parameters()]
        twice = self._tied.counted_elsewhere
        gradients = [e.grad for e in every if e is not twice and e.grad is not None]
        # In fp32, whatever dtype a stage's gradients have.
        own = get_total_norm(gradients, norm_type).to(self._device, torch.float32)
        norms = [torch.empty_like(own) for _ in range(self._group.size())]
        dist.all_gather(norms, own, group=self._group)
        total: Tensor = torch.linalg.vector_norm(torch.stack(norms), norm_type)
        scale_gradients([each for each in every if each.grad is not None], max_norm, total)
        return total

    def _run(
        self,
        run: Callable[..., Any],
        batches: _Batches,
        inputs: Tensor,
        target: Tensor,
        keywords: dict[str, Any],
    ) -> list[Tensor]:
        check_keywords(self.stages[0], keywords)
        batches.check(inputs, target)
        split = _for_each_sequence(keywords, inputs)
        losses: list[Tensor] = []
        arguments = (inputs,) if any(own.is_first for own in self._owned) else ()
        run(*arguments, target=target, losses=losses, return_outputs=False, **split)
        batches.has_run(inputs)
        return [loss.detach() * self._n_microbatches for loss in losses]


def _check_mesh(pp_mesh: DeviceMesh) -> None:
    if pp_mesh.ndim != 1:
        raise ValueError(
            f"{pp_mesh} has {pp_mesh.ndim} axes: give that of the pipeline, mesh['pp']."
        )


def _check_schedule(name: str, count: int, n_microbatches: int, pp_size: int) -> None:
    known: Any = _ONE if count == 1 else _SEVERAL
    if name not in known:
        raise ValueError(
            f"schedule={name!r} for {count} stages a rank: expected one of {sorted(known)}. "
            f"{sorted(_ONE)} run one stage a rank (virtual=1), {sorted(_SEVERAL)} several."
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


class _Batches:
    """Batches of one schedule of torch: where a model has several stages, all of one shape.

    They are checked on every rank before anything is sent: a rank that refuses a batch in the
    middle of a step leaves the others waiting for it.
    """

    def __init__(self, n_microbatches: int, n_stages: int) -> None:
        self._n_microbatches = n_microbatches
        self._has_peers = n_stages > 1
        self._first: tuple[torch.Size, torch.dtype] | None = None

    def check(self, inputs: Tensor, target: Tensor) -> None:
        """Check that microbatches divide a batch, and that it has the first one's shape and dtype.

        The same on all ranks of the pipeline.
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
                "or drop what is shorter, or make another pipeline_schedule for it."
            )

    def has_run(self, inputs: Tensor) -> None:
        """Note a batch with which the stages have prepared what they receive."""
        if self._first is None and self._has_peers:
            self._first = (inputs.shape, inputs.dtype)


def _for_each_sequence(keywords: Mapping[str, Any], inputs: Tensor) -> dict[str, Any]:
    """Return keywords whose tensors all have the batch as first dimension: torch splits by it.

    Tensors, also in lists and dictionaries, are for each sequence or, with a first dimension of 1,
    for all. Inputs have the shape (batch, tokens) or (batch, tokens, features).

    Raises:
        ValueError: a tensor has another first dimension, or one dimension that may be either that
            of the sequences or that of the tokens.
    """

    def is_mask(each: Any) -> bool:
        return isinstance(each, BlockMask)

    return {
        name: tree_map(partial(_expanded, name, inputs), value, is_leaf=is_mask)
        for name, value in keywords.items()
    }


def _expanded(name: str, inputs: Tensor, value: Any) -> Any:
    if not isinstance(value, Tensor | BlockMask):
        return value
    batch, tokens = inputs.shape[:2]
    shape = tuple(value.shape)
    if shape == (batch,) == (tokens,):
        raise ValueError(
            f"{name} has {batch} elements, and the batch has {batch} sequences of {tokens} tokens: "
            f"one for each sequence, or for each token? Give {name}[None] for the tokens of all "
            f"sequences, or {name}[:, None] for the sequences."
        )
    if not shape or shape[0] not in ((batch,) if len(shape) == 1 else (1, batch)):
        raise ValueError(
            f"{name} has the shape {shape}, and the batch has {batch} sequences: tensors are split "
            "by sequences, in their first dimension. What is the same for all sequences needs a "
            f"first dimension of 1, as {name}[None]; a single number goes as {name}.item()."
        )
    if isinstance(value, BlockMask) or shape[0] == batch:  # torch takes a BlockMask of 1 for all
        return value
    return value.expand(batch, *shape[1:])


class TiedParameter:
    """The embedding that is tied to the head, where they are in different stages.

    Either stage has the parameter, and a gradient of its own part of the model. What a training
    step adds to both is summed, so that the two stay one. All ranks of the pipeline create this
    with their parallelized stages, and use it together.

    Raises:
        ValueError: the two stages have it in different shapes, dtypes or placements, or one has it
            frozen.
    """

    def __init__(self, stages: Sequence[nn.Module], pp_mesh: DeviceMesh) -> None:
        self._group = pp_mesh.get_group()
        self._parameter: nn.Parameter | None = None
        self._is_first = False
        self._peer = -1
        for stage, own in zip(stages, map(stage_of, stages), strict=True):
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
        """Sum over the two stages what is added to the gradient within the block."""
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
        ways = (dist.isend, added.contiguous()), (dist.irecv, others)
        peer: Any = {"group": self._group, "group_peer": self._peer}
        for work in dist.batch_isend_irecv([dist.P2POp(*way, **peer) for way in ways]):
            work.wait()
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


def _local_gradient(parameter: nn.Parameter) -> Tensor | None:
    gradient = parameter.grad
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def _description(parameter: nn.Parameter) -> str:
    trained = "trained" if parameter.requires_grad else "frozen"
    value: Tensor = parameter
    split = f" of {value.placements}" if isinstance(value, DTensor) else ""
    local = value.to_local() if isinstance(value, DTensor) else value
    return f"{tuple(local.shape)}{split}, {value.dtype}, {trained}"
