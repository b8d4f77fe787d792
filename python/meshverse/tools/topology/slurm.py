"""Parsers for Slurm's formats: lists of hosts, tasks on each node, and topology.conf.

The formats are those of Slurm's manual pages srun(1), "OUTPUT ENVIRONMENT VARIABLES", and
topology.conf(5).
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from meshverse.wording import did_you_mean

_LARGEST_LIST = 1 << 20  # hosts or tasks; a longer list is taken for a typing error

# Names of the levels of switches, beginning with those that nodes are connected to.
_TIERS = ("switch", "spine", "core")
_BLOCK_TIERS = ("domain", "block")  # topology/block is for NVLink domains

# Fields of a line of topology.conf, by the field that names what the line describes.
_FIELDS = {
    "SwitchName": ("Nodes", "Switches", "LinkSpeed", "Comment"),
    "BlockName": ("Nodes", "BlockSizes", "Comment"),
}


def expand_hosts(text: str) -> list[str]:
    """Return the hosts of a list such as "tux[0-2,07],gpu-[1-2]n[1-2],login", in its order.

    Raises:
        ValueError: brackets do not match, a range descends, or there are too many hosts.
    """
    hosts: list[str] = []
    for part in re.split(r",(?![^\[]*\])", text):  # at the commas outside of brackets
        if not part.strip():
            raise ValueError(
                f"The host list {text!r} has an empty part: write hosts as in tux[0-3]."
            )
        pieces = re.split(r"\[([^\[\]]*)\]", part.strip())  # odd indices: inside brackets
        if any(mark in piece for piece in pieces[::2] for mark in "[]"):
            raise ValueError(f"The brackets of the host list {text!r} do not match.")
        choices = [
            [number for one in piece.split(",") for number in _numbers(one, text)]
            if index % 2
            else [piece]
            for index, piece in enumerate(pieces)
        ]
        if len(hosts) + math.prod(map(len, choices)) > _LARGEST_LIST:
            raise ValueError(f"The host list {text!r} has more than {_LARGEST_LIST} hosts.")
        hosts += map("".join, itertools.product(*choices))
    return hosts


def _numbers(piece: str, text: str) -> Sequence[str]:
    """Return the numbers of "3" or "01-12" as strings, with their leading zeros."""
    found = re.fullmatch(r"\s*([0-9]{1,12})(?:-([0-9]{1,12}))?\s*", piece)
    first, last = (found[1], found[2] or found[1]) if found else ("1", "0")
    if int(last) < int(first):
        raise ValueError(
            f"{piece!r} in the host list {text!r} is neither a number nor a range: write it as in "
            "tux[0-3,07]."
        )
    count = int(last) - int(first) + 1
    if count > _LARGEST_LIST:
        raise ValueError(f"The host list {text!r} has more than {_LARGEST_LIST} hosts.")
    return [str(int(first) + index).zfill(len(first)) for index in range(count)]


def expand_tasks(text: str) -> list[int]:
    """Return the number of tasks on each node, from a list such as "8(x3),4".

    Raises:
        ValueError: the list has another form, or too many nodes.
    """
    tasks: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"\s*([0-9]{1,12})(?:\(x([0-9]{1,12})\))?\s*", part)
        times = int(found[2] or 1) if found else 0
        if found is None or len(tasks) + times > _LARGEST_LIST:
            raise ValueError(f"{part!r} in the tasks per node {text!r} is not as in 8(x3),4.")
        tasks += [int(found[1])] * times
    return tasks


def switches_of_address(address: str, pattern: str) -> dict[str, str]:
    """Return the switches of one node, by level, from `SLURM_TOPOLOGY_ADDR` and its pattern.

    Example: "core0.leaf3.tux7" with "switch.switch.node" is {"switch": "leaf3", "spine": "core0"}.

    Raises:
        ValueError: the address and its pattern have different numbers of parts.
    """
    parts, kinds = address.split("."), pattern.split(".")
    if len(parts) != len(kinds):
        if kinds[-1:] != ["node"] or len(parts) < len(kinds):
            raise ValueError(
                f"SLURM_TOPOLOGY_ADDR={address!r} does not fit its pattern {pattern!r}: they have "
                f"{len(parts)} and {len(kinds)} parts."
            )
        parts = parts[: len(kinds) - 1]  # the node is last; its name may have dots
    named = list(zip(parts, kinds, strict=False))[::-1]
    found: dict[str, str] = {}
    for tiers, kind in ((_TIERS, "switch"), (_BLOCK_TIERS, "block")):
        names = [name for name, of_kind in named if of_kind == kind]
        found |= {_tier(tiers, height): name for height, name in enumerate(names)}
    return found


def _tier(tiers: Sequence[str], height: int) -> str:
    return tiers[height] if height < len(tiers) else f"{tiers[-1]}{height - len(tiers) + 2}"


@dataclass(frozen=True)
class Network:
    """Nodes of a topology.conf, and the switches or blocks that they belong to.

    Attributes:
        source: name of the file, for messages.
        nodes: names of the nodes, in the order of the file.
        levels: by name of a level, the part of each node.
    """

    source: str
    nodes: tuple[str, ...]
    levels: Mapping[str, Mapping[str, str]]

    def of_nodes(self, nodes: Sequence[str]) -> dict[str, list[str]]:
        """Return, by level, the part of each of these nodes.

        Raises:
            ValueError: the file does not name one of the nodes.
        """
        known = set(self.nodes)
        missing = sorted({node for node in nodes if node not in known})
        if missing:
            shown = ", ".join(missing[:8]) + f" and {len(missing) - 8} more" * (len(missing) > 8)
            raise ValueError(
                f"{self.source} does not name {shown}, on which ranks run: add these nodes, or do "
                "not pass the file."
            )
        return {name: [of_node[node] for node in nodes] for name, of_node in self.levels.items()}


def read_network(text: str, source: str) -> Network:
    """Return the network of a topology.conf: switches (topology/tree) or blocks (topology/block).

    The levels of switches are named "switch" (those that nodes are connected to), "spine", "core",
    and so on; the level of blocks is "domain". If a node has no switch at a level, its part there
    is its highest switch below that level, or else the switch that it is connected to.

    Args:
        text: content of the file.
        source: name of the file, for messages.

    Raises:
        ValueError: a line has another form, an unknown field or one twice; a node or switch is
            listed below two switches or in two blocks; a listed switch has no line; a switch is
            above itself; switches and blocks have different nodes; or the file has no nodes.
    """
    # The switch above each node and above each switch. Keys of switches begin with a space, because
    # a node and a switch may have the same name.
    above: dict[str, str] = {}
    blocks: dict[str, str] = {}
    defined: set[str] = set()
    for line in text.replace("\\\n", " ").splitlines():
        words = line.partition("#")[0].split()
        pairs = [word.partition("=") for word in words]
        if not all(equals and value for _, equals, value in pairs):
            raise ValueError(f"{source}: {line.strip()!r} is not of the form Name=value ...")
        fields = {name.lower(): value for name, _, value in pairs}
        _check_fields([name for name, _, _ in pairs], line.strip(), source)
        nodes = expand_hosts(fields["nodes"]) if "nodes" in fields else []
        if "switchname" in fields:
            defined.add(fields["switchname"])
            switches = expand_hosts(fields["switches"]) if "switches" in fields else []
            for child in [*nodes, *(f" {switch}" for switch in switches)]:
                if above.setdefault(child, fields["switchname"]) != fields["switchname"]:
                    raise ValueError(
                        f"{source}: {child.strip()} is below {above[child]} and below "
                        f"{fields['switchname']}. List it below one switch."
                    )
        elif "blockname" in fields:
            for node in nodes:
                if blocks.setdefault(node, fields["blockname"]) != fields["blockname"]:
                    raise ValueError(
                        f"{source}: {node} is in {blocks[node]} and in {fields['blockname']}. "
                        "List it in one block."
                    )
        elif fields.keys() - {"blocksizes", "comment"}:
            raise ValueError(
                f"{source}: {line.strip()!r} begins with neither SwitchName= nor BlockName=. It is "
                "read as Slurm's topology.conf; a JSON file begins with {."
            )
    known = tuple(dict.fromkeys([*(name for name in above if name[0] != " "), *blocks]))
    if not known:
        raise ValueError(f"{source} has no nodes: no line of it has Nodes=.")
    for child, switch in above.items():
        if child[0] == " ":
            if child[1:] not in defined:
                raise ValueError(
                    f"{source}: Switches= of {switch} lists {child[1:]}, but no line has "
                    f"SwitchName={child[1:]}.{did_you_mean(child[1:], defined)}"
                )
            _chain(child, above, source)  # raises if the switch is above itself
    if blocks and any(name[0] != " " for name in above):
        for node in known:
            if node not in above or node not in blocks:
                kind = "switch" if node in blocks else "block"
                raise ValueError(
                    f"{source}: the node {node} is on no {kind}, but others are. List each node "
                    "below a switch and in a block, or leave out all lines of one kind."
                )
    levels = {"domain": blocks} if blocks else {}
    return Network(source, known, levels | _tiers(above, source))


def _check_fields(names: Sequence[str], line: str, source: str) -> None:
    lowered = [name.lower() for name in names]
    for name in names:
        if lowered.count(name.lower()) > 1:
            raise ValueError(f"{source}: {line!r} has {name}= twice. Write it once, as a list.")
    kinds = [kind for kind in _FIELDS if kind.lower() in lowered]
    if len(kinds) > 1:
        raise ValueError(
            f"{source}: {line!r} has SwitchName= and BlockName=. Write a line for each."
        )
    for kind in kinds:
        known = (kind, *_FIELDS[kind])
        for name in names:
            if name.lower() not in map(str.lower, known):
                raise ValueError(
                    f"{source}: {line!r} has {name}=, but the fields of a line with {kind}= are "
                    f"{', '.join(known)}.{did_you_mean(name, known)}"
                )


def _tiers(above: Mapping[str, str], source: str) -> dict[str, dict[str, str]]:
    chains = {name: _chain(name, above, source) for name in above if name[0] != " "}
    heights = dict.fromkeys((switch for chain in chains.values() for switch in chain), 0)
    # A switch is higher than everything below it: it may have both nodes and switches below it.
    for _ in range(max(map(len, chains.values()), default=0)):
        for chain in chains.values():
            for below, switch in itertools.pairwise(chain):
                heights[switch] = max(heights[switch], heights[below] + 1)
    return {
        _tier(_TIERS, height): {
            node: next((each for each in reversed(chain) if heights[each] <= height), chain[0])
            for node, chain in chains.items()
        }
        for height in range(max(heights.values(), default=-1) + 1)
    }


def _chain(node: str, above: Mapping[str, str], source: str) -> list[str]:
    chain = [above[node]]
    while (upper := above.get(f" {chain[-1]}")) is not None:
        if upper in chain:
            raise ValueError(f"{source}: the switch {upper} is above itself.")
        chain.append(upper)
    return chain
