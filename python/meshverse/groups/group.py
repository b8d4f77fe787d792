"""A process group in this process, its states, and how universes use it.

| state | meaning | make | suspend | resume | destroy | end | revive |
| --- | --- | --- | --- | --- | --- | --- | --- |
| planned | has a name; its members create it at first use | live | error | error | | ended | |
| being made | one thread is creating it | live | error | error | | ended | |
| live | usable | live | suspended | live | destroyed | ended | |
| suspended | its backend has freed device memory | error | suspended | live | destroyed | ended | |
| destroyed | `destroy_process_group` was called for it | error | error | error | | ended | |
| ended | its universes or its world have ended | error | error | error | | ended | planned |

The last six columns are events. A cell gives the next state, "error" (the call raises), or nothing
(the event is ignored). `make`, `suspend`, `resume`, `end` and `revive` are methods of `Group`;
"destroy" is a call of `destroy_process_group` for the group. While one thread creates a group,
`make` in other threads waits. `end` does not: the thread that creates c10d's group then ends that,
and raises. If the creation fails, the group is planned again. The use of a destroyed or ended group
raises, and a new mesh gets a new group. Only a group that ended with
its world can be revived: when the world goes on, with a new default group. The `Group` of the
default group, planned again, then becomes live again.
"""

from __future__ import annotations

import enum
import threading
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from meshverse._core import OptionsKey
from meshverse._torch_compat.c10d_creation import find_interrupted
from meshverse._torch_compat.c10d_groups import (
    end_group,
    find_c10d_group,
    resolve_group,
    shrunk_from,
    when_destroyed,
)
from meshverse._torch_compat.private_names import ProcessGroup
from meshverse.locks import Claim, WeakRegistry, state_changed, state_lock
from meshverse.wording import rank_list

from .request import GroupRequest, Way


class State(enum.Enum):
    """The state of a process group in this process."""

    PLANNED = enum.auto()
    BEING_MADE = enum.auto()
    LIVE = enum.auto()
    SUSPENDED = enum.auto()
    DESTROYED = enum.auto()
    ENDED = enum.auto()


_SHOWN_AXES = 3  # of other meshes, in a table
_NOBODY = (0, object())  # as `Group._maker`


