"""A world: the lifetime of one default process group, from `init_process_group` to its end.

`World.state` gives each subpackage an object of its own for each world, so that no state carries
over to the next world by accident, and none depends on the state of another subpackage.

Example: a program calls `destroy_process_group()`, then `init_process_group()` again. So it has two
worlds, one after the other. A mesh of the first world refuses to create groups in the second,
unless `meshverse.revive()` is called: then the first world goes on, with the new default group.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import threading
import time
import warnings
import weakref
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

from meshverse._torch_compat.backends import (
    HowCreated,
    all_ranks_reason,
    creation_blocks,
    split_devices,
)
from meshverse._torch_compat.c10d_groups import (
    can_be_reconfigured,
    clone_store,
    current_default_group,
    destroys_passed_default_group,
    is_shrunk_default,
    set_up_world_and_device,
    store_allows_rendezvous,
    store_of,
    thread_id,
    world_lifetime,
)
from meshverse._torch_compat.private_names import ProcessGroup, StockDeviceMesh
from meshverse.descriptors import computed
from meshverse.locks import state_changed, state_lock
from meshverse.options.group_options import NO_OVERRIDE, GroupOptions

from .store import Run, StoreKeys

_log = logging.getLogger(__name__)


class WorldState:
    """Base class of the state that a subpackage keeps for each world; `World.state` creates it.

    Example: the process groups of a world are `world.state(GroupRegistry)`.
    """

    def end(self) -> None:
        """Drop all references to process groups. Called when the world has ended."""

    def on_revive(self, current: World) -> None:
        """Continue in this world after it was revived.

        `current` is the `World` object of the new default group, which this world replaces; take
        from it what ranks have agreed on since.
        """

    def reset_after_fork(self) -> None:
        """Drop the parent's process groups without ending them. Called in a forked process."""


_State = TypeVar("_State", bound=WorldState)


