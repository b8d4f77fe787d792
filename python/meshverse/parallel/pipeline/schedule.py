"""Pipeline stages of a rank, torch's schedules over them, and tied embeddings.

Example:
    >>> stages = pipeline_stages(model, mesh["pp"])  # doctest: +SKIP
    >>> for stage in stages:  # doctest: +SKIP
    ...     fsdp2_strategy_parallelize(stage, mesh)
    >>> pipeline = pipeline_schedule(stages, mesh["pp"], loss_of, 4)  # doctest: +SKIP
    >>> losses = pipeline.step(tokens, target=targets)  # doctest: +SKIP
"""

from __future__ import annotations

import contextlib
import copy
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleLoopedBFS,
)
from torch.distributed.tensor import DTensor
from torch.nn.attention.flex_attention import BlockMask
from torch.utils._pytree import tree_leaves, tree_map

from meshverse.parallel.experts.sharding import get_total_norm, scale_gradients
from meshverse.parallel.losses.per_token import LossPerToken, sums_gradients
from meshverse.parallel.meshes.degrees import is_degree
from meshverse.parallel.models.modules import stage_of
from meshverse.parallel.models.trials import OF_EVERY_MODULE

from .stage import check_keywords, check_names, split_into_stages

_Model = TypeVar("_Model", bound=nn.Module)
Loss = Callable[[Tensor, Tensor], Tensor]

_ONE = {"1F1B": Schedule1F1B, "GPipe": ScheduleGPipe}  # one stage per rank
_SEVERAL = {"Interleaved1F1B": ScheduleInterleaved1F1B, "LoopedBFS": ScheduleLoopedBFS}

# Types of values of attributes that are put back after torch has tried out stages.
_VALUES = (bool, int, float, complex, str, tuple, list, dict, set, deque)

# Groups of pipelines in which a batch raised on this rank.
_interrupted: WeakSet[dist.ProcessGroup] = WeakSet()


