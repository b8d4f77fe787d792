"""Context parallelism: each rank of `cp` has a part of every sequence; attention sees all of it.

Example:
    >>> batch = [inputs, labels, positions]  # doctest: +SKIP
    >>> with context_parallel(mesh, buffers=batch, buffer_seq_dims=[1, 1, 1]):  # doctest: +SKIP
    ...     loss_of(model(inputs, position_ids=positions), labels).backward()
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
from collections.abc import Collection, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.experimental import context_parallel as split_by_torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from meshverse._torch_compat.tracing import has_compiled
from meshverse.parallel.models.packed_sequences import without_masks_for_packed_sequences

# Devices and kernels for which torch implements attention over parts of sequences. With other
# kernels, attention would treat a rank's parts, which are out of order, as a whole sequence.
_DEVICES = ("cuda",)
# In a context, the whole length of its sequences.
_whole_length: ContextVar[int | None] = ContextVar("meshverse_whole_length", default=None)
_has_split = threading.Event()  # set once attention has been split in this process
_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]


@contextlib.contextmanager
def context_parallel(
    mesh: DeviceMesh,
    *,
    buffers: Sequence[Tensor],
    buffer_seq_dims: Sequence[int],
    no_restore_buffers: Collection[Tensor] = (),
) -> Iterator[None]:
    """Cut buffers to this rank's part of each sequence within the context.

    Checks the arguments, then enters torch's `context_parallel`. Run forward and backward inside.
    Attention must be causal and without a mask, and called as an attribute of torch.nn.functional,
    `scaled_dot_product_attention`: torch replaces this attribute, not a name imported from there.
    It sees the whole sequence; all other layers see this rank's part. Pass as buffers all tensors
    with a dimension of tokens, including positions, and labels that were shifted before. All ranks
    of the axis pass the same batch.

    If the length is divisible by twice the number of ranks, rank i gets the i-th part from the
    front and the i-th part from the end, so that all ranks have the same work. transformers would
    assume that such parts are packed sequences, and mask them from each other. The context disables
    this check, so sequences must not be packed.

    Args:
        mesh: mesh with an axis cp, or a 1-D mesh. With one rank, nothing is done.
        buffers: tensors to split in place; restored when the context ends.
        buffer_seq_dims: dim of the sequence in each buffer.
        no_restore_buffers: those of the buffers that need not be restored.

    Raises:
        KeyError: the mesh has several axes, and none is called cp.
        RuntimeError: the context ends, and no attention was split in it; gradients are wrong then.
            Not raised once attention has been split in this process, or torch.compile has compiled
            anything: calls in compiled code are not seen.
        NotImplementedError: torch has no such attention for the mesh's device, such as the CPU.
        ValueError: a buffer lacks its dim, shares memory with another buffer, requires a gradient
            or is not contiguous; or lengths differ, are not divisible by the number of ranks, or
            are equal to it. Nothing is changed then. Inside, the first attention has a mask; or a
            model that `fsdp2_strategy_parallelize` returned has a window of fewer tokens.
    """
    axes = mesh.mesh_dim_names or ()
    if "cp" not in axes and mesh.ndim != 1:
        raise KeyError(
            f"No axis 'cp': the mesh has the axes {axes}. Give a mesh with 'cp', or the 1-D mesh "
            "of the ranks over which a sequence is split."
        )
    cp_mesh = mesh["cp"] if "cp" in axes else mesh
    if cp_mesh.size() == 1:
        yield
        return
    if cp_mesh.device_type not in _DEVICES:
        raise NotImplementedError(
            f"Context parallelism over {cp_mesh.size()} ranks on {cp_mesh.device_type!r}: torch "
            "has no attention for parts of sequences on this device, only on "
            f"{', '.join(_DEVICES)}. Use cp_size=1, or give each of these ranks its own sequences."
        )
    whole = _check(buffers, buffer_seq_dims, cp_mesh.size())
    # Non-negative dims: torch handles negative ones wrongly.
    dims = [dim % buffer.ndim for buffer, dim in zip(buffers, buffer_seq_dims, strict=True)]
    kept = set(no_restore_buffers)
    split = split_by_torch(
        cp_mesh, buffers=list(buffers), buffer_seq_dims=dims, no_restore_buffers=kept
    )
    split.__enter__()
    length = _whole_length.set(whole)
    try:
        # Positions jump from a rank's front part to its end part, like those of packed sequences.
        with sdpa_kernel(_KERNELS), without_masks_for_packed_sequences(), _noted_attention():
            yield
    finally:
        # Without the exception: with one, torch 2.11 restores neither buffers nor attention.
        split.__exit__(None, None, None)
        _whole_length.reset(length)
    if not _has_split.is_set() and not has_compiled():
        raise RuntimeError(
            "No attention was split over the ranks of context parallelism: nothing in the context "
            "called torch.nn.functional.scaled_dot_product_attention, so each rank took its parts "
            "of sequences for whole ones, and gradients are wrong. Set the model's "
            'attn_implementation="sdpa"; in your own modules, call it as an attribute of '
            "torch.nn.functional. Run forward and backward inside the context."
        )


@contextlib.contextmanager
def _noted_attention() -> Iterator[None]:
    """Note whether attention is split, but for calls in compiled code."""
    if _has_split.is_set():
        yield
        return
    split_attention = F.scaled_dot_product_attention  # torch's, for parts of sequences

    @functools.wraps(split_attention)
    def noted(*arguments: Any, **keywords: Any) -> Tensor:
        if not torch.compiler.is_compiling():
            mask = arguments[3] if len(arguments) > 3 else keywords.get("attn_mask")
            if mask is not None:
                raise ValueError(
                    "scaled_dot_product_attention has a mask, and torch's attention over parts of "
                    "sequences takes none. Leave padding masks out: with causal attention, pad at "
                    "the end and give padded tokens labels of -100. Models whose attention has a "
                    "sliding window need cp_size=1."
                )
            _has_split.set()
        return split_attention(*arguments, **keywords)

    functions: Any = F
    functions.scaled_dot_product_attention = noted
    try:
        yield
    finally:
        functions.scaled_dot_product_attention = split_attention


def refuse_short_windows(model: nn.Module) -> None:
    """Have a model of transformers raise ValueError where sequences are longer than its window.

    From the tokens of one rank, transformers would conclude that all are in the window, and use no
    mask: then attention would see all of the sequence.
    """
    windows = dict[str, int]()
    for config in _configs(getattr(model, "config", None)):
        kinds = getattr(config, "layer_types", None)
        if kinds is None or any(kind != "full_attention" for kind in kinds):
            for name in ("sliding_window", "attention_chunk_size"):
                if isinstance(window := getattr(config, name, None), int):
                    windows[name] = min(window, windows.get(name, window))
    if windows:
        model.register_forward_pre_hook(functools.partial(_check_windows, windows))


def _configs(config: Any) -> Iterator[Any]:
    """Yield a config and those in it, such as that of a multimodal model's language model."""
    for each in (config, *vars(config).values()) if hasattr(config, "__dict__") else ():
        # Some configs have the size of a window that they do not use.
        if getattr(each, "use_sliding_window", True):
            yield each


