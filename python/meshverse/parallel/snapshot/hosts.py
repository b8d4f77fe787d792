"""Hosts of a job: sets of ranks that see the same folder."""

from __future__ import annotations

import contextlib
import os
import socket
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from meshverse.parallel.collectives.steps import gathered, together

__all__ = ["Hosts", "meet", "partners_of"]


class Hosts(NamedTuple):
    """Ranks of each host, and their names.

    Attributes:
        ranks: ranks by host; hosts and ranks ascend.
        names: what errors call each host: its name and its folder.
        partners: for each host, the one that keeps its copies; none if there is only one domain.
        mine: index of this rank's host.
        place: index of this rank among those of its host.
    """

    ranks: list[list[int]]
    names: list[str]
    partners: list[int]
    mine: int
    place: int

    def partner(self) -> int:
        """Return the rank that keeps this rank's copies."""
        others = self.ranks[self.partners[self.mine]]
        return others[self.place % len(others)]

    def senders(self) -> list[int]:
        """Return the ranks whose copies this rank keeps."""
        n_ranks = len(self.ranks[self.mine])
        return [
            rank
            for host, partner in enumerate(self.partners)
            if partner == self.mine
            for index, rank in enumerate(self.ranks[host])
            if index % n_ranks == self.place
        ]


def partners_of(domains: Iterable[str]) -> list[int]:
    """Return, for each host, one of another failure domain that keeps its copies.

    If no domain has more than half of the hosts, each host keeps the copies of one other.

    Args:
        domains: failure domain of each host; two or more different ones.
    """
    by_domain: dict[str, list[int]] = defaultdict(list)
    for host, domain in enumerate(domains):
        by_domain[domain].append(host)
    hosts = [host for own in by_domain.values() for host in own]
    largest, end, partners = max(map(len, by_domain.values())), 0, [0] * len(hosts)
    for own in by_domain.values():
        end += len(own)
        for index, host in enumerate(own):
            # `largest` places further, and among the hosts of other domains in any case.
            place = (index + largest - len(own)) % (len(hosts) - len(own))
            partners[host] = hosts[(end + place) % len(hosts)]
    return partners


def meet(folder: Path, attempt: str, domain: str | None, group: dist.ProcessGroup | None) -> Hosts:
    """Return which ranks share a folder. Each leaves a file in it and looks whose it finds.

    All ranks of the group call it.

    Args:
        folder: the folder.
        attempt: name that the ranks have agreed on.
        domain: failure domain of this rank's host; None if each host is its own.
        group: the group.

    Raises:
        ValueError: ranks of one host have different domains, or only some ranks have one.
        OSError: a rank cannot write into its folder, or list it; on all ranks.
    """
    rank, name = dist.get_rank(group), f"{socket.gethostname()}:{folder}"
    mark = folder / f".{attempt}.{rank}.here"
    try:
        together(mark.touch, group)
        listed = together(lambda: os.listdir(folder), group)  # once all have left their marks
        found = [seen for seen in listed if seen.startswith(f".{attempt}.")]
        ranks = sorted(int(seen.split(".")[2]) for seen in found if seen.endswith(".here"))
        every = gathered((ranks, name, domain), group)
    finally:
        with contextlib.suppress(OSError):  # others go on; the next attempt has other marks
            mark.unlink()
    members = sorted({tuple(ranks): list(ranks) for ranks, _, _ in every}.values())
    domains = _domains(members, [domain for _, _, domain in every])
    partners = partners_of(domains) if len(set(domains)) > 1 else []
    names = [every[ranks[0]][1] for ranks in members]
    return Hosts(members, names, partners, members.index(ranks), ranks.index(rank))


def _domains(hosts: list[list[int]], given: list[str | None]) -> list[str]:
    """Return the failure domain of each host, from what each rank gave."""
    for first, other in [(ranks[0], other) for ranks in hosts for other in ranks]:
        if given[first] != given[other]:
            raise ValueError(
                f"ranks {first} and {other} share a folder, but have failure_domain="
                f"{given[first]!r} and {given[other]!r}: pass the same one on all ranks of a host"
            )
    none = [ranks[0] for ranks in hosts if given[ranks[0]] is None]
    if none and len(none) < len(hosts):
        raise ValueError(
            f"rank {none[0]} has no failure_domain, and other ranks have one: pass it on all ranks"
        )
    return [given[ranks[0]] or f"host {number}" for number, ranks in enumerate(hosts)]
