"""A process group in this process, its states, and how universes use it.

| state | meaning | make | suspend | resume | destroyed by others | end | revive |
| --- | --- | --- | --- | --- | --- | --- | --- |
| planned | named; made by its members at first use | live | error | error | | ended | |
| being made | by one thread; others wait for it | live | error | error | | ended, once made | |
| live | usable | live | suspended | live | destroyed | ended | |
| suspended | its backend has freed device memory | error | suspended | live | destroyed | ended | |
| destroyed | by somebody's `destroy_process_group` | error | error | error | | ended | |
| ended | with its universes, or its world | error | error | error | | ended | planned |

Columns are events; an empty cell means that nothing happens. If making a group fails, it is planned
again. A destroyed group stays destroyed: its use raises, and a new mesh has a new group.
"""

from __future__ import annotations

import enum
import threading
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from meshverse import _torch_compat as compat
from meshverse.wording import rank_list
from meshverse.world.weak_registry import WeakRegistry

from .request import GroupRequest


class State(enum.Enum):
    """The state of a process group in this process."""

    PLANNED = enum.auto()
    BEING_MADE = enum.auto()
    LIVE = enum.auto()
    SUSPENDED = enum.auto()
    DESTROYED = enum.auto()
    ENDED = enum.auto()


class Origin(enum.Enum):
    """Origin of a process group, as seen by the universe that lists it."""

    DEFAULT_GROUP = enum.auto()  # it is the default group itself
    SPLIT = enum.auto()  # split off the default group
    BY_MEMBERS = enum.auto()  # made by its members
    BY_ALL = enum.auto()  # made by all ranks
    NOT_YET = enum.auto()  # planned: made when it is first used
    AT_FIRST_USE = enum.auto()  # planned, then made when this universe was the first to use it
    SHARED = enum.auto()  # another universe made it
    GIVEN = enum.auto()  # the user made it
    OTHER_UNIVERSE = enum.auto()  # of a mesh that was combined with one of this universe


