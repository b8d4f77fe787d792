"""Settings of the strategies, as dataclasses that check their values at construction.

Example:
    >>> config = FSDP2Config(sequence_parallel=True, activation_checkpointing="selective")
    >>> config.mp_policy.param_dtype
    torch.bfloat16
    >>> config.to_dict()["activation_checkpointing"]
    'selective'
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor.parallel import ParallelStyle

# A tensor-parallel plan, its import path, or a function that returns it.
TPPlan = str | dict[str, ParallelStyle] | Callable[..., dict[str, ParallelStyle]]
# Arguments of a model's forward: positional ones, or by name.
ExampleInputs = tuple[Any, ...] | Mapping[str, Any]
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

    def __post_init__(self) -> None:
        for each in fields(self):  # type: ignore[arg-type]
            if each.type == "bool":
                check_type(each.name, getattr(self, each.name), bool)

    def to_dict(self) -> dict[str, Any]:
        """Return the settings by name; values are the config's own objects, not copies."""
        return {each.name: getattr(self, each.name) for each in fields(self)}  # type: ignore[arg-type]


def check_type(name: str, value: Any, *allowed: type | None, cure: str = "") -> None:
    """Check the type of an argument. None among the allowed types stands for the value None.

    Raises:
        TypeError: the value has another type. A bool is no int.
    """
    types = tuple(each for each in allowed if each is not None)
    is_wrong = not isinstance(value, types) or (isinstance(value, bool) and bool not in types)
    if is_wrong and not (value is None and None in allowed):
        kinds = " or ".join("None" if each is None else each.__name__ for each in allowed)
        raise TypeError(
            f"{name}={value!r:.80} of type {type(value).__name__} must be {kinds}. {cure}".rstrip()
        )


def check_precision(name: str, policy: MixedPrecisionPolicy | None) -> None:
    """Check a policy, in which FSDP2 checks nothing.

    Raises:
        TypeError: it is no policy, or one of its values has a wrong type.
        ValueError: a dtype is not of floating-point numbers.
    """
    check_type(name, policy, MixedPrecisionPolicy, None)
    for each in ("param_dtype", "reduce_dtype", "output_dtype") if policy else ():
        dtype = getattr(policy, each)
        check_type(f"{name}.{each}", dtype, torch.dtype, None)
        if dtype is not None and not dtype.is_floating_point:
            raise ValueError(f"{name}.{each}={dtype} must be of floating-point numbers, or None.")
    if policy:
        check_type(f"{name}.cast_forward_inputs", policy.cast_forward_inputs, bool)


def check_plan(name: str, plan: Any) -> None:
    """Raise TypeError unless a value is a tensor-parallel plan, its path, a function, or None."""
    if not callable(plan):
        check_type(name, plan, str, dict, None, cure="Or give a function that returns a dict.")


def check_example_inputs(example: Any) -> None:
    """Raise TypeError unless `example_inputs` are `ExampleInputs` or None."""
    check_type("example_inputs", example, tuple, Mapping, None)


def check_trainability(function: Any) -> None:
    """Raise TypeError unless `reapply_trainability` is a function or None."""
    if function is not None and not callable(function):
        raise TypeError(
            f"reapply_trainability={function!r:.80} of type {type(function).__name__} must be a "
            "function of the model, or None."
        )


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
        fsdp2_backward_prefetch_depth: number of layers to gather ahead in backward, 0 or more.
        fsdp2_forward_prefetch_depth: number of layers to gather ahead in forward, 0 or more.
        reduce_unused_parameters: whether FSDP2 reduces zeros as the gradients of parameters that a
            rank has not used in a backward. Set it if ranks use different parameters of a layer, as
            where tokens choose experts that are modules, or batches choose heads: otherwise torch
            adds up gradients of different parameters, or hangs. A parameter that no rank uses then
            has a gradient of zeros instead of None, which an optimizer with momentum or weight
            decay takes. For layers that a rank does not call at all, it does nothing. It needs a
            torch whose FSDPModule has `set_reduce_scatter_unused_params`, such as 2.13.
        split_logits: whether tensor parallelism leaves logits split over the vocabulary in training
            mode, as DTensors, for torch's `loss_parallel`. In eval mode, and by default, each rank
            gathers them. If you pass or register a plan other than `llama_tp_plan`, its style of
            the head decides instead.

    Raises:
        TypeError: a value has another type than above.
        ValueError: `activation_checkpointing` or its scope is not one of the values above, a depth
            is negative, or `mp_policy` has dtypes of integers.
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
    reduce_unused_parameters: bool = False
    split_logits: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_type("reshard_after_forward", self.reshard_after_forward, bool, None)
        check_plan("tp_plan", self.tp_plan)
        check_precision("mp_policy", self.mp_policy)
        check_type("offload_policy", self.offload_policy, OffloadPolicy, None)
        for name in ("fsdp2_backward_prefetch_depth", "fsdp2_forward_prefetch_depth"):
            depth = getattr(self, name)
            check_type(name, depth, int)
            if depth < 0:
                raise ValueError(f"{name}={depth} must be 0 or more layers.")
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
        TypeError: the scope is no string or collection.
        ValueError: a part is unknown, or "all" is not alone.
    """
    check_type("activation_checkpointing_scope", scope, Collection, None)
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
        check_for_nan_in_grad: whether gradients are checked for NaN; a version of megatron-fsdp
            without this argument does not check them.
        report_nan_in_param_grad: whether the check names the parameter.
        average_in_collective: whether the collective averages gradients.
        disable_bucketing: whether every parameter is a bucket of its own.
        calculate_per_token_loss: whether gradients are summed, for a loss averaged over tokens.
        keep_fp8_transpose_cache: whether transposes of fp8 parameters are kept.
        nccl_ub: whether communication buffers are registered with NCCL.
        fsdp_double_buffer: whether communication uses two persistent buffers.
        activation_checkpointing: whether layers are recomputed in backward.

    Raises:
        TypeError: a value has another type than above.
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
        super().__post_init__()
        units = self.megatron_fsdp_unit_modules
        if isinstance(units, str):
            raise TypeError(
                f"megatron_fsdp_unit_modules={units!r} must be a list of classes or of their "
                f"import paths: give [{units!r}]."
            )
        check_type("megatron_fsdp_unit_modules", units, Sequence, None)
        for unit in units or ():
            check_type("A class in megatron_fsdp_unit_modules", unit, str, type)


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

    Raises:
        TypeError: a value has another type than above.
        ValueError: `bucket_cap_mb` is not above 0, or infinite.
    """

    bucket_cap_mb: float | None = None
    broadcast_buffers: bool = True
    find_unused_parameters: bool = False
    static_graph: bool = False
    gradient_as_bucket_view: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        size = self.bucket_cap_mb
        check_type("bucket_cap_mb", size, int, float, None)
        if size is not None and not 0 < size < math.inf:
            raise ValueError(f"bucket_cap_mb={size} must be a number of MiB above 0, or None.")
