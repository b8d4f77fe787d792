"""Real processes that form one small world after another.

The processes are kept for the session.
"""

from __future__ import annotations

import faulthandler
import math
import multiprocessing.process
import tempfile
import traceback
import weakref
from collections.abc import Callable, Mapping
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from time import monotonic
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist

from helpers import jitter
from helpers.forked import CONTEXT, SECONDS

WORLD_TIMEOUT_SECONDS = 120  # of the default group's operations; longer than a busy machine takes
_START_SECONDS = SECONDS
_LEAVE_SECONDS = 60
_GRACE_SECONDS = 3  # for other ranks to tell what went wrong, once one has

Program = Callable[..., Any]


class RankError(AssertionError):
    """Some rank of a world failed or did not finish.

    The message has the traceback of the rank that failed first, and a line for each other one.
    """


class Failure(NamedTuple):
    """End of a rank that returned nothing.

    Attributes:
        moment: when it failed, on the clock that all processes of a machine share.
        summary: a line.
        details: its traceback, or where it was when it ended.
    """

    moment: float
    summary: str
    details: str


_Answer = tuple[Failure | None, Any]  # with what the program returned


class Crew:
    """Processes waiting for work, as many as the largest world so far had ranks.

    A world that fails or hangs is ended by ending them all.
    """

    all: ClassVar[weakref.WeakSet[Crew]] = weakref.WeakSet()  # that this process has started

    def __init__(self) -> None:
        self.all.add(self)
        self._processes: list[multiprocessing.process.BaseProcess] = []
        self._pipes: list[Connection] = []

    def run(
        self,
        program: Program,
        world_size: int,
        *arguments: Any,
        timeout: float = SECONDS,
        grace: float = _GRACE_SECONDS,
    ) -> list[Any]:
        """Run a program on every rank of a fresh gloo world.

        Args:
            program: a function of a test module; called as `program(*arguments)` on every rank.
            world_size: number of ranks, one process each.
            arguments: picklable.
            timeout: seconds in which all ranks must have finished.
            grace: seconds for the others to finish, once a rank has failed.

        Returns:
            What the program returned, by rank.

        Raises:
            RankError: a rank raised or did not finish in time.
        """
        self._start(world_size)
        name = f"{jitter.current_test()} {program.__qualname__}"
        with tempfile.TemporaryDirectory() as folder:
            for rank, pipe in enumerate(self._pipes[:world_size]):
                pipe.send((program, arguments, rank, world_size, folder, timeout, name))
            answers = self._collect(world_size, timeout, grace, folder)
            failures = {rank: failure for rank, (failure, _) in answers.items() if failure}
            if failures or len(answers) < world_size:
                self._kill()
                for rank in set(range(world_size)) - set(answers):
                    summary = f"did not finish in {timeout} s"
                    failures[rank] = Failure(math.inf, summary, _stack(folder, rank))
                raise RankError(report(failures))
        return [answers[rank][1] for rank in range(world_size)]

    @property
    def pids(self) -> list[int | None]:
        """The processes, by rank."""
        return [process.pid for process in self._processes]

    def _collect(
        self, world_size: int, timeout: float, grace: float, folder: str
    ) -> dict[int, _Answer]:
        deadline = monotonic() + timeout
        pending = {pipe: rank for rank, pipe in enumerate(self._pipes[:world_size])}
        answers: dict[int, _Answer] = {}
        while pending and (left := deadline - (asked := monotonic())) > 0:
            for pipe in wait(list(pending), left):
                rank = pending.pop(pipe)  # type: ignore[call-overload]
                try:
                    answers[rank] = pipe.recv()  # type: ignore[union-attr]
                except EOFError:
                    summary = f"died with exit code {self._exit_code(rank)}"
                    # It died after `asked`, and before others noticed.
                    failure = Failure(asked, summary, _stack(folder, rank))
                    answers[rank] = (failure, None)
                if answers[rank][0] is not None:
                    deadline = min(deadline, monotonic() + grace)
        return answers

    def _exit_code(self, rank: int) -> int | None:
        self._processes[rank].join(30)
        return self._processes[rank].exitcode

    def _start(self, world_size: int) -> None:
        """Start the processes that a world of this size lacks."""
        there = len(self._processes)
        for _ in range(there, world_size):
            mine, theirs = CONTEXT.Pipe()
            process = CONTEXT.Process(target=_work, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(mine)
        deadline = monotonic() + _START_SECONDS
        for pipe in self._pipes[there:]:
            if not pipe.poll(max(0, deadline - monotonic())):
                self._kill()
                raise RuntimeError(f"the processes did not start in {_START_SECONDS} s")
            pipe.recv()

    def stop(self) -> None:
        """End the processes; the next run starts new ones."""
        # They leave by themselves: a process that is killed cannot take back what it has of the
        # system, such as the semaphore of a progress bar's lock.
        for pipe in self._pipes:
            pipe.close()
        deadline = monotonic() + _LEAVE_SECONDS
        for process in self._processes:
            process.join(max(0.0, deadline - monotonic()))
        self._kill()

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []


def _work(pipe: Connection) -> None:
    torch.set_num_threads(1)
    pipe.send("ready")
    while True:
        try:
            program, arguments, rank, world_size, folder, timeout, name = pipe.recv()
        except EOFError:
            return
        jitter.begin(f"{name} on rank {rank}")
        with _stack_file(folder, rank).open("w") as stack:
            # So that a crash shows where it crashed, and a hang where it hangs.
            faulthandler.enable(file=stack)
            faulthandler.dump_traceback_later(max(0.5, timeout - 1), file=stack)
            try:
                value = _run_in_world(program, arguments, rank, world_size, folder)
                answer: _Answer = (None, value)
            except BaseException as error:  # noqa: BLE001  (the parent shows it)
                summary = traceback.format_exception_only(error)[-1].strip().partition("\n")[0]
                answer = (Failure(monotonic(), summary, traceback.format_exc()), None)
            finally:
                faulthandler.cancel_dump_traceback_later()
                faulthandler.disable()  # the file closes
        pipe.send(answer)


def _run_in_world(
    program: Program, arguments: tuple[Any, ...], rank: int, world_size: int, folder: str
) -> Any:
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(f"{folder}/store", world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=WORLD_TIMEOUT_SECONDS),
    )
    dist.all_reduce(torch.zeros(1))  # a program may end the world while others still connect
    value = program(*arguments)
    dist.all_reduce(torch.zeros(1))  # nobody leaves while others still talk to them
    dist.destroy_process_group()
    return value


