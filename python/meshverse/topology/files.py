"""Topologies in files: ours, in JSON (see `Topology.from_file`), and Slurm's topology.conf."""

from __future__ import annotations

import itertools
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from meshverse import _torch_compat as compat

from .levels import Level, level_of
from .slurm import Network, expand_hosts, read_network

_LARGEST_WORLD = 1 << 24

_MOST_GAPS, _MOST_CHARACTERS = 100, 200  # in a message

_Piece = tuple[int, int, str]  # first rank, last rank, the part that they are on


def levels_of_file(
    path: str | os.PathLike[str], nodes: str | Sequence[str] | None, node_size: int | None
) -> list[Level]:
    """Return the levels in a file of either form; see `Topology.from_file`."""
    source, text = os.fspath(path), _read_text(path)
    if not text.lstrip().startswith(("{", "[")):
        return _levels_of_network(text, source, nodes, node_size)
    levels = _levels_of_json(text, source)
    if nodes is not None or node_size is not None:
        raise ValueError(
            f"{source} says which ranks are on each node: leave nodes= and node_size= out."
        )
    return levels


def _read_text(path: str | os.PathLike[str]) -> str:
    try:
        return Path(path).read_text(encoding="utf-8-sig")  # some editors begin it with a mark
    except UnicodeDecodeError as error:
        raise ValueError(f"{os.fspath(path)} is no text in UTF-8: {error}.") from error


def read_network_file(path: str | os.PathLike[str]) -> Network:
    """Return the network in a topology.conf."""
    return read_network(_read_text(path), os.fspath(path))


@compat.untraced()
def levels_to_dict(levels: Iterable[Level]) -> dict[str, dict[str, str]]:
    """Return the ranks of each part of each level, in ranges such as "0-7,16-23"."""
    found = {}
    for level in levels:
        of_parts = torch.split(level.of_rank.argsort(stable=True), level.sizes.tolist())
        found[level.name] = dict(zip(level.parts, map(_ranges, of_parts), strict=True))
    return found


def _ranges(ranks: torch.Tensor) -> str:
    starts = torch.ones(len(ranks), dtype=torch.bool)
    starts[1:] = ranks[1:] != ranks[:-1] + 1
    return _text(zip(ranks[starts].tolist(), ranks[starts.roll(-1)].tolist(), strict=True))


def _text(ranges: Iterable[tuple[int, int]]) -> str:
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in ranges)


def _levels_of_json(text: str, source: str) -> list[Level]:
    """Return the levels in a file of ours.

    Raises:
        ValueError: no JSON, or not of this form; a name that is there twice; a rank that is on no
            part of a level, or is named twice there.
    """
    try:
        given = json.loads(text, object_pairs_hook=_each_once)
    except (RecursionError, ValueError) as error:  # ValueError: also of too long numbers
        raise ValueError(f"{source} is no JSON: {error}.") from error
    levels = [given, *given.values()] if isinstance(given, dict) else [None]
    if not all(isinstance(each, dict) and each and "" not in each for each in levels):
        raise ValueError(
            f'{source} has no levels: write {{"node": {{"tux0": "0-7", "tux1": "8-15"}}}}, the '
            "ranks of each part by level."
        )
    pieces = {name: _pieces(name, given[name], source) for name in given}
    world_size = 1 + max(of_level[-1][1] for of_level in pieces.values())
    return [level_of(name, _complete(name, pieces[name], world_size, source)) for name in pieces]


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object; `json.loads` alone keeps the last of several that have one name."""
    counts = Counter(name for name, _ in pairs)
    if repeated := [name for name, count in counts.items() if count > 1]:
        raise ValueError(f"it has {repeated[0]!r} twice in one object, of which one would be lost")
    return dict(pairs)


def _pieces(level: str, given: Mapping[str, Any], source: str) -> list[_Piece]:
    """Return a level's ranks in ascending order, as ranges: a short text can have very many."""
    pieces = sorted(
        (first, last, part)
        for part, ranks in given.items()
        for first, last in _read_ranks(ranks, f"{level} {part!r} in {source}")
    )
    for (_, last, part), (rank, _, other) in itertools.pairwise(pieces):
        if rank <= last:
            two = f"is on two {level} parts, {part!r} and {other!r}"
            how = f"is twice on {level} {part!r}" if part == other else two
            raise ValueError(f"{source}: rank {rank} {how}. Name it once.")
    return pieces


