"""Context parallelism: each rank of `cp` has a part of every sequence, attention sees all of it.

Example:
    >>> batch = [inputs, labels, positions]  # doctest: +SKIP
    >>> with context_parallel(mesh, buffers=batch, buffer_seq_dims=[1, 1, 1]):  # doctest: +SKIP
    ...     loss_of(model(inputs, position_ids=positions), labels).backward()
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Collection, Iterator, Sequence

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.experimental import context_parallel as split_by_torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from meshverse.parallel.models.packed_sequences import without_masks_for_packed_sequences

# Where torch has attention for parts of sequences, and its kernels for it. The one in plain
# operations would take the parts, which are not in order, for a whole.
_DEVICES = ("cuda",)
_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]


@contextlib.contextmanager
def context_parallel(
    mesh: DeviceMesh,
    *,
    buffers: Sequence[Tensor],
    buffer_seq_dims: Sequence[int],
    no_restore_buffers: Collection[Tensor] = (),
) -> Iterator[None]:
    """Give buffers this rank's part of the sequence within the context, and attention all of it.

    torch's `context_parallel`, checked first. Forward and backward both belong inside. Attention
    must be `scaled_dot_product_attention`, causal and without a mask. What depends on a token's
    place goes with the buffers, labels (shifted by one before) and positions too: a rank has the
    i-th part from the front and the i-th from the end, where the length divides by twice the ranks,
    so that all have the same work. transformers would mask such parts from each other, and does not
    here: sequences must not be packed. All ranks of the axis call this with the same batch.

    Args:
        mesh: with an axis cp, or 1-D. Where it has one rank, nothing is done.
        buffers: tensors to split in place, and to restore in the end.
        buffer_seq_dims: of each buffer, the dim of the sequence.
        no_restore_buffers: those of the buffers that need not be restored.

    Raises:
        KeyError: the mesh has several axes and none of them is cp.
        NotImplementedError: torch has no such attention for the mesh's device, as for the CPU.
        ValueError: buffers without a dim each, of different or indivisible lengths, that share
            memory, or are parameters. Nothing is changed then.
    """
    axes = mesh.mesh_dim_names or ()
    if "cp" not in axes and mesh.ndim != 1:
        raise KeyError(
            f"No axis 'cp': the mesh has the axes {axes}. Give a mesh with it, or the 1-D mesh "
            "of the ranks that share a sequence."
        )
    cp_mesh = mesh["cp"] if "cp" in axes else mesh
    if cp_mesh.size() == 1:
        yield
        return
    if cp_mesh.device_type not in _DEVICES:
        raise NotImplementedError(
            f"Context parallelism over {cp_mesh.size()} ranks on {cp_mesh.device_type!r}: torch "
            f"has no attention for parts of sequences there, only on {', '.join(_DEVICES)}. Use "
            "cp_size=1, or give each of these ranks sequences of its own."
        )
    _check(buffers, buffer_seq_dims, cp_mesh.size())
    # From the front: torch takes a dim from the end for another one.
    dims = [dim % buffer.ndim for buffer, dim in zip(buffers, buffer_seq_dims, strict=True)]
    kept = set(no_restore_buffers)
    split = split_by_torch(
        cp_mesh, buffers=list(buffers), buffer_seq_dims=dims, no_restore_buffers=kept
    )
    split.__enter__()
    try:
        # A rank's positions jump, from its part of the front to that of the end.
        with sdpa_kernel(_KERNELS), without_masks_for_packed_sequences():
            yield
    finally:
        # As if nothing was raised: else torch 2.11 restores neither buffers nor attention.
        split.__exit__(None, None, None)


def _check(buffers: Sequence[Tensor], dims: Sequence[int], ranks: int) -> None:
    """Check buffers: one dim for each, lengths that divide, and memory of their own."""
    if not buffers or len(buffers) != len(dims):
        raise ValueError(
            f"{len(buffers)} buffers and {len(dims)} buffer_seq_dims: give one or more buffers, "
            "and of each the dim of the sequence."
        )
    lengths = []
    for number, (buffer, dim) in enumerate(zip(buffers, dims, strict=True)):
        if not -buffer.ndim <= dim < buffer.ndim:
            raise ValueError(f"Buffer {number} of shape {tuple(buffer.shape)} has no dim {dim}.")
        if buffer.requires_grad or not buffer.is_contiguous():
            raise ValueError(
                f"Buffer {number} of shape {tuple(buffer.shape)} is a parameter, needs a gradient, "
                "or is a view with gaps, and cannot be split in place. Give its detach().clone()."
            )
        lengths.append(buffer.size(dim))
    if len(set(lengths)) > 1 or lengths[0] % ranks:
        raise ValueError(
            f"Buffers of lengths {lengths}: they must be of one length, which divides by the "
            f"{ranks} ranks of context parallelism. Pad the sequences."
        )
    starts = [(each.data_ptr(), number) for number, each in enumerate(buffers)]
    for (first_start, first), (start, second) in itertools.pairwise(sorted(starts)):
        if start < first_start + buffers[first].nbytes:
            raise ValueError(
                f"Buffers {first} and {second} share memory: to split one would change the other. "
                "Give clones of them."
            )