class Group:
    """A process group in this process. The module's docstring has its states and events.

    Args:
        name: c10d name, the same on all members.
        request: request of the axis that requested the group first.
        registry: registry that finds the group by its name.
        handle: c10d's group, if it exists already.
        content: scope, ranks and options by which the registry also finds the group; None if it
            finds the group by name only.

    Attributes:
        contents: `content`, and the same in the other scopes that have the group; empty if None.
        state: current state.
        handle: c10d's group while the state is live, else None.
        is_lazy: whether a lazy universe requested it before it was first live.
        was_live: whether it has ever been live.
        have_all_joined: whether all members have joined a rendezvous to create it. Then c10d may
            have created it on some of them only.
        refs: references not yet released. The group ends with the last one that owns it, and c10d's
            group with it. No universe owns an external group (`is_external`): it ends with its last
            reference, and c10d's group stays.
    """

    def __init__(
        self,
        name: str,
        request: GroupRequest,
        registry: Any,
        handle: ProcessGroup | None = None,
        *,
        content: tuple[Hashable, str, OptionsKey] | None = None,
    ) -> None:
        self.name, self.request = name, request
        self.contents = set() if content is None else {content}
        self.state = State.PLANNED
        self._registry = registry.reference
        self.refs: WeakRegistry[GroupRef] = WeakRegistry()
        self.handle: ProcessGroup | None = None
        self.is_lazy = self.was_live = self.have_all_joined = False
        self._handles: list[weakref.ref[ProcessGroup]] = []  # every c10d group it has had
        self._maker = _NOBODY  # id of the thread that creates the group, and its call of `make`
        self._end = Claim()  # of the thread that ends c10d's group
        if handle is not None:
            self.become_live(handle)

    # --- transitions ----------------------------------------------------------------------------

    def make(self, create: Callable[[Group], ProcessGroup | None]) -> bool:
        """Create the group if it is planned. Of several threads, one does, and the others wait.

        Args:
            create: function that creates the group with the other members.

        Returns:
            Whether this call created the group.

        Raises:
            RuntimeError: the group is suspended, destroyed or ended, or this thread is creating it
                already.
            Whatever `create` raises.
        """
        me, handle = threading.get_ident(), None
        maker = (me, object())
        try:
            with state_lock.held:
                while self.state is State.BEING_MADE and self._maker[0] != me:
                    state_changed.wait()
                if self.state is State.LIVE:
                    return False
                if self.state is not State.PLANNED:
                    raise RuntimeError(self._why_unusable())
                self.state, self._maker = State.BEING_MADE, maker
            try:
                handle = create(self)
            finally:
                self._settle(handle, maker)
        finally:
            if self._maker is maker:  # interrupted before it was settled
                self._settle(None, maker)
        if (error := self.error_if_ended()) is not None:
            raise error
        return True

    def _settle(self, handle: ProcessGroup | None, maker: tuple[int, object]) -> None:
        """End the creation: the group is live if c10d has it, else planned again.

        If this is interrupted, `_maker` is still `maker`, and a second call does the rest.
        """
        registry = self._registry()
        # If this rank was interrupted, c10d may have the group all the same, and the other members
        # too. In the next world, another group may have the name.
        if handle is None and registry is not None and not registry.world_is_over:
            handle = find_interrupted(self.name, self.request.my_ranks())
        with state_lock.held:
            is_maker = self._maker is maker  # not if the group was revived meanwhile, and is made
            is_wanted = is_maker and self.state in (State.BEING_MADE, State.LIVE)
            try:
                if is_wanted and handle is not None:
                    self.become_live(handle)
                    self._maker = _NOBODY
                elif is_wanted:
                    self.state, self._maker = State.PLANNED, _NOBODY
            finally:
                state_changed.notify_all()
        if is_wanted:
            return
        # Ended by another thread, a signal handler or the world.
        if handle is not None and find_c10d_group(self.name) is handle:
            end_group(self.name, abort=False)
        if is_maker:
            if registry is not None:
                registry.free_name_of(self)
            self._maker = _NOBODY

    def suspend(self) -> bool:
        """Suspend the group, which frees device memory; return False if it was suspended already.

        Raises:
            RuntimeError: the group is neither live nor suspended.
            Whatever a backend raises; the group stays live then. Or what a signal handler raises
                meanwhile; then the group is suspended if its backends are.
        """
        from meshverse._torch_compat import c10d_suspension

        if self.state is State.SUSPENDED:
            return False
        handle = self.live_handle()
        backends, done = c10d_suspension.backends_to_suspend(handle), list[object]()
        try:
            self.state = State.SUSPENDED  # before the backends act, so no thread begins to use it
            self._drop_handle()
            c10d_suspension.suspend(backends, done)
        except BaseException:
            if len(done) < len(backends):
                try:
                    c10d_suspension.resume(backends[: len(done)], [])
                finally:
                    self._become_live_again(handle)
            raise
        return True

    def resume(self) -> bool:
        """Resume a suspended group; return False if it was live already.

        Raises:
            RuntimeError: the group is neither live nor suspended, or was ended meanwhile.
            Whatever a backend raises; the group stays suspended then. Or what a signal handler
                raises meanwhile; then the group is live if its backends are.
        """
        from meshverse._torch_compat import c10d_suspension

        if self.state is not State.SUSPENDED:
            self.live_handle()
            return False
        handle = resolve_group(self.name)
        backends, done = c10d_suspension.backends_to_suspend(handle), list[object]()
        try:
            c10d_suspension.resume(backends, done)
        finally:
            if len(done) == len(backends):
                self._become_live_again(handle)
            else:
                c10d_suspension.suspend(backends[: len(done)], [])
        self.live_handle()
        return True

    def _become_live_again(self, handle: ProcessGroup) -> None:
        """Use c10d's group again after a suspension, unless the group has ended meanwhile."""
        with state_lock.held:
            if self.state is State.SUSPENDED:
                self.become_live(handle)

    def note_destroyed(self) -> None:
        """Mark the group as destroyed by somebody. May run in any thread, at any time."""
        if self.state in (State.LIVE, State.SUSPENDED):
            self.state = State.DESTROYED
            self._drop_handle()

    def end(self, *, abort: bool) -> None:
        """End the group. c10d's group is destroyed too, unless it is external or gone already.

        Args:
            abort: abort its collectives, if the backend can, instead of waiting for them.

        Raises:
            Whatever c10d raises; then a second call tries again.
        """
        caller = object()
        try:
            is_mine = self._end.take(caller)
            with state_lock.held:
                if self.is_external or self.state not in (State.LIVE, State.SUSPENDED):
                    self.note_ended()
                    state_changed.notify_all()  # threads that wait while it is made
                    return
                self._drop_handle()
            if is_mine:  # or else another thread ends it, or what a signal interrupted
                end_group(self.name, abort=abort)
                self.note_ended()
        finally:
            self._end.give_back(caller)

    def note_ended(self) -> None:
        """Mark the group as ended and drop c10d's group, without destroying it."""
        self.state = State.ENDED
        self._drop_handle()

    def revive(self) -> None:
        """Plan the group again, if it ended: its world goes on with a new default group."""
        if self.state is State.ENDED:
            self.state = State.PLANNED

    def reset_after_fork(self) -> None:
        """Drop the parent's group without destroying it, in a forked process."""
        self._end = Claim()  # a thread of the parent may have taken it
        if self.state is State.BEING_MADE:
            self.state = State.PLANNED
        elif self.state is not State.PLANNED:
            # Its destructor would wait for threads that do not exist in this process.
            _of_parents.append(self.handle)
            self.note_ended()

    def become_live(self, handle: ProcessGroup) -> None:
        """Use c10d's group: one just created or resumed, or that of the next world."""
        was_live, self.was_live = self.was_live, True
        self.state, self.handle = State.LIVE, handle
        self._handles = [known for known in self._handles if known() not in (None, handle)]
        self._handles.append(weakref.ref(handle))
        refs = self.refs.alive()
        for ref in refs:
            ref.process_groups[self.name] = handle
            # At an eager first creation there is nothing to notify: no mesh has the group yet.
            if self.is_lazy or was_live or len(refs) > 1:
                ref.notify()
        when_destroyed(handle, _note_destroyed, self.name, self._registry)

    def _drop_handle(self) -> None:
        # A reference to a destroyed group would keep its threads, file descriptors and memory.
        self.handle = None
        for ref in self.refs.alive():
            ref.process_groups.pop(self.name, None)
            ref.notify()

    def ended_handles(self) -> list[ProcessGroup]:
        """Return this group's earlier c10d groups that are still referenced."""
        handles = [known() for known in self._handles]
        return [handle for handle in handles if handle not in (None, self.handle)]

    # --- questions ------------------------------------------------------------------------------

    @property
    def is_external(self) -> bool:
        """Whether it is the default group, or one that the user created."""
        return self.request.way.borrows

    @property
    def is_gone(self) -> bool:
        """Whether the group is destroyed or ended."""
        return self.state in (State.DESTROYED, State.ENDED)

    @property
    def may_be_elsewhere(self) -> bool:
        """Whether other members may have the group too, which this process has and created."""
        is_alone = self.request.axis.size == 1
        return self.state is State.LIVE and not (self.is_external or is_alone)

    def live_handle(self) -> ProcessGroup:
        """Return c10d's group.

        Raises:
            RuntimeError: the group is not live.
        """
        handle = self.handle
        if handle is None:
            raise RuntimeError(self._why_unusable())
        return handle

    def check_in_graph(self) -> None:
        """Check that a graph of torch.compile can use the group.

        Raises:
            RuntimeError: the group is not live.
        """
        if self.state in (State.PLANNED, State.BEING_MADE):
            raise RuntimeError(
                f"The {self.in_words()} is lazy and not created yet, and torch.compile cannot "
                "create it inside a compiled function. Call mesh.universe.warm_up() on all its "
                "ranks before the first call of that function."
            )
        self.live_handle()

    def error_if_ended(self) -> RuntimeError | None:
        """Return the error of a group that was ended while it is being created, or None."""
        return RuntimeError(self._why_unusable()) if self.state is State.ENDED else None

    def in_words(self) -> str:
        """Return the group's axes and ranks, for messages. O(group size)."""
        names = dict.fromkeys(name for ref in self.refs.alive() for name in list(ref.requests))
        axes = " or ".join(map(repr, names)) or repr(self.request.axis_name)
        ranks = f"[{rank_list(self.request.my_ranks())}]"
        return f"process group of axis {axes} with ranks {ranks}"

    def _why_unusable(self) -> str:
        what = self.in_words()
        if self.state is State.PLANNED:
            return f"The {what} is not created yet: it is lazy. Its first use creates it."
        if self.state is State.BEING_MADE:
            return f"The {what} is being created, and cannot be used yet."
        if self.state is State.SUSPENDED:
            return (
                f"The {what} is suspended, by universe.suspend(). All its ranks must call "
                "mesh.universe.resume() before they use it."
            )
        shrunk = shrunk_from(self.name)
        if shrunk is not None:
            left = f"[{rank_list(dist.get_process_group_ranks(shrunk))}]"
            return (
                f"The {what} was shrunk by shrink_group() to ranks {left}, in a new group, in "
                "which their group ranks may differ. Create a mesh of the ranks that are left: "
                "init_device_mesh(..., ranks=...), or DeviceMesh.from_group() of the new group."
            )
        if self.state is State.ENDED or self.is_external:
            return (
                f"The {what} was destroyed, by destroy_process_group(group) or with the universe "
                "that created it. Create the mesh again; if you pass existing groups or meshes, "
                "pass ones that are not destroyed."
            )
        shared = ""
        if sum(sum(ref.requests.values()) for ref in self.refs.alive()) > 1:
            shared = " It was shared, so it is gone for all meshes and axes that requested it."
        return (
            f"The {what} was destroyed, by destroy_process_group(group).{shared} Create the mesh "
            "again, on all its ranks: a new mesh has a new group. To free all groups of a "
            "universe, call mesh.universe.destroy() instead."
        )


