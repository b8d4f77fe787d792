"""The command line `meshverse`: its commands and their exit status."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence

import meshverse
from meshverse.tools.environment import environment_report
from meshverse.tools.pictures.model import printable

from .doctor_command import add_doctor
from .hang_command import add_hang
from .plan_command import add_plan
from .run_command import add_run


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        arguments: arguments of the command line; by default those of the process.

    Returns:
        The exit status: 0 for success, 1 if a check failed, 2 if the command could not run.
    """
    status: int | Callable[[], None] = 0
    try:
        try:
            status = _run(arguments)
        finally:
            # Now, as a closed pipe must raise here, not when the process exits.
            if sys.stdout is not None:  # None if the shell has closed it
                sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as head, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (ValueError, OSError) as error:
        lines = "\n".join(map(printable, str(error).splitlines()))
        print(f"meshverse: {lines}", file=sys.stderr)  # noqa: T201
        return 2
    if callable(status):  # the user's program, whose errors pass through
        status()
        return 0
    return status


def _run(arguments: Sequence[str] | None) -> int | Callable[[], None]:
    parser = argparse.ArgumentParser(
        prog="meshverse",
        description="Process meshes: plan them before a job, check ranks, find out why jobs hang.",
    )
    parser.add_argument("--version", action="version", version=f"meshverse {meshverse.__version__}")
    commands = parser.add_subparsers(metavar="command")
    add_plan(commands)
    add_doctor(commands)
    add_hang(commands)
    add_run(commands)
    commands.add_parser(
        "versions", help="print versions of this environment, for bug reports"
    ).set_defaults(run=_print_versions)
    given = parser.parse_args(arguments)
    if not hasattr(given, "run"):
        parser.print_help()
        return 2
    status: int | Callable[[], None] = given.run(given)
    return status


def _print_versions(_: argparse.Namespace) -> int:
    report = environment_report()
    width = max(map(len, report))
    for name, value in report.items():
        print(f"{name.ljust(width)}  {value}")  # noqa: T201
    return 0
