"""One life of the default process group: what all meshes made during it have in common."""

from __future__ import annotations

import os
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any, Protocol

from meshverse import _torch_compat as compat
from meshverse._core import AxisLayout, GroupCache, OptionsKey
from meshverse.agreement import Board, CallOrder, OwnWaits, Run
from meshverse.options.group_options import GroupOptions
from meshverse.options.overrides import NO_OVERRIDE

from .weak_registry import WeakRegistry

__all__ = ["World"]


class Holder(Protocol):
    """What keeps process groups alive, by c10d name."""

    handles: dict[str, compat.ProcessGroup]


class World:
    """The default process group, from `init_process_group` to its end, as this rank sees it.

    Holds the default group weakly: when torch lets go of it, the world is over. Ranks that are
    threads have a default group, and so a world, each. A forked process has none of its parent's.

    Attributes:
        rank: this process's global rank.
        size: number of ranks.
        thread_id: of the thread that is this rank, under torch's threaded test backend; else None.
        life: how many worlds this process had before; other ranks may have had more or fewer.
        holders: what keeps process groups alive, by c10d name, for its universes; emptied when the
            world ends, so that meshes that live on keep no ended group, with its threads, alive.
        universes: those that made process groups, oldest first. They are kept as long as c10d keeps
            the groups, so that all ranks find the same ones, whatever garbage each has collected.
        run: of the default group, among those that used the same store.
        waits: what this rank lets others know of its waits.
        pending: lazy groups that are still to be made, by c10d name.
        leftovers: what removes from the store the texts of universes that could not be made, by
            their ranks. Late ranks read those texts, until these ranks have made a universe.
        shared_groups: groups that all universes of this world share, where they share.
    """

    def __init__(self, default_group: compat.ProcessGroup) -> None:
        self.holders: WeakRegistry[Holder] = WeakRegistry()
        self._default_group = weakref.ref(default_group)
        self.universes: list[Any] = []
        self.leftovers: dict[str, list[Callable[[], None]]] = {}
        kept = (self.universes, self.leftovers)
        end = weakref.finalize(compat.world_lifetime(), _let_go, self.holders, kept)
        end.atexit = False
        self._process_id = os.getpid()
        self.is_of_parent = False  # after a fork
        self.rank = default_group.rank()
        self.size = default_group.size()
        self.thread_id = compat.thread_id()
        self.life = _lives[self.thread_id]
        _lives[self.thread_id] += 1
        self.run = Run(self.rank, self.size)
        self.waits = OwnWaits()
        self._root_orders: dict[str, CallOrder] = {}
        self.pending: dict[str, Any] = {}
        self.shared_groups = GroupCache()
        self._users: Counter[str] = Counter()  # universes that use a group, by its c10d name
        self._ordinals: dict[str, int] = {}
        self._lock = threading.Lock()  # protects the two above
        self._can_split: dict[str | None, bool] = {}
        self._hazards: dict[str, str | None] = {}
        self._blocks: dict[str, bool] = {}
        self._device_types_set_up: set[str] = set()

    @staticmethod
    def current() -> World | None:
        """The world of this thread, or None before `init_process_group`."""
        default_group = compat.current_default_group()
        if default_group is None:
            return None
        with _worlds_lock:
            world = _worlds.get(default_group)
            if world is None:
                world = _worlds[default_group] = World(default_group)
            return world

    @property
    def label(self) -> tuple[int | None, int]:
        """Stands for this world among all that this process had: whose it is, and its number."""
        return self.thread_id, self.life

    @property
    def is_over(self) -> bool:
        """Whether this world's process groups are gone, with its default group or by a fork."""
        group = self._default_group()
        return group is None or group is not compat.current_default_group() or self.is_of_parent

    @property
    def default_group(self) -> compat.ProcessGroup:
        """The default process group; RuntimeError if it is not this world's any more."""
        group = self._default_group()
        if group is None or self.is_over:
            raise RuntimeError(self._why_over())
        return group

    def _why_over(self) -> str:
        if self.is_of_parent:
            return (
                f"This mesh was made in process {self._process_id}, of which this one "
                f"({os.getpid()}) is a fork: process groups do not survive a fork. Here it can be "
                "held, sliced and compared; use its groups in the process that made it, or start "
                "this one by spawn or forkserver and make the mesh in it."
            )
        current = compat.current_default_group()
        state = "there is none" if current is None else "there is another one"
        return (
            f"The default process group of {self.size} ranks that this mesh was made with is "
            f"gone ({state} now), and its process groups with it. Make the mesh again after "
            "init_process_group()."
        )

    @property
    def store(self) -> Any | None:
        """The default group's store; None where there is none that ranks could meet in."""
        return compat.store_of(self.default_group)

    @property
    def board(self) -> Board | None:
        """What all ranks of this world can read; None where they have no store for it."""
        store = self.store
        return None if store is None else Board(store, self.run)

    def root_order(self, ranks: str) -> CallOrder:
        """The order in which some ranks make root meshes together.

        Args:
            ranks: the same text on all these ranks, and on no others.
        """
        return self._root_orders.setdefault(ranks, CallOrder(ranks))

    @cached_property
    def default_options(self) -> GroupOptions:
        """What a group is when nothing is overridden."""
        return GroupOptions.resolve(NO_OVERRIDE, self.default_group)

    def can_split(self, backend: str | None) -> bool:
        """Whether groups of this backend are split off the default group. Decided once."""
        if backend not in self._can_split:
            self._can_split[backend] = compat.can_split(self.default_group, backend)
        return self._can_split[backend]

    def members_only_hazard(self, backend: str) -> str | None:
        """Why all ranks must make a group of this backend, or None. Decided once."""
        if backend not in self._hazards:
            self._hazards[backend] = compat.members_only_hazard(self.default_group, backend)
        return self._hazards[backend]

    def creation_blocks(self, backend: str) -> bool:
        """Whether creating a group of this backend waits for its members. Decided once."""
        if backend not in self._blocks:
            self._blocks[backend] = compat.creation_blocks(backend)
        return self._blocks[backend]

    def next_ordinal(self, kind: str) -> int:
        """How often this was asked for this kind of thing before in this world: 0, 1, 2, ..."""
        with self._lock:
            ordinal = self._ordinals.get(kind, 0)
            self._ordinals[kind] = ordinal + 1
        return ordinal

    def new_name(self, identity: str) -> str:
        """A group name: what the group is, and how often this very group was made in this world.

        All members of the group, and nobody else, have exactly that in common; so they agree on the
        name, whatever other groups each of them made before.
        """
        return f"meshverse-{identity}-{self.next_ordinal(identity)}"

    def take_back_name(self, name: str) -> None:
        """Let the latest name of a group be new again: no member has made anything of it."""
        identity, _, ordinal = name.removeprefix("meshverse-").rpartition("-")
        with self._lock:
            if self._ordinals[identity] == int(ordinal) + 1:
                self._ordinals[identity] = int(ordinal)

    def retain(self, group_name: str) -> None:
        """Note that one more universe uses a group that Meshverse made."""
        with self._lock:
            self._users[group_name] += 1

    def retain_shared(self, group_name: str) -> bool:
        """The same of a group that others use too, if one of them still does."""
        with self._lock:
            if self._users[group_name] == 0:
                return False
            self._users[group_name] += 1
            return True

    def has_several_users(self, group_name: str) -> bool:
        """Whether several universes use a group that Meshverse made."""
        with self._lock:
            return self._users[group_name] > 1

    def release(self, group_name: str, shared_as: tuple[AxisLayout, OptionsKey] | None) -> bool:
        """Note that one universe less uses a group; whether that was the last one.

        Args:
            group_name: c10d's.
            shared_as: its key among the shared groups, of which the last user takes it out.
        """
        with self._lock:
            self._users[group_name] -= 1
            if self._users[group_name] > 0:
                return False
            del self._users[group_name]
            if shared_as is not None:
                self._take_out(group_name, shared_as)
            return True

    def unshare(self, group_name: str, shared_as: tuple[AxisLayout, OptionsKey]) -> None:
        """Take a group that was destroyed out of the shared ones, though others note it still."""
        with self._lock:
            self._take_out(group_name, shared_as)

    def _take_out(self, group_name: str, shared_as: tuple[AxisLayout, OptionsKey]) -> None:
        shared = self.shared_groups.get(*shared_as)
        if shared is not None and shared.name == group_name:  # and no newer one
            self.shared_groups.remove(*shared_as)

    def set_up_device(self, mesh: compat.StockDeviceMesh, device_type: str) -> None:
        """Choose this rank's device as stock does, once for each device type."""
        if device_type not in self._device_types_set_up:
            compat.set_up_device(mesh)
            self._device_types_set_up.add(device_type)


def _let_go(holders: WeakRegistry[Holder], kept: Iterable[list[Any] | dict[str, Any]]) -> None:
    for holder in holders.alive():
        holder.handles.clear()
    for entries in kept:
        entries.clear()


def _leave_to_parent() -> None:
    for world in list(_worlds.values()):
        world.is_of_parent = True
        for holder in world.holders.alive():
            # Ending a parent's group would wait for threads that this process has not.
            _of_parents.append(dict(holder.handles))
            holder.handles.clear()


os.register_at_fork(after_in_child=_leave_to_parent)
_of_parents: list[dict[str, compat.ProcessGroup]] = []  # handles of processes this one is a fork of

_worlds: weakref.WeakKeyDictionary[compat.ProcessGroup, World] = weakref.WeakKeyDictionary()
_worlds_lock = threading.Lock()  # protects _worlds
_lives: Counter[int | None] = Counter()  # by the thread that is the rank, if ranks are threads