def _complete(level: str, pieces: Sequence[_Piece], world_size: int, source: str) -> list[str]:
    firsts, lasts = [first for first, *_ in pieces], [last for _, last, _ in pieces]
    between = zip([-1, *lasts], [*firsts, world_size], strict=True)
    gaps = [(last + 1, first - 1) for last, first in between if last + 1 < first]
    if gaps:
        shown = _text(gaps[:_MOST_GAPS]) + ",..." * (len(gaps) > _MOST_GAPS)
        raise ValueError(
            f"{source}: ranks {shown} are on no {level}. Name each of the ranks 0 to "
            f"{world_size - 1} once at each level."
        )
    return [part for first, last, part in pieces for _ in range(first, last + 1)]


def _read_ranks(given: Any, where: str) -> list[tuple[int, int]]:
    """Return the ranges, as first and last rank, in "0-7,16-23" or in a list of ranks."""
    ranges = []
    if isinstance(given, list):
        ranges = [(rank, rank) if type(rank) is int else (1, 0) for rank in given]
    elif isinstance(given, str):
        for piece in given.split(","):
            # No world has ranks of more digits, and int() refuses very many.
            found = re.fullmatch(r"\s*([0-9]{1,12})(?:\s*-\s*([0-9]{1,12}))?\s*", piece)
            ranges.append((int(found[1]), int(found[2] or found[1])) if found else (1, 0))
    if not ranges or not all(0 <= first <= last < _LARGEST_WORLD for first, last in ranges):
        text = repr(given)
        shown = text[:_MOST_CHARACTERS] + "..." * (len(text) > _MOST_CHARACTERS)
        raise ValueError(
            f'{shown}, the ranks of {where}: write them as in "0-7,16-23", with ranks below '
            f"{_LARGEST_WORLD}."
        )
    return ranges


def _levels_of_network(
    text: str, source: str, nodes: str | Sequence[str] | None, node_size: int | None
) -> list[Level]:
    """Return the levels of ranks that fill nodes of a topology.conf one after the other.

    Args:
        text: of the file.
        source: its name, for messages.
        nodes: those of the job, in the order of its ranks; by default all in the file.
        node_size: ranks on each of them.

    Raises:
        ValueError: a bad file, nodes that it does not name or that are named twice, no node size,
            or one of too many ranks.
    """
    if isinstance(node_size, bool) or not isinstance(node_size, int) or node_size < 1:
        raise ValueError(
            f"{source} is Slurm's: it says how nodes are connected, not how many ranks run on "
            f"each. Give node_size=, an int above 0; got {node_size!r}."
        )
    network = read_network(text, source)
    if nodes is None:
        nodes = network.nodes
    elif isinstance(nodes, str):
        nodes = expand_hosts(nodes)
    if repeated := [node for node, count in Counter(nodes).items() if count > 1]:
        raise ValueError(
            f"{repeated[0]!r} is in nodes= twice. Name each node once: the ranks of a node follow "
            "each other, node_size= of them."
        )
    if len(nodes) * node_size > _LARGEST_WORLD:
        raise ValueError(
            f"{len(nodes)} nodes of {node_size} ranks have more than {_LARGEST_WORLD}: give the "
            "ranks on each node as node_size=."
        )
    return levels_on_nodes([node for node in nodes for _ in range(node_size)], network)


def levels_on_nodes(node_of_rank: Sequence[str], network: Network | None) -> list[Level]:
    """Return the levels of ranks on these nodes.

    Raises:
        ValueError: nodes that the network does not name.
    """
    upper = {} if network is None else network.of_nodes(node_of_rank)
    return [level_of(name, parts) for name, parts in {"node": node_of_rank, **upper}.items()]
