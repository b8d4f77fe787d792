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
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.experimental import context_parallel as split_by_torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from meshverse._torch_compat.tracing import has_compiled
from meshverse.parallel.models.packed_sequences import without_masks_for_packed_sequences

# Devices and kernels for which torch implements attention over parts of sequences. With other
# kernels, attention would treat a rank's parts, which are out of order, as a whole sequence.
_DEVICES = ("cuda",)
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
            or is not contiguous; or lengths differ, or are not divisible by the number of ranks.
            Nothing is changed then.
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
    _check(buffers, buffer_seq_dims, cp_mesh.size())
    # Non-negative dims: torch handles negative ones wrongly.
    dims = [dim % buffer.ndim for buffer, dim in zip(buffers, buffer_seq_dims, strict=True)]
    kept = set(no_restore_buffers)
    split = split_by_torch(
        cp_mesh, buffers=list(buffers), buffer_seq_dims=dims, no_restore_buffers=kept
    )
    split.__enter__()
    try:
        # Positions jump from a rank's front part to its end part, like those of packed sequences.
        with sdpa_kernel(_KERNELS), without_masks_for_packed_sequences(), _noted_attention():
            yield
    finally:
        # Without the exception: with one, torch 2.11 restores neither buffers nor attention.
        split.__exit__(None, None, None)
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
            _has_split.set()
        return split_attention(*arguments, **keywords)

    functions: Any = F
    functions.scaled_dot_product_attention = noted
    try:
        yield
    finally:
        functions.scaled_dot_product_attention = split_attention


def _check(buffers: Sequence[Tensor], dims: Sequence[int], ranks: int) -> None:
    """Check that each buffer has its dim, a length divisible by the ranks, and its own memory."""
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
    starts = [(each.data_ptr(), number) for number, each in enumerate(buffers)]
    for (first_start, first), (start, second) in itertools.pairwise(sorted(starts)):
        if start < first_start + buffers[first].nbytes:
            raise ValueError(
                f"Buffers {first} and {second} share memory: splitting one would change the other. "
                "Give clones of them."
            )
