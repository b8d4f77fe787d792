"""The universes of this process by world, and which one a saved mesh is of."""

from __future__ import annotations

import threading
from collections.abc import Collection
from typing import TYPE_CHECKING

from meshverse._core import AxisLayout, RankMap
from meshverse.world.weak_registry import WeakRegistry
from meshverse.world.world import World, WorldState

if TYPE_CHECKING:
    from .universe import Universe


class WorldUniverses(WorldState):
    """The universes of one world.

    Attributes:
        kept: those that made process groups, oldest first. They are kept as long as c10d keeps the
            groups, so that all ranks find the same ones, whatever garbage each has collected.
        n_ended: how many were destroyed or aborted.
        alive: all that are alive, but for those whose rank was given.
    """

    def __init__(self) -> None:
        self.kept: list[Universe] = []
        self.n_ended = 0
        self.alive: WeakRegistry[Universe] = WeakRegistry()
        self._lock = threading.Lock()  # protects the first two

    def keep(self, universe: Universe) -> None:
        """Keep a universe that made process groups, once."""
        with self._lock:
            if not (universe.groups.is_kept or universe.is_over):
                universe.groups.is_kept = True
                self.kept.append(universe)

    def end(self) -> None:
        """Keep none any more; from now on this process's rank may be another one."""
        self.kept.clear()
        for universe in self.alive.alive():
            universe.meshes.forget_coordinates()

    def begin_again(self) -> None:
        """Keep those again that made process groups and are alive."""
        self.kept = [
            universe
            for universe in _universes.alive()
            if universe.groups.is_kept and not universe.is_over and self._has(universe)
        ]
        for universe in self.alive.alive():
            universe.meshes.keep_coordinates()

    def _has(self, universe: Universe) -> bool:
        return universe.world is not None and universe.world.state(WorldUniverses) is self

    def note_end(self, universe: Universe) -> None:
        """Note that a universe was destroyed or aborted."""
        with self._lock:
            self.n_ended += 1
            if universe in self.kept:
                self.kept.remove(universe)


def note_universe(universe: Universe) -> int:
    """Note a new universe; return how many universes of its world have ended."""
    _universes.add(universe)
    if universe.world is None:
        return 0
    universes = universe.world.state(WorldUniverses)
    if not universe.has_own_rank:
        universes.alive.add(universe)
    return universes.n_ended


def live_universes() -> list[Universe]:
    """Return the universes of this process that nobody has ended, also those of ended worlds."""
    return [universe for universe in _universes.alive() if not universe.is_over]


def universes_here() -> list[Universe]:
    """Return the live universes of this world that made process groups, oldest first."""
    world = World.current()
    return [] if world is None else list(world.state(WorldUniverses).kept)


def universes_over(rank_map: RankMap) -> list[Universe]:
    """Return the live universes of these ranks in this world; first those that made groups."""
    return sorted(_live(rank_map), key=lambda universe: _distance(universe, 0, ()))


def find_universe(
    rank_map: RankMap, serial: int, groups: Collection[tuple[AxisLayout, str | None]] = ()
) -> Universe | None:
    """Return a live universe of these ranks in this world, or None: all ranks find the same.

    Of those that know all these groups, the one with this serial, or else the first that made
    process groups. If none knows them all, the same of the others.

    Args:
        rank_map: the ranks.
        serial: of the universe that is wanted.
        groups: axis layouts of groups in it, with the digests of their options keys.
    """
    live = _live(rank_map)
    return min(live, key=lambda universe: _distance(universe, serial, groups), default=None)


def _live(rank_map: RankMap) -> list[Universe]:
    world = World.current()
    return [
        universe
        for universe in _universes.alive()
        if universe.rank_map == rank_map and universe.world is world and not universe.is_over
    ]


def _distance(
    universe: Universe, serial: int, groups: Collection[tuple[AxisLayout, str | None]]
) -> tuple[bool, bool, bool, bool, int]:
    knows_all = all(universe.groups.known(*group) is not None for group in groups)
    own, made_none = universe.serial, not universe.groups.is_kept
    return not knows_all, own != serial, made_none, own < 0, abs(own)


def next_own_serial(rank_map: RankMap) -> int:
    """Return the next serial of universes of these ranks that made no process groups."""
    with _own_serials_lock:
        serial = _own_serials.get(rank_map.fingerprint, 0) - 1
        _own_serials[rank_map.fingerprint] = serial
    return serial


_universes: WeakRegistry[Universe] = WeakRegistry()
_own_serials: dict[str, int] = {}  # the last one of each rank map, by fingerprint
_own_serials_lock = threading.Lock()
