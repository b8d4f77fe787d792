"""Ranks exchange through the store of the default process group where they are."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from meshverse.agreement import Rendezvous
from meshverse.world.world import World, WorldState

from .environment import own_node, own_switches
from .files import levels_on_nodes, read_network_file
from .levels import Level, level_of
from .nvlink import nvlink_domain

__all__ = ["levels_detected", "own_place"]

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_FAILED = "!"  # begins the text of a rank that failed

_BOOT = "boot"  # when a machine was started: tells those of one name apart

Place = dict[str, str]
"""Where one rank is: the name of its part of each level."""


class Detections(WorldState):
    """How many times the ranks of a world have told each other where they are."""

    def __init__(self) -> None:
        self.count = 0


def own_place(node: str | None, domain: str | None, switches: Mapping[str, str] | None) -> Place:
    """Where this process is, as far as it can tell and is not told.

    Raises:
        TypeError: told with names that are no strings.
        ValueError, OSError: what the environment or the system tells cannot be read.
    """
    place = own_switches(os.environ) if switches is None else dict(switches)
    if node is None:
        place["node"] = own_node(os.environ, socket.gethostname())
        place[_BOOT] = _BOOT_ID.read_text().strip()[:8] if _BOOT_ID.exists() else ""
    else:
        place["node"] = node
    if domain is None:
        domain = nvlink_domain() or place.get("domain", "")
    place = {**place, "domain": domain} if domain else place
    given: dict[Any, Any] = dict(place)  # users name the switches
    for name, part in given.items():
        if not (isinstance(name, str) and name.strip() and isinstance(part, str)):
            raise TypeError(
                f"{{{name!r}: {part!r}}}, given as where this rank is: give strings, the name of "
                'the part by that of its level, such as switches={"switch": "leaf3"}.'
            )
    return place


def levels_detected(
    own_place: Callable[[], Place],
    network_file: str | os.PathLike[str] | None,
    world: World,
    timeout: timedelta,
) -> list[Level]:
    """The levels that the ranks tell each other; see `Topology.detect`.

    Args:
        own_place: tells where this rank is.
        network_file: Slurm's topology.conf, where switches are not left to the ranks.
        world: of the default process group.
        timeout: see `_gather`.
    """
    places = _gather(own_place, world, timeout)
    # A rank that cannot read it fails now, and keeps no other rank waiting.
    network = None if network_file is None else read_network_file(network_file)
    nodes = [place["node"] for place in places]
    levels = levels_on_nodes(nodes, network)
    known = {level.name for level in levels}
    told = dict.fromkeys(name for place in places for name in place if name not in known)
    return levels + [level_of(name, _parts_told(name, places, nodes)) for name in told]


def _parts_told(name: str, places: Sequence[Place], nodes: Sequence[str]) -> list[str]:
    """The part of each rank at a level that some ranks have told."""
    parts = [place.get(name, "") for place in places]
    if name == "domain":
        return [part or f"node {node}" for part, node in zip(parts, nodes, strict=True)]
    if "" in parts:
        rank = parts.index("")
        other = next(rank for rank, part in enumerate(parts) if part)
        raise ValueError(
            f"Rank {rank} on node {nodes[rank]!r} tells no {name}, but rank {other} tells "
            f"{parts[other]!r}: have all ranks tell it (switches=, SLURM_TOPOLOGY_ADDR), or none."
        )
    return parts


def _gather(own_place: Callable[[], Place], world: World, timeout: timedelta) -> list[Place]:
    """Where each rank is. All ranks call this together.

    Args:
        own_place: tells where this rank is.
        world: of the default process group.
        timeout: how long to wait for the other ranks.

    Raises:
        RuntimeError: ranks did not come in time, or failed; the default group has no store that
            ranks could meet in.
    """
    if world.run_store is None:
        raise RuntimeError(
            "Topology.detect() needs a store that all ranks read, and the default process group "
            "has none. Use Topology.from_environment() or from_file()."
        )
    detections = world.state(Detections)
    if not detections.count:
        # For good: the answer stays, and a later run on this store must not find it as its own.
        world.run.add_user(detections)
    name = f"topology/{detections.count}"
    detections.count += 1  # first: whatever fails here, all ranks count the same
    failure: Exception | None = None
    try:
        text = json.dumps(own_place())
    except (OSError, TypeError, ValueError) as error:  # which the other ranks must know
        failure, text = error, f"{_FAILED}{error}"
    try:
        texts = world.state(Rendezvous).join(
            *(world, name, "the topology", range(world.size), timeout), text=text
        )[1]
    except RuntimeError as error:
        raise failure or RuntimeError(f"Topology.detect(): {error}") from None
    if failure is not None:
        raise failure
    for rank, text in enumerate(texts):
        if text.startswith(_FAILED):
            why = text.removeprefix(_FAILED)
            raise RuntimeError(f"Topology.detect() failed on rank {rank}: {why}")
    return _with_unique_nodes([json.loads(text) for text in texts])


def _with_unique_nodes(places: list[Place]) -> list[Place]:
    """Places without boots, which are in the names of nodes where those alone are not unique."""
    boots: dict[str, set[str]] = {}
    for place in places:
        boots.setdefault(place["node"], set()).add(place.get(_BOOT, ""))
    named = []
    for place in places:
        node, boot = place["node"], place.get(_BOOT, "")
        node = node if len(boots[node]) == 1 else f"{node} ({boot})"
        rest = {name: part for name, part in place.items() if name not in ("node", _BOOT)}
        named.append({"node": node, **rest})
    return named