class World:
    """The lifetime of one default process group, from `init_process_group` to its end.

    A world references the default group weakly; it is over when torch drops the group. If ranks are
    threads, each has a default group and so a world of its own. In a forked process, the parent's
    worlds are over. A world that is over can be revived: then it goes on with the default group of
    now.

    Attributes:
        rank: this process's global rank.
        size: number of ranks.
        thread_id: id of the thread that is this rank, under torch's threaded test backend; else
            None.
        generation: number of earlier worlds of this process (of this thread, if ranks are
            threads). It may differ between ranks.
        may_change: whether the default group can be reconfigured. Then each use of the world checks
            whether its rank and size have changed.
        since_ns: time when this process first saw it, in nanoseconds since the epoch.
        has_universes: whether universes were created in this world.
        axes_of_default_group: names of mesh axes whose group is the default group, as keys.
        run: the run of the default group, which has a number among the runs on the same store.
    """

    def __init__(self, default_group: ProcessGroup) -> None:
        self._states: dict[type[WorldState], Any] = {}
        parent = _process_of_inherited.get(default_group)
        self._process_id = os.getpid() if parent is None else parent
        self.since_ns = time.time_ns()
        self.has_universes = False
        self.is_of_parent = parent is not None  # whether it is in a process forked from its own
        self.axes_of_default_group: dict[str, None] = {}
        self.rank = default_group.rank()
        self.size = default_group.size()
        self.thread_id = thread_id()
        self.generation = 0  # until `current` counts it
        self._use(default_group)

    def _use(self, default_group: ProcessGroup) -> None:
        """Use a default group of this rank and size, until it ends."""
        self._default_group = weakref.ref(default_group)
        self.may_change = can_be_reconfigured(default_group)
        self.run = Run(self.rank, self.size)
        self._clones = threading.local()  # further clients of the store, one per thread
        self._how_created: dict[str, HowCreated] = {}
        self._was_passed = False  # to `destroy_process_group(group)`, which ended this world
        self._device_types_chosen: set[str] = set()
        self._store_allows_rendezvous: bool | None = None
        vars(self).pop("default_options", None)
        # Must come last: another thread may end the default group at any time.
        self._finalizer = weakref.finalize(world_lifetime(), _end, self)
        self._finalizer.atexit = False

    def revive(self, current: World) -> None:
        """Continue with the current default group, replacing the `World` object created for it.

        Args:
            current: that object, of the same rank and size. Nothing may use it afterwards. What
                ranks have counted together in it is kept (runs, rendezvous, names of groups);
                everything else comes from this world.
        """
        default_group = current.default_group
        self._use(default_group)
        self.run = current.run
        current._finalizer.detach()
        for kind in list(current._states):
            self.state(kind)
        for state in list(self._states.values()):
            state.on_revive(current)
        with state_lock.held:
            _worlds[default_group] = self
        for call in _called_at_start:
            call()

    def note_revived(self) -> None:
        """Note that this world has its groups again. Until then, `ended_last` returns it."""
        _ended_last.pop(self.thread_id, None)

    @property
    def ended_default_group(self) -> ProcessGroup | None:
        """The default group that this world had when it ended, if something still refers to it."""
        return self._default_group() if self.is_over else None

    @staticmethod
    def ended_last() -> World | None:
        """Return the world of this thread that had universes and ended last, or None."""
        return _ended_last.get(thread_id())

    @staticmethod
    def current() -> World | None:
        """Return the world of this thread, or None before `init_process_group`."""
        default_group = current_default_group()
        if default_group is None:
            return None
        world = _worlds.get(default_group)  # without the lock, so that no finalizer waits for it
        if world is not None:
            return world
        started = World(default_group)  # not under the lock: it asks the group, which may be Python
        with state_lock.held:
            world = _worlds.setdefault(default_group, started)
            if world is started:
                world.generation = _generations[world.thread_id]
                _generations[world.thread_id] += 1
        if world is not started:  # another thread was first
            started._finalizer.detach()
            return world
        for call in () if world.is_of_parent else _called_at_start:
            call()
        return world

    def state(self, kind: type[_State]) -> _State:
        """Return this world's state of a class, which is created at its first use."""
        state: _State | None = self._states.get(kind)
        return self._states.setdefault(kind, kind()) if state is None else state

    @property
    def label(self) -> tuple[int | None, int]:
        """Label of this world, unique in this process: `thread_id` and `generation`."""
        return self.thread_id, self.generation

    @property
    def is_over(self) -> bool:
        """Whether this world's process groups cannot be used any more.

        The default group has ended or was reconfigured, or this process is a fork.
        """
        group = self._default_group()
        return (
            group is None
            or group is not current_default_group()
            or self.is_of_parent
            or (self.may_change and self._has_changed(group))
        )

    def _has_changed(self, group: ProcessGroup) -> bool:
        return (group.rank(), group.size()) != (self.rank, self.size)

    @property
    def default_group(self) -> ProcessGroup:
        """The default process group; RuntimeError if this world is over."""
        group = self._default_group()
        if group is None or self.is_over:
            raise RuntimeError(self._why_over())
        return group

    def check_rank(self) -> None:
        """Raise RuntimeError if this process's rank, or the number of ranks, has changed."""
        current = current_default_group()
        if current is not None and self._has_changed(current):
            raise RuntimeError(self._why_over())

    def _why_over(self) -> str:
        if self.is_of_parent:
            return (
                f"This process ({os.getpid()}) is a fork of process {self._process_id}, whose "
                "process groups do not survive a fork. A fork can hold, slice and compare the "
                "meshes of its parent. Use groups in the process that created them, or start this "
                "process by spawn or forkserver and create a mesh here."
            )
        current = current_default_group()
        if current is not None and current is self._default_group():
            return (
                f"The default process group was reconfigured: this mesh was created by rank "
                f"{self.rank} of {self.size}, which is rank {current.rank()} of "
                f"{current.size()} now. Call destroy_process_group() and init_process_group() on "
                "all ranks, then create the mesh again."
            )
        state = "there is none" if current is None else "there is another one"
        if current is not None and is_shrunk_default(current):
            state = f"shrink_group() has left {current.size()} of them, whose ranks have changed,"
        who = f"{self._who_ended_it()} " if self._was_passed else ""
        # revive() goes on with the world that ended last.
        is_last = self.ended_last() is self
        revive = ", or call meshverse.revive() then, on all ranks" if is_last else ""
        return (
            f"The default process group of {self.size} ranks that this mesh was created with is "
            f"gone ({state} now), and its process groups with it. {who}Create the mesh again after "
            f"init_process_group(){revive}."
        )

    def _who_ended_it(self) -> str:
        axes = ", ".join(map(repr, itertools.islice(self.axes_of_default_group, 4)))
        return (
            f"destroy_process_group(group) was called with the group of axis {axes}, which is the "
            "default group: as in torch, that ends all process groups. To end groups of a mesh "
            "only, call mesh.universe.destroy(); for a group of the axis's own, give it isolate=."
        )

    def warn_that_destroy_ended_it(self, caller: FrameType) -> None:
        """Warn at the line that passed the default group to `destroy_process_group`."""
        if not self.axes_of_default_group:
            return
        self._was_passed = True
        variables = caller.f_globals
        warnings.warn_explicit(
            f"The default process group of {self.size} ranks has ended: {self._who_ended_it()} To "
            "end all of them without this warning, call destroy_process_group().",
            UserWarning,
            filename=caller.f_code.co_filename,
            lineno=caller.f_lineno,
            module=variables.get("__name__"),
            registry=variables.setdefault("__warningregistry__", {}),
        )

    @property
    def store(self) -> Any | None:
        """This thread's client of the default group's store.

        None if ranks cannot have a rendezvous in that store; see `store_allows_rendezvous`.
        """
        if self._store_allows_rendezvous is None:
            self._store_allows_rendezvous = store_allows_rendezvous(self.default_group)
        if not self._store_allows_rendezvous:
            return None
        return self.store_client(self.default_group)

    def store_client(self, default_group: ProcessGroup) -> Any:
        """Return this thread's client of the store: in the main thread, the default group's own.

        A client is blocked while c10d waits in the store for other ranks. If two threads of a rank
        shared one, and so did two threads of another rank, they could wait for each other in a
        deadlock.

        Args:
            default_group: the default group of this world.
        """
        store = store_of(default_group)
        if self.is_main_thread():
            return store
        clone = getattr(self._clones, "store", None)
        if clone is None:
            clone = self._clones.store = clone_store(store)
        return clone

    def is_main_thread(self) -> bool:
        """Return whether this thread is the main one, or the one that is this rank."""
        thread = threading.current_thread()
        return thread is threading.main_thread() or thread.ident == self.thread_id

    @property
    def run_keys(self) -> StoreKeys | None:
        """This run's keys in the store; None if the store allows no rendezvous."""
        store = self.store
        return None if store is None else self.run.keys(store)

    @computed
    def default_options(self) -> GroupOptions:
        """Options of a group for which nothing is overridden."""
        return GroupOptions.resolve(NO_OVERRIDE, self.default_group)

    def how_created(self, backend: str) -> HowCreated:
        """Return how groups of this backend are created. Computed once."""
        known = self._how_created.get(backend)
        if known is None:
            group = self.default_group
            known = self._how_created[backend] = HowCreated(
                split_devices(group, backend) is not None,
                all_ranks_reason(group, backend),
                creation_blocks(backend),
            )
        return known

    def choose_device(self, mesh: StockDeviceMesh, device_type: str) -> None:
        """Choose this rank's device as torch does, once per device type."""
        if device_type not in self._device_types_chosen:
            set_up_world_and_device(mesh)
            self._device_types_chosen.add(device_type)


