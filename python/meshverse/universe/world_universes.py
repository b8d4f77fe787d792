"""The universes of this process by world, and the search for that of a saved mesh."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection
from typing import TYPE_CHECKING

from meshverse._core import AxisLayout, RankMap
from meshverse.layouts.derivation import MeshDescription
from meshverse.locks import WeakRegistry, state_lock
from meshverse.world import World, WorldState

if TYPE_CHECKING:
    from .universe import Universe


class WorldUniverses(WorldState):
    """The universes of one world.

    Attributes:
        with_groups: universes that created process groups, in the order in which they first did;
            those that were revived come first, in the order in which they were constructed. Strong
            references until the universe or the world ends, so that all ranks find the same
            universes, whenever each collects garbage.
        next_numbers: number of the next universe over a set of ranks, by the set's fingerprint; see
            `UniverseCalls.number`.
        n_ended: how many universes were destroyed or aborted.
        with_world_rank: weak references to the universes that took their rank from the default
            group.
    """

    def __init__(self) -> None:
        self.with_groups: list[Universe] = []
        self.next_numbers: Counter[str] = Counter()
        self.n_ended = 0
        self.with_world_rank: WeakRegistry[Universe] = WeakRegistry()

    def add(self, universe: Universe) -> None:
        """Add a universe that created process groups to `with_groups`, unless it has ended."""
        with state_lock.held:
            if not (universe.groups.had_own_groups or universe.is_over):
                universe.groups.had_own_groups = True
                self.with_groups.append(universe)

    def drop(self, universe: Universe) -> None:
        """Set `is_over`, for a universe that its caller never gets, as the call has failed."""
        world = universe.world
        with state_lock.held:
            universe.is_over = True
            if universe in self.with_groups:
                self.with_groups.remove(universe)
            if world is not None:
                others = any(one.world is world for one in universes_not_ended())
                world.has_universes = others or self.n_ended > 0

    def end(self) -> None:
        """Drop the universes of a world that has ended, and their meshes' stored coordinates.

        In the next world, this process may have another rank, and equal meshes are other ones.
        """
        self.with_groups.clear()
        for universe in self.with_world_rank.alive():
            universe.meshes.note_world_end()

    def on_revive(self, current: World) -> None:
        """Undo `end`: keep universes that created groups, and let meshes store coordinates.

        The next numbers follow those of the universes that are revived: all ranks of a universe
        revive it, so they go on with the same number.
        """
        revived = [universe for universe in universes_not_ended() if self._has(universe)]
        self.with_groups = [universe for universe in revived if universe.groups.had_own_groups]
        self.next_numbers.clear()
        for calls in (universe.groups.calls for universe in revived):
            if calls.number is not None:
                following = max(self.next_numbers[calls.fingerprint], calls.number + 1)
                self.next_numbers[calls.fingerprint] = following
        for universe in self.with_world_rank.alive():
            universe.meshes.on_revive()
        # The revived world takes the place of the current one, which thus ends here.
        for universe in current.state(WorldUniverses).with_world_rank.alive():
            universe.meshes.note_world_end()

    def _has(self, universe: Universe) -> bool:
        return universe.world is not None and universe.world.state(WorldUniverses) is self

    def note_end(self, universe: Universe) -> None:
        """At the first call, set `is_over`, count the universe and drop the reference to it."""
        with state_lock.held:
            if universe.is_over:
                return
            universe.is_over = True
            self.n_ended += 1
            if universe in self.with_groups:
                self.with_groups.remove(universe)


def note_universe(universe: Universe) -> int:
    """Register a new universe; return how many universes of its world have ended."""
    _universes.add(universe)
    if universe.world is None:
        return 0
    universe.world.has_universes = True
    universes = universe.world.state(WorldUniverses)
    if not universe.rank_was_passed:
        universes.with_world_rank.add(universe)
    return universes.n_ended


def universes_not_ended() -> list[Universe]:
    """Return the universes that were neither destroyed nor aborted, also of ended worlds."""
    return [universe for universe in _universes.alive() if not universe.is_over]


def universes_here() -> list[Universe]:
    """Return the live universes of this world that use process groups.

    Those that created groups come first, in the order in which they first did. The others use only
    groups that exist elsewhere, such as the default group; they come in the order in which they
    were constructed. References to them are weak, so ranks may find different ones of these.
    """
    world = World.current()
    if world is None:
        return []
    others = [universe for universe in _live() if len(universe.groups) > 0]
    return list(dict.fromkeys([*world.state(WorldUniverses).with_groups, *others]))


def universes_over(rank_map: RankMap) -> list[Universe]:
    """Return the live universes over these ranks in this world; those with groups first."""
    return sorted(_live_over(rank_map), key=lambda universe: _distance(universe, 0, ()))


def find_universe(
    rank_map: RankMap,
    serial: int,
    groups: Collection[tuple[AxisLayout, str | None]] = (),
    meshes: Collection[MeshDescription] | None = None,
) -> Universe | None:
    """Return the live universe over these ranks in this world that fits best; None without any.

    The candidates may have one of `meshes`, and have all of `groups`; if none has them all,
    `groups` is ignored. The result is the candidate with this serial; if there is none, the
    candidate that created process groups first. All ranks find the same universe if it has a number
    (see `UniverseCalls.number`). The serial of one without a number may differ between ranks.

    Args:
        rank_map: ranks of the universe.
        serial: serial of the universe that is wanted.
        groups: axis layouts of groups in it, each with the digest of its options key.
        meshes: descriptions of meshes; see `UniverseMeshes.may_have`. None for any universe.
    """
    live = [
        universe
        for universe in _live_over(rank_map)
        if meshes is None or universe.meshes.may_have(meshes)
    ]
    return min(live, key=lambda universe: _distance(universe, serial, groups), default=None)


def _live() -> list[Universe]:
    world = World.current()
    return [universe for universe in universes_not_ended() if universe.world is world]


def _live_over(rank_map: RankMap) -> list[Universe]:
    return [universe for universe in _live() if universe.rank_map == rank_map]


def _distance(
    universe: Universe, serial: int, groups: Collection[tuple[AxisLayout, str | None]]
) -> tuple[bool, bool, bool, bool, int]:
    has_all = all(universe.groups.known(*group) is not None for group in groups)
    own, has_no_groups = universe.serial, not universe.groups.had_own_groups
    return not has_all, own != serial, has_no_groups, own < 0, abs(own)


def next_own_serial(rank_map: RankMap) -> int:
    """Return the next serial, -1, -2, ..., for a universe that created no process groups."""
    with state_lock.held:
        serial = _own_serials.get(rank_map.fingerprint, 0) - 1
        _own_serials[rank_map.fingerprint] = serial
    return serial


def _reset_after_fork() -> None:
    for universe in _universes.alive():
        universe.groups.reset_after_fork()


os.register_at_fork(after_in_child=_reset_after_fork)

_universes: WeakRegistry[Universe] = WeakRegistry()
_own_serials: dict[str, int] = {}  # the last serial of each rank map, by fingerprint
