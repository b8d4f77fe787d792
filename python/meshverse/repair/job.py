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
from typing import Any, NoReturn

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
)
from .state import State

_log = logging.getLogger(__name__)

_POLL_SECONDS = 0.02


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
    name: str = "job",
    rank: int | None = None,
    lost_after: float = 10.0,
    slow_after: float = 60.0,
    replaced_within: float = 0.0,
    started_within: float = 600.0,
    **init: Any,
) -> Job:
    """Join a job, and return when this process is a rank of it.

    The first processes that join become the ranks of the job. The others are spares: they wait here
    until they take the place of a lost rank.

    This calls `init_process_group`. The store must outlive every rank: start one by
    `python -m meshverse store --port 29400` on a host that stays.

    Args:
        store: address of the store, "host:port", or a client of it.
        ranks: number of ranks; or all numbers that are acceptable, such as `[4, 8]`: the job runs
            with as many as it has processes for.
        name: name of the job among those that use the store.
        rank: rank that this process asks for at first; by default the environment's `RANK` if
            `WORLD_SIZE` is the number of ranks. Without one, ranks follow the order of arrival,
            those of one host one after another.
        lost_after: seconds without a sign of life after which a process is lost. A process that
            dies is noticed at once by others on its host.
        slow_after: seconds after which a rank that lives but does not come to `repair()` is lost
            too, such as one in a data loader that hangs.
        replaced_within: seconds to wait for new processes, if there are too few spares, before the
            job goes on with fewer ranks, or fails.
        started_within: seconds to wait for the processes of the first world.
        init: further arguments of `init_process_group`, such as `backend`, `timeout` or
            `device_id`.

    Raises:
        JobFailedError: the job cannot go on, as it has too few processes.
        SystemExit: the job has finished, and did not need this spare. The status is 0.
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
    if rank is None and os.environ.get("WORLD_SIZE") == str(sizes[-1]):
        rank = int(os.environ.get("RANK", "0"))
    job = Job(
        _client(store),
        sizes,
        name=name,
        rank=rank,
        lost_after=lost_after,
        init=init,
        seconds={
            "slow_after": slow_after,
            "replaced_within": replaced_within,
            "started_within": started_within,
        },
    )
    job._begin()
    return job


def _client(store: str | dist.TCPStore) -> dist.TCPStore:
    if isinstance(store, dist.TCPStore):
        return store
    host, _, port = store.rpartition(":")
    if not (host and port.isdecimal()):
        raise ValueError(f"store={store!r}: pass an address, such as 'host:29400', or a TCPStore.")
    return dist.TCPStore(host, int(port), is_master=False, wait_for_workers=False)


class Job:
    """A job that goes on when ranks are lost. `join` creates it.

    Attributes:
        LOST: exceptions that a lost rank causes on the others. They include those of the program
            itself: `repair()` raises the exception again if no rank is lost.
        step: number of steps that are whole: that all ranks have finished.
        is_new: whether this process has to build its meshes and models: at first, and after the
            number of ranks has changed.
        world: number of the current world, which counts the repairs.

    Example:
        >>> with repair.join("head:29400", ranks=8) as job:  # doctest: +SKIP
        ...     while job.step < steps:
        ...         try:
        ...             if job.is_new:
        ...                 model, optimizer = build()
        ...             job.restore(model, optimizer, otherwise=load)
        ...             backward(model, job.step)
        ...             job.commit(optimizer.step)
        ...         except job.LOST:
        ...             job.repair()
    """

    LOST: tuple[type[Exception], ...] = (RuntimeError,)

    def __init__(
        self,
        store: dist.TCPStore,
        sizes: Collection[int],
        *,
        name: str,
        rank: int | None,
        lost_after: float,
        init: dict[str, Any],
        seconds: dict[str, float],
    ) -> None:
        self.step = 0
        self.is_new = True
        self.world = -1
        self._kept_sockets = compat.open_sockets()
        self._store, self._init, self._lost_after = store, init, lost_after
        self._jobs = JobStore(store, name)
        self._membership = Membership(
            self._jobs, sizes, rank, own_address(store), lost_after=lost_after, **seconds
        )
        self._decision: Decision | None = None
        self._hosts: set[str] = set()
        self._alarm = threading.Event()
        self._why = ""  # the reason of the alarm
        self._lock = threading.Lock()  # held while a world is left, or its collectives are ended
        self._state: State | None = None
        self._has_state = self._is_torn = False
        self._is_restored = False
        self._pending: tuple[Callable[[], object], ...] | None = None
        self._is_closed = False
        connection: Any = store.clone()
        self._heartbeat = Heartbeat(
            JobStore(connection, name), self._membership.own, lost_after, self._end_collectives
        )

    # --- questions -------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """Rank of this process in the current world."""
        assert self._decision is not None
        return self._decision.processes.index(self._membership.own.number)

    @property
    def size(self) -> int:
        """Number of ranks of the current world."""
        assert self._decision is not None
        return len(self._decision.processes)

    def __repr__(self) -> str:
        at = "closed" if self._is_closed else f"world {self.world}, step {self.step}"
        return f"<Job: rank {self.rank} of {self.size}, {at}>"

    # --- worlds ----------------------------------------------------------------------------------

    def _begin(self) -> None:
        try:
            self._next_world()
        except BaseException:
            self._heartbeat.stop(has_left=True)
            raise

    def repair(self) -> None:
        """Go on without the ranks that are lost. Call it in the handler of `LOST`.

        All ranks that are left, and spares in the places of the lost ones, enter a new world. If
        each lost rank is replaced, their meshes are revived (see `meshverse.revive`): models,
        optimizers and compiled graphs stay. A step that was half done is undone, or finished if
        another rank has finished it. Otherwise `is_new` is true: build everything again, for
        the `size` of now. Then call `restore`.

        Raises:
            The exception that is being handled: no rank is lost, so it is the program's own.
            JobFailedError: too few processes are left, or the store cannot be reached.
        """
        self._check_open()
        error = sys.exc_info()[1]
        self._check_is_loss(error)
        if error is not None:
            _clear_frames(error)  # they refer to process groups that end now
        self._next_world()

    def _next_world(self) -> None:
        while True:
            over = ""
            signature = Signature(
                self._membership.own.number,
                self.step if self._has_state else -1,
                self._is_torn,
            )
            try:
                decision = self._membership.next_world(self.world, signature, self._check_store)
            except JobOverError as error:
                over = str(error)
            except LeftOutError:
                end_left_out(self.world, self._jobs.status().world)
            except RuntimeError as error:
                raise JobFailedError(f"The store of the job cannot be reached: {error}") from error
            if over:
                self._raise_over(over)
            try:
                self._enter(decision)
                return
            except RuntimeError as error:
                self._check_is_loss(error)
                _clear_frames(error)

    def _enter(self, decision: Decision) -> None:
        """Leave the last world, if there is one, and enter another."""
        begin = time.monotonic()
        with self._lock:
            self._alarm.clear()
            self._decision, self.world = decision, decision.world
            self._hosts = {*decision.hosts, "127.0.0.1", "::1"}
            self._is_restored = False
            self._heartbeat.follow(decision)
        if dist.is_initialized():
            compat.abort_all()
        store = self._store_of_world(decision)
        dist.init_process_group(store=store, rank=self.rank, world_size=self.size, **self._init)
        world = World.current()
        assert world is not None
        if decision.is_resized:
            self.is_new, self._has_state = True, False
        world.is_provisional = self.is_new and decision.step >= 0 and not decision.is_resized
        if not self.is_new:
            revive_with_new_ranks(self._check)
        if self._pending is not None and decision.step > self.step >= 0:
            self._finish_commit()
        self._pending = None
        if self.rank == 0:
            _log.log(
                logging.WARNING if decision.world else logging.INFO,
                "world %d of the job: %d ranks, new ones %s, at step %d, after %.2f s. %s",
                decision.world,
                self.size,
                f"[{rank_list(decision.new_ranks)}]",
                decision.step,
                time.monotonic() - begin,
                decision.reason,
            )

    def _store_of_world(self, decision: Decision) -> dist.TCPStore:
        """Return the store of a world: rank 0 has it, and it ends with the world."""
        key = f"address/{decision.world}"
        if self.rank == 0:
            host = self._membership.own.address
            store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
            self._jobs.write(key, f"{host} {store.port}")
            return store
        while not (address := self._jobs.read(key)):
            self._check()
            time.sleep(_POLL_SECONDS)
        host, port = address.split(" ")
        return dist.TCPStore(host, int(port), is_master=False, wait_for_workers=False)

    # --- alarms ----------------------------------------------------------------------------------

    def _end_collectives(self, world: int, reason: str) -> None:
        """End the collectives of a world in which an alarm was raised. In the heartbeat's thread."""
        with self._lock:
            if world != self.world:
                return
            self._why = reason
            self._alarm.set()
            compat.unblock_collectives(self._hosts, self._kept_sockets, self._store.port)

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
        deadline = time.monotonic() + self._lost_after + 4 * beat_seconds(self.size)
        while not self._is_alarmed() and time.monotonic() < deadline:
            self._alarm.wait(beat_seconds(self.size) / 10)
        if not self._is_alarmed():
            if error is not None:
                _log.error("No rank of the job is lost: the error is the program's own.")
                raise error
            raise RuntimeError("repair() was called, and no rank of the job is lost.")
        self._check_store()

    def _raise_over(self, why: str) -> NoReturn:
        if why == "complete":
            self._is_closed = True
            self._heartbeat.stop()
            raise SystemExit(0)
        raise JobFailedError(f"The job cannot go on: {why}")

    # --- steps -----------------------------------------------------------------------------------

    def restore(
        self,
        *state: Any,
        otherwise: Callable[[], int] | None = None,
        copies: Any = None,
    ) -> None:
        """Restore the state of the job after it began or was repaired; else do nothing.

        Ranks that were there before go back to the last whole step. A rank that is new fetches its
        shards from ranks that hold the same ones, by the placements of each DTensor: replicas of
        HSDP, copies in a tensor-parallel group. If nobody holds one of them, or nobody has a state
        yet, all ranks call `otherwise`.

        Args:
            state: modules and optimizers, and other objects with `state_dict` and
                `load_state_dict`, the same on all ranks of a pipeline stage.
            otherwise: function that loads the last checkpoint into these objects, or initializes
                them, and returns the number of steps that it includes. All ranks call it together.
                By default the objects stay as they are, at step 0, which is an error after step 0.
            copies: mesh of the ranks that have the same plain tensors and values as this one:
                buffers, hyperparameters, schedulers. By default those that hold the same shards of
                every DTensor.

        Raises:
            RankLostError: a rank was lost meanwhile.
            RuntimeError: the state is lost, and there is no `otherwise`.
        """
        self._check_open()
        if self._is_restored:
            return
        self._check()
        assert self._decision is not None
        decision = self._decision
        world = World.current()
        self.is_new = False
        if world is not None and world.is_provisional:
            revive_with_new_ranks(self._check)
        ranks = None if copies is None else copies.mesh.flatten().tolist()
        if self._state is None or not self._state.is_of(state):
            self._state = State(state, ranks)
        if self._has_state:
            self._state.undo_step()
        if decision.step < 0 or decision.is_resized or not self._fetch(self._state, decision):
            self._load(otherwise, decision)
        else:
            self.step = decision.step
        self._has_state, self._is_torn = True, False
        self._state.note()
        self._is_restored = True
        self._check()

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

    def _load(self, otherwise: Callable[[], int] | None, decision: Decision) -> None:
        if otherwise is None and decision.world > 0:
            raise RuntimeError(
                f"Nobody holds the state of ranks [{rank_list(decision.new_ranks)}] any more, and "
                "restore() has no otherwise=, which would load the last checkpoint."
            )
        self._is_torn = True
        step = 0 if otherwise is None else otherwise()
        if not isinstance(step, int) or step < 0:
            raise ValueError(
                f"otherwise() returned {step!r}: it must return the number of steps that the "
                "checkpoint includes, 0 for none."
            )
        steps: list[Any] = [None] * self.size
        dist.all_gather_object(steps, step)
        if len({*steps}) > 1:
            raise ValueError(
                f"otherwise() returned different steps on ranks 0 to {self.size - 1}: {steps}. All "
                "ranks must load the same checkpoint."
            )
        self.step = step

    def commit(self, *steps: Callable[[], object]) -> None:
        """Finish a step: wait until all ranks have come here, then call functions that change state.

        Either all ranks call them or none does, whenever a rank is lost: those that cannot tell any
        more learn it in `repair()`, which then calls them. This waits for all ranks once a step.

        Args:
            steps: functions without arguments that change the state and need no other rank, such
                as `optimizer.step` and `scheduler.step`.
        """
        self._check_open()
        if not self._is_restored:
            raise RuntimeError("commit() comes after restore(), which this world has not had.")
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
        """Finish the job, on all ranks: spares that wait end. Destroys the default process group.

        Raises:
            JobFailedError: the job cannot go on.
        """
        if self._is_closed:
            return
        while True:
            try:
                self._check()
                dist.barrier()
                break
            except RuntimeError:
                if self._jobs.status().over == "complete":
                    break
                try:
                    self.repair()
                except SystemExit:
                    break
                if self.is_new or self._state is None:
                    raise
                self.restore(*self._state.objects)
        self._membership.finish(self.world)
        self._is_closed = True
        self._heartbeat.stop()
        if dist.is_initialized():
            dist.destroy_process_group()

    def leave(self) -> None:
        """Leave the job: this process is lost for the others, which notice it at once."""
        if not self._is_closed:
            self._is_closed = True
            self._heartbeat.stop(has_left=True)

    def __enter__(self) -> Job:
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
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if error.__traceback__ is not None:
            with contextlib.suppress(RuntimeError):
                traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__  # type: ignore[assignment]


__all__ = ["Job", "JobFailedError", "RankLostError", "join"]
