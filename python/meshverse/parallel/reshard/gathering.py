"""The ranks of a move tell each other, through the store, what they have: once, when it is built.

Every rank writes what it has and goes on waiting. The rank that came first collects: it reads the
others' texts as they come, until it knows from them that all are there. Then it writes one text for
all of them, the roster. So a rank asks the store a few times, however many ranks there are.

Example: ranks 0 to 3 train and ranks 4 and 5 generate. Rank 4 comes first. When it has read that
ranks 0 and 5 are there, it knows from their meshes that ranks 1, 2 and 3 have to come too.
"""

from __future__ import annotations

import base64
import json
import threading
import time
import zlib
from collections import Counter
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Protocol

from meshverse.agreement import Board
from meshverse.world.world import World, WorldState

__all__ = ["Collector", "Gathering"]

_POLL_SECONDS = 0.002
_GRACE_SECONDS = 5.0  # for the collecting rank to tell who is missing


class Collector(Protocol):
    """What the rank that collects makes of the others' texts."""

    def add(self, said: dict[str, Any], contents: Mapping[str, str]) -> None:
        """Take what one rank said, and the texts that it referred to, by digest."""

    def is_complete(self) -> bool:
        """Whether no other rank is needed."""

    def roster(self) -> dict[str, Any]:
        """What all ranks are told, when all are there, or when time is up."""


class _Counts(WorldState):
    """How many moves of each name this rank has built."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # protects the counts
        self._counts: Counter[str] = Counter()

    def next(self, name: str) -> int:
        with self._lock:
            self._counts[name] += 1
            return self._counts[name]


class Gathering:
    """One move, as its ranks meet for it in the store.

    Args:
        function: what the user called, for messages.
        name: of the move. The ranks' first moves of a name meet each other, then their second.

    Attributes:
        world: this rank's.
        label: the name and number of the move.

    Raises:
        RuntimeError: there is no default process group, or it has no store.
    """

    def __init__(self, function: str, name: str) -> None:
        world = World.current()
        if world is None:
            raise RuntimeError(
                f"{function} needs the default process group: call init_process_group() first."
            )
        if world.board is None:
            raise RuntimeError(
                f"{function} needs a store that all ranks reach; this world has none."
            )
        self.world = world
        self.label = f"{name}/{(number := world.state(_Counts).next(name))}"
        if number == 1:  # texts may stay in the store, which a later run may use too
            world.run.add_user(object())
        self._prefix = f"reshard/{self.label}"
        self._noted: set[str] = set()
        self._n_came = 0  # 0 if the ranks have not met, or some did not come
        self._digests: list[str] = []

    @property
    def _board(self) -> Board:
        # Asked for each time: who holds a board keeps the port of the store open.
        board = self.world.board
        if board is None:
            raise RuntimeError("Reshard: the store of the default process group is gone.")
        return board

    def meet(
        self,
        said: Mapping[str, Any],
        contents: Mapping[str, str],
        collector: Collector,
        timeout: timedelta,
    ) -> dict[str, Any]:
        """Tell the others what this rank has, and learn what all of them have.

        Args:
            said: what only this rank says. "contents" lists the digests of the other texts.
            contents: texts that many ranks say alike, by digest. The first of them writes each.
            collector: what the rank that comes first collects with.
            timeout: how long to wait for other ranks.

        Raises:
            RuntimeError: the rank that collects tells nothing in time.
        """
        deadline = time.monotonic() + timeout.total_seconds()
        for digest, content in contents.items():
            if self.is_first(f"writers/{digest}"):
                self._board.write(self._key("content", digest), _packed(content))
        arrival = self._board.count(self._key("arrivals"))
        if arrival == 1:
            collector.add(dict(said), contents)
            self._collect(collector, deadline)
            text = json.dumps(collector.roster())
            self._board.write(self._key("roster"), _packed(text))
        else:
            self._board.write(self._key("arrival", arrival), json.dumps(said))
            found = self._wait_for("roster", deadline=deadline + _GRACE_SECONDS)
            if found is None:
                raise RuntimeError(
                    "Reshard: the rank that came first, and that collects what all of them have, "
                    f"told nothing in {timeout.total_seconds():g} s. It may have ended since."
                )
            text = _unpacked(found)
        roster: dict[str, Any] = json.loads(text)
        self._n_came, self._digests = roster.get("came", 0), list(roster.get("contents", ()))
        return roster

    def leave(self) -> None:
        """Take this rank's notes out of the store; the last rank to leave takes out the rest.

        After a meeting that failed, what was told stays: ranks that come late are told it too.
        """
        if not self._n_came:
            return
        self.remove(*self._noted)
        if self._board.count(self._key("left")) == self._n_came:
            for digest in self._digests:
                self.remove(f"writers/{digest}", f"content/{digest}")
            self.remove("arrivals", "roster", "left")

    def _collect(self, collector: Collector, deadline: float) -> None:
        arrival = 1
        known: dict[str, str] = {}
        while not collector.is_complete():
            arrival += 1
            text = self._wait_for("arrival", arrival, deadline=deadline)
            if text is None:
                return
            self._board.remove(self._key("arrival", arrival))
            said = json.loads(text)
            for digest in said["contents"]:
                if digest not in known:
                    content = self._wait_for("content", digest, deadline=deadline)
                    if content is None:
                        return
                    known[digest] = _unpacked(content)
            collector.add(said, known)

    def note(self, key: str, text: str) -> None:
        """Write something for the other ranks of this move."""
        self._noted.add(key)
        self._board.write(self._key(key), text)

    def read(self, key: str) -> str:
        """What a rank of this move wrote; "" if nothing."""
        return self._board.read(self._key(key))

    def wait_for(self, key: str, timeout: timedelta) -> str | None:
        """What a rank of this move writes; None if it does not come in time."""
        return self._wait_for(key, deadline=time.monotonic() + timeout.total_seconds())

    def is_first(self, key: str) -> bool:
        """Whether this rank is the first to ask that of a key."""
        return self._board.count(self._key(key)) == 1

    def remove(self, *keys: str) -> None:
        """Take texts out of the store."""
        for key in keys:
            self._board.remove(self._key(key))

    def _wait_for(self, *parts: object, deadline: float) -> str | None:
        board, key = self._board, self._key(*parts)
        while not (text := board.read(key)):
            if time.monotonic() > deadline:
                return None
            board.pause(_POLL_SECONDS)
        return text

    def _key(self, *parts: object) -> str:
        return "/".join([self._prefix, *map(str, parts)])


def _packed(text: str) -> str:
    return base64.b64encode(zlib.compress(text.encode())).decode()


def _unpacked(text: str) -> str:
    return zlib.decompress(base64.b64decode(text)).decode()
