"""What all ranks of a move have, and which ranks have to come for it to be complete."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple

from meshverse._core import RankMap

from .sides import Content, Side, digest_of, ranks_of_root

__all__ = [
    "SIDES",
    "Part",
    "Roster",
    "RosterCollector",
    "Settings",
    "in_words",
    "read_roster",
    "what_is_said",
]

SIDES = ("source", "target")


@dataclass
class Part:
    """What some ranks of one side have alike.

    Attributes:
        content: their tensors, and the meshes of these.
        ranks: those that have it.
        firsts: for each of the meshes, the ranks at which its copies begin.
    """

    content: Content
    ranks: list[int]
    firsts: list[list[int]]


@dataclass
class Roster:
    """What all ranks of a move have.

    Attributes:
        ranks: all of them, ascending.
        sides: by "source" and "target".
        right_to_left: by side, names of tensors that are split as FSDP2 does.
        device_types: of all tensors.
        settings: what all ranks were called with alike.
    """

    ranks: list[int]
    sides: dict[str, list[Part]]
    right_to_left: dict[str, set[str]]
    device_types: set[str]
    settings: Settings


class Settings(NamedTuple):
    """What the plans of all ranks depend on.

    Attributes:
        buffer_bytes: memory for messages.
        node_size: ranks on each node, 1 if that is not known.
        nodes: the node of every rank, in place of `node_size`.
        ranks: those that the user said have to come.
    """

    buffer_bytes: int
    node_size: int = 1
    nodes: tuple[int, ...] | None = None
    ranks: tuple[int, ...] | None = None


def what_is_said(
    sides: Mapping[str, Side | None], settings: Settings, rank: int, error: str
) -> tuple[dict[str, Any], dict[str, str]]:
    """What one rank says: what only it says, and texts that others say too, by digest."""
    nodes, ranks = json.dumps(settings.nodes), json.dumps(settings.ranks)
    contents = {digest_of(nodes): nodes}
    said: dict[str, Any] = {"rank": rank, "error": error, **dict.fromkeys(SIDES)}
    said["settings"] = [
        *(settings.buffer_bytes, settings.node_size),
        *(digest_of(nodes), digest_of(ranks)),
    ]
    devices: set[str] = set()
    for name, side in sides.items():
        if side is not None:
            text = side.content()
            contents[digest_of(text)] = text
            orders = [side.right_to_left, side.left_to_right]
            said[name] = {"content": digest_of(text), "firsts": side.firsts, "orders": orders}
            devices.update(tensor.device.type for tensor in side.tensors.values())
    said["devices"], said["contents"] = sorted(devices), list(contents)
    return said, contents


@dataclass
class RosterCollector:
    """Puts together what ranks say, on the rank that came first.

    Args:
        world_size: number of ranks of the default group.
        ranks: all ranks of the move, if the user gave them.
        timeout: for messages.
    """

    world_size: int
    ranks: Sequence[int] | None
    timeout: timedelta
    _arrived: dict[int, dict[str, Any]] = field(default_factory=dict)
    _contents: dict[str, str] = field(default_factory=dict)
    _expected: set[int] = field(default_factory=set)
    _read: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._expected.update(self.ranks or ())

    def add(self, said: dict[str, Any], contents: Mapping[str, str]) -> None:
        """Take what one rank said, and the texts that it referred to, by digest."""
        self._arrived[said["rank"]] = said
        for digest in said["contents"]:
            if digest not in self._contents:
                self._contents[digest] = contents[digest]
        for side in SIDES:
            if said[side] and self.ranks is None and said[side]["content"] not in self._read:
                self._read.add(said[side]["content"])
                self._expected |= self._needed_for(contents[said[side]["content"]])

    def _needed_for(self, content: str) -> set[int]:
        roots = Content.read(content).roots
        if not roots:  # plain tensors only: nobody knows which other ranks give some
            return set(range(self.world_size))
        return {rank for root in roots for rank in ranks_of_root(root)}

    def is_complete(self) -> bool:
        """Whether no other rank is needed."""
        if self._expected - set(self._arrived):
            return False
        has_error = any(said["error"] for said in self._arrived.values())
        return self.ranks is not None or has_error or not self._absent_sides()

    def _absent_sides(self) -> list[str]:
        return [side for side in SIDES if not any(said[side] for said in self._arrived.values())]

    def roster(self) -> dict[str, Any]:
        """What all ranks are told."""
        if error := self._error() or self._settings_error():
            return {"error": error}
        merged: dict[str, Any] = {
            "ranks": sorted(said["rank"] for said in self._with_a_part()),
            "came": len(self._arrived),
            "contents": self._contents,
            "settings": self._settings(),
            "devices": sorted(
                {each for said in self._arrived.values() for each in said["devices"]}
            ),
        }
        for side in SIDES:
            parts: dict[str, dict[str, Any]] = {}
            orders: tuple[set[str], set[str]] = (set(), set())
            for rank in sorted(self._arrived):
                if (has := self._arrived[rank][side]) is None:
                    continue
                part = parts.setdefault(
                    has["content"], {"ranks": [], "firsts": [set() for _ in has["firsts"]]}
                )
                part["ranks"].append(rank)
                for known, first in zip(part["firsts"], has["firsts"], strict=True):
                    known.add(first)
                for order, names in zip(orders, has["orders"], strict=True):
                    order.update(names)
            if both := sorted(orders[0] & orders[1]):
                return {"error": _split_in_no_way(side, both[0])}
            for part in parts.values():
                part["firsts"] = [sorted(firsts) for firsts in part["firsts"]]
            merged[side] = parts
            merged[f"{side} right to left"] = sorted(orders[0])
        return merged

    def _with_a_part(self) -> list[dict[str, Any]]:
        return [said for said in self._arrived.values() if any(said[side] for side in SIDES)]

    def _settings(self) -> list[Any]:
        buffer_bytes, node_size, nodes, _ = self._with_a_part()[0]["settings"]
        if any(said["settings"][1] != node_size for said in self._with_a_part()):
            node_size = 1  # nodes of different sizes, which only a topology can tell
        return [buffer_bytes, node_size, json.loads(self._contents[nodes])]

    def _settings_error(self) -> str:
        first, *others = self._with_a_part()
        for said in others:
            for index, what in ((0, "buffer_bytes"), (2, "topology"), (3, "ranks=")):
                if said["settings"][index] != first["settings"][index]:
                    values = "" if index else f" {first['settings'][0]} and {said['settings'][0]}"
                    return (
                        f"Reshard: ranks {first['rank']} and {said['rank']} give different "
                        f"{what}{values and ':'}{values}. Give the same on all ranks."
                    )
        return ""

    def _error(self) -> str:
        errors = {rank: said["error"] for rank, said in self._arrived.items() if said["error"]}
        if errors:
            ranks = in_words(errors)
            return f"Reshard: {ranks} cannot take part. Rank {min(errors)}: {errors[min(errors)]}"
        came = in_words(self._arrived)
        if self.ranks is not None and (others := set(self._arrived) - self._expected):
            return (
                f"Reshard(ranks=...) of {in_words(self._expected)}: {in_words(others)} came too. "
                "Give the same ranks on all of them."
            )
        waited = f"within {self.timeout.total_seconds():g} s"
        if missing := self._expected - set(self._arrived):
            return (
                f"Reshard: {in_words(missing)} did not come {waited}. Came: {came}. All ranks of "
                "both sides call it, with None for a side that they have no part in: those of the "
                "meshes that tensors are on, and of the meshes that these were derived from. Where "
                "a rank gives plain tensors only, all ranks of the default group call it. Give "
                "ranks= if it is others."
            )
        if absent := self._absent_sides():
            return (
                f"Reshard: no rank gave a {' or a '.join(absent)} {waited}. Came: {came}. Ranks "
                "meet at their first move of a name, then at their second. If ranks have moves "
                "with different ranks, give each of these a name: Reshard(..., name=...)."
            )
        return ""


def _split_in_no_way(side: str, name: str) -> str:
    return (
        f"Reshard: the local tensors of {side} {name!r} on different ranks have shapes that no one "
        "way of splitting it gives. Split it by the same placements on all of them."
    )


def read_roster(met: Mapping[str, Any]) -> Roster:
    """What all ranks are told, read.

    Raises:
        RuntimeError: a rank did not come in time, or cannot take part.
    """
    if "error" in met:
        raise RuntimeError(met["error"])
    contents = {part: Content.read(met["contents"][part]) for side in SIDES for part in met[side]}
    sides = {
        side: [
            Part(contents[digest], part["ranks"], part["firsts"])
            for digest, part in met[side].items()
        ]
        for side in SIDES
    }
    right_to_left = {side: set(met[f"{side} right to left"]) for side in SIDES}
    buffer_bytes, node_size, nodes = met["settings"]
    settings = Settings(buffer_bytes, node_size, None if nodes is None else tuple(nodes))
    return Roster(met["ranks"], sides, right_to_left, set(met["devices"]), settings)


def in_words(ranks: Any) -> str:
    """Ranks for a sentence: "rank 3", "ranks 0 to 7", "ranks 0, 2, 4"."""
    ordered = sorted(ranks)
    if len(ordered) == 1:
        return f"rank {ordered[0]}"
    if ordered and ordered == list(range(ordered[0], ordered[-1] + 1)):
        return f"ranks {ordered[0]} to {ordered[-1]}"
    return str(RankMap.from_ranks(ordered)) if ordered else "no rank"
