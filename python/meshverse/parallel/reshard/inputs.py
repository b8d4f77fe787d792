"""What a move is built with, checked: names, memory, buffers, nodes."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TypeAlias

from torch import Tensor
from torch.distributed.tensor import DTensor

from meshverse import Topology
from meshverse.world.world import World

from .roster import Settings
from .sides import Side, local_tensor

__all__ = ["Rename", "check_apart", "layout_in_words", "read_settings", "renamed"]

Rename: TypeAlias = Mapping[str, str] | Callable[[str], str]

_LEAST_BUFFER_BYTES = 1024


def read_settings(buffer_bytes: int, topology: Topology | None, world: World) -> Settings:
    """What the plans of all ranks depend on, checked.

    Raises:
        TypeError: buffer_bytes is no int.
        ValueError: it is too small, or the topology is not of this world.
    """
    if isinstance(buffer_bytes, bool) or not isinstance(buffer_bytes, int):
        raise TypeError(f"buffer_bytes={buffer_bytes!r}: give an int.")
    if buffer_bytes < _LEAST_BUFFER_BYTES:
        raise ValueError(
            f"buffer_bytes={buffer_bytes}: give at least {_LEAST_BUFFER_BYTES}, room for the "
            "messages of two rounds."
        )
    if topology is not None:
        level = topology.level("node")
        if level is None or topology.world_size != world.size:
            raise ValueError(
                f"topology={topology!r} of {topology.world_size} ranks: give one with nodes, of "
                f"the world's {world.size} ranks."
            )
        return Settings(buffer_bytes, 1, tuple(level.of_rank.tolist()))
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    return Settings(buffer_bytes, int(local) if local.isdecimal() and int(local) > 0 else 1)


def renamed(
    source: Mapping[str, Tensor] | None, rename: Rename | None
) -> Mapping[str, Tensor] | None:
    """The sources under their names in the target.

    Raises:
        TypeError: a new name is no string.
        ValueError: two sources get the same name.
    """
    if source is None or rename is None or not isinstance(source, Mapping):
        return source
    renamed: dict[str, Tensor] = {}
    old_names: dict[str, str] = {}
    for old, tensor in source.items():
        new = rename(old) if callable(rename) else rename.get(old, old)
        if not isinstance(new, str):
            raise TypeError(f"rename gives {new!r} for source {old!r}: give a str.")
        if new in renamed:
            raise ValueError(
                f"rename gives {new!r} for source {old!r} and for {old_names[new]!r}: give every "
                "source a name of its own."
            )
        renamed[new], old_names[new] = tensor, old
    return renamed


def check_apart(source: Side | None, target: Side | None) -> None:
    """Check that no source and target share memory, unless one is the other."""
    if source is None or target is None:
        return
    by_storage: dict[int, list[tuple[str, Tensor]]] = {}
    for name, tensor in source.tensors.items():
        local = local_tensor(tensor)
        if local.numel():
            by_storage.setdefault(local.untyped_storage().data_ptr(), []).append((name, local))
    for name, tensor in target.tensors.items():
        local = local_tensor(tensor)
        if not local.numel():
            continue
        for other, theirs in by_storage.get(local.untyped_storage().data_ptr(), ()):
            is_same = (
                name == other
                and _memory(local) == _memory(theirs)
                and local.stride() == theirs.stride()
                and source.specs[name] == target.specs[name]
                and source.firsts == target.firsts
                and source.grids == target.grids
            )
            first, last = _memory(local)
            their_first, their_last = _memory(theirs)
            if not is_same and first <= their_last and their_first <= last:
                raise ValueError(
                    f"source {other!r} and target {name!r} overlap in memory on this rank: what "
                    "is written into the one would change what is read from the other. Give one "
                    "of them memory of its own, as by clone()."
                )


def _memory(tensor: Tensor) -> tuple[int, int]:
    """The first byte of a tensor that has elements, and the last."""
    reach = sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    first = tensor.data_ptr()
    return first, first + (reach + 1) * tensor.element_size() - 1


def layout_in_words(tensor: Tensor) -> str:
    """All of a tensor that a plan depends on."""
    local = local_tensor(tensor)
    placed = ""
    if isinstance(tensor, DTensor):
        placed = f" of {tuple(tensor.shape)} {tensor.placements} on {tensor.device_mesh}"
    # FSDP2 frees the memory of what it has put back into shards.
    has_memory = local.untyped_storage().nbytes() > 0 or local.numel() == 0
    state = "" if has_memory else " without memory"
    return f"{tuple(local.shape)} {local.dtype} on {local.device}{placed}{state}"