def _end(world: World) -> None:
    if world.has_universes and not world.is_of_parent:
        _ended_last[world.thread_id] = world
    # What these raise, Python reports, and goes on.
    with contextlib.ExitStack() as ending:  # calls all of these, last first, whatever one raises
        if (caller := destroys_passed_default_group()) is not None:
            ending.callback(world.warn_that_destroy_ended_it, caller)
        for state in reversed(list(world._states.values())):
            ending.callback(_end_state, state)


def _end_state(state: WorldState) -> None:
    try:
        state.end()
    except BaseException:  # of a signal handler
        state.end()  # from its begin, so that nothing is left half ended
        raise


def _reset_after_fork() -> None:
    _ended_last.clear()
    for world in list(_worlds.values()):
        world.is_of_parent = True
        for state in list(world._states.values()):
            state.reset_after_fork()
    inherited = current_default_group()
    if inherited is not None and inherited not in _worlds:
        _process_of_inherited[inherited] = os.getppid()
    with state_lock.held:
        state_changed.notify_all()


os.register_at_fork(after_in_child=_reset_after_fork)


def on_world_started(function: Callable[[], object]) -> None:
    """Call a function whenever this process first sees a world, or revives one, from now on.

    An error of the function is logged.
    """

    def call() -> None:
        try:
            function()
        except Exception:  # noqa: BLE001  (of an extra, without which meshes work)
            _log.exception("A function that on_world_started() registered has failed")

    _called_at_start.append(call)


_called_at_start: list[Callable[[], object]] = []
# In a fork, its parent's default group of which there was no world, and the parent's process id.
_process_of_inherited: weakref.WeakKeyDictionary[ProcessGroup, int] = weakref.WeakKeyDictionary()
_worlds: weakref.WeakKeyDictionary[ProcessGroup, World] = weakref.WeakKeyDictionary()
_ended_last: dict[int | None, World] = {}  # by the thread that is the rank, if ranks are threads
_generations: Counter[int | None] = Counter()  # number of worlds so far, by `World.thread_id`
