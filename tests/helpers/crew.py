"""Real processes that form one small world after another.

The processes are kept for the session.
"""

from __future__ import annotations

import faulthandler
import multiprocessing.process
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from time import monotonic
from typing import Any

import torch
import torch.distributed as dist

from helpers.forked import CONTEXT, SECONDS

WORLD_TIMEOUT_SECONDS = 40  # of the default group's operations; unlike c10d's default
_START_SECONDS = 180
_LEAVE_SECONDS = 10
_GRACE_SECONDS = 3  # for other ranks to tell what went wrong, once one has

Program = Callable[..., Any]


class RankError(AssertionError):
    """Some rank of a world failed or did not finish; the message has every traceback."""


class Crew:
    """Processes waiting for work, as many as the largest world so far had ranks.

    A world that fails or hangs is ended by ending them all.
    """

    def __init__(self) -> None:
        self._processes: list[multiprocessing.process.BaseProcess] = []
        self._pipes: list[Connection] = []

    def run(
        self, program: Program, world_size: int, *arguments: Any, timeout: float = SECONDS
    ) -> list[Any]:
        """Run a program on every rank of a fresh gloo world.

        Args:
            program: a function of a test module; called as `program(*arguments)` on every rank.
            world_size: number of ranks, one process each.
            arguments: picklable.
            timeout: seconds in which all ranks must have finished.

        Returns:
            What the program returned, by rank.

        Raises:
            RankError: a rank raised or did not finish in time.
        """
        self._start(world_size)
        with tempfile.TemporaryDirectory() as folder:
            for rank, pipe in enumerate(self._pipes[:world_size]):
                pipe.send((program, arguments, rank, world_size, folder, timeout))
            answers = self._collect(world_size, timeout, folder)
            failures = {rank: text for rank, (text, _) in answers.items() if text is not None}
            if failures or len(answers) < world_size:
                self._kill()
                for rank in set(range(world_size)) - set(answers):
                    failures[rank] = f"did not finish in {timeout} s\n{_stack(folder, rank)}"
                raise RankError(_report(failures))
        return [answers[rank][1] for rank in range(world_size)]

    def _collect(
        self, world_size: int, timeout: float, folder: str
    ) -> dict[int, tuple[str | None, Any]]:
        deadline = monotonic() + timeout
        pending = {pipe: rank for rank, pipe in enumerate(self._pipes[:world_size])}
        answers: dict[int, tuple[str | None, Any]] = {}
        while pending and (left := deadline - monotonic()) > 0:
            for pipe in wait(list(pending), left):
                rank = pending.pop(pipe)  # type: ignore[call-overload]
                try:
                    answers[rank] = pipe.recv()  # type: ignore[union-attr]
                except EOFError:
                    code = self._exit_code(rank)
                    answers[rank] = (f"died with exit code {code}\n{_stack(folder, rank)}", None)
                if answers[rank][0] is not None:
                    deadline = min(deadline, monotonic() + _GRACE_SECONDS)
        return answers

    def _exit_code(self, rank: int) -> int | None:
        self._processes[rank].join(1)
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
            program, arguments, rank, world_size, folder, timeout = pipe.recv()
        except EOFError:
            return
        with _stack_file(folder, rank).open("w") as stack:
            # So that a crash shows where it crashed, and a hang where it hangs.
            faulthandler.enable(file=stack)
            faulthandler.dump_traceback_later(max(0.5, timeout - 1), file=stack)
            try:
                value = _run_in_world(program, arguments, rank, world_size, folder)
                answer: tuple[str | None, Any] = (None, value)
            except BaseException:  # noqa: BLE001  (the parent shows it)
                answer = (traceback.format_exc(), None)
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


def _report(failures: dict[int, str]) -> str:
    return "\n".join(f"--- rank {rank}: {text}" for rank, text in sorted(failures.items()))