def _check_windows(windows: dict[str, int], model: nn.Module, _: Any) -> None:
    length = _whole_length.get()
    for name, window in windows.items():
        if length is not None and length > window:
            raise ValueError(
                f"{type(model).__name__} has {name}={window}, and context parallelism splits "
                f"sequences of {length} tokens: torch's attention over parts of sequences has no "
                "windows. Use shorter sequences, another model, or cp_size=1."
            )


def _check(buffers: Sequence[Tensor], dims: Sequence[int], ranks: int) -> int:
    """Return the length of the sequences, if buffers can be split along it.

    Raises:
        ValueError: a buffer lacks its dim, or memory of its own; or ranks cannot share the length.
    """
    if not buffers or len(buffers) != len(dims):
        raise ValueError(
            f"{len(buffers)} buffers and {len(dims)} buffer_seq_dims: give one or more buffers, "
            "and the dim of the sequence for each of them."
        )
    lengths = []
    for number, (buffer, dim) in enumerate(zip(buffers, dims, strict=True)):
        if not -buffer.ndim <= dim < buffer.ndim:
            raise ValueError(f"Buffer {number} of shape {tuple(buffer.shape)} has no dim {dim}.")
        if buffer.requires_grad or not buffer.is_contiguous():
            raise ValueError(
                f"Buffer {number} of shape {tuple(buffer.shape)} cannot be split in place: it must "
                "be contiguous and not require a gradient. Give its detach().clone()."
            )
        lengths.append(buffer.size(dim))
    if len(set(lengths)) > 1 or lengths[0] % ranks:
        raise ValueError(
            f"Buffers of lengths {lengths} must have one length, divisible by the {ranks} ranks of "
            "context parallelism. Pad the sequences."
        )
    if lengths[0] == ranks:
        raise ValueError(
            f"Sequences of {lengths[0]} tokens over {ranks} ranks of context parallelism: models "
            "of transformers do not use causal attention for one token per rank. Pad the sequences."
        )
    starts = [(each.data_ptr(), number) for number, each in enumerate(buffers)]
    for (first_start, first), (start, second) in itertools.pairwise(sorted(starts)):
        if start < first_start + buffers[first].nbytes:
            raise ValueError(
                f"Buffers {first} and {second} share memory: splitting one would change the other. "
                "Give clones of them."
            )
    return lengths[0]