class Group:
    """A process group in this process. The module's docstring has its states and events.

    Args:
        name: c10d's, the same on all members.
        request: of the axis that requested it first.
        registry: that finds it by its name.
        handle: c10d's group, if it is made already.
        content: scope, ranks and options by which the registry finds it; None if it does not.
        borrowed: whether it is not Meshverse's: the default group, or one that the user made.

    Attributes:
        state: the state it is in.
        handle: c10d's group while it is live.
        was_live: whether it has been live, in this life of its world or an earlier one.
        uses: those of live universes. The ones that are not borrowed are its references: when the
            last is released, the group ends.
    """

    def __init__(
        self,
        name: str,
        request: GroupRequest,
        registry: Any,
        handle: compat.ProcessGroup | None = None,
        *,
        content: tuple[Hashable, str, str] | None = None,
        borrowed: bool = False,
    ) -> None:
        self.name, self.request, self.borrowed = name, request, borrowed
        self.content = content
        self.state = State.PLANNED
        self._registry = registry.reference
        self.uses: WeakRegistry[GroupUse] = WeakRegistry()
        self.handle: compat.ProcessGroup | None = None
        self.was_live = False
        self._last: weakref.ref[compat.ProcessGroup] | None = None  # its handle, also afterwards
        self._making = threading.RLock()  # held by the thread that makes or ends it
        if handle is not None:
            self._live(handle)

    # --- transitions ----------------------------------------------------------------------------

    def make(self, create: Callable[[Group], compat.ProcessGroup | None]) -> bool:
        """Make the group, if it is planned: of several threads, one does, and the others wait.

        Args:
            create: creates it with the other members.

        Returns:
            Whether it was made here and now.

        Raises:
            RuntimeError: it is suspended, destroyed or ended; or whatever `create` raises.
        """
        with self._making:
            if self.state is State.LIVE:
                return False
            if self.state is not State.PLANNED:
                raise RuntimeError(self._why_unusable())
            self.state = State.BEING_MADE
            handle = None
            try:
                handle = create(self)
            finally:
                # c10d may have it although this rank was interrupted, as the other members do.
                if handle is None:
                    handle = compat.find_interrupted(self.name, self.request.my_ranks())
                if self.state is not State.BEING_MADE:  # a signal handler, or the world, ended it
                    compat.end_group(self.name, abort=False)
                elif handle is None:
                    self.state = State.PLANNED
                else:
                    self._live(handle)
            if self.state is State.ENDED:
                raise RuntimeError(self._why_unusable())
            return True

    def suspend(self) -> bool:
        """Suspend the group, which frees device memory; return False if it was suspended already.

        Raises:
            RuntimeError: it is not live nor suspended; or whatever the backend raises.
        """
        if self.state is State.SUSPENDED:
            return False
        handle = self.live_handle()
        self.state = State.SUSPENDED  # at once, so that no other thread begins to use it
        self._let_go()
        try:
            compat.suspend(handle)
        except BaseException:
            self._live(handle)
            raise
        return True

    def resume(self) -> bool:
        """Resume a suspended group; return False if it was live already.

        Raises:
            RuntimeError: it is not live nor suspended; or whatever the backend raises.
        """
        if self.state is not State.SUSPENDED:
            self.live_handle()
            return False
        handle = compat.resolve_group(self.name)
        compat.resume(handle)
        self._live(handle)
        return True

    def note_destroyed(self) -> None:
        """Note that somebody destroyed the group. c10d may call this in any thread, at any time."""
        if self.state in (State.LIVE, State.SUSPENDED):
            self.state = State.DESTROYED
            self._let_go()

    def end(self, *, abort: bool) -> None:
        """Destroy the group, if it is Meshverse's and still there.

        Args:
            abort: abort its collectives, if the backend can, instead of waiting for them.

        Raises:
            Whatever c10d raises; then a second call tries again.
        """
        with self._making:  # after the thread that is making it, if there is one
            if self.state in (State.LIVE, State.SUSPENDED) and not self.borrowed:
                self._let_go()
                compat.end_group(self.name, abort=abort)
            self.note_ended()

    def note_ended(self) -> None:
        """Note that the group is gone with its world, or in a fork."""
        self.state = State.ENDED
        self._let_go()

    def revive(self) -> None:
        """Plan the group again, if it ended with its world, which goes on."""
        if self.state is State.ENDED:
            self.state = State.PLANNED

    def take_over(self, handle: compat.ProcessGroup) -> None:
        """Use c10d's group in place of the one that ended with the world: the new default group."""
        self._live(handle)

    def leave_to_parent(self) -> None:
        """Give up the parent's group, in a forked process."""
        self._making = threading.RLock()
        if self.state is State.BEING_MADE:
            self.state = State.PLANNED
        elif self.state is not State.PLANNED:
            # Ending a parent's group would wait for threads that are not in this process.
            _of_parents.append(self.handle)
            self.note_ended()

    def _live(self, handle: compat.ProcessGroup) -> None:
        was_live, self.was_live = self.was_live, True
        self.state, self.handle, self._last = State.LIVE, handle, weakref.ref(handle)
        for use in self.uses.alive():
            use.process_groups[self.name] = handle
            if use.how is Origin.NOT_YET or was_live:  # else no mesh has asked for it yet
                use.notify(is_live=True)
        compat.when_destroyed(handle, _note_destroyed, self.name, self._registry)

    def _let_go(self) -> None:
        # An ended group that is still held would keep its threads, descriptors and memory.
        self.handle = None
        for use in self.uses.alive():
            use.process_groups.pop(self.name, None)
            use.notify(is_live=False)

    def last_handle(self) -> compat.ProcessGroup | None:
        """Return c10d's group of its last life, if somebody still holds it."""
        return None if self._last is None else self._last()

    # --- questions ------------------------------------------------------------------------------

    @property
    def is_gone(self) -> bool:
        """Whether the group was destroyed, or has ended."""
        return self.state in (State.DESTROYED, State.ENDED)

    def live_handle(self) -> compat.ProcessGroup:
        """Return c10d's group.

        Raises:
            RuntimeError: it is not live.
        """
        handle = self.handle
        if handle is None:
            raise RuntimeError(self._why_unusable())
        return handle

    def in_words(self) -> str:
        """Return the group's axes and ranks, for messages. O(group)."""
        names = dict.fromkeys(name for use in self.uses.alive() for name in use.requests)
        axes = " or ".join(map(repr, names)) or repr(self.request.axis_name)
        ranks = f"[{rank_list(self.request.my_ranks())}]"
        return f"process group of axis {axes} with ranks {ranks}"

    def _why_unusable(self) -> str:
        what = self.in_words()
        if self.state is State.PLANNED:
            return f"The {what} is not made yet: it is lazy."
        if self.state is State.BEING_MADE:
            return f"The {what} is being made by this thread, and cannot be used yet."
        if self.state is State.SUSPENDED:
            return (
                f"The {what} is suspended, by universe.suspend(). All its ranks must call "
                "mesh.universe.resume() before they use it."
            )
        shrunk = compat.shrunk_from(self.name)
        if shrunk is not None:
            left = f"[{rank_list(dist.get_process_group_ranks(shrunk))}]"
            return (
                f"The {what} was shrunk by shrink_group() to ranks {left}, in a new group, where "
                "ranks may have other numbers. Make a mesh of the ranks that are left: "
                "init_device_mesh(..., ranks=...), or DeviceMesh.from_group() of the new group."
            )
        if self.state is State.ENDED or self.borrowed:
            return (
                f"The {what} was destroyed, by destroy_process_group(group) or with the universe "
                "that made it. Make the mesh again, on groups that are there."
            )
        shared = ""
        if sum(sum(use.requests.values()) for use in self.uses.alive()) > 1:
            shared = " These axes share one group, so it is gone for all of them."
        return (
            f"The {what} was destroyed, by destroy_process_group(group).{shared} Make the mesh "
            "again, on all its ranks: a new mesh has a new group. To free all groups of a "
            "universe, call mesh.universe.destroy() instead."
        )


