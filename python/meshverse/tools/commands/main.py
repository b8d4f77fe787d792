"""The command line `meshverse`: its commands and their exit status."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import re
import sys
from collections.abc import Callable, Sequence

from meshverse.tools.commit import version_and_commit
from meshverse.wording import did_you_mean, paragraph, printable

# Each is described by the module `NAME_command`, which is imported if the command is given.
_COMMANDS = {
    "run": "run an unchanged program with Meshverse's meshes",
    "plan": "list the process groups of a job, without running it",
    "doctor": "check a job's ranks, before the job",
    "hang": "why a job hangs, from dumps of torch's flight recorder, of any torch program",
    "versions": "print versions of this environment, for bug reports",
    "completion": "print a script that completes these commands in a shell",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        arguments: arguments of the command line; by default those of the process.

    Returns:
        The exit status: 0 for success, 1 if a check failed, 2 if the command could not run.
    """
    status: int | Callable[[], int] = 0
    try:
        try:
            status = _run(sys.argv[1:] if arguments is None else arguments)
        finally:
            # Now, as a closed pipe must raise here, not when the process exits.
            if sys.stdout is not None:  # None if the shell has closed it
                sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as head, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (ValueError, OSError) as error:
        return refuse(error)
    # Outside of the `try`: errors of the user's program pass through.
    return status() if callable(status) else status


def refuse(error: Exception) -> int:
    """Print why a command could not run; return its exit status."""
    text = str(error)
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        # As in other commands: "train.py: No such file or directory".
        text = f"{error.filename}: {error.strerror}"
    lines = "\n".join(map(printable, text.splitlines()))
    print_beside(f"meshverse: {lines}")
    return 2


def print_beside(text: str) -> None:
    """Print a line to the standard error, or nowhere if that is closed: the output has the data."""
    if sys.stderr is not None:  # else `print` would write to the standard output
        with contextlib.suppress(OSError):
            print(text, file=sys.stderr)  # noqa: T201


def _run(arguments: Sequence[str]) -> int | Callable[[], int]:
    if arguments[:1] == ["--version"]:  # whatever follows it
        print(f"meshverse {version_and_commit()}")  # noqa: T201
        return 0
    name = next((word for word in arguments if not word.startswith("-")), None)
    if name is not None and name not in _COMMANDS:
        raise ValueError(
            f"There is no command {name!r}.{did_you_mean(name, _COMMANDS)} The commands are "
            f"{', '.join(_COMMANDS)}."
        )
    parser, parsers = parser_of([] if name is None else [name])
    given, unknown = parser.parse_known_args(arguments)
    if unknown:
        asked = parser if name is None else parsers[name]
        known = re.findall(r"--[\w-]+", asked.format_usage())
        hints = (did_you_mean(word.partition("=")[0], known) for word in unknown)
        asked.error(f"unrecognized arguments: {' '.join(unknown)}.{next(hints)}")
    if not hasattr(given, "run"):
        parser.print_help()
        return 2
    status: int | Callable[[], int] = given.run(given)
    return status


def parser_of(
    described: Sequence[str] = tuple(_COMMANDS),
) -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """Return the parser of the command line, and those of the described commands, by name.

    Args:
        described: commands to import and to describe.
    """
    parser = argparse.ArgumentParser(
        prog="meshverse",
        description="Process meshes: run a program on them, plan them before a job, check its "
        "ranks, find out why it hangs.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--version",
        action="store_true",  # `_run` reads it
        help="print the version and the commit that it was built from",
    )
    commands = parser.add_subparsers(metavar="command")
    parsers = {}
    for name, help_ in _COMMANDS.items():
        parsers[name] = commands.add_parser(
            name,
            help=help_,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if name in described:
            importlib.import_module(f".{name}_command", __package__).describe(parsers[name])
            parsers[name].description = "\n".join(paragraph(parsers[name].description or ""))
    return parser, parsers
