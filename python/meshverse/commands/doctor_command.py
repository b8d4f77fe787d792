"""`meshverse doctor`: check a job's ranks before the job."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from datetime import timedelta

from meshverse.doctor import Examination, examine
from meshverse.doctor.roll_call import NotAllHereError

__all__ = ["add_doctor"]

_EXAMPLES = """\
examples:
  torchrun --nproc-per-node 4 -m meshverse doctor dp=2,tp=2
  torchrun ... -m meshverse doctor dp=64,tp=8 --view pp=8,dp=8,tp=8 --timeout 120 --json

srun sets other variables than torchrun. Pass them on, in a job with --ntasks-per-node:
  export MASTER_ADDR=$(scontrol show hostnames | head -n 1) MASTER_PORT=29500
  srun bash -c 'RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID \\
    LOCAL_WORLD_SIZE=$SLURM_NTASKS_PER_NODE python -m meshverse doctor dp=64,tp=8'

The exit status is 0 if all is well, 1 if there is a problem or a rank does not answer, and 2 if
what was asked for cannot be done.
"""


_TABLE_WIDTH = 110
_LARGEST = 1_000_000


def add_doctor(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "doctor",
        help="check a job's ranks, before the job",
        description="Are all ranks there, equal, and do they reach each other? All ranks of a job "
        "run this together. It compares versions and variables, measures the store and the clocks, "
        "makes every process group of these views, and checks and times each by all-reduces.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("mesh", help="the world's axes in order, as of meshverse plan: dp=2,tp=2")
    parser.add_argument("--view", action="append", default=[], help="another view of the world")
    parser.add_argument("--backend", help="of all groups (default: nccl where there is CUDA)")
    parser.add_argument(
        "--timeout", type=float, default=60, help="seconds to wait for a rank (default: 60)"
    )
    parser.add_argument(
        "--megabytes", type=float, default=16, help="of the large all-reduce (default: 16)"
    )
    parser.add_argument("--json", action="store_true", help="print data instead of tables")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    for name in ("timeout", "megabytes"):
        if not 0 < getattr(arguments, name) <= _LARGEST:
            raise ValueError(
                f"--{name} {getattr(arguments, name)}: give a number above 0, {_LARGEST:,} at most."
            )
    try:
        found = examine(
            [arguments.mesh, *arguments.view],
            backend=arguments.backend,
            timeout=timedelta(seconds=arguments.timeout),
            large_bytes=max(int(arguments.megabytes * 2**20), 1),
        )
    except NotAllHereError as error:
        print(f"meshverse doctor: {error}", file=sys.stderr)  # noqa: T201
        return 1
    if int(os.environ["RANK"]) == 0:
        # rich ends the process where nobody reads; the status says what was found all the same
        with contextlib.suppress(BrokenPipeError, SystemExit):
            if arguments.json:
                print(found.to_json())  # noqa: T201
            else:
                _show(found)
    return 0 if found.is_well else 1


def _show(found: Examination) -> None:
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        print(found)  # noqa: T201
        return
    console = Console()
    console.width = max(console.width, _TABLE_WIDTH)  # a log, too, has room for it
    facts = Table(show_header=False, box=None)
    for row in found.facts():
        facts.add_row(*row)
    titles, *rows = found.rows()
    table = Table()
    for title in titles:
        is_number = title not in ("axes", "layout", "slow groups")
        table.add_column(title, justify="right" if is_number else "left")
    for one in rows:
        table.add_row(*one)
    console.print(facts, table, *found.verdict(), sep="\n", markup=False, highlight=False)
