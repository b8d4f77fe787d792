"""Ranks tell each other through the store of the default process group where they are.

Each rank writes one line under a key of its own. Rank 0 reads them all, and writes them as one
compact text, which each of the others reads: two keys a rank.
"""

from __future__ import annotations

import base64
import json
import os
import socket
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from meshverse.agreement import Board, shortened
from meshverse.world.world import World, WorldState

from .environment import own_node, own_switches
from .files import levels_on_nodes, read_network_file
from .levels import Level, level_of
from .nvlink import nvlink_domain

__all__ = ["levels_detected", "own_place"]

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.002, 0.5
_HERE = "here"  # the line of rank 0, which reads the others'
_FAILED = "!"  # begins the text of rank 0, if ranks did not come

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
        timeout: how long rank 0 waits for the others; these wait for rank 0 as long, and again as
            long once it has come.

    Raises:
        RuntimeError: ranks did not come in time, who are named; the default group has no store
            that ranks could meet in.
    """
    board = world.board
    if board is None:
        raise RuntimeError(
            "Topology.detect() needs a store that all ranks read, and the default process group "
            "has none. Use Topology.from_environment() or from_file()."
        )
    detections = world.state(Detections)
    if not detections.count:
        # For good: the answer stays, and a later run on this store must not find it as its own.
        world.run.add_user(object())
    key = f"topology/{detections.count}"
    detections.count += 1  # first: whatever fails here, all ranks count the same
    try:
        mine = own_place()
    except (OSError, TypeError, ValueError) as error:
        board.put_first(key, f"{_FAILED}Topology.detect() failed on rank {world.rank}: {error}")
        raise
    if world.size == 1:
        return _with_unique_nodes([mine])
    if world.rank == 0:
        board.write(f"{key}/0", _HERE)
        return _gathered(board, key, mine, world.size, timeout)
    board.write(f"{key}/{world.rank}", json.dumps(mine))
    return _answered(board, key, timeout)


def _gathered(
    board: Board, key: str, mine: Place, world_size: int, timeout: timedelta
) -> list[Place]:
    places, pause = [mine], _FIRST_PAUSE_SECONDS
    deadline = time.monotonic() + timeout.total_seconds()
    while (rank := len(places)) < world_size:
        if line := board.read(f"{key}/{rank}"):
            places.append(json.loads(line))
        elif time.monotonic() < deadline:
            if failed := board.read(key):
                return _outcome(board, key, failed, world_size)
            board.pause(pause)
            pause = min(1.5 * pause, _LONGEST_PAUSE_SECONDS)
        elif missing := [r for r in range(rank, world_size) if not board.read(f"{key}/{r}")]:
            text = (
                f"Topology.detect(): {world_size - len(missing)} of {world_size} ranks came in "
                f"{timeout}. Not seen were ranks {shortened(missing)}. They have died, or do not "
                "call it: all ranks call it together."
            )
            return _outcome(board, key, _FAILED + text, world_size)
    return _outcome(board, key, _packed(_with_unique_nodes(places)), world_size)


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


def _outcome(board: Board, key: str, text: str, world_size: int) -> list[Place]:
    """What rank 0 found, unless a rank has given up before: all ranks get the same."""
    text = board.put_first(key, text)
    for rank in range(world_size):
        board.remove(f"{key}/{rank}")
    return _unpacked(text)


def _answered(board: Board, key: str, timeout: timedelta) -> list[Place]:
    start, pause, has_come = time.monotonic(), _FIRST_PAUSE_SECONDS, False
    limit = timeout.total_seconds()
    while not (text := board.read(key)):
        waited = time.monotonic() - start
        if waited > limit and not has_come:
            has_come = bool(board.read(f"{key}/0"))
            limit = 2 * limit if has_come else limit
        if waited > limit:
            text = (
                "Topology.detect(): rank 0, which gathers what the ranks tell, "
                f"{'has come but not answered' if has_come else 'did not come'} in "
                f"{timedelta(seconds=limit)} (told by rank {board.rank}). All ranks call it "
                "together."
            )
            return _unpacked(board.put_first(key, _FAILED + text))
        board.pause(pause)
        pause = min(1.5 * pause, _LONGEST_PAUSE_SECONDS)
    return _unpacked(text)


def _packed(places: list[Place]) -> str:
    """Places as a short text: what differs, and which of these each rank has.

    The levels of a place stay in the order told, which is innermost first.
    """
    kinds: dict[str, tuple[int, Place]] = {}  # what is told in another order is the same
    keys = [json.dumps(place, sort_keys=True) for place in places]
    pairs = zip(keys, places, strict=True)
    of_rank = [kinds.setdefault(key, (len(kinds), place))[0] for key, place in pairs]
    told = json.dumps([[place for _, place in kinds.values()], of_rank]).encode()
    return base64.b64encode(zlib.compress(told)).decode()


def _unpacked(text: str) -> list[Place]:
    if text.startswith(_FAILED):
        raise RuntimeError(text.removeprefix(_FAILED))
    kinds, of_rank = json.loads(zlib.decompress(base64.b64decode(text)))
    return [kinds[index] for index in of_rank]
