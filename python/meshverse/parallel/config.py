"""Settings of the strategies, as dataclasses that check their values at construction.

Example:
    >>> config = FSDP2Config(sequence_parallel=True, activation_checkpointing="selective")
    >>> config.mp_policy.param_dtype
    torch.bfloat16
    >>> config.to_dict()["activation_checkpointing"]
    'selective'
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor.parallel import ParallelStyle

# A tensor-parallel plan, its import path, or a function that returns it.
TPPlan = str | dict[str, ParallelStyle] | Callable[..., dict[str, ParallelStyle]]
CheckpointingMode = Literal[True, False, "full", "selective"]
CheckpointingScope = str | Collection[str] | None

_CHECKPOINTING = (True, False, "full", "selective")
_ZERO_STRATEGIES = (0, 1, 2, 3, "no_shard", "optim", "optim_grads", "optim_grads_params")
_SCOPES = ("all", "language", "vision", "audio", "multimodal")


def default_mixed_precision() -> MixedPrecisionPolicy:
    """Return the default policy: parameters, inputs and outputs in bf16, reduction in fp32."""
    return MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.bfloat16)


class _Settings:
    """Base of the configs."""

    def to_dict(self) -> dict[str, Any]:
        """Return the settings by name; values are the config's own objects, not copies."""
        return {each.name: getattr(self, each.name) for each in fields(self)}  # type: ignore[arg-type]


@dataclass
class FSDP2Config(_Settings):
    """Settings of FSDP2 and of tensor, pipeline, context and expert parallelism with it.

    Attributes:
        sequence_parallel: whether activations between tensor-parallel layers are split by tokens.
        tp_plan: the tensor-parallel plan (parallel styles by module name), its import path, or a
            function that returns it; None to choose one for the model.
        patch_is_packed_sequence: whether to replace transformers' check for packed sequences, which
            waits for the device in every layer. Leave it off if sequences are packed.
        mp_policy: precision of parameters, gradients and outputs; None for the default, in bf16.
        offload_policy: where sharded parameters live, such as CPUOffloadPolicy.
        activation_checkpointing: recompute every layer (True or "full"), or some operations
            ("selective").
        activation_checkpointing_scope: parts of the model to recompute, in a form that
            `checkpointing_parts` takes; stored as a tuple.
        reshard_after_forward: whether layers free gathered parameters after their forward; None
            for all layers but the last.
        enable_compile: whether to compile each decoder layer.
        enable_fsdp2_prefetch: whether to gather layers ahead explicitly, by the two depths below.
        fsdp2_backward_prefetch_depth: number of layers to gather ahead in backward.
        fsdp2_forward_prefetch_depth: number of layers to gather ahead in forward.
        split_logits: whether tensor parallelism leaves logits split over the vocabulary in training
            mode, as DTensors, for torch's `loss_parallel`. In eval mode, and by default, each rank
            gathers them. If you pass or register a plan other than `llama_tp_plan`, its style of
            the head decides instead.

    Raises:
        ValueError: `activation_checkpointing` or its scope is not one of the values above.
    """

    sequence_parallel: bool = False
    tp_plan: TPPlan | None = None
    patch_is_packed_sequence: bool = False
    mp_policy: MixedPrecisionPolicy | None = field(default_factory=default_mixed_precision)
    offload_policy: OffloadPolicy | None = None
    activation_checkpointing: CheckpointingMode = False
    activation_checkpointing_scope: CheckpointingScope = "all"
    reshard_after_forward: bool | None = None
    enable_compile: bool = False
    enable_fsdp2_prefetch: bool = False
    fsdp2_backward_prefetch_depth: int = 2
    fsdp2_forward_prefetch_depth: int = 1
    split_logits: bool = False

    def __post_init__(self) -> None:
        if self.mp_policy is None:
            self.mp_policy = default_mixed_precision()
        mode = self.activation_checkpointing
        if type(mode) not in (bool, str) or mode not in _CHECKPOINTING:
            raise ValueError(f"activation_checkpointing={mode!r} must be one of {_CHECKPOINTING}.")
        parts = checkpointing_parts(self.activation_checkpointing_scope)
        self.activation_checkpointing_scope = parts