_of_parents: list[object] = []  # a parent process's groups, kept until this process ends


def _note_destroyed(name: str, registry: weakref.ref[Any]) -> None:
    known = registry()
    if known is not None:
        known.note_destroyed(name)


@dataclass(eq=False)
class GroupRef:
    """A universe's reference to a process group, with the requests of its axes.

    Attributes:
        request: first request for the group in this universe.
        process_groups: the universe's live groups by c10d name, kept up to date by `Group`.
        owner: the universe, whose meshes change when the group becomes live or is no longer live.
        group: the group; None if this rank is in no group of the axis.
        name: c10d name of the group; None if this rank is in no group of the axis.
        created: whether this universe created the group, at the request or at the first use.
        requests: number of requests for the group, by axis name.
        is_released: whether the call that created this reference failed before another one
            requested the group. A thread that has it requests the group again.
    """

    request: GroupRequest
    process_groups: dict[str, ProcessGroup]
    owner: weakref.ref[Any]
    group: Group | None = None
    name: str | None = None
    created: bool = False
    requests: dict[str, int] = field(default_factory=dict)
    is_released: bool = False

    def notify(self) -> None:
        """Have the universe's meshes notice that the group became live, or is no longer live."""
        owner = self.owner()
        if owner is not None and self.name is not None:
            owner.meshes.renew_names(self.name)

    def count_request(self, axis_name: str) -> bool:
        """Count a request for the group by an axis of this name; return False if it is released."""
        with state_lock.held:
            if not self.is_released:
                self.requests[axis_name] = self.requests.get(axis_name, 0) + 1
            return not self.is_released

    def withdraw_request(self, axis_name: str) -> None:
        """Count one request less: the call that made it has failed."""
        with state_lock.held:
            if self.requests.get(axis_name, 0) > 1:
                self.requests[axis_name] -= 1
            else:
                self.requests.pop(axis_name, None)

    def release_unless_requested(self) -> bool:
        """Return whether nothing has requested the group. From then on, nothing can."""
        with state_lock.held:
            self.is_released = not self.requests
            return self.is_released

    @property
    def is_borrowed(self) -> bool:
        """Whether the universe does not own the group, and so never ends it."""
        return self.request.way.borrows

    @property
    def state(self) -> State | None:
        """State of the group; None if this rank is in no group of the axis."""
        return None if self.group is None else self.group.state

    @property
    def is_planned(self) -> bool:
        """Whether the universe's members are still to create the group, at its first use."""
        is_lazy = self.group is not None and self.group.is_lazy and not self.is_borrowed
        return is_lazy and self.state in (State.PLANNED, State.BEING_MADE)

    @property
    def origin(self) -> str:
        """Where the group comes from, in words."""
        way, group = self.request.way, self.group
        if group is not None and way is Way.OTHER_UNIVERSE:
            words = f"of {self._other_axes(group) or 'another mesh'}"
        elif group is None or way.borrows:
            words = way.value
        elif self.is_planned:
            words = "not created yet (lazy)"
        elif not self.created:
            words = f"shared with {self._other_axes(group) or 'another mesh'}"
        else:
            words = f"{way.value} at first use" if group.is_lazy else way.value
            if others := self._other_axes(group):
                words += f", shared with {others}"
        reason = self.request.all_ranks_reason
        return words if reason is None else f"{words} ({reason})"

    def _other_axes(self, group: Group) -> str:
        """Return which axes of other meshes use a group, in words; "" if there are none.

        Names that this universe's requests have, too, are left out: a part may have requested them.
        """
        of_others = (name for ref in group.refs.alive() for name in list(ref.requests))
        names = [name for name in dict.fromkeys(of_others) if name not in self.requests]
        if not names:
            return ""
        more = f" and {len(names) - _SHOWN_AXES} more" * (len(names) > _SHOWN_AXES)
        axes = ", ".join(map(repr, names[:_SHOWN_AXES]))
        return f"ax{'i' if len(names) == 1 else 'e'}s {axes}{more} of another mesh"
