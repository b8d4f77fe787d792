"""`meshverse doctor`: check a job's ranks before the job."""

from __future__ import annotations

import argparse
from datetime import timedelta
from typing import TYPE_CHECKING

from meshverse.wording import printable

from .main import print_beside
from .plan_command import one_view

if TYPE_CHECKING:
    from meshverse.tools.doctor import Examination

_EXAMPLES = """\
examples:
  torchrun --nproc-per-node 4 -m meshverse doctor
  torchrun --nproc-per-node 4 -m meshverse doctor dp=2,tp=2
  torchrun ... -m meshverse doctor dp=-1,tp=8 --view pp=8,dp=-1,tp=8 --timeout 120 --json

srun sets other variables than torchrun. Translate them, in a job with --ntasks-per-node:
  export MASTER_ADDR=$(scontrol show hostnames | head -n 1) MASTER_PORT=29500
  srun bash -c 'RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID \\
    LOCAL_WORLD_SIZE=$SLURM_NTASKS_PER_NODE python -m meshverse doctor dp=64,tp=8'

One rank prints. The exit status is 0 if all is well, 1 if there is a problem or a rank does not
answer, and 2 if the command cannot run.
"""


_LARGEST = 1_000_000


def describe(parser: argparse.ArgumentParser) -> None:
    """Add the command's description and arguments."""
    parser.description = (
        "Checks that all ranks have joined, have equal environments and reach one "
        "another. All ranks of a job must run this together. It compares versions and variables, "
        "measures the store and the clocks, creates every process group of these views, and checks "
        "and times each by all-reduces."
    )
    parser.epilog = _EXAMPLES
    parser.add_argument(
        "mesh",
        nargs="*",
        help="the world's axes in order, as in meshverse plan: dp=2,tp=2 (default: one axis of all "
        "ranks)",
    )
    parser.add_argument("--view", action="append", default=[], help="another view of the world")
    parser.add_argument("--backend", help="backend of all groups (default: nccl if there is CUDA)")
    parser.add_argument(
        "--timeout", type=float, default=60, help="seconds to wait for a rank (default: 60)"
    )
    parser.add_argument(
        "--megabytes", type=float, default=16, help="size of the large all-reduce (default: 16)"
    )
    parser.add_argument("--json", action="store_true", help="print data instead of tables")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    from meshverse.tools.doctor import NotAllHereError, examine
    from meshverse.tools.doctor.membership import report_once

    unwritten: list[OSError] = []

    def report(result: Examination | Exception) -> None:
        try:
            if isinstance(result, Exception):
                lines = "\n".join(map(printable, str(result).splitlines()))
                print_beside(f"meshverse doctor: {lines}")
            else:
                print(result.to_json() if arguments.json else result, flush=True)  # noqa: T201
        except BrokenPipeError:  # nobody reads; the status stays
            pass
        except OSError as error:  # such as a full disk: of this rank alone
            unwritten.append(error)

    try:
        for name in ("timeout", "megabytes"):
            if not 0 < getattr(arguments, name) <= _LARGEST:
                raise ValueError(
                    f"--{name} {getattr(arguments, name)}: pass a number above 0, at most "
                    f"{_LARGEST:,}."
                )
        found = examine(
            [*one_view(arguments.mesh), *arguments.view],
            backend=arguments.backend,
            timeout=timedelta(seconds=arguments.timeout),
            large_bytes=max(int(arguments.megabytes * 2**20), 1),
            report=report,
            own_process=True,
        )
    except NotAllHereError:  # one rank has reported it
        return 1
    except (OSError, ValueError) as error:
        report_once(error, report)
        return 2
    if unwritten:
        raise unwritten[0]
    return 0 if found.is_well else 1
