"""Processes that join a job of `meshverse.repair`, and may be killed at any moment."""

from __future__ import annotations

import faulthandler
import pickle
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import torch
import torch.distributed as dist

from helpers.forked import CONTEXT, SECONDS

Program = Callable[..., Any]


class Jobs:
    """A store, and processes that use it; each runs a program and may return a value.

    The store is in this process, so it outlives all of them.
    """

    def __init__(self) -> None:
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._folder = tempfile.TemporaryDirectory()
        self.processes: list[Any] = []

        self.address = f"127.0.0.1:{self.store.port}"

    def end_store(self) -> None:
        """End the store, as if its host had died."""
        del self.store

    def start(self, program: Program, n_processes: int, *arguments: Any) -> list[int]:
        """Start processes that call `program(address, *arguments)`; return their numbers."""
        first = len(self.processes)
        for number in range(first, first + n_processes):
            given = (program, self.address, arguments, self._path(number))
            process = CONTEXT.Process(target=_work, args=given, daemon=True)
            process.start()
            self.processes.append(process)
        return list(range(first, len(self.processes)))

    def wait(self, timeout: float = SECONDS, *, kills_stopped: bool = True) -> list[Any]:
        """Wait until all processes have ended.

        Args:
            timeout: seconds in which they must have ended.
            kills_stopped: whether to kill processes that are stopped when all others have ended.

        Returns:
            What each program returned; an exception's text if it raised, or the exit status if it
            did not get that far: minus the signal that ended it.
        """
        deadline = monotonic() + timeout
        while monotonic() < deadline and any(map(_runs, self.processes)):
            sleep(0.1)  # sleep: it looks again
            if kills_stopped and not any(
                _runs(one) and not _is_stopped(one) for one in self.processes
            ):
                break
        for process in self.processes:
            if kills_stopped and _is_stopped(process):
                process.kill()
                process.join()
        stuck = [number for number, one in enumerate(self.processes) if one.is_alive()]
        stacks = ""
        for number in stuck:
            self.processes[number].kill()
            self.processes[number].join()
            stacks += f"\n--- process {number}: {self._path(number).with_suffix('.stack')}"
            stacks += self._path(number).with_suffix(".stack").read_text()
        assert not stuck, f"processes {stuck} did not end in {timeout} s{stacks}"
        return [self._answer(number) for number in range(len(self.processes))]

    def close(self) -> None:
        """Kill what is left."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        self._folder.cleanup()

    def _path(self, number: int) -> Path:
        return Path(self._folder.name) / str(number)

    def _answer(self, number: int) -> Any:
        path = self._path(number)
        return pickle.loads(path.read_bytes()) if path.exists() else self.processes[number].exitcode


def _is_stopped(process: Any) -> bool:
    try:
        return "State:\tT" in Path(f"/proc/{process.pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):  # it has ended
        return False


def _runs(process: Any) -> bool:
    return bool(process.is_alive())


def _work(program: Program, address: str, arguments: tuple[Any, ...], path: Path) -> None:
    torch.set_num_threads(1)
    with path.with_suffix(".stack").open("w") as stack:
        faulthandler.dump_traceback_later(SECONDS - 20, file=stack)
        try:
            answer = program(address, *arguments)
        except SystemExit as error:
            answer = f"SystemExit: {error.code}"
        except Exception as error:  # noqa: BLE001  # the test compares it
            answer = f"{type(error).__name__}: {error}"
            stack.write(traceback.format_exc())
        faulthandler.cancel_dump_traceback_later()
    path.with_suffix(".new").write_bytes(pickle.dumps(answer))
    path.with_suffix(".new").rename(path)