def pipeline_stages(
    model: _Model,
    pp_mesh: DeviceMesh,
    *,
    virtual: int = 1,
    layers_per_stage: Sequence[int] | None = None,
) -> list[_Model]:
    """Return this rank's stages of a model, which the caller then parallelizes one by one.

    Args:
        model: as in `split_into_stages`.
        pp_mesh: 1-D mesh of all ranks of the pipeline, `mesh["pp"]`.
        virtual: number of stages per rank, above 1 for interleaved schedules. Rank r has the stages
            r, r + pp size, and so on.
        layers_per_stage: number of layers of each stage of the model; by default as equal as
            possible.

    Raises:
        ValueError: `split_into_stages` raised it; or `virtual` is not an int above 0, or is above 1
            for a pipeline of one rank.
    """
    _check_mesh(pp_mesh)
    rank, size = pp_mesh.get_local_rank(), pp_mesh.size()
    if not is_degree(virtual) or (virtual > 1 and size == 1):
        raise ValueError(
            f"virtual={virtual!r} stages per rank for {size} ranks of pp: it must be an int above "
            "0, and 1 if pp has one rank."
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
    """Create torch's schedule over this rank's stages. All ranks of the pipeline call this.

    Args:
        stages: stages that `pipeline_stages` returned, already parallelized.
        pp_mesh: mesh that was passed to `pipeline_stages`.
        loss_function: function of a microbatch's logits and targets that returns their mean loss;
            or a `LossPerToken`, whose losses are not averaged over microbatches but summed.
        n_microbatches: number of microbatches that a batch is split into.
        schedule: torch's name of the schedule: "1F1B" (default) or "GPipe" for one stage per rank,
            "Interleaved1F1B" (default) or "LoopedBFS" for several.

    Raises:
        ValueError: the schedule is unknown, or does not fit the number of stages or microbatches;
            `stages` are not this rank's stages of a model; or a tied embedding and head are split
            in different ways, or only one of them is frozen.
        RuntimeError: a batch raised in this pipeline.
    """
    _check_mesh(pp_mesh)
    _check_group(pp_mesh)
    rank, size, stages = pp_mesh.get_local_rank(), pp_mesh.size(), tuple(stages)
    owned = [own for own in map(stage_of, stages) if own is not None]
    count = len(owned)
    indices, counts = [own.index for own in owned], {own.count for own in owned}
    expected = list(range(rank, size * count, size))
    if not owned or count < len(stages) or indices != expected or counts != {size * count}:
        raise ValueError(
            f"Stages {indices} of {sorted(counts)}, among {len(stages)} modules, for rank {rank} "
            f"of {size} of the pipeline: give the list that pipeline_stages() returned on this "
            "rank for this mesh."
        )
    name = schedule or ("1F1B" if count == 1 else "Interleaved1F1B")
    _check_schedule(name, count, n_microbatches, size)
    kind = pp_mesh.device_type
    local = [] if kind == "cpu" else [torch.get_device_module(kind).current_device()]
    device = torch.device(kind, *local)

    parts = 1 if isinstance(loss_function, LossPerToken) else n_microbatches

    def scaled_loss(output: Tensor, target: Tensor) -> Tensor:
        return loss_function(output, target) / parts

    def make() -> tuple[Any, list[_Stage]]:
        torch_stages = [
            _Stage(stage, own.index, own.count, device, group=pp_mesh.get_group())
            for stage, own in zip(stages, owned, strict=True)
        ]
        make_schedule: Any = (_ONE | _SEVERAL)[name]
        # With scale_grads=True, torch would also scale the gradients of earlier steps again.
        settings = {"loss_fn": scaled_loss, "scale_grads": False}
        own_stages = torch_stages[0] if count == 1 else torch_stages
        return make_schedule(own_stages, n_microbatches, **settings), torch_stages

    return PipelineSchedule(stages, pp_mesh, device, n_microbatches, loss_function, parts, make)


class PipelineSchedule:
    """Schedule that trains a rank's pipeline stages, which `pipeline_schedule` creates.

    All ranks of a pipeline call each method, in the same order.

    Attributes:
        schedule: torch's schedule.
        stages: this rank's stages.
    """

    def __init__(
        self,
        stages: Sequence[nn.Module],
        pp_mesh: DeviceMesh,
        device: torch.device,
        n_microbatches: int,
        loss_function: Loss,
        parts: int,
        make: Callable[[], tuple[Any, list[_Stage]]],
    ) -> None:
        self.stages = tuple(stages)
        self._owned = [own for own in map(stage_of, stages) if own is not None]
        self._mesh, self._device = pp_mesh, device
        self._loss_function = loss_function
        self._parts = parts  # number by which each loss was divided
        self._tied = TiedParameter(stages, pp_mesh)
        self._batches, self._evaluated = (
            _Batches(n_microbatches, self._owned[0].count) for _ in range(2)
        )
        self._make = make
        self.schedule, self._torch_stages = make()
        # A separate schedule: in some versions of torch, a schedule cannot train after evaluation.
        self._evaluation: Any = None
        self._has_trained = False
        self._has_raised = False  # in a batch that was under way

    def parts_to_revive(self) -> list[object]:
        """Return what `meshverse.revive` gives new process groups."""
        return [self.schedule, self._evaluation]

    def step(self, inputs: Tensor, *, target: Tensor, **keywords: Any) -> list[Tensor]:
        """Run forward and backward of a batch, and add to the parameters' gradients.

        The gradients are those of the mean of the microbatches' losses; of a `LossPerToken`, of
        their sum.

        Args:
            inputs: tokens, shape (batch, tokens); the same on all ranks of the pipeline, and of
                the same shape in each call.
            target: targets, shape (batch, ...).
            keywords: keywords for the forward of every stage, such as attention_mask. Tensors in
                them are split along the first dimension, the batch; if its size is 1, the tensor
                applies to all sequences.

        Returns:
            Losses of the microbatches on the rank with the last stage; an empty list on others.

        Raises:
            TypeError: a keyword, such as use_cache, needs all layers of the model.
            ValueError: the batch cannot be divided into the microbatches, its shape or dtype is not
                that of the first call, a keyword cannot be split along the batch, or the loss
                function is a `LossPerToken` inside another one. With the same arguments, all ranks
                raise, and nothing is sent.
            RuntimeError: gradients are disabled; a `LossPerToken` has not counted these targets; or
                an earlier batch raised in a pipeline of several stages, whose other ranks may still
                wait for its messages.
        """
        if not torch.is_grad_enabled():
            raise RuntimeError("step() needs gradients, which are disabled here. Call eval().")
        _check_loss(self._loss_function, self.stages, inputs, target)
        split = self._checked(self._batches, inputs, target, keywords)
        # In its first step, torch tries out the stages, and then deletes FSDP2's gradients.
        kept = contextlib.nullcontext() if self._has_trained else _set_aside(self._torch_stages)
        loss = self._loss_function
        # Torch also calls the loss function where it tries out the stages.
        taken = loss.taken(target) if isinstance(loss, LossPerToken) else contextlib.nullcontext()
        with taken, kept, self._tied.summed():
            losses = self._run(self.schedule.step, self._batches, inputs, target, split)
        self._has_trained = True
        return losses

    @torch.no_grad()
    def eval(self, inputs: Tensor, *, target: Tensor, **keywords: Any) -> list[Tensor]:
        """Return the losses of a batch as `step` does, without computing gradients.

        All batches of `eval` must have one shape, which may differ from that of `step`.
        """
        split = self._checked(self._evaluated, inputs, target, keywords)
        tried: Sequence[_Stage] = ()
        if self._evaluation is None:
            self._evaluation, tried = self._make()
        parameters = [each for stage in self.stages for each in stage.parameters()]
        gradients = [each.grad for each in parameters]
        try:
            with _state_set_aside(tried):
                return self._run(self._evaluation.eval, self._evaluated, inputs, target, split)
        finally:
            for stage in self.stages:  # where FSDP2 left whole parameters, they have no gradients
                for module in stage.modules():
                    if isinstance(module, FSDPModule):
                        module.reshard()
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the gradients of all stages by their total norm, in which tied gradients count once.

        Args:
            max_norm: largest norm of the whole model's gradients after the call.
            norm_type: the p of the p-norm, above 0; infinity is allowed.

        Returns:
            The norm before clipping, as a plain fp32 tensor, the same on all ranks of the pipeline.

        Raises:
            ValueError: `norm_type` is not above 0.
        """
        every = [each for stage in self.stages for each in stage.parameters()]
        twice = self._tied.counted_elsewhere
        gradients = [e.grad for e in every if e is not twice and e.grad is not None]
        # In fp32 on all ranks: the dtypes of gradients may differ between stages.
        own = get_total_norm(gradients, norm_type).to(self._device, torch.float32)
        norms = [torch.empty_like(own) for _ in range(self._mesh.size())]
        dist.all_gather(norms, own, group=self._mesh.get_group())
        total: Tensor = torch.linalg.vector_norm(torch.stack(norms), float(norm_type))
        scale_gradients([each for each in every if each.grad is not None], max_norm, total)
        return total

    def _checked(
        self, batches: _Batches, inputs: Tensor, target: Tensor, keywords: dict[str, Any]
    ) -> dict[str, Any]:
        """Return a batch's keywords as torch splits them, if the batch can run."""
        check_keywords(self.stages[0], keywords)
        check_names(self.stages[0], keywords)
        batches.check(inputs, target)
        batches.check_lists(keywords, inputs)
        split = _for_each_sequence(keywords, inputs)
        _check_group(self._mesh)
        if self._has_raised:  # torch's schedules still have that batch's microbatches
            (self.schedule, self._torch_stages), self._evaluation = self._make(), None
            self._has_trained = self._has_raised = False
        return split

    def _run(
        self,
        run: Callable[..., Any],
        batches: _Batches,
        inputs: Tensor,
        target: Tensor,
        split: dict[str, Any],
    ) -> list[Tensor]:
        losses: list[Tensor] = []
        # Torch 2.11 refuses other strides, such as those of the tokens before the last one.
        is_first = any(own.is_first for own in self._owned)
        arguments = (inputs.contiguous(),) if is_first else ()
        try:
            run(*arguments, target=target, losses=losses, return_outputs=False, **split)
        except BaseException:
            self._has_raised = True
            if self._owned[0].count > 1:
                _interrupted.add(self._mesh.get_group())
            raise
        batches.has_run(inputs)
        return [loss.detach() * self._parts for loss in losses]


class _Stage(PipelineStage):
    """Torch's stage, and what is to be done once torch has tried it out.

    Attributes:
        begin: function that is called before each microbatch, which a trial is not.
    """

    begin: Callable[[], None] | None = None

    def forward_one_chunk(self, *arguments: Any, **keywords: Any) -> Any:
        """Run a microbatch."""
        if self.begin is not None:
            self.begin()
        return super().forward_one_chunk(*arguments, **keywords)


@contextlib.contextmanager
def _state_set_aside(stages: Sequence[_Stage]) -> Iterator[None]:
    """Let modules have copies of their buffers and attributes while torch tries out stages.

    Attributes are values such as numbers, texts, tensors and lists of these. They may belong to the
    buffers, as the length for which a rotary embedding has computed its frequencies.
    """
    modules = {each for stage in stages for each in stage.submod.modules()}
    aside = [(each._buffers, {**each._buffers}) for each in modules]
    aside += [(vars(each), _values_of(each)) for each in modules]
    for table, own in aside:
        table.update({name: _copied(each) for name, each in own.items()})

    def put_back() -> None:
        while aside:
            table, own = aside.pop()
            for name in [*table]:  # also those that are new
                if name not in own and name not in OF_EVERY_MODULE and _is_value(table[name]):
                    del table[name]
            table.update(own)

    for stage in stages:
        stage.begin = put_back
    try:
        yield
    finally:
        put_back()


def _values_of(module: nn.Module) -> dict[str, Any]:
    return {
        name: each
        for name, each in vars(module).items()
        if name not in OF_EVERY_MODULE and _is_value(each)
    }


def _is_value(value: Any) -> bool:
    return value is None or isinstance(value, Tensor) or type(value) in _VALUES


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    return copy.copy(value)


@contextlib.contextmanager
def _set_aside(stages: Sequence[_Stage]) -> Iterator[None]:
    """Take the gradients off the parameters within the context, and add them back after it.

    Buffers and attributes are set aside while torch tries out the stages.
    """
    parameters = [each for stage in stages for each in stage.submod.parameters()]
    earlier = [each.grad for each in parameters]
    for each in parameters:
        each.grad = None
    try:
        with _state_set_aside(stages):
            yield
    finally:
        with torch.no_grad():
            for each, gradient in zip(parameters, earlier, strict=True):
                if gradient is not None:
                    # In place, as autograd does: the caller may hold the earlier gradient.
                    each.grad = gradient if each.grad is None else gradient.add_(each.grad)


def _check_mesh(pp_mesh: DeviceMesh) -> None:
    if pp_mesh.ndim != 1:
        raise ValueError(f"{pp_mesh} has {pp_mesh.ndim} axes, and must have one: give mesh['pp'].")


def _check_group(pp_mesh: DeviceMesh) -> None:
    if pp_mesh.get_group() in _interrupted:
        raise RuntimeError(
            f"A batch raised in this pipeline of {pp_mesh.size()} ranks, and its messages may "
            "still be under way: another batch could receive them. Restart the program from a "
            "checkpoint; or destroy the default process group on all ranks, create it again, and "
            "call meshverse.revive() with this schedule."
        )


def _check_loss(
    loss_function: Loss, stages: Sequence[nn.Module], inputs: Tensor, target: Tensor
) -> None:
    """Check what all ranks of the pipeline know of a `LossPerToken`, before anything is sent."""
    if not isinstance(loss_function, LossPerToken):
        if any(map(sums_gradients, stages)):
            raise ValueError(
                f"A LossPerToken was created for these stages, so that their gradients are "
                f"summed, but those of loss_function={loss_function!r} would be averaged. Give "
                "pipeline_schedule the LossPerToken itself, or an instance of a subclass."
            )
        return
    if not all(sums_gradients(each) for each in stages if isinstance(each, FSDPModule)):
        raise ValueError(
            "The LossPerToken was not created for all of these stages: FSDP2 would divide their "
            "gradients by the number of ranks. Create it with the list of stages."
        )
    if type(loss_function) is LossPerToken and target.shape != inputs.shape[:2]:
        raise ValueError(
            f"Targets of shape {tuple(target.shape)} for inputs of shape {tuple(inputs.shape)}: "
            f"LossPerToken needs one target per token, of shape {tuple(inputs.shape[:2])}."
        )


def _check_schedule(name: str, count: int, n_microbatches: int, pp_size: int) -> None:
    known: Any = _ONE if count == 1 else _SEVERAL
    if name not in known:
        raise ValueError(
            f"schedule={name!r} for {count} stages per rank must be one of {sorted(known)}. "
            f"{sorted(_ONE)} need one stage per rank (virtual=1), {sorted(_SEVERAL)} several."
        )
    if not is_degree(n_microbatches):
        raise ValueError(f"n_microbatches={n_microbatches!r} must be an int above 0.")
    if name == "1F1B" and n_microbatches < pp_size:
        raise ValueError(
            f"n_microbatches={n_microbatches} for {pp_size} stages: 1F1B must have at least one "
            "microbatch per stage. Split the batch further, or use schedule='GPipe'."
        )
    rounds = max(1, n_microbatches // pp_size)
    if name == "Interleaved1F1B" and n_microbatches % rounds:
        raise ValueError(
            f"n_microbatches={n_microbatches} over {pp_size} ranks run in {rounds} rounds, and "
            f"must be divisible by that number. Choose a multiple of {pp_size}."
        )


class _Batches:
    """Checks of the batches of one schedule; with several stages, all must have one shape.

    Each rank checks a batch before anything is sent: if a rank raised during a step, the other
    ranks would wait for it.
    """

    def __init__(self, n_microbatches: int, n_stages: int) -> None:
        self._n_microbatches = n_microbatches
        self._has_peers = n_stages > 1
        self._first: tuple[torch.Size, torch.dtype] | None = None

    def check(self, inputs: Tensor, target: Tensor) -> None:
        """Check that a batch can be split into microbatches, and is like the first batch.

        The result is the same on all ranks of the pipeline.
        """
        if inputs.ndim < 2 or not target.ndim:
            raise ValueError(
                f"Inputs of shape {tuple(inputs.shape)} and targets of shape "
                f"{tuple(target.shape)}: inputs must have the shape (batch, tokens), and targets "
                "(batch, ...). Give a single sequence as inputs[None]."
            )
        batch, count = inputs.size(0), self._n_microbatches
        if not batch or batch % count or target.size(0) != batch:
            raise ValueError(
                f"A batch of {batch} sequences with {target.size(0)} targets does not divide into "
                f"{count} microbatches. n_microbatches must divide the batch of each rank."
            )
        if self._first is not None and self._first != (inputs.shape, inputs.dtype):
            shape, dtype = self._first
            raise ValueError(
                f"A batch of shape {tuple(inputs.shape)}, {inputs.dtype}, after a first one of "
                f"shape {tuple(shape)}, {dtype}: all batches must have one shape and dtype. Pad or "
                "drop shorter batches, or create another pipeline_schedule for them."
            )

    def check_lists(self, keywords: Mapping[str, Any], inputs: Tensor) -> None:
        """Raise ValueError for a list that may have one entry per sequence: torch splits none."""
        batch, count = inputs.size(0), self._n_microbatches
        for name, value in keywords.items() if count > 1 else ():
            if length := next((len(each) for each in _lists_in(value) if len(each) == batch), 0):
                raise ValueError(
                    f"{name} has a list of {length} entries, and the batch has {batch} sequences: "
                    f"each of the {count} microbatches would get the whole list. Give {name} as a "
                    "tensor of shape (batch, ...), with one entry per sequence; set what is for "
                    "all sequences as an attribute of the model."
                )

    def has_run(self, inputs: Tensor) -> None:
        """Record the first batch, for which torch's stages have allocated their receive buffers."""
        if self._first is None and self._has_peers:
            self._first = (inputs.shape, inputs.dtype)


def _lists_in(value: Any) -> Iterator[Sequence[Any]]:
    """Yield the lists and tuples in a keyword, without those that contain tensors."""
    if isinstance(value, Mapping):
        for each in value.values():
            yield from _lists_in(each)
    elif isinstance(value, list | tuple):
        if not any(isinstance(each, Tensor | BlockMask) for each in tree_leaves(value)):
            yield value
        for each in value:
            yield from _lists_in(each)


def _for_each_sequence(keywords: Mapping[str, Any], inputs: Tensor) -> dict[str, Any]:
    """Return keywords with each tensor expanded to the batch, along which torch splits tensors.

    A tensor, which may be in a list or dict, must have one entry per sequence, or a first dimension
    of size 1, whose entry then applies to all sequences.

    Args:
        keywords: keywords of a step.
        inputs: batch of shape (batch, tokens) or (batch, tokens, features).

    Raises:
        ValueError: a tensor has another first dimension; or it is 1-D with as many entries as there
            are sequences and tokens, so that its meaning is ambiguous.
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
            f"it could have one per sequence or per token. Give {name}[:, None] for one per "
            f"sequence, or {name}[None] for one per token, the same in all sequences."
        )
    if shape == (batch, batch, tokens):
        raise ValueError(
            f"{name} has the shape {shape}, and the batch has {batch} sequences of {tokens} "
            "tokens: its first dimension could be the sequences, or sections of position ids, "
            "which cannot be split. Use a batch of another size; give a mask as "
            "(batch, 1, tokens, tokens)."
        )
    if not shape or shape[0] not in ((batch,) if len(shape) == 1 else (1, batch)):
        raise ValueError(
            f"{name} has the shape {shape}, and the batch has {batch} sequences: a tensor's first "
            f"dimension must be {batch}, or 1 if all sequences share it, as {name}[None]. Give a "
            f"single number as {name}.item()."
        )
    if isinstance(value, BlockMask) or shape[0] == batch:  # torch uses a BlockMask of 1 for all
        return value
    return value.expand(batch, *shape[1:])


class TiedParameter:
    """Parameter of an embedding that is tied to the head, if these are in different stages.

    Each of the two stages has a copy of the parameter, whose gradient comes from that stage. After
    a step, the two ranks sum what the step added to both gradients, so that the copies stay equal.
    All ranks of the pipeline create this object and use it together.

    Args:
        stages: this rank's stages, already parallelized.
        pp_mesh: 1-D mesh of the pipeline.

    Raises:
        ValueError: the copies have different shapes, dtypes or placements, or only one is frozen.
    """

    def __init__(self, stages: Sequence[nn.Module], pp_mesh: DeviceMesh) -> None:
        self._mesh = pp_mesh
        self._place: tuple[nn.Module, str] | None = None  # a stage, and the parameter's name in it
        self._is_first = False
        self._peer = -1
        for stage, own in zip(stages, map(stage_of, stages), strict=True):
            if own is not None and own.tied is not None:
                self._place = stage, own.tied
                self._is_first = own.is_first
                self._peer = pp_mesh.size() - 1 if own.is_first else 0
                self._check(own.tied, stage.get_parameter(own.tied))

    @property
    def _parameter(self) -> nn.Parameter | None:
        """The parameter that the stage has now: `load_state_dict(assign=True)` replaces it."""
        if self._place is None:
            return None
        stage, name = self._place
        return stage.get_parameter(name)

    @property
    def counted_elsewhere(self) -> nn.Parameter | None:
        """The parameter, if the other rank counts its gradient in the total norm; else None."""
        return None if self._is_first else self._parameter

    @contextlib.contextmanager
    def summed(self) -> Iterator[None]:
        """Sum, over the two stages, what is added to the gradients within the context."""
        parameter = self._parameter
        if parameter is None or not parameter.requires_grad:  # frozen: on the other stage too
            yield
            return
        before = _local_gradient(parameter)
        before = None if before is None else before.clone()
        yield
        if parameter.grad is None:  # unused on this stage, whose inputs were embeddings
            parameter.grad = torch.zeros_like(parameter)
        after = _local_gradient(parameter)
        assert after is not None
        added = after if before is None else after - before
        others = torch.empty_like(added)
        ways = (dist.isend, added.contiguous()), (dist.irecv, others)
        peer: Any = {"group": self._mesh.get_group(), "group_peer": self._peer}
        for work in dist.batch_isend_irecv([dist.P2POp(*way, **peer) for way in ways]):
            work.wait()
        # Add the earlier gradient last: then both stages round in the same way.
        total = others.add_(added)
        after.copy_(total if before is None else total.add_(before))

    def _check(self, name: str, parameter: nn.Parameter) -> None:
        own, theirs, group = _description(parameter), [""], self._mesh.get_group()
        if self._is_first:  # one of the two must send first
            dist.send_object_list([own], group=group, group_dst=self._peer)
        dist.recv_object_list(theirs, group=group, group_src=self._peer)
        if not self._is_first:
            dist.send_object_list([own], group=group, group_dst=self._peer)
        if theirs[0] != own:
            raise ValueError(
                f"{name} is tied to a parameter of another pipeline stage, but they differ: {own} "
                f"on this stage, and {theirs[0]} on the other. Both must have the same "
                "tensor-parallel style, FSDP2 mesh and requires_grad. Change one, or untie them."
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
