"""Loss per token of a batch whose tokens are spread unevenly over ranks and microbatches.

Example:
    >>> loss_of = LossPerToken(model, mesh)  # once, after sharding  # doctest: +SKIP
    >>> loss_of.count(*targets)  # of all microbatches of this step  # doctest: +SKIP
    >>> for inputs, target in zip(microbatches, targets):  # doctest: +SKIP
    ...     loss_of(model(inputs).logits, target).backward()
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.functional import cross_entropy

from meshverse import DeviceMesh
from meshverse._torch_compat.callers import is_in_backward
from meshverse.parallel.meshes.degrees import is_degree
from meshverse.parallel.meshes.submesh import axis_size, get_flat_mesh
from meshverse.parallel.models.modules import stage_of

from .split_logits import loss_of_split_logits

_MARK = "_meshverse_sums_gradients"


def sums_gradients(model: nn.Module) -> bool:
    """Return whether a `LossPerToken` was created for a model or stage."""
    return getattr(model, _MARK, False)


class LossPerToken:
    """Cross-entropy summed over tokens and divided by the tokens of the batch of all ranks.

    A mean of each rank's and each microbatch's own mean would give tokens of short ones more
    weight. Instead, every token counts the same, and gradients are summed: the constructor sets the
    factor by which FSDP2 divides them to 1. Call `count` once per step, then the object for each
    microbatch, or pass it to `pipeline_schedule` as the loss function: the object itself, because
    another function around it would be averaged over microbatches.

    With context parallelism, targets are whole outside of `context_parallel`, and a rank's part
    inside: pass one `context_parallel` the tensors of all microbatches of a step, and call `count`
    in it.

    Args:
        model: model that is already sharded with FSDP2, or a sequence of this rank's pipeline
            stages.
        device_mesh: mesh that `create_device_meshes` returned.
        dp_cp_mesh_name: its axis over all ranks with different tokens.
        ignore_index: target of positions that do not count.
        losses_per_target: number of losses that a step computes of each target, such as 2 if a
            second head predicts the same tokens.

    Attributes:
        tokens: number of tokens that the last `count` found, in a tensor without dimensions; None
            before the first.

    Raises:
        KeyError: the mesh lacks the axis.
        ValueError: several ranks have different tokens, but FSDP2 does not shard the model; or
            `losses_per_target` is not an int above 0.
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        device_mesh: DeviceMesh,
        *,
        dp_cp_mesh_name: str = "dp_cp",
        ignore_index: int = -100,
        losses_per_target: int = 1,
    ) -> None:
        if not is_degree(losses_per_target):
            raise ValueError(f"losses_per_target={losses_per_target!r} must be an int above 0.")
        models = [model] if isinstance(model, nn.Module) else list(model)
        self._mesh, self._data = device_mesh, get_flat_mesh(device_mesh, dp_cp_mesh_name)
        kind, self._ignored = device_mesh.device_type, ignore_index
        local = [] if kind == "cpu" else [torch.get_device_module(kind).current_device()]
        self._device = torch.device(kind, *local)
        self.tokens: Tensor | None = None
        self._n_cp = axis_size(device_mesh, "cp")
        self._counted: set[tuple[int, ...]] = set()  # shapes of the targets that were counted
        self._losses_per_target = losses_per_target
        self._n_left = 0  # counted targets whose loss has not been computed yet
        self._is_taken = False  # whether those of the batch that is run were subtracted
        for each in models:
            if self._data.size() > 1 and not isinstance(each, FSDPModule):
                raise ValueError(
                    f"{type(each).__name__} is not sharded with FSDP2, but the {self._data.size()} "
                    f"ranks of {dp_cp_mesh_name!r} have different tokens: their gradients would "
                    "not be summed. Call fsdp2_strategy_parallelize() first. It does not work with "
                    "DistributedDataParallel and Megatron-FSDP."
                )
        for each in models:
            setattr(each, _MARK, True)
            for module in each.modules():
                if stage_of(module) is not None:
                    setattr(module, _MARK, True)
                if isinstance(module, FSDPModule):
                    module.set_gradient_divide_factor(1.0)
                    # Without it, torch multiplies by 1 while it reduces, which only NCCL can.
                    module.set_force_sum_reduction_for_comms(True)

    def count(self, *targets: Tensor) -> Tensor:
        """Count the tokens of a step: of all microbatches, over all ranks with different tokens.

        All these ranks call this once per step; a rank may pass no targets.

        Args:
            targets: targets of each microbatch, shape (batch, tokens): what each position predicts.
                Of `labels=`, which transformers shifts itself, pass `labels[:, 1:]`.

        Returns:
            Their number as an integer tensor without dimensions, at least 1, on the mesh's device.
            Models of transformers take it as `num_items_in_batch=` beside `labels=`.
        """
        self._counted = {tuple(each.shape) for each in targets}
        self._n_left = self._losses_per_target * sum(each.numel() for each in targets)
        own = sum((each.ne(self._ignored).sum() for each in targets), torch.tensor(0))
        self.tokens = own.to(self._device)
        dist.all_reduce(self.tokens, group=self._data.get_group())
        self.tokens.clamp_(min=1)  # a batch without targets has a loss of 0
        return self.tokens

    def __call__(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return a microbatch's share of the loss per token of the whole batch.

        Args:
            logits: shape (batch, tokens, vocabulary), plain or split over the vocabulary.
            targets: shape (batch, tokens): what each position predicts.

        Raises:
            RuntimeError: `count` was not called for these targets, or was called with whole
                sequences, of which context parallelism has split this rank's part.
            ValueError: the targets do not have the shape of the logits without the vocabulary.
        """
        if logits.shape[:-1] != targets.shape:
            raise ValueError(
                f"Targets of shape {tuple(targets.shape)} for logits of shape "
                f"{tuple(logits.shape)}: they must have the shape {tuple(logits.shape[:-1])}, one "
                "target for each position."
            )
        if self.tokens is None:
            raise RuntimeError(
                "LossPerToken does not know the tokens of the batch yet. Call "
                "count(*targets), with the targets of all microbatches of this step, before."
            )
        shape = tuple(targets.shape)
        whole = (*shape[:-1], self._n_cp * shape[-1]) if shape else shape
        if shape not in self._counted and whole in self._counted:
            raise RuntimeError(
                f"LossPerToken.count() got targets of shape {whole}, and this rank's part of them "
                f"has shape {shape}: each of the {self._n_cp} ranks of context parallelism counted "
                "all tokens. Call count inside context_parallel(), with the parts of all "
                "microbatches of the step."
            )

        # Compiled code would be compiled again for each number that is left, and backward may
        # compute a checkpointed loss again.
        counts = torch.is_grad_enabled() and not torch.compiler.is_compiling()
        if counts and not (self._is_taken or is_in_backward()):
            self._take(targets)

        def total(logits: Tensor, targets: Tensor) -> Tensor:
            return cross_entropy(
                logits.flatten(0, -2).float(),
                targets.flatten(),
                ignore_index=self._ignored,
                reduction="sum",
            )

        loss: Tensor = loss_of_split_logits(total, logits, targets)
        return loss / self.tokens

    @contextlib.contextmanager
    def taken(self, targets: Tensor) -> Iterator[None]:
        """Take the targets of a batch at once, for the losses of its parts within the context."""
        self._take(targets)
        self._is_taken = True
        try:
            yield
        finally:
            self._is_taken = False

    def _take(self, targets: Tensor) -> None:
        """Raise RuntimeError if these targets were not counted; count them once only."""
        if targets.numel() > self._n_left:
            raise RuntimeError(
                f"LossPerToken got {targets.numel()} targets, but only {self._n_left} counted ones "
                "are left, so the loss would be divided by the tokens of other ones. Call "
                "count(*targets) before each pass over a batch, with all its microbatches. If a "
                "step computes several losses of each target, pass losses_per_target=."
            )
        self._n_left -= targets.numel()

    def total(self, *losses: Tensor) -> float:
        """Return the loss of the whole batch, the same on all ranks of the mesh, which call this.

        Args:
            losses: this rank's losses of all microbatches of a step; none where a pipeline's last
                stage is elsewhere.
        """
        whole = torch.zeros((), dtype=torch.float64, device=self._device)
        for loss in losses:
            whole += loss.detach()
        stages = ["pp"] if "pp" in (self._mesh.mesh_dim_names or ()) else []
        for group in (self._data.get_group(), *map(self._mesh.get_group, stages)):
            dist.all_reduce(whole, group=group)
        return whole.item()
