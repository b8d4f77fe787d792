"""Hosts of a job: sets of ranks that see the same folder."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

__all__ = ["Hosts", "gathered", "meet"]


class Hosts(NamedTuple):
    """Ranks of each host, and their names.

    Attributes:
        ranks: ranks by host; hosts and ranks ascend.
        names: what errors call each host: its name and its folder.
        mine: index of this rank's host.
        place: index of this rank among those of its host.
    """

    ranks: list[list[int]]
    names: list[str]
    mine: int
    place: int

    def partner(self) -> int:
        """Return the rank of the next host that keeps this rank's copies."""
        others = self.ranks[(self.mine + 1) % len(self.ranks)]
        return others[self.place % len(others)]

    def senders(self) -> list[int]:
        """Return the ranks of the host before whose copies this rank keeps."""
        before, n_ranks = self.ranks[self.mine - 1], len(self.ranks[self.mine])
        return [rank for index, rank in enumerate(before) if index % n_ranks == self.place]


def gathered(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """Return every rank's value, by rank in the group."""
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def meet(folder: Path, attempt: str, group: dist.ProcessGroup | None) -> Hosts:
    """Return which ranks share a folder. Each leaves a file in it and looks whose it finds.

    All ranks of the group call it.
    """
    rank, name = dist.get_rank(group), f"{socket.gethostname()}:{folder}"
    mark = folder / f".{attempt}.{rank}.here"
    mark.touch()
    try:
        dist.barrier(group=group)
        found = [seen for seen in os.listdir(folder) if seen.startswith(f".{attempt}.")]
        ranks = sorted(int(seen.split(".")[2]) for seen in found if seen.endswith(".here"))
        every = gathered((ranks, name), group)  # also waits until all ranks have looked
    finally:
        mark.unlink(missing_ok=True)
    hosts = sorted({tuple(ranks): name for ranks, name in reversed(every)}.items())
    members = [list(ranks) for ranks, _ in hosts]
    mine = members.index(ranks)
    return Hosts(members, [name for _, name in hosts], mine, ranks.index(rank))
