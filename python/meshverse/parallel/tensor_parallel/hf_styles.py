"""The names that plans of Hugging Face transformers give to parallel styles, as torch's styles.

Example:
    >>> translate_to_torch_parallel_style("colwise_rep").output_layouts
    (Replicate(),)
"""

from __future__ import annotations

from collections.abc import Callable

from torch.distributed.tensor import Partial, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)

from meshverse.parallel.styles.local_styles import (
    LocalParameters,
    PackedColwiseParallel,
    PackedRowwiseParallel,
    ReplicatedWithGradAllreduce,
    SharedKeyGradAllreduce,
)

__all__ = ["EXPERT_STYLES", "translate_to_torch_parallel_style"]


def _sum_output() -> ParallelStyle:
    return PrepareModuleOutput(output_layouts=Partial(), desired_output_layouts=Replicate())


def _gathered_columns() -> ParallelStyle:
    return ColwiseParallel(output_layouts=Replicate())


def _split_rows() -> ParallelStyle:
    return RowwiseParallel(input_layouts=Replicate())


# Where transformers renamed a style, the older name follows the current one.
_STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "local_colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    # Its output is a rank's term of a sum that the module around it makes ("gather").
    "local_rowwise": lambda: RowwiseParallel(output_layouts=Partial()),
    "all_reduce": _sum_output,
    "gather": _sum_output,
    "colwise_gather_output": _gathered_columns,
    "colwise_rep": _gathered_columns,
    "embedding_colwise": _gathered_columns,
    "rowwise_split_input": _split_rows,
    "rowwise_rep": _split_rows,
    "embedding_rowwise": _split_rows,
    "sequence_parallel": SequenceParallel,
    "packed_colwise": PackedColwiseParallel,
    "local_packed_colwise": PackedColwiseParallel,
    "packed_rowwise": PackedRowwiseParallel,
    "local_packed_rowwise": PackedRowwiseParallel,
    "replicated_with_grad_allreduce": ReplicatedWithGradAllreduce,
    "mla_kv_a_proj": SharedKeyGradAllreduce,
    "local_params": lambda: LocalParameters({}),
    "replicate": lambda: LocalParameters({}),
}

# Said of the modules of experts and what is around them: hf_experts.py makes a style of them all.
EXPERT_STYLES = frozenset(
    {
        "ep_dispatch_experts",
        "ep_router",
        "grouped_gemm",
        "local",
        "moe_identity_expert",
        "moe_tp_experts",
    }
)


def translate_to_torch_parallel_style(style: str) -> ParallelStyle:
    """The torch style for a style's name in a plan of transformers, current or older.

    Args:
        style: such as "colwise".

    Returns:
        A new object each time.

    Raises:
        TypeError: the style is not a string.
        ValueError: the name is unknown, or that of a way to split experts.
    """
    if not isinstance(style, str):
        raise TypeError(
            f"A parallel style is named by a string, got {style!r} of type "
            f"{type(style).__name__}. Give one of {sorted(_STYLES)}."
        )
    if style not in _STYLES:
        experts = (
            " splits experts, of which the module has one style: ExpertFeaturesParallel, or, with "
            "tokens that change ranks, ExpertParallel"
            if style in EXPERT_STYLES
            else ""
        )
        raise ValueError(
            f"Parallel style {style!r}{experts or ' is unknown'}. Known styles of tensor "
            f"parallelism: {sorted(_STYLES)}."
        )
    return _STYLES[style]()
