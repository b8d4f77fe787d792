"""`meshverse versions`: versions of this environment, for bug reports."""

from __future__ import annotations

import argparse


def describe(parser: argparse.ArgumentParser) -> None:
    """Add the command's description and arguments."""
    parser.description = "Prints versions, and environment variables that change what c10d does."
    parser.set_defaults(run=_run)


def _run(_: argparse.Namespace) -> int:
    from meshverse.tools.commit import version_and_commit
    from meshverse.tools.environment import environment_report

    report = environment_report() | {"meshverse": version_and_commit()}
    width = max(map(len, report))
    for name, value in report.items():
        print(f"{name.ljust(width)}  {value}")  # noqa: T201
    return 0
