"""Running the programs of the documentation's pages; `helpers.pages` finds them."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import meshverse
from helpers.pages import Program
from helpers.worlds import fake_world

__all__ = ["TORCHRUN_SECONDS", "Ended", "is_shown", "run_alone", "run_here", "run_script"]

TORCHRUN_SECONDS = 240  # torchrun, and imports by four processes on a busy machine
_FAKE = re.compile(r"fake (\d+)(?:, rank (\d+))?")

Ended = tuple[str, list[str], str]
"""What a program printed; what it raised and logged; the traceback, or "" if it ended well."""


def run_here(source: str, file: str) -> Ended:
    """Run a program, which is that file to tracebacks, in the world that is there.

    Pages write "cuda" where a job has GPUs: here it is read as "cpu".
    """
    code = compile(source.replace('"cuda"', '"cpu"'), file, "exec")
    said: list[str] = []
    failed = ""
    with _logged(said), contextlib.redirect_stdout(io.StringIO()) as printed:
        try:
            exec(code, _names(source))
        except Exception as error:  # noqa: BLE001  (whatever the page's program raises)
            said.append("".join(traceback.format_exception_only(error)))
            failed = traceback.format_exc()
        finally:
            meshverse.uninstall()
    return printed.getvalue(), said, failed


def run_alone(program: Program) -> Ended:
    """Run a program in this process: in a fake world, or in one that it makes itself."""
    fake = _FAKE.fullmatch(program.how)
    with contextlib.ExitStack() as stack:
        if fake is not None:
            stack.enter_context(fake_world(int(fake[1]), int(fake[2] or 0)))
        else:
            stack.callback(_end_world, sys.excepthook)
        return run_here(program.source, program.file)


def run_script(program: Program, processes: int, folder: Path) -> Ended:
    """Run a program under torchrun, as a script of its own; of what it prints, rank 0's."""
    script = folder / "page.py"
    script.write_text(program.source, encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={processes}", "--local-ranks-filter=0", str(script)]
    run = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=TORCHRUN_SECONDS,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=folder,
        check=False,
    )
    return run.stdout, [run.stderr], run.stderr if run.returncode else ""


def is_shown(text: str, said: str) -> bool:
    """Whether a text is what was said: "..." is for anything, and lines may break anywhere."""
    any_words, any_letters = r"\s(?:.*?\s)?", ".*?"
    pattern = r"\s+".join(re.escape(word) for word in text.split())
    pattern = pattern.replace(r"\s+\.\.\.\s+", any_words).replace(r"\.\.\.", any_letters)
    return re.fullmatch(pattern, said.strip(), re.DOTALL) is not None


def _names(source: str) -> dict[str, Any]:
    """What the pages' short examples use without importing it."""
    init = meshverse.init_device_mesh
    return {
        "__name__": "page",
        "DeviceMesh": meshverse.DeviceMesh,
        "Universe": meshverse.Universe,
        "dist": dist,
        "init_device_mesh": _filled_in(init) if "init_device_mesh(..." in source else init,
        "meshverse": meshverse,
        "timedelta": timedelta,
        "torch": torch,
    }


def _filled_in(init: Callable[..., Any]) -> Callable[..., Any]:
    """`init_device_mesh(..., lazy=True)`: the dots are for a mesh of all ranks, 2 x the rest."""

    def init_device_mesh(*given: Any, **keywords: Any) -> Any:
        if given[:1] == (...,):
            shape = (2, dist.get_world_size() // 2)
            return init("cpu", shape, **{"mesh_dim_names": ("dp", "tp"), **keywords})
        return init(*given, **keywords)

    return init_device_mesh


@contextlib.contextmanager
def _logged(said: list[str]) -> Iterator[None]:
    """Collect what Meshverse logs."""
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("meshverse")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def _end_world(hook: Any) -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    sys.excepthook = hook  # torch wraps it once more in every world
