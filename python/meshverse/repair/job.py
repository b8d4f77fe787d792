"""A job that goes on when ranks are lost: in the same processes, with spares in the lost places."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.distributed as dist

from meshverse import _torch_compat as compat
from meshverse.universe.revival import revive_with_new_ranks
from meshverse.wording import rank_list
from meshverse.world.world import World

from .heartbeat import Heartbeat, end_left_out
from .membership import (
    Decision,
    JobOverError,
    JobStore,
    LeftOutError,
    Membership,
    Signature,
    beat_seconds,
    own_address,
    pause_seconds,
)
from .resize import move_state, whole_replica
from .state import State

if TYPE_CHECKING:
    from typing_extensions import Self

_log = logging.getLogger(__name__)

_CONNECT = timedelta(seconds=2)  # for one attempt to connect to the store of a world
_STORE_TIMEOUT = timedelta(minutes=30)  # of that store, if the user gives no timeout
_IN_USE = 5.0  # seconds after an alarm for which connections that are in use are not closed


_STUCK_BUILD = (
    "build() has not returned within built_within= seconds in this spare. Perhaps it waits for "
    "other ranks: it may not use collectives of the default group, such as dist.barrier()."
)


class RankLostError(RuntimeError):
    """Error of a rank whose job has lost another one."""

    __module__ = "meshverse.repair"  # as tracebacks print it, and where users import it from


class JobFailedError(RuntimeError):
    """Error of all ranks of a job that cannot go on."""

    __module__ = "meshverse.repair"


def join(
    store: str | dist.TCPStore,
    *,
    ranks: int | Collection[int],
    build: Callable[[], Any],
    load: Callable[..., int] | None = None,
    copies: Callable[[], Collection[int]] | None = None,
    name: str = "job",
    rank: int | None = None,
    lost_after: float = 10.0,
    slow_after: float = 60.0,
    replaced_within: float = 0.0,
    started_within: float = 600.0,
    built_within: float = 600.0,
    **init: Any,
) -> Job:
    """Join a job, and return when this process is a rank of it and has its state.

    The first processes that join become the ranks of the job. The others are spares: they wait here
    until they take the place of a lost rank.

    This calls `init_process_group`. The store must outlive every rank: start one by
    `python -m meshverse store --port 29400` on a host that stays.

    Args:
        store: address of the store, "host:port", or a client of it.
        ranks: number of ranks; or all numbers that are acceptable, such as `[4, 8]`: the job runs
            with as many as it has processes for.
        build: function that creates the meshes, models and optimizers, and returns those objects
            that hold the state of the job: modules, optimizers, and objects with `state_dict` and
            `load_state_dict`. It is called on all ranks at first, and again when the number of
            ranks has changed. A spare calls it alone: there, collectives of its meshes do nothing,
            as the tensors are replaced afterwards, and those of the default group are not allowed.
        load: function that loads the last checkpoint into these objects, which are its arguments,
            and returns the number of steps that it includes; 0 if there is no checkpoint yet. All
            ranks call it together, at first and whenever a part of the state is lost. If it returns
            0 in a repair that kept the models, all ranks build and call it again. By default the
            job begins with what `build` returned, and cannot go on if a part is lost.
        copies: function that returns the ranks that have the same plain tensors and values as this
            one: buffers, hyperparameters, schedulers. By default they are those that hold the same
            shards of every DTensor.
        name: name of the job among those that use the store.
        rank: rank that this process asks for at first; by default the environment's `RANK` if
            `WORLD_SIZE` is the number of ranks. Without one, ranks follow the order of arrival,
            those of one host one after another.
        lost_after: seconds without a sign of life after which a process is lost. A process that
            dies is noticed at once if the rank that watches it is on its host.
        slow_after: seconds after a loss within which the other ranks must come to `repair()`. One
            that does not is lost too, such as one that waits for its data loader.
        replaced_within: seconds to wait for new processes, if there are too few spares, before the
            job goes on with fewer ranks, or fails.
        started_within: seconds to wait for the processes of the first world.
        built_within: seconds within which `build` must return in a spare, or the spare ends itself.
        init: further arguments of `init_process_group`, such as `backend`, `timeout` or
            `device_id`.

    Raises:
        JobFailedError: there are too few processes, a shard is lost and there is no `load`, or the
            store was lost while this process waited.
        torch.distributed.DistError: this process cannot connect to the store.
        SystemExit: the job has finished, and did not need this spare. The status is 0.
        TypeError: an object that `build` returned has no state.
        ValueError: an argument cannot be used.
    """
    sizes = [ranks] if isinstance(ranks, int) else sorted(ranks)
    if not sizes or min(sizes) < 1:
        raise ValueError(f"ranks={ranks!r}: pass the number of ranks, or several, from 1 on.")
    for what, seconds in (("lost_after", lost_after), ("slow_after", slow_after)):
        if seconds < 1:
            raise ValueError(f"{what}={seconds}: pass at least 1 second.")
    wrong = {"store", "rank", "world_size", "init_method"} & {*init}
    if wrong:
        raise ValueError(f"join() chooses {sorted(wrong)} of init_process_group itself.")
    if dist.is_initialized():
        raise ValueError("join() creates the default process group, and there is one already.")
    # torchrun's store is not used: each world has a store of its own, which begins empty.
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    if rank is None and os.environ.get("WORLD_SIZE") == str(sizes[-1]):
        rank = int(os.environ.get("RANK", "0"))
    seconds_of = {
        "slow_after": slow_after,
        "replaced_within": replaced_within,
        "started_within": started_within,
    }
    of_user = _User(build, load, copies, init)
    job = Job(_client(store), sizes, of_user, name, rank, lost_after, built_within, seconds_of)
    job._begin()
    return job


def _client(store: str | dist.TCPStore) -> dist.TCPStore:
    if isinstance(store, dist.TCPStore):
        return store
    host, _, port = store.rpartition(":")
    if not (host and port.isdecimal()):
        raise ValueError(f"store={store!r}: pass an address, such as 'host:29400', or a TCPStore.")
    return dist.TCPStore(host, int(port), is_master=False, wait_for_workers=False)


class _User(NamedTuple):
    """Functions and arguments that the user passed to `join`."""

    build: Callable[[], Any]
    load: Callable[..., int] | None
    copies: Callable[[], Collection[int]] | None
    init: dict[str, Any]


class Job:
    """A job that goes on when ranks are lost. `join` creates it.

    Attributes:
        LOST: exceptions that a lost rank causes on the others. They include those of the program
            itself: `repair()` raises the exception again if no rank is lost.
        state: what `build` returned last. It changes if the number of ranks does.
        step: number of steps that are whole: that all ranks have finished.
        world: number of the current world: how often the job was repaired.

    Example:
        >>> with repair.join("head:29400", ranks=8, build=build) as job:  # doctest: +SKIP
        ...     while job.step < steps:
        ...         try:
        ...             model, optimizer = job.state
        ...             model(batch(job.step)).mean().backward()
        ...             job.commit(optimizer.step)
        ...             optimizer.zero_grad()
        ...         except job.LOST:
        ...             job.repair()
    """

    LOST: tuple[type[Exception], ...] = (RuntimeError,)

    def __init__(
        self,
        store: dist.TCPStore,
        sizes: Collection[int],
        of_user: _User,
        name: str,
        rank: int | None,
        lost_after: float,
        built_within: float,
        seconds: dict[str, float],
    ) -> None:
        self._built_within, self._slow_after = built_within, seconds["slow_after"]
        self.state: Any = None
        self.step = 0
        self.world = -1
        self._kept_sockets = compat.open_sockets()
        self._served_port = -1  # of the world's store, if it is in this process
        self._store, self._of_user, self._lost_after = store, of_user, lost_after
        self._jobs = JobStore(store, name)
        self._membership = Membership(
            self._jobs,
            sizes,
            rank,
            own_address(store),
            whole_replica=self._whole_replica,
            lost_after=lost_after,
            **seconds,
        )
        self._decision: Decision | None = None
        self._rank = -1
        self._alarm = threading.Event()
        self._why, self._alarm_since = "", 0.0  # the reason of the alarm
        self._lock = threading.Lock()  # held while a world is left, or its collectives are ended
        self._state: State | None = None  # that of `state`; None until it is built
        self._last: tuple[Decision, State] | None = None  # a state of another number of ranks
        self._has_state = self._is_torn = False
        self._pending: tuple[Callable[[], object], ...] | None = None
        self._is_closed = False
        connection = compat.clone_store(store)
        self._heartbeat = Heartbeat(
            JobStore(connection, name),
            self._membership.own,
            lost_after,
            self._slow_after,
            self._end_collectives,
        )

    # --- questions -------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """Rank of this process in the current world."""
        return self._rank

    @property
    def size(self) -> int:
        """Number of ranks of the current world."""
        assert self._decision is not None
        return len(self._decision.processes)

    @property
    def _number(self) -> int:
        return self._membership.own.number

    def __repr__(self) -> str:
        if self._decision is None:
            return "<Job: a spare>"
        at = "closed" if self._is_closed else f"world {self.world}, step {self.step}"
        return f"<Job: rank {self.rank} of {self.size}, {at}>"

    # --- worlds ----------------------------------------------------------------------------------

    def _begin(self) -> None:
        try:
            self._next_world()
        except BaseException:
            self.leave()
            raise

    def repair(self) -> None:
        """Go on without the ranks that are lost. Call it in the handler of `LOST`.

        All ranks that are left, and spares in the places of the lost ones, enter a new world. If
        each lost rank is replaced, their meshes are revived (see `meshverse.revive`): models,
        optimizers and compiled graphs stay. A step that was half done is undone, or finished if
        another rank has finished it. New ranks get their shards from ranks that hold the same ones:
        replicas of HSDP, copies in a tensor-parallel group. If nobody has some shard any more, all
        ranks call `load`.

        If the number of ranks changes, all ranks build everything again, and shards come from
        a replica all of whose ranks are left.

        Raises:
            The exception that is being handled: no rank is lost, so it is the program's own.
            JobFailedError: too few processes are left, a shard is lost and there is no `load`, or
                the store cannot be reached.
            SystemExit: the job went on with fewer ranks and has finished, without this process.
        """
        self._check_open()
        error = sys.exc_info()[1]
        self._check_is_loss(error)
        if error is not None:
            _clear_frames(error)  # they refer to process groups that end now
        self._next_world()

    def _next_world(self) -> None:
        while (decision := self._decide()) is not None:
            try:
                self._enter(decision)
                return
            except JobFailedError:  # noqa: PERF203
                raise
            except RuntimeError as error:
                self._check_is_loss(error)
                _clear_frames(error)

    def _decide(self) -> Decision | None:
        """Take part in the decision on the next world; return None if the job is complete."""
        signature = Signature(
            self._number,
            self.step if self._has_state else -1,
            is_torn=self._is_torn,
        )
        self._heartbeat.is_main_waiting = True
        try:
            return self._membership.next_world(
                self.world, signature, self._check_store, self._become_spare
            )
        except JobOverError as over:
            self._end_at(over)
            return None
        except LeftOutError:
            end_left_out(self.world, self._jobs.status().world)
        except JobFailedError:
            raise
        except RuntimeError as error:
            raise JobFailedError(f"The store of the job cannot be reached: {error}") from error

    def _whole_replica(self, left: Collection[int]) -> Collection[int]:
        """Return ranks, of those left, that hold the whole state; none if this one has none."""
        return whole_replica(self._state, left) if self._state and self._has_state else ()

    def _become_spare(self) -> None:
        """Drop everything that belongs to this process as a rank, and wait to be one again."""
        _log.warning("This process is a spare now: the next world of the job has fewer ranks.")
        self._heartbeat.unfollow()
        compat.abort_world()
        self._decision, self.world, self._pending = None, -1, None
        self._state = self.state = self._last = None
        self._has_state = self._is_torn = False

    def _end_at(self, over: JobOverError) -> None:
        """Return if this rank is at the last step or can finish it; end a spare; else raise."""
        if over.step < 0:
            raise JobFailedError(f"The job cannot go on: {over}")
        if not self._has_state:  # this spare was not needed
            self._is_closed = True
            self._heartbeat.stop()
            raise SystemExit(0)
        if over.step == self.step + 1 and self._pending is not None:
            self._finish_commit()
        if self.step != over.step:
            raise JobFailedError(
                f"Another rank has closed the job at step {over.step}, and this one is at step "
                f"{self.step}."
            )

    def _enter(self, decision: Decision) -> None:
        """Leave the last world, if there is one, and enter another, with the state of the job."""
        begin, before = time.monotonic(), self._decision
        with self._lock:
            self._alarm.clear()
            self._heartbeat.is_main_waiting = False
            self._decision, self.world = decision, decision.world
            self._rank = decision.processes.index(self._number)
            self._heartbeat.follow(decision)
        compat.abort_world()
        late = f"rank {self.rank} could not connect to the others within {self._slow_after:g} s"
        self._heartbeat.alarm_at = time.monotonic() + self._slow_after, late
        try:
            store = self._store_of_world(decision)
            dist.init_process_group(
                store=store, rank=self.rank, world_size=self.size, **self._of_user.init
            )
        finally:
            self._heartbeat.alarm_at = None
        connected = time.monotonic()
        if self._state is not None and not decision.is_revived:
            self._last = (before, self._state) if before and self._has_state else None
            self._state, self._has_state = None, False
        self._build_or_revive(decision)
        built = time.monotonic()
        self._restore(decision)
        if self.rank == 0:
            now = time.monotonic()
            _log.log(
                logging.WARNING if decision.world else logging.INFO,
                "World %d of the job: %d ranks, new ones [%s], at step %d. Seconds: %.2f to "
                "connect, %.2f for meshes and models, %.2f for their state. %s",
                *(decision.world, self.size, rank_list(decision.new_ranks), self.step),
                *(connected - begin, built - connected, now - built, decision.reason),
            )

    def _store_of_world(self, decision: Decision) -> dist.TCPStore:
        """Return the store of a world: rank 0 has it, and it ends with the world."""
        key = f"address/{decision.world}"
        self._served_port = -1
        if self.rank == 0:
            host = self._membership.own.address
            store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
            self._served_port = store.port
            self._jobs.write(key, f"{host} {store.port}")
            return store
        while not (address := self._jobs.read(key)):
            self._check()
            time.sleep(pause_seconds(self.size))
        host, port = address.split(" ")
        while True:
            self._check()  # the host may be lost meanwhile
            with contextlib.suppress(dist.DistError):
                store = dist.TCPStore(
                    host, int(port), is_master=False, wait_for_workers=False, timeout=_CONNECT
                )
                store.set_timeout(self._of_user.init.get("timeout") or _STORE_TIMEOUT)
                return store

    def _build_or_revive(self, decision: Decision) -> None:
        """Build meshes and models on all ranks; or only on new ones, and revive all of them."""
        if not decision.is_revived:
            self._build()
            return
        if self._state is None:
            world = World.current()
            assert world is not None
            world.is_provisional = True
            self._heartbeat.must_end_at = time.monotonic() + self._built_within, _STUCK_BUILD
            try:
                self._build()
            finally:
                self._heartbeat.must_end_at = None
        revive_with_new_ranks(self._check)

    def _build(self) -> None:
        self._state = self.state = None  # free the memory of the objects before
        built = self._of_user.build()
        objects = built if isinstance(built, (tuple, list)) else (built,)
        copies = None if self._of_user.copies is None else self._of_user.copies()
        self._state, self.state = State(objects, copies), built

    # --- alarms ----------------------------------------------------------------------------------

    def _end_collectives(self, world: int, reason: str) -> None:
        """End the collectives of a world in which an alarm was raised.

        The heartbeat calls this until this process has left the world: the main thread may begin
        another collective before it sees the alarm.
        """
        with self._lock:
            if world != self.world:
                return
            if not self._alarm.is_set():
                self._why, self._alarm_since = reason, time.monotonic()
                self._alarm.set()
            if self._heartbeat.is_main_waiting:
                return
            compat.unblock_collectives(
                *(self._kept_sockets, self._store.port, self._served_port, self.size),
                busy_too=time.monotonic() - self._alarm_since > _IN_USE,
            )

    def _check(self) -> None:
        """Raise RankLostError if an alarm was raised in the current world."""
        if self._alarm.is_set():
            raise RankLostError(f"The job has lost a rank: {self._why}. Call repair().")

    def _check_store(self) -> None:
        if self._heartbeat.why_no_store:
            raise JobFailedError(f"The job cannot go on: {self._heartbeat.why_no_store}")

    def _is_alarmed(self) -> bool:
        if self._alarm.is_set():
            return True
        try:
            status = self._jobs.status()
        except RuntimeError as error:
            raise JobFailedError(f"The store of the job cannot be reached: {error}") from error
        return status.world != self.world or status.alarm != "" or status.over != ""

    def _check_is_loss(self, error: BaseException | None) -> None:
        """Raise an error again, unless an alarm is raised within the time that this may take."""
        self._heartbeat.wake()
        waited, longest = 0.0, self._lost_after + 4 * beat_seconds(self.size)
        while not self._is_alarmed() and waited < longest:
            pause = pause_seconds(self.size)
            self._alarm.wait(pause)
            waited += pause  # not by the clock: this host may have been suspended
        if not self._is_alarmed():
            if error is not None:
                _log.error("No rank of the job is lost: the error is the program's own.")
                raise error
            raise RuntimeError("repair() was called, and no rank of the job is lost.")
        self._check_store()
        if not self._alarm.is_set():  # end this rank's collectives, so that others notice too
            self._end_collectives(self.world, "a rank was lost")

    # --- the state -------------------------------------------------------------------------------

    def _restore(self, decision: Decision) -> None:
        """Have the state of the job at one step on all ranks."""
        state = self._state
        assert state is not None
        if self._pending is not None and decision.step == self.step + 1 and self._has_state:
            self._finish_commit()
        self._pending = None
        if self._has_state:
            state.undo_step()
        if self._is_copied(state, decision):
            self.step = decision.step
        else:
            self._load(decision)
        self._has_state, self._is_torn, self._last = True, False, None
        assert self._state is not None
        self._state.note()
        if self.rank == 0:
            self._jobs.write("begun", "yes")
        self._check()

    def _is_copied(self, state: State, decision: Decision) -> bool:
        """Copy what ranks lack from others; return False if the state must be loaded instead."""
        if decision.step < 0:
            return False
        if not decision.is_resized:
            return self._fetch(state, decision)
        was, old = self._last or (None, None)
        if old is not None:
            old.undo_step()
        numbers: list[Any] = [None] * self.size
        dist.all_gather_object(numbers, None if was is None else was.processes.index(self._number))
        new_rank = {number: rank for rank, number in enumerate(numbers) if number is not None}
        return move_state(old, state, new_rank)

    def _fetch(self, state: State, decision: Decision) -> bool:
        """Give new ranks copies of their state; return whether all parts were found."""
        new = decision.new_ranks
        if not new:
            return True
        having = [rank for rank in range(self.size) if rank not in new]
        wanted = state.wanted(having) if self.rank in new else {}
        of_ranks: list[Any] = [None] * self.size
        dist.all_gather_object(of_ranks, wanted)
        if any(one is None for one in of_ranks):
            return False
        for rank in new:  # all ranks use one order
            for source, keys in sorted(of_ranks[rank].items()):
                if self.rank == source:
                    state.send(keys, rank)
                elif self.rank == rank:
                    state.receive(keys, source)
        return True

    def _load(self, decision: Decision) -> None:
        load = self._of_user.load
        if load is None and self._jobs.read("begun"):  # all ranks read it before rank 0 goes on
            raise JobFailedError(
                "The job cannot go on: no complete copy of its state is left "
                f"({decision.reason}), and join() was not given load=, which would load the last "
                "checkpoint."
            )
        self._is_torn = True
        step = self._loaded(load)
        if step == 0 and decision.is_revived:
            # Nothing was loaded, and new ranks, which have built alone, have no initial values.
            why = "there is no checkpoint yet, so all ranks build again"
            self._has_state = False
            self._heartbeat.alarm_at = time.monotonic(), why
            raise RankLostError(f"The state is lost: {why}.")
        self.step = step

    def _loaded(self, load: Callable[..., int] | None) -> int:
        """Call the user's `load`; return the step, the same on all ranks."""
        assert self._state is not None
        step: Any = 0 if load is None else load(*self._state.objects)
        if not isinstance(step, int) or step < 0:
            raise ValueError(
                f"load() returned {step!r}: it must return the number of steps that the checkpoint "
                "includes, 0 for none."
            )
        steps: list[Any] = [None] * self.size
        dist.all_gather_object(steps, step)
        if len({*steps}) > 1:
            raise ValueError(
                f"load() returned different steps on ranks 0 to {self.size - 1}: {steps}. All "
                "ranks must load the same checkpoint."
            )
        return step

    def commit(self, *steps: Callable[[], object]) -> None:
        """Finish a step: wait until all ranks have come here, then change the state.

        Either all ranks change it or none does, whenever a rank is lost: one whose wait failed
        changes it in `repair()` if others have. This waits for all ranks once a step.

        Args:
            steps: functions without arguments that change the state and need no other rank, such
                as `optimizer.step` and `scheduler.step`.

        Raises:
            RankLostError: a rank is lost.
        """
        self._check_open()
        self._check()
        self._pending = steps
        dist.barrier()
        self._finish_commit()

    def _finish_commit(self) -> None:
        assert self._pending is not None
        self._is_torn = True
        for step in self._pending:
            step()
        self._pending, self._is_torn = None, False
        self.step += 1
        if self._state is not None:
            self._state.note()

    # --- end -------------------------------------------------------------------------------------

    def close(self) -> None:
        """Finish the job, on all ranks at the same step: spares that wait end.

        A rank that is lost now does not matter any more. Destroys the default process group.
        """
        if self._is_closed:
            return
        self._is_closed = True
        self._heartbeat.is_main_waiting = True  # no collective is left that an alarm has to end
        self._membership.finish(self.world, self.step, self.size)
        self._heartbeat.stop()
        if dist.is_initialized():
            dist.destroy_process_group()

    def leave(self) -> None:
        """Leave the job: this process is lost for the others, which notice it at once."""
        if not self._is_closed:
            self._is_closed = True
            self._heartbeat.stop(has_left=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        frames: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.leave()

    def _check_open(self) -> None:
        if self._is_closed:
            raise RuntimeError("The job is closed on this rank.")


def _clear_frames(error: BaseException) -> None:
    """Drop the local variables of the functions that an error has ended."""
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        if one.__traceback__ is not None:
            with contextlib.suppress(RuntimeError):
                traceback.clear_frames(one.__traceback__)
        one = one.__cause__ or one.__context__


__all__ = ["Job", "JobFailedError", "RankLostError", "join"]
