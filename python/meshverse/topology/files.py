"""Topologies in files: ours, in JSON, and Slurm's topology.conf.

Ours has, for each level, the ranks of each part:

    {"node":   {"tux0": "0-7", "tux1": "8-15", "tux2": "16-23"},
     "switch": {"leaf0": "0-15", "leaf1": "16-23"}}
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from meshverse import _torch_compat as compat

from .levels import Level, level_of
from .slurm import Network, expand_hosts, read_network

__all__ = ["levels_of_file", "levels_on_nodes", "levels_to_dict", "read_network_file"]

_LARGEST_WORLD = 1 << 24


def levels_of_file(
    path: str | os.PathLike[str], nodes: str | Sequence[str] | None, node_size: int | None
) -> list[Level]:
    """The levels in a file of either form; see `Topology.from_file`."""
    source, text = os.fspath(path), Path(path).read_text(encoding="utf-8")
    if not text.lstrip().startswith("{"):
        return _levels_of_network(text, source, nodes, node_size)
    if nodes is not None or node_size is not None:
        raise ValueError(
            f"{source} tells which ranks are on each node: leave nodes= and node_size= out."
        )
    return _levels_of_json(text, source)


def read_network_file(path: str | os.PathLike[str]) -> Network:
    """The network in a topology.conf."""
    return read_network(Path(path).read_text(encoding="utf-8"), os.fspath(path))


@compat.untraced()
def levels_to_dict(levels: Iterable[Level]) -> dict[str, dict[str, str]]:
    """The ranks of each part of each level, in ranges such as "0-7,16-23"."""
    told = {}
    for level in levels:
        sizes = level.sizes.tolist()
        of_parts = torch.split(level.of_rank.argsort(stable=True), sizes)
        pairs = zip(level.parts, of_parts, strict=True)
        told[level.name] = {part: _ranges(ranks) for part, ranks in pairs}
    return told


def _ranges(ranks: torch.Tensor) -> str:
    starts = torch.ones(len(ranks), dtype=torch.bool)
    starts[1:] = ranks[1:] != ranks[:-1] + 1
    firsts = ranks[starts].tolist()
    lasts = ranks[starts.roll(-1)].tolist()
    pairs = zip(firsts, lasts, strict=True)
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in pairs)


def _levels_of_json(text: str, source: str) -> list[Level]:
    """The levels in a file of ours.

    Raises:
        ValueError: no JSON, or not of this form; a rank that is on no part of a level, or on two.
    """
    try:
        told = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{source} is no JSON: {error}.") from error
    if not isinstance(told, dict) or not told or not all(_is_level(told[name]) for name in told):
        raise ValueError(
            f'{source} tells no levels: write {{"node": {{"tux0": "0-7", "tux1": "8-15"}}}}, the '
            "ranks of each part by level."
        )
    parts = {name: _part_of_rank(name, told[name], source) for name in told}
    world_size = 1 + max(max(part_of_rank) for part_of_rank in parts.values())
    return [level_of(name, _complete(name, parts[name], world_size, source)) for name in parts]


def _is_level(told: Any) -> bool:
    return isinstance(told, dict) and bool(told) and "" not in told


def _part_of_rank(level: str, told: Mapping[str, Any], source: str) -> dict[int, str]:
    part_of_rank: dict[int, str] = {}
    for part, ranks in told.items():
        for rank in _read_ranks(ranks, f"{level} {part!r} in {source}"):
            if part_of_rank.setdefault(rank, part) != part:
                raise ValueError(
                    f"{source}: rank {rank} is on two {level} parts, {part_of_rank[rank]!r} and "
                    f"{part!r}. Name it once."
                )
    return part_of_rank


@compat.untraced()
def _complete(
    level: str, part_of_rank: Mapping[int, str], world_size: int, source: str
) -> list[str]:
    missing = [rank for rank in range(world_size) if rank not in part_of_rank]
    if missing:
        shown = _ranges(torch.tensor(missing[:1000]))
        raise ValueError(
            f"{source}: ranks {shown} are on no {level}. Name each of the ranks 0 to "
            f"{world_size - 1} once at each level."
        )
    return [part_of_rank[rank] for rank in range(world_size)]


def _read_ranks(told: Any, where: str) -> Iterable[int]:
    if isinstance(told, list) and all(type(rank) is int and rank >= 0 for rank in told):
        return told
    ranks: list[int] = []
    for piece in told.split(",") if isinstance(told, str) else [""]:
        found = re.fullmatch(r"\s*(\d+)(?:\s*-\s*(\d+))?\s*", piece)
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
        if first > last or last >= _LARGEST_WORLD:
            raise ValueError(f'{told!r}, the ranks of {where}: write them as in "0-7,16-23".')
        ranks += range(first, last + 1)
    return ranks


def _levels_of_network(
    text: str, source: str, nodes: str | Sequence[str] | None, node_size: int | None
) -> list[Level]:
    """The levels of ranks that fill nodes of a topology.conf one after the other.

    Args:
        text: of the file.
        source: its name, for messages.
        nodes: those of the job, in the order of its ranks; by default all in the file.
        node_size: ranks on each of them.

    Raises:
        ValueError: a bad file, nodes that it does not name, or no node size.
    """
    if isinstance(node_size, bool) or not isinstance(node_size, int) or node_size < 1:
        raise ValueError(
            f"{source} is Slurm's: it tells how nodes are connected, not how many ranks run on "
            f"each. Give node_size=, an int above 0; got {node_size!r}."
        )
    network = read_network(text, source)
    if nodes is None:
        nodes = network.nodes
    elif isinstance(nodes, str):
        nodes = expand_hosts(nodes)
    return levels_on_nodes([node for node in nodes for _ in range(node_size)], network)


def levels_on_nodes(node_of_rank: Sequence[str], network: Network | None) -> list[Level]:
    """The levels of ranks on these nodes.

    Raises:
        ValueError: nodes that the network does not name.
    """
    upper = {} if network is None else network.of_nodes(node_of_rank)
    return [level_of(name, parts) for name, parts in {"node": node_of_rank, **upper}.items()]