_of_parents: list[object] = []  # groups of parent processes, kept until this process ends


def _note_destroyed(name: str, registry: weakref.ref[Any]) -> None:
    known = registry()
    if known is not None:
        known.note_destroyed(name)


@dataclass(eq=False)
class GroupUse:
    """A universe's use of a process group, with the requests of its axes.

    Attributes:
        request: of the axis that requested it first, in this universe.
        process_groups: of the universe: its live groups, by name.
        group: the group; None on a rank that is in no group of the axis.
        name: c10d's name of my group, or None.
        how: its origin, when it was requested.
        created: whether a group was made for it here.
        borrowed: whether the universe does not own the group: it is the default group, or one that
            the user or another universe made.
        reason: why all ranks make the group, where the origin is BY_ALL; else None.
        requests: how often it was requested, by axis name.
        owner: the universe's groups, which are notified of changes.
    """

    request: GroupRequest
    process_groups: dict[str, compat.ProcessGroup]
    group: Group | None
    name: str | None
    how: Origin
    owner: weakref.ref[Any]
    created: bool = False
    borrowed: bool = False
    reason: str | None = None
    requests: dict[str, int] = field(default_factory=dict)

    def notify(self, *, is_live: bool) -> None:
        """Notify the universe that the group has become live, or is so no more."""
        owner = self.owner()
        if owner is not None:
            owner.note_change(is_live=is_live)

    def count_request(self, axis_name: str) -> None:
        """Note that an axis of this name requested the group."""
        self.requests[axis_name] = self.requests.get(axis_name, 0) + 1

    @property
    def origin(self) -> Origin:
        """Origin of the group, as known now: that of a planned group changes when it is made."""
        if self.how is not Origin.NOT_YET or self.state in (State.PLANNED, State.BEING_MADE):
            return self.how
        return Origin.AT_FIRST_USE if self.created else Origin.SHARED

    @property
    def state(self) -> State | None:
        """The state of the group; None if this rank is in none."""
        return None if self.group is None else self.group.state
