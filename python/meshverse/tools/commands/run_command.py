"""`meshverse run`: run an unchanged program on Meshverse."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from .main import refuse
from .program import NoProgramError, Program

_EXAMPLES = """\
examples:
  torchrun --nproc-per-node 8 -m meshverse run train.py --lr 1e-4
  torchrun --nproc-per-node 8 -m meshverse run --share world -m my_package.train
  accelerate launch -m meshverse run train.py
  deepspeed --module meshverse run train.py

Write Meshverse's options before the program and the program's own options after it. Use
`meshverse run` on all ranks of a job or on none.
"""


def describe(parser: argparse.ArgumentParser) -> None:
    """Add the command's description and arguments."""
    parser.description = (
        "Runs a program as Python would, after meshverse.install(): every DeviceMesh "
        "that it or a library creates is a Meshverse mesh, also in processes that multiprocessing "
        "starts. At the end, rank 0 prints how many process groups were created and saved."
    )
    parser.epilog = _EXAMPLES
    parser.usage = "meshverse run [--share {mesh,world}] [--explain] (SCRIPT | -m MODULE) ..."
    parser.add_argument(
        "--share",
        choices=("mesh", "world"),
        default="mesh",
        help="which meshes share process groups: a root mesh with the meshes that derive from it, "
        "or all meshes of the world (default: mesh)",
    )
    parser.add_argument(
        "--explain", action="store_true", help="also print the table of each universe at the end"
    )
    parser.add_argument("-m", dest="is_module", action="store_true", help="run a module")
    # One argument for the program and its own: otherwise argparse would drop the first "--".
    parser.add_argument(
        "program",
        nargs=argparse.REMAINDER,
        metavar="SCRIPT ...",
        help="script, or module with -m, and its arguments",
    )
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> Callable[[], int]:
    given = arguments.program[arguments.program[:1] == ["--"] :]
    if not given:
        raise ValueError("run: no program is named. Pass a script, or -m and a module.")
    program = Program(given[0], given[1:], is_module=arguments.is_module)
    from .process_setup import Setup  # imports torch

    Setup(arguments.share, arguments.explain).begin_in_first_process()

    def start() -> int:
        try:
            program.load()
        except NoProgramError as error:
            return refuse(error)
        program.run()
        return 0

    return start