def checkpointing_parts(scope: CheckpointingScope) -> tuple[str, ...]:
    """Return the parts of a model that an `activation_checkpointing_scope` names, each once.

    Args:
        scope: "all", or one or more of "language", "vision", "audio" and "multimodal". Give several
            as a collection of strings, or as one string with commas or plus signs. Upper and lower
            case are the same. None, an empty scope, "auto" and "default" mean "all".

    Raises:
        ValueError: a part is unknown, or "all" is not alone.
    """
    given = [scope] if isinstance(scope, str) else scope or ()
    words = ",".join(map(str, given)).replace("+", ",").lower().split(",")
    parts = [word.strip() for word in words if word.strip()] or ["all"]
    parts = ["all" if part in ("auto", "default") else part for part in parts]
    unknown = [part for part in parts if part not in _SCOPES]
    if unknown or ("all" in parts and len(set(parts)) > 1):
        wrong = f"unknown parts {unknown}" if unknown else "'all' includes the other parts"
        raise ValueError(
            f"activation_checkpointing_scope={scope!r}: {wrong}. Give one or more of {_SCOPES}, or "
            "'all' alone."
        )
    return tuple(dict.fromkeys(parts))


@dataclass
class MegatronFSDPConfig(_Settings):
    """Settings of Megatron-FSDP, under the names of `megatron_fsdp.fully_shard`.

    Attributes:
        megatron_fsdp_unit_modules: classes of the modules to shard one by one, or their import
            paths; None for the model's own `_no_split_modules`.
        zero_dp_strategy: tensors to shard. 0: none; 1: the optimizer's state; 2: also gradients;
            3: also parameters. Or the package's name of one of these: "no_shard", "optim",
            "optim_grads" or "optim_grads_params".
        init_fsdp_with_meta_device: whether parameters are on the meta device until sharded.
        grad_reduce_in_fp32: whether gradients are reduced in fp32.
        preserve_fp32_weights: whether fp32 main weights are kept.
        overlap_grad_reduce: whether reducing gradients overlaps with backward.
        overlap_param_gather: whether gathering parameters overlaps with computation.
        check_for_nan_in_grad: whether gradients are checked for NaN.
        report_nan_in_param_grad: whether the check names the parameter.
        average_in_collective: whether the collective averages gradients.
        disable_bucketing: whether every parameter is a bucket of its own.
        calculate_per_token_loss: whether gradients are summed, for a loss averaged over tokens.
        keep_fp8_transpose_cache: whether transposes of fp8 parameters are kept.
        nccl_ub: whether communication buffers are registered with NCCL.
        fsdp_double_buffer: whether communication uses two persistent buffers.
        activation_checkpointing: whether layers are recomputed in backward.

    Raises:
        ValueError: `zero_dp_strategy` is not one of the values above, or
            `activation_checkpointing` is not a bool.
    """

    megatron_fsdp_unit_modules: Sequence[str | type[nn.Module]] | None = None
    zero_dp_strategy: int | str = 3
    init_fsdp_with_meta_device: bool = False
    grad_reduce_in_fp32: bool = False
    preserve_fp32_weights: bool = False
    overlap_grad_reduce: bool = True
    overlap_param_gather: bool = True
    check_for_nan_in_grad: bool = True
    report_nan_in_param_grad: bool = False
    average_in_collective: bool = False
    disable_bucketing: bool = False
    calculate_per_token_loss: bool = False
    keep_fp8_transpose_cache: bool = False
    nccl_ub: bool = False
    fsdp_double_buffer: bool = False
    activation_checkpointing: bool = False

    def __post_init__(self) -> None:
        stage = self.zero_dp_strategy
        if type(stage) not in (int, str) or stage not in _ZERO_STRATEGIES:  # True == 1 == 1.0
            raise ValueError(f"zero_dp_strategy={stage!r} must be one of {_ZERO_STRATEGIES}.")
        if not isinstance(self.activation_checkpointing, bool):
            raise ValueError(
                f"activation_checkpointing={self.activation_checkpointing!r} must be True (all "
                "layers) or False (no layer) for Megatron-FSDP."
            )


@dataclass
class DDPConfig(_Settings):
    """Settings of DistributedDataParallel, with its argument names.

    Use them as `DistributedDataParallel(model, **config.to_dict())`.

    Attributes:
        bucket_cap_mb: size of a bucket of gradients in MiB; None for torch's default.
        broadcast_buffers: whether buffers are broadcast before every forward.
        find_unused_parameters: whether each forward finds the parameters that get no gradient.
        static_graph: whether the autograd graph is the same in every step.
        gradient_as_bucket_view: whether gradients are views of the buckets.
    """

    bucket_cap_mb: float | None = None
    broadcast_buffers: bool = True
    find_unused_parameters: bool = False
    static_graph: bool = False
    gradient_as_bucket_view: bool = False
