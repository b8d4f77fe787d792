"""`meshverse hang`: why a job hangs, from dumps of torch's flight recorder."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from meshverse.hang.dumps import Dumps, read_dumps
from meshverse.hang.records import complete_default_group
from meshverse.hang.report import ReportFormatter
from meshverse.hang.verdicts import Cause, find_stuck
from meshverse.wording import counted, rank_ranges

from .main import print_beside

if TYPE_CHECKING:
    from meshverse.hang.named_groups import MeshNames, MeshSizes

_EXAMPLES = """\
examples:
  meshverse hang /tmp/nccl_trace_rank_*
  meshverse hang dumps/ --mesh pp=2,dp=8,tp=8
  meshverse hang dumps/ --mesh mesh.json --json

When NCCL's watchdog finds a timeout, torch writes a dump on each rank. The file's name is
TORCH_FR_DUMP_TEMP_FILE (older versions: TORCH_NCCL_DEBUG_INFO_TEMP_FILE) followed by the rank.
Other files in the folder, and dumps of another hang, are left out and named.
mesh.json contains what mesh.universe.explain().to_json() returns on any rank. The exit status is 0
if nothing is stuck, 1 if something is, and 2 if there is no dump. A call that was made less than a
second before the dumps may not be stuck: it is printed, and counts only if the ranks' calls differ.
"""


_MOST_FOLLOWERS = 8  # calls that follow from others and are printed
_MOST_LEFT_OUT = 8  # files that are named
_SECONDS_BETWEEN = 10.0  # two questions to RAS
_SHORTEST_SECONDS = 1.0  # under which a call that a dump has as pending may not be stuck


def describe(parser: argparse.ArgumentParser) -> None:
    """Add the command's description and arguments."""
    parser.description = (
        "Works on the dumps of any torch program, whether it uses Meshverse or not. "
        "Prints for each stuck call which ranks wait in it, which are missing, and where these are "
        "instead. Causes come first. Uses only the dumps: the job need not exist any more."
    )
    parser.epilog = _EXAMPLES
    parser.add_argument(
        "dumps", nargs="*", metavar="DUMP", help="files of the ranks, or folders of such files"
    )
    parser.add_argument(
        "--live",
        metavar="HOST",
        help="ask NCCL's RAS (ncclras) about the running job with a process on this host, twice, "
        "and print the stacks (py-spy) of the processes here that it names",
    )
    parser.add_argument(
        "--mesh",
        metavar="SIZES|FILE",
        help="sizes of the mesh's axes, the outermost first, like pp=2,dp=8,tp=8, or JSON of "
        "mesh.universe.explain(): for axes and coordinates",
    )
    parser.add_argument("--json", action="store_true", help="print data instead of text")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    if not arguments.dumps and arguments.live is None:
        raise ValueError("There is nothing to read: pass dumps or folders, or --live HOST.")
    if arguments.live is not None and (arguments.json or arguments.mesh is not None):
        option = "--json" if arguments.json else "--mesh"
        raise ValueError(
            f"--live prints what NCCL says, as text: leave {option} out, or ask about the dumps in "
            "a second command."
        )
    status = 0 if arguments.live is None else _ask_ras(arguments.live)
    return max(status, _read(arguments)) if arguments.dumps else status


def _ask_ras(host: str) -> int:
    from meshverse.hang.ras import findings_in, query, report, stacks

    before = findings_in(query(host))
    time.sleep(_SECONDS_BETWEEN)
    now = findings_in(query(host))
    print("\n".join([*report(before, now, _SECONDS_BETWEEN), *stacks(now)]), "\n")  # noqa: T201
    return 1 if any(one in before for one in now) else 0


def _read(arguments: argparse.Namespace) -> int:
    names = None if arguments.mesh is None else _names(arguments.mesh)
    dumps = read_dumps(arguments.dumps)
    if names is None:
        complete_default_group(dumps.records, dumps.largest_rank(), is_guess=True)
    else:
        names.name(dumps.records)
    stuck = find_stuck(dumps.records)
    if any(one.cause in (Cause.MISMATCH, Cause.DEADLOCK, Cause.MISSING) for one in stuck):
        from meshverse.hang.skips import find_skips

        find_skips(stuck, stuck, dumps.history)
    formatter = ReportFormatter(
        why_no_dump=dumps.why_missing,
        shortest=_SHORTEST_SECONDS,
        whose_ranks="pass --mesh to find out which are missing",
    )
    if names is not None:
        formatter = formatter._replace(
            coordinates=names.coordinates, whose_ranks="--mesh has no such group"
        )
    if arguments.json:
        print(json.dumps(formatter.data(stuck)))  # noqa: T201  # the command's output
    elif stuck:
        followers = [one for one in stuck if one.cause is Cause.FOLLOWS]
        left_out = followers[_MOST_FOLLOWERS:]
        shown = stuck[: len(stuck) - len(left_out)]
        print(formatter.text(stuck, shown))  # noqa: T201
        if left_out:
            more = counted(len(left_out), "more call")
            print(f"\nAnd {more} that follow from these: pass --json to see all.")  # noqa: T201
    else:
        print(_nothing_is_pending(dumps))  # noqa: T201
    _name_left_out(dumps, print_beside if arguments.json else print)
    return 0 if all(map(formatter.may_be_short, stuck)) else 1


def _names(mesh: str) -> MeshNames | MeshSizes:
    from meshverse.hang.named_groups import MeshNames, MeshSizes

    is_file = bool(mesh) and Path(mesh).exists() and not Path(mesh).is_dir()
    return MeshNames.of_file(mesh) if is_file else MeshSizes.of_text(mesh)


def _nothing_is_pending(dumps: Dumps) -> str:
    records = dumps.records
    groups = (seen.ranks for record in records.values() for seen in record.groups.values())
    distinct = {ranks if isinstance(ranks, range) else tuple(ranks or ()) for ranks in groups}
    absent = sorted({rank for ranks in distinct for rank in ranks} - records.keys())
    kind = "call" if any(record.has_p2p for record in records.values()) else "collective"
    text = f"No {kind} is pending in the dumps of {counted(len(records), 'rank')}."
    if absent:
        are = "are no dumps" if len(absent) > 1 else "is no dump"
        text += f" There {are} of rank{'s' * (len(absent) > 1)} {rank_ranges(absent)}."
    return (
        f"{text} Gloo does not record sends and receives; with NCCL, the first call of a group or "
        "of a pair of ranks is recorded once all of them have made it. If the job hangs in one, "
        "start meshverse.watch() in it, or look at the stacks of its processes (py-spy dump)."
    )


def _name_left_out(dumps: Dumps, say: Callable[[str], object]) -> None:
    for one in dumps.left_out[:_MOST_LEFT_OUT]:
        say(f"Left out: {one.file}: {one.reason}.")
    if len(dumps.left_out) > _MOST_LEFT_OUT:
        more = counted(len(dumps.left_out) - _MOST_LEFT_OUT, "more file")
        say(f"Left out: {more}.")
