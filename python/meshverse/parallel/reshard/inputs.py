"""What a move is built with, checked: names, memory, buffers, nodes."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from meshverse import Topology
from meshverse.world.world import World

from .roster import Settings
from .sides import Side, local_tensor

__all__ = ["Rename", "check_apart", "read_settings", "renamed"]

Rename: TypeAlias = Mapping[str, str] | Callable[[str], str]

_LEAST_BUFFER_BYTES = 1024


def read_settings(
    buffer_bytes: int, topology: Topology | None, ranks: Sequence[int] | None, world: World
) -> Settings:
    """What the plans of all ranks depend on, checked.

    Raises:
        TypeError: buffer_bytes is no int, ranks are no list of them.
        ValueError: buffer_bytes is too small; the topology or a rank is not of this world.
    """
    asked = _read_ranks(ranks, world.size)
    if isinstance(buffer_bytes, bool) or not isinstance(buffer_bytes, int):
        raise TypeError(f"buffer_bytes={buffer_bytes!r}: give an int.")
    if buffer_bytes < _LEAST_BUFFER_BYTES:
        raise ValueError(
            f"buffer_bytes={buffer_bytes}: give at least {_LEAST_BUFFER_BYTES}, room for the "
            "messages of two rounds."
        )
    if topology is not None:
        if not isinstance(topology, Topology):
            raise TypeError(
                f"topology={topology!r:.80} of type {type(topology).__name__}: give a Topology."
            )
        level = topology.level("node")
        if level is None or topology.world_size != world.size:
            raise ValueError(
                f"topology={topology!r} of {topology.world_size} ranks: give one with nodes, of "
                f"the world's {world.size} ranks."
            )
        return Settings(buffer_bytes, 1, tuple(level.of_rank.tolist()), asked)
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    node_size = int(local) if local.isdecimal() and int(local) > 0 else 1
    return Settings(buffer_bytes, node_size, None, asked)


def _read_ranks(ranks: Sequence[int] | None, world_size: int) -> tuple[int, ...] | None:
    if ranks is None:
        return None
    try:
        found = sorted(operator.index(rank) for rank in ranks)
    except TypeError:
        raise TypeError(f"ranks={ranks!r:.80}: give a list of global ranks, or None.") from None
    for index, rank in enumerate(found):
        if not 0 <= rank < world_size or rank in found[index + 1 : index + 2]:
            wrong = "is given twice" if 0 <= rank < world_size else "is not in the default group"
            raise ValueError(
                f"ranks={ranks!r:.80}: rank {rank} {wrong}, which has ranks 0 to {world_size - 1}. "
                "Give each rank that calls it once."
            )
    return tuple(found)


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
    if not isinstance(rename, Mapping) and not callable(rename):
        raise TypeError(
            f"rename={rename!r:.80} of type {type(rename).__name__}: give a dict of names by "
            "name, or a function of a name."
        )
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


class _Memory(NamedTuple):
    """Where the elements of a tensor are, in bytes."""

    first: int
    last: int
    name: str
    is_source: bool
    local: Tensor


def check_apart(source: Side | None, target: Side | None) -> None:
    """Check that what is written under a name is neither read nor written under another.

    Raises:
        ValueError: it is, at least in part; or a target has one memory for several elements.
    """
    for name, tensor in (target.tensors if target else {}).items():
        local = local_tensor(tensor)
        if _overlaps_itself(local):
            raise ValueError(
                f"target {name!r} is expanded or unfolded: several of its elements are one in "
                f"memory, which cannot hold them (shape {tuple(local.shape)}, strides "
                f"{local.stride()}). Give a tensor with memory for each, as by "
                "clone(memory_format=torch.contiguous_format)."
            )
    used = sorted([*_memories(source, True), *_memories(target, False)], key=lambda m: m.first)
    for index, one in enumerate(used):
        for other in used[index + 1 :]:
            if other.first > one.last:
                break
            if one.is_source and other.is_source:
                continue
            if not _is_same(one, other, source, target) and _overlap(one.local, other.local):
                _refuse_overlap(one, other)


def _overlaps_itself(local: Tensor) -> bool:
    """Whether several elements of a tensor are one in memory. O(dims) unless its rows interlace."""
    strides = zip(local.stride(), local.shape, strict=True)
    axes = sorted((stride, size) for stride, size in strides if size > 1)
    reach = 0
    for stride, size in axes:
        if stride <= reach:
            break
        reach += stride * (size - 1)
    else:
        return False
    if not local.numel() or axes[0][0] == 0:
        return local.numel() > 0
    places = torch.zeros(1, dtype=torch.long)
    for stride, size in axes:
        places = (places[:, None] + stride * torch.arange(size)).flatten()
    return len(set(places.tolist())) < places.numel()


def _memories(side: Side | None, is_source: bool) -> list[_Memory]:
    found = []
    for name, tensor in (side.tensors if side else {}).items():
        local = local_tensor(tensor)
        if local.numel():
            first = local.data_ptr()
            reach = sum(stride * (size - 1) for stride, size in _byte_strides(local))
            found.append(_Memory(first, first + reach, name, is_source, local))
    return found


def _byte_strides(local: Tensor) -> list[tuple[int, int]]:
    """Strides and sizes of a tensor's bytes; of size 1 none but the last, of an element's bytes."""
    size = local.element_size()
    strides = zip(local.stride(), local.shape, strict=True)
    return [*((stride * size, n) for stride, n in strides if n > 1), (1, size)]


def _is_same(one: _Memory, other: _Memory, source: Side | None, target: Side | None) -> bool:
    """Whether two are the same elements in the same order: a tied weight, or one that stays."""
    if (
        one.first != other.first
        or one.local.dtype != other.local.dtype
        or one.local.shape != other.local.shape
        or one.local.stride() != other.local.stride()
        or one.local.is_conj() != other.local.is_conj()
        or one.local.is_neg() != other.local.is_neg()
    ):
        return False
    if one.is_source == other.is_source or source is None or target is None:
        return True
    return one.name == other.name and source.placed(one.name) == target.placed(one.name)


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have a byte in common; what lies between their elements does not count.

    They have one if steps along the strides of the first, less steps along those of the second,
    add up to the distance between their first bytes.
    """
    steps: dict[int, list[int]] = {}  # by stride, how many at least and at most
    for sign, tensor in ((1, one), (-1, other)):
        for stride, size in _byte_strides(tensor):
            steps.setdefault(stride, [0, 0])[max(sign, 0)] += sign * (size - 1)
    ordered = [(stride, low, high) for stride, (low, high) in sorted(steps.items(), reverse=True)]
    return _add_up(ordered, other.data_ptr() - one.data_ptr())


def _add_up(steps: list[tuple[int, int, int]], distance: int) -> bool:
    if not steps:
        return distance == 0
    (stride, low, high), *rest = steps
    least = sum(stride * low for stride, low, _ in rest)
    most = sum(stride * high for stride, _, high in rest)
    if stride == 0:
        return _add_up(rest, distance)
    fewest, many = max(low, -((most - distance) // stride)), min(high, (distance - least) // stride)
    return any(_add_up(rest, distance - n * stride) for n in range(fewest, many + 1))


def _refuse_overlap(one: _Memory, other: _Memory) -> None:
    if one.is_source == other.is_source:
        raise ValueError(
            f"targets {one.name!r} and {other.name!r} overlap in memory on this rank: what is "
            "written into the one would change the other. Give one of them memory of its own, as "
            "by clone()."
        )
    source, target = (one, other) if one.is_source else (other, one)
    raise ValueError(
        f"source {source.name!r} and target {target.name!r} overlap in memory on this rank: what "
        "is written into the one would change what is read from the other. Give one of them "
        "memory of its own, as by clone()."
    )
