"""`meshverse run`: a program as it is, on Meshverse."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from .process_setup import Setup
from .program import Program

_EXAMPLES = """\
examples:
  torchrun --nproc-per-node 8 -m meshverse run train.py --lr 1e-4
  torchrun --nproc-per-node 8 -m meshverse run --share world -m my_package.train
  accelerate launch -m meshverse run train.py
  deepspeed --module meshverse run train.py

Options of Meshverse come before the program, the program's own after it. All ranks of a job run
with it, or none.
"""


def add_run(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "run",
        help="run a program as it is, with every mesh ours",
        description="Runs a program as Python would, after meshverse.install(): every DeviceMesh "
        "that it or a library makes is ours, also in processes that multiprocessing starts. At "
        "the end, rank 0 prints how many process groups were created and saved.",
        usage="meshverse run [--share {mesh,world}] [--explain] (SCRIPT | -m MODULE) ...",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--share",
        choices=("mesh", "world"),
        default="mesh",
        help="who shares process groups: a root mesh with what derives from it, or all of them "
        "(default: mesh)",
    )
    parser.add_argument(
        "--explain", action="store_true", help="print the table of each universe at the end, too"
    )
    parser.add_argument("-m", dest="is_module", action="store_true", help="it is a module")
    # One argument for all of this, or argparse would take the first "--" for itself.
    parser.add_argument(
        "program",
        nargs=argparse.REMAINDER,
        metavar="SCRIPT ...",
        help="script, or module with -m; and its own arguments",
    )
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> Callable[[], None]:
    given = arguments.program[arguments.program[:1] == ["--"] :]
    if not given:
        raise ValueError("run: name the program to run, a script or -m and a module.")
    program = Program(given[0], given[1:], is_module=arguments.is_module)
    Setup(arguments.share, arguments.explain).begin()
    program.load()
    return program.run
