"""The command line: which suites, how large, and where the results go."""

from __future__ import annotations

import argparse
import importlib
import shlex
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

import page
from harness import Run
from machine import circumstances
from reports import Report

__all__ = ["main"]

HERE = Path(__file__).resolve().parent

SUITES = [
    "operations",
    "layouts",
    "keys",
    "parallel_meshes",
    "trainer",
    "processes",
    "store",
    "waiting",
    "hang",
    "rank_lists",
    "memory",
    "one_graph",
    "experts",
    "reshard",
    "snapshot",
    "restarts",
    "gpu",
]


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure Meshverse against stock torch.")
    parser.add_argument("suites", nargs="*", help=f"of {', '.join(SUITES)}; by default all")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="small scales, to see that everything works; took over 15 minutes on two busy cores, "
        "not timed on idle ones",
    )
    parser.add_argument("--results", type=Path, help="folder; by default results/, or build/")
    arguments = parser.parse_args()
    if unknown := set(arguments.suites) - set(SUITES):
        parser.error(f"unknown suites {sorted(unknown)}: choose of {', '.join(SUITES)}")
    # A quick run shows that everything works; its figures do not take the place of real ones.
    default = HERE.parent / "build" / "quick-benchmarks" if arguments.quick else HERE / "results"
    folder = arguments.results or default
    folder.mkdir(parents=True, exist_ok=True)

    console = Console()
    reports = run_suites(arguments.suites or SUITES, arguments.quick, folder, console)
    _show(reports, console)
    if folder == HERE / "results":
        page.write(HERE.parent, folder)
    console.print(f"Tables, samples and plots: {folder}")
    return 0


def run_suites(names: list[str], quick: bool, folder: Path, console: Console) -> list[Report]:
    """Measure suites in turn and save each when it is done.

    A terminal shows a bar for each suite; a file or pipe gets a line when each is done.
    """
    if not console.is_terminal:
        return [_line_for(name, quick, folder, console) for name in names]
    columns = (
        TextColumn("{task.description:<16}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[now]}"),
    )
    with Progress(*columns, console=console) as progress:
        return [_bar_for(name, quick, folder, progress) for name in names]


def _line_for(name: str, quick: bool, folder: Path, console: Console) -> Report:
    report = _measure(name, Run(quick), folder)
    console.print(f"{name}: {_verdict(report)}, {report.seconds:.0f} s", soft_wrap=True)
    return report


def _bar_for(name: str, quick: bool, folder: Path, progress: Progress) -> Report:
    bar = progress.add_task(name, total=None, now="")

    def tell(done: int, total: int, now: str) -> None:
        progress.update(bar, completed=done, total=total, now=now)

    report = _measure(name, Run(quick, tell), folder)
    total = progress.tasks[bar].total or 1
    progress.update(bar, completed=total, total=total, now=_verdict(report))
    progress.stop_task(bar)
    return report


def _measure(name: str, run: Run, folder: Path) -> Report:
    command = shlex.join(["python", "benchmarks/run.py", *sys.argv[1:]])
    suite = importlib.import_module(f"suites.{name}")
    start = time.monotonic()
    outcome = suite.run(run)
    seconds = time.monotonic() - start
    facts = suite.TITLE, suite.METHOD, suite.SCALE
    report = Report(name, *facts, outcome, circumstances(command), seconds)
    if outcome.measurements:  # else it was skipped, for want of a GPU
        import plots  # and matplotlib, once there is something to draw

        report.save(folder)
        plots.draw(folder, name)
    return report


def _verdict(report: Report) -> str:
    checks = report.outcome.checks
    if not report.outcome.measurements:
        return " ".join(report.outcome.notes) or "nothing measured"
    met = sum(check.is_met for check in checks)
    return f"{met} of {len(checks)} targets met" if checks else "done"


def _show(reports: list[Report], console: Console) -> None:
    missed = [(report, check) for report in reports for check in report.outcome.checks]
    missed = [(report, check) for report, check in missed if not check.is_met]
    if not missed:
        console.print("All targets were met.")
        return
    table = Table("suite", "claim", "measured", "target", title="Targets missed")
    for report, check in missed:
        sign = "≥" if check.at_least else "≤"
        table.add_row(
            report.name, check.claim, f"{check.figure:,.3g}", f"{sign} {check.limit:,.3g}"
        )
    console.print(table)
