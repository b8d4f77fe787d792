"""Transfer of a job's state from the meshes of one world to those of another number of ranks."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate

from meshverse import DeviceMesh
from meshverse.parallel import Reshard

from .state import State


def move_state(old: State | None, new: State, new_rank: Mapping[int, int]) -> bool:
    """Copy the state of a world that has ended into objects on the meshes of the current one.

    All ranks call this. The old meshes' ranks are those of the old world. Of each DTensor,
    all ranks of one replica must still be there.

    Args:
        old: this rank's state in the old world; None if it was not a rank there.
        new: its state in the current world, to be filled.
        new_rank: current rank of each rank of the old world that is still there.

    Returns:
        Whether the state was copied. It was not if some DTensor has no complete replica, or if
        ranks held different parameters, as the stages of a pipeline do.
    """
    with torch.no_grad():
        sources = None if old is None else _sources(old, new_rank)
    names = None if old is None else sorted(old.tensors())
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, (old is not None, sources is not None, names))
    first = next(rank for rank, (was_there, *_) in enumerate(found) if was_there)
    if any(each != (True, True, found[first][2]) for each in found if each[0]):
        return False
    about: list[Any] = [None if old is None else old.plain_parts()]
    dist.broadcast_object_list(about, first)
    with torch.no_grad():
        targets = new.take_plain_parts(about[0])
        if sorted(targets) != found[first][2]:
            raise ValueError(
                "build() returned other parameters than before the number of ranks changed. It "
                "must build the same model and optimizer on the new meshes."
            )
        if targets:
            with Reshard(sources or None, targets, name="meshverse.repair") as reshard:
                reshard()
    return True


def whole_replica(state: State, left: Collection[int]) -> set[int]:
    """Return ranks that together hold all sharded parameters that this rank has shards of.

    Args:
        state: this rank's state.
        left: ranks of its world to choose from.

    Returns:
        Few of these ranks; none if some parameter has no complete replica among them.
    """
    slices = [
        [{*part.flatten().tolist()} for part in _slices(state.ranks[mesh], placements)]
        for mesh, placements in state.places
    ]
    chosen, there = set[int](), {*left}
    for parts in sorted(slices, key=lambda parts: -len(parts[0])):
        complete = [part for part in parts if part <= there]
        if not complete:
            return set()
        chosen |= min(complete, key=lambda part: len(part - chosen))
    return chosen


def _sources(old: State, new_rank: Mapping[int, int]) -> dict[str, DTensor] | None:
    """Return this rank's shards of the old state; None if a DTensor has no complete replica."""
    sources: dict[str, DTensor] = {}
    meshes: dict[Any, Any] = {}
    for name, tensor in old.tensors().items():
        place = tensor.device_mesh, tensor.placements
        if place not in meshes:
            ranks = old.ranks[id(tensor.device_mesh)]
            meshes[place] = _complete_slice(ranks, tensor.placements, new_rank)
        if meshes[place] is None:
            return None
        mesh = meshes[place]
        if mesh.get_coordinate() is not None:
            kept = [one for one in tensor.placements if not isinstance(one, Replicate)]
            sources[name] = DTensor.from_local(
                tensor.to_local(),
                mesh,
                kept or [Replicate()],
                run_check=False,
                shape=tensor.shape,
                stride=tensor.stride(),
            )
    return sources


def _complete_slice(
    ranks: torch.Tensor, placements: Sequence[Any], new_rank: Mapping[int, int]
) -> DeviceMesh | None:
    """Return a mesh of ranks that together hold a DTensor and are all there; None if there is none.

    It has the axes along which the tensor is not replicated, and the ranks' numbers of now.

    Args:
        ranks: old ranks of the DTensor's mesh.
        placements: its placements.
        new_rank: as for `move_state`.
    """
    for part in _slices(ranks, placements):
        now = [new_rank.get(rank) for rank in part.flatten().tolist()]
        if None not in now:
            of_now = torch.tensor(now).view(part.shape)
            return DeviceMesh("cpu", of_now, _init_backend=False, _rank=dist.get_rank())
    return None


def _slices(ranks: torch.Tensor, placements: Sequence[Any]) -> Iterator[torch.Tensor]:
    """Iterate over the replicas of a DTensor: ranks along the axes that do not replicate it."""
    choices: list[Any] = [
        range(size) if isinstance(placement, Replicate) else (slice(None),)
        for size, placement in zip(ranks.shape, placements, strict=True)
    ]
    for index in itertools.product(*choices):
        yield ranks[tuple(index)].reshape(ranks[index].shape or (1,))