def _stack_file(folder: str, rank: int) -> Path:
    return Path(folder) / f"stack-{rank}"


def _stack(folder: str, rank: int) -> str:
    file = _stack_file(folder, rank)
    return file.read_text() if file.exists() else ""


def report(failures: Mapping[int, Failure]) -> str:
    """Return the first failure in full, then a line for each other one, in order of time.

    If nobody failed, all ranks that did not finish are shown in full: where each of them is says
    what they wait for.
    """
    ordered = sorted(failures.items(), key=lambda pair: (pair[1].moment, pair[0]))
    (_, first), lines = ordered[0], []
    for place, (rank, failure) in enumerate(ordered):
        if place == 0 or first.moment == math.inf:
            lines.append(f"--- rank {rank}: {failure.summary}\n{failure.details}")
        elif failure.moment == math.inf:
            lines.append(f"--- rank {rank}: {failure.summary}{_last_line(failure.details)}")
        else:
            later = failure.moment - first.moment
            lines.append(f"--- rank {rank}, {later:.1f} s later: {failure.summary}")
    return "\n".join(lines)


def _last_line(stack: str) -> str:
    """Return where a thread was, of a stack whose last call comes first."""
    calls = [line.strip() for line in stack.splitlines() if line.lstrip().startswith("File ")]
    return f", in {calls[0]}" if calls else ""
