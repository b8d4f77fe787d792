"""What one rank sends, receives and keeps, as planned by the core; and that in words."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from meshverse._core import plan_reshard
from meshverse.report.tables import aligned, in_bytes

from .moves import Move, Moves

__all__ = ["Box", "Kept", "Message", "MovePlan", "Traffic", "plan_of"]

_IN_FLIGHT = 2  # steps at once: while one is under way, the next is packed
_ALIGNMENT = 16  # bytes of the largest element
_N_SHOWN = 16  # peers in a printed table


class Box(NamedTuple):
    """Elements of one tensor in a message.

    Attributes:
        move: number of the tensor.
        first_byte: in the message.
        starts: the first element in this rank's local tensor.
        extents: how many along each dimension.
    """

    move: int
    first_byte: int
    starts: list[int]
    extents: list[int]


class Kept(NamedTuple):
    """Elements that this rank has already, and only copies."""

    move: int
    source_starts: list[int]
    target_starts: list[int]
    extents: list[int]


class Message(NamedTuple):
    """What one rank sends another in one round."""

    peer: int
    n_bytes: int
    boxes_at: int
    n_boxes: int


class Step(NamedTuple):
    """What a rank exchanges at once: at most one message sent, and one received."""

    round: int
    sent: Message | None
    received: Message | None


@dataclass(frozen=True)
class MovePlan:
    """What one rank does in a run.

    Attributes:
        moves: the tensors.
        steps: in the order in which all ranks take them.
        round_bytes: the longest message.
    """

    moves: list[Move]
    steps: list[Step]
    round_bytes: int
    _boxes: list[int]
    _kept: list[int]

    def boxes(self, message: Message) -> Iterator[Box]:
        """What a message is made of, in order."""
        numbers, at = self._boxes, message.boxes_at
        for _ in range(message.n_boxes):
            move, first_byte, n = numbers[at : at + 3]
            middle = at + 3 + n
            yield Box(move, first_byte, numbers[at + 3 : middle], numbers[middle : middle + n])
            at = middle + n

    def kept(self) -> Iterator[Kept]:
        """What this rank copies."""
        numbers, at = self._kept, 0
        while at < len(numbers):
            move, n = numbers[at : at + 2]
            lists = [numbers[at + 2 + k * n : at + 2 + (k + 1) * n] for k in range(3)]
            yield Kept(move, *lists)
            at += 2 + 3 * n

    @property
    def n_buffers(self) -> int:
        """Steps that are under way at once; each has a buffer for each direction."""
        return min(_IN_FLIGHT, len(self.steps))

    @property
    def sent_bytes(self) -> int:
        """The longest message that this rank sends."""
        return max((step.sent.n_bytes for step in self.steps if step.sent), default=0)

    @property
    def received_bytes(self) -> int:
        """The longest message that this rank receives."""
        return max((step.received.n_bytes for step in self.steps if step.received), default=0)

    @property
    def staging_bytes(self) -> int:
        """Memory for messages while a run is under way, at most."""
        return self.n_buffers * (self.sent_bytes + self.received_bytes)


def plan_of(
    moves: Moves,
    rank: int,
    world_size: int,
    buffer_bytes: int,
    node_size: int = 1,
    node_of_rank: Sequence[int] | None = None,
) -> MovePlan:
    """What one rank does. Costs what it has to do with, however many ranks there are.

    Args:
        moves: of all tensors, the same on all ranks.
        rank: to plan for.
        world_size: number of ranks of the default group.
        buffer_bytes: memory for messages, at most.
        node_size: ranks on each node.
        node_of_rank: the node of each rank, in place of `node_size`.
    """
    round_bytes = buffer_bytes // (2 * _IN_FLIGHT) // _ALIGNMENT * _ALIGNMENT
    messages, boxes, kept = plan_reshard(
        moves.holders,
        [move.planned() for move in moves.moves],
        rank,
        world_size,
        round_bytes,
        node_size,
        node_of_rank,
    )
    steps: dict[tuple[int, int], dict[bool, Message]] = {}
    for step, turn, peer, is_sent, n_bytes, boxes_at, n_boxes in messages.tolist():
        message = Message(peer, n_bytes, boxes_at, n_boxes)
        steps.setdefault((step, turn), {})[bool(is_sent)] = message
    ordered = [Step(key[1], both.get(True), both.get(False)) for key, both in steps.items()]
    return MovePlan(moves.moves, ordered, round_bytes, boxes.tolist(), kept.tolist())


class Traffic:
    """What one rank sends, receives and keeps in each run; prints as a table.

    Attributes:
        rank: of which this tells.
        sent: bytes by the rank they go to.
        received: bytes by the rank they come from.
        kept: bytes that this rank has already and copies.
        lower_bound: bytes that this rank has to receive, whoever sends them.
        staging: bytes of memory for messages while a run is under way, at most.
        rounds: messages that this rank sends or receives, one after the other.
    """

    def __init__(self, plan: MovePlan, rank: int, target_bytes: int) -> None:
        self.rank = rank
        sent: defaultdict[int, int] = defaultdict(int)
        received: defaultdict[int, int] = defaultdict(int)
        for step in plan.steps:
            for message, by_peer in ((step.sent, sent), (step.received, received)):
                if message is not None:
                    by_peer[message.peer] += message.n_bytes
        self.sent, self.received = dict(sorted(sent.items())), dict(sorted(received.items()))
        self.kept = sum(
            math.prod(kept.extents) * plan.moves[kept.move].dtype.itemsize for kept in plan.kept()
        )
        self.lower_bound = target_bytes - self.kept
        self.staging = plan.staging_bytes
        self.rounds = len(plan.steps)

    def to_dict(self) -> dict[str, Any]:
        """The same as plain data."""
        return dict(vars(self))

    def __str__(self) -> str:
        sent, received = sum(self.sent.values()), sum(self.received.values())
        head = (
            f"Rank {self.rank} receives {in_bytes(received)} in each run (no less is possible: "
            f"{in_bytes(self.lower_bound)}), sends {in_bytes(sent)} and keeps "
            f"{in_bytes(self.kept)}, in {self.rounds} rounds with {in_bytes(self.staging)} of "
            "memory for messages."
        )
        peers = sorted({*self.sent, *self.received})
        rows = [("rank", "sends to it", "receives from it")]
        rows += [
            (f"{peer}", in_bytes(self.sent.get(peer, 0)), in_bytes(self.received.get(peer, 0)))
            for peer in peers[:_N_SHOWN]
        ]
        lines = [head, *(aligned(rows, right=range(3)) if peers else [])]
        if len(peers) > _N_SHOWN:
            lines.append(f"  and {len(peers) - _N_SHOWN} more ranks")
        return "\n".join(lines)
