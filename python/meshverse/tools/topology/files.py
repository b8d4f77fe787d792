"""Topologies in files: JSON (see `Topology.from_file`), and Slurm's topology.conf."""

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

from meshverse._torch_compat.tracing import outside_torch_modes

from .levels import LARGEST_WORLD, Level, level_of
from .slurm import Network, expand_hosts, read_network

_MOST_GAPS, _MOST_CHARACTERS = 100, 200  # shown in a message

_Piece = tuple[int, int, str]  # first rank, last rank, and the part that these ranks are on


def levels_of_file(
    path: str | os.PathLike[str], nodes: str | Sequence[str] | None, node_size: int | None
) -> list[Level]:
    """Return the levels in a JSON file or a topology.conf; see `Topology.from_file`."""
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
        return Path(path).read_text(encoding="utf-8-sig")  # some editors write a byte order mark
    except UnicodeDecodeError as error:
        raise ValueError(f"{os.fspath(path)} is not text in UTF-8: {error}.") from error


def read_network_file(path: str | os.PathLike[str]) -> Network:
    """Return the network in a topology.conf."""
    return read_network(_read_text(path), os.fspath(path))


@outside_torch_modes()
def levels_to_dict(levels: Iterable[Level]) -> dict[str, dict[str, str]]:
    """Return, by level, the ranks of each part as ranges, such as "0-7,16-23"."""
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
    """Return the levels in a JSON file.

    Raises:
        ValueError: the text is not JSON or has another form; a name stands twice in one object; a
            rank is missing at a level, or is listed twice.
    """
    try:
        given = json.loads(text, object_pairs_hook=_each_once)
    except (RecursionError, ValueError) as error:  # ValueError: also for too long numbers
        raise ValueError(f"{source} is not valid JSON: {error}.") from error
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
    """Return a JSON object; of several values of one name, `json.loads` alone keeps the last."""
    counts = Counter(name for name, _ in pairs)
    if repeated := [name for name, count in counts.items() if count > 1]:
        raise ValueError(
            f"it has {repeated[0]!r} twice in one object, and one of the two would be lost"
        )
    return dict(pairs)


def _pieces(level: str, given: Mapping[str, Any], source: str) -> list[_Piece]:
    """Return a level's ranks as ranges, ascending: a short text can name very many ranks."""
    pieces = sorted(
        (first, last, part)
        for part, ranks in given.items()
        for first, last in _read_ranks(ranks, f"{level} {part!r} in {source}")
    )
    for (_, last, part), (rank, _, other) in itertools.pairwise(pieces):
        if rank <= last:
            two = f"is on two {level} parts, {part!r} and {other!r}"
            how = f"is twice on {level} {part!r}" if part == other else two
            raise ValueError(f"{source}: rank {rank} {how}. List it once.")
    return pieces


def _complete(level: str, pieces: Sequence[_Piece], world_size: int, source: str) -> list[str]:
    firsts, lasts = [first for first, *_ in pieces], [last for _, last, _ in pieces]
    between = zip([-1, *lasts], [*firsts, world_size], strict=True)
    gaps = [(last + 1, first - 1) for last, first in between if last + 1 < first]
    if gaps:
        shown = _text(gaps[:_MOST_GAPS]) + ",..." * (len(gaps) > _MOST_GAPS)
        raise ValueError(
            f"{source}: ranks {shown} are on no {level}. List each of the ranks 0 to "
            f"{world_size - 1} once at each level."
        )
    return [part for first, last, part in pieces for _ in range(first, last + 1)]


def _read_ranks(given: Any, where: str) -> list[tuple[int, int]]:
    """Return the first and last rank of each range in "0-7,16-23", or of a list of ranks."""
    ranges = []
    if isinstance(given, list):
        ranges = [(rank, rank) if type(rank) is int else (1, 0) for rank in given]
    elif isinstance(given, str):
        for piece in given.split(","):
            # At most 12 digits: no rank has more, and int() refuses numbers of very many.
            found = re.fullmatch(r"\s*([0-9]{1,12})(?:\s*-\s*([0-9]{1,12}))?\s*", piece)
            ranges.append((int(found[1]), int(found[2] or found[1])) if found else (1, 0))
    if not ranges or not all(0 <= first <= last < LARGEST_WORLD for first, last in ranges):
        text = repr(given)
        shown = text[:_MOST_CHARACTERS] + "..." * (len(text) > _MOST_CHARACTERS)
        raise ValueError(
            f'{shown} is not a list of ranks, for {where}: write it as in "0-7,16-23", with ranks '
            f"below {LARGEST_WORLD}."
        )
    return ranges


def _levels_of_network(
    text: str, source: str, nodes: str | Sequence[str] | None, node_size: int | None
) -> list[Level]:
    """Return the levels of ranks that fill the nodes of a topology.conf one after the other.

    Args:
        text: content of the file.
        source: name of the file, for messages.
        nodes: nodes of the job, in the order of its ranks; by default all nodes of the file.
        node_size: number of ranks on each node.

    Raises:
        ValueError: the file is malformed; a node is not in it, or is listed twice in `nodes`; or
            `node_size` is missing or too large.
    """
    network = read_network(text, source)
    if isinstance(node_size, bool) or not isinstance(node_size, int) or node_size < 1:
        raise ValueError(
            f"{source} is a topology.conf of Slurm, which does not say how many ranks run on each "
            f"node. Give node_size=, an int above 0; got {node_size!r}."
        )
    if nodes is None:
        nodes = network.nodes
    elif isinstance(nodes, str):
        nodes = expand_hosts(nodes)
    if repeated := [node for node, count in Counter(nodes).items() if count > 1]:
        raise ValueError(
            f"{repeated[0]!r} is in nodes= twice. Name each node once: it gets node_size= "
            "consecutive ranks."
        )
    if len(nodes) * node_size > LARGEST_WORLD:
        raise ValueError(
            f"{len(nodes)} nodes of {node_size} ranks have more than {LARGEST_WORLD} ranks: "
            "node_size= is the number of ranks on one node."
        )
    return levels_on_nodes([node for node in nodes for _ in range(node_size)], network)


def levels_on_nodes(node_of_rank: Sequence[str], network: Network | None) -> list[Level]:
    """Return the level "node" of ranks on these nodes, and the levels of the network.

    Args:
        node_of_rank: name of each rank's node.
        network: nodes and switches of a topology.conf, or None.

    Raises:
        ValueError: the network does not name one of the nodes.
    """
    upper = {} if network is None else network.of_nodes(node_of_rank)
    return [level_of(name, parts) for name, parts in {"node": node_of_rank, **upper}.items()]
