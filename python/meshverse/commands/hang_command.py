"""`meshverse hang`: why a job hangs, from dumps of torch's flight recorder."""

from __future__ import annotations

import argparse
import json

from meshverse.hang.named_groups import MeshNames
from meshverse.hang.records import read_dumps
from meshverse.hang.report import ReportFormatter
from meshverse.hang.verdicts import Cause, find_stuck
from meshverse.wording import counted

_EXAMPLES = """\
examples:
  meshverse hang /tmp/nccl_trace_rank_*
  meshverse hang dumps/ --mesh mesh.json --json

When NCCL's watchdog finds a timeout, torch writes a dump on each rank. The file's name is
TORCH_FR_DUMP_TEMP_FILE (older versions: TORCH_NCCL_DEBUG_INFO_TEMP_FILE) followed by the rank.
mesh.json contains what mesh.universe.explain().to_json() returns on any rank. The exit status is 0
if nothing is stuck, 1 if something is, and 2 if the dumps cannot be read.
"""


_MOST_FOLLOWERS = 8  # groups that follow from others and are printed


def add_hang(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "hang",
        help="why a job hangs, from dumps of torch's flight recorder",
        description="Prints for each stuck process group which call it is stuck in, which ranks "
        "wait there, which are missing, and where these are instead. Causes come first. Uses only "
        "the dumps: the job need not exist any more.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "dumps", nargs="+", metavar="DUMP", help="files of the ranks, or folders of such files"
    )
    parser.add_argument(
        "--mesh", metavar="FILE", help="JSON of mesh.universe.explain(), for axes and coordinates"
    )
    parser.add_argument("--json", action="store_true", help="print data instead of text")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    names = None if arguments.mesh is None else MeshNames.of_file(arguments.mesh)
    records = read_dumps(arguments.dumps)
    if names is not None:
        names.name(records)
    stuck = find_stuck(records)
    formatter = ReportFormatter() if names is None else ReportFormatter(names.coordinates)
    if arguments.json:
        print(json.dumps(formatter.data(stuck)))  # noqa: T201  # the command's output
    elif stuck:
        followers = [one for one in stuck if one.cause is Cause.FOLLOWS]
        left_out = followers[_MOST_FOLLOWERS:]
        shown = stuck[: len(stuck) - len(left_out)]
        print(formatter.text(stuck, shown))  # noqa: T201
        if left_out:
            more = counted(len(left_out), "more group")
            print(f"\nAnd {more} that follow from these: pass --json to see all.")  # noqa: T201
    else:
        print(f"No call is pending in the dumps of {counted(len(records), 'rank')}.")  # noqa: T201
    return 1 if stuck else 0
