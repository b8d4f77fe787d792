"""Python programs that begin with torch imported: forks of one server, which imported it once.

A process that starts by itself spends seconds of a core on importing torch. What a fork computes,
and what it does with other processes, is the same. What Python does at its own start and end is
not: a program whose subject is the hash seed, an import, `atexit` or the end of the interpreter is
started by `subprocess`.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from helpers import jitter, one_gloo_thread

__all__ = ["CONTEXT", "SECONDS", "Forked", "printed_by", "torchrun"]

one_gloo_thread.use_one_thread()  # all processes of the tests import this module

SECONDS = 600  # in which a program ends, however busy the machine is

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    [
        "pytest",
        "numpy",
        "torch",
        "torch._dynamo",
        "torch.distributed.checkpoint",
        "torch.distributed.fsdp",
        "torch.distributed.pipelining",
        "torch.distributed.tensor.parallel",
        "transformers.models.auto.modeling_auto",
        "transformers.models.llama.modeling_llama",
        "meshverse.parallel.strategies.fsdp2",
        "meshverse.tools.doctor",
    ]
)


class Forked:
    """A Python program in a fork of the server, with standard output and error in files.

    Args:
        command: what follows `python`: `-m` and a module, `-c` and a program, or a script; and
            its arguments.
        env: the environment variables, all of them.
        cwd: working directory; this process's by default.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
    ) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._files = [Path(self._folder.name) / name for name in ("stdout", "stderr")]
        given = dict(os.environ if env is None else env)
        program = f"{Path(command[0]).name} on rank {given.get('RANK')}"
        pauses = (f"{jitter.current_test()} {program}", jitter.seed())
        arguments = (list(command), given, os.fspath(cwd or os.getcwd()), self._files, pauses)
        self._process = CONTEXT.Process(target=_run, args=arguments)
        self._process.start()
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    def is_alive(self) -> bool:
        """Whether the process has not ended yet."""
        return self._process.is_alive()

    def kill(self) -> None:
        """Kill the process."""
        self._process.kill()

    def printed_so_far(self) -> tuple[str, str]:
        """Return standard output and error, while the program runs."""
        out, err = (file.read_text() if file.exists() else "" for file in self._files)
        return out, err

    def communicate(self, timeout: float = SECONDS) -> tuple[int, str, str]:
        """Wait for the end of the program.

        Args:
            timeout: seconds, after which the program is killed.

        Returns:
            Its exit status (negative: the signal that ended it), standard output and error.

        Raises:
            TimeoutError: it did not end in time; with all that it had printed.
        """
        self._process.join(timeout)
        status = self._process.exitcode
        if status is None:
            self._process.kill()
            self._process.join()
        out, err = (file.read_text() if file.exists() else "" for file in self._files)
        self._folder.cleanup()
        if status is None:
            raise TimeoutError(f"did not end in {timeout} s\n{out}\n{err}")
        return status, out, err


def _run(
    command: list[str],
    env: dict[str, str],
    cwd: str,
    files: list[Path],
    pauses: tuple[str, str | None],
) -> None:
    for number, file in enumerate(files, start=1):
        opened = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(opened, number)
        os.close(opened)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    jitter.begin(*pauses)
    torch.set_num_threads(int(env.get("OMP_NUM_THREADS", "1")))
    if command[0] == "-m":
        sys.argv = command[1:]
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    elif command[0] == "-c":
        sys.argv = ["-c", *command[2:]]
        exec(compile(command[1], "<string>", "exec"), {"__name__": "__main__"})
    else:
        _run_script(command)


def _run_script(command: Sequence[str]) -> None:
    """Run a script in this process, as `python` would; its path, then its arguments."""
    sys.argv = list(command)
    sys.path.insert(0, str(Path(command[0]).resolve().parent))
    runpy.run_path(command[0], run_name="__main__")


# --- torchrun ------------------------------------------------------------------------------------


def torchrun(
    n_ranks: int,
    script: Path,
    *arguments: object,
    folder: Path,
    restarts: int = 0,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
) -> Forked:
    """Start torchrun in a fork of the server, and its workers in others.

    Args:
        n_ranks: number of workers.
        script: what they run.
        arguments: of the script.
        folder: where what they print is kept; see `printed_by`.
        restarts: how often torchrun starts all workers again if one fails.
        env: the environment variables, all of them.
        cwd: working directory of torchrun; this process's by default.
    """
    command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={n_ranks}"]
    command += [f"--max-restarts={restarts}", "--monitor-interval=0.1"]
    command += ["--run-path", "--start-method=forkserver"]
    command += ["--redirects=3", f"--log-dir={folder}"]
    return Forked([*command, __file__, str(script), *map(str, arguments)], env=env, cwd=cwd)


def printed_by(rank: int, folder: Path, stream: str = "stdout") -> str:
    """Return the output of a worker of `torchrun`, in all attempts."""
    return "".join(log.read_text() for log in sorted(folder.glob(f"*/*/{rank}/{stream}.log")))


if __name__ == "__main__":  # a worker of `torchrun`
    torch.set_num_threads(1)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # what a test may wait for
    jitter.begin(f"{jitter.current_test()} on rank {os.environ['RANK']}")
    _run_script(sys.argv[1:])
