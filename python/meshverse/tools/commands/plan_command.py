"""`meshverse plan`: the process groups of a job, without running it."""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import re
from pathlib import Path

from meshverse.parallel.meshes.degrees import ParallelismSizes
from meshverse.tools.planner import View, plan, saves, trainer_views
from meshverse.wording import did_you_mean

from .main import print_beside

_EXAMPLES = """\
examples:
  meshverse plan pp=8,dp=160,tp=8 --node-size 8
  meshverse plan pp=8,dp=160,tp=8,loss=pp*dp --view pp=8,replicate=4,shard=40,tp=8 --rank 777
  meshverse plan dp=-1,tp=8 --world-size 64
  meshverse plan pp=8,dp=160,tp=8 --view pp=8,replicate=4,shard=40,tp=8 --saves
  meshverse plan pp=8,dp=160,tp=8,edp=dp --isolate edp
  meshverse plan dp=4,tp=8 --topology topology.conf --nodes tux[0-3] --node-size 8
  meshverse plan --degrees dp_replicate=4,dp_shard=40,tp=8,pp=8,ep=8 --json
  meshverse plan pp=8,dp=160,tp=8 --node-size 8 --html plan.html --svg plan.svg
"""

_DEGREES = ("dp", "dp_replicate", "dp_shard", "cp", "tp", "pp", "ep")


def describe(parser: argparse.ArgumentParser) -> None:
    """Add the command's description and arguments."""
    parser.description = (
        "Lists the process groups that a job with these views would create: how many, "
        "how large, which nodes they cross, and how many torch would create. Starts no process and "
        "needs no GPU."
    )
    parser.epilog = _EXAMPLES
    parser.add_argument(
        "mesh",
        nargs="*",
        help="the world's axes in order, the last varying fastest: pp=8,dp=160,tp=8. "
        "loss=pp*dp adds an axis flattened from others; dp=-1 takes the rest of --world-size",
    )
    parser.add_argument("--view", action="append", default=[], help="another view of the world")
    parser.add_argument(
        "--degrees", help=f"a trainer's degrees ({', '.join(_DEGREES)}) as views: tp=8,dp_shard=40"
    )
    parser.add_argument("--world-size", type=int, help="ranks; by default those of the first view")
    parser.add_argument("--node-size", type=int, help="ranks on each node")
    parser.add_argument("--domain-size", type=int, help="ranks in each NVLink domain")
    parser.add_argument(
        "--topology",
        metavar="FILE",
        help="hardware of the ranks: JSON that Topology.save() wrote, or Slurm's topology.conf "
        "with --node-size",
    )
    parser.add_argument(
        "--nodes", help="the job's nodes in a topology.conf, in the order of ranks: tux[0-3,7]"
    )
    parser.add_argument(
        "--isolate",
        action="append",
        default=[],
        metavar="AXES",
        help="axes that get groups of their own, as with an isolate= tag each: edp,ep",
    )
    parser.add_argument("--backend", default="nccl", help="backend of all groups (default: nccl)")
    parser.add_argument("--rank", type=int, default=0, help="rank to list groups of (default: 0)")
    parser.add_argument(
        "--saves",
        action="store_true",
        help="print what sharing saves the rank against torch's DeviceMesh, by published figures",
    )
    parser.add_argument("--json", action="store_true", help="print data instead of a table")
    parser.add_argument("--html", metavar="FILE", help="also write a page that draws the views")
    parser.add_argument("--svg", metavar="FILE", help="also write a picture")
    parser.set_defaults(run=_run)


def one_view(words: list[str]) -> list[str]:
    """Return the axes of the command line as a list of one view, or of none.

    Raises:
        ValueError: the axes are separated by spaces.
    """
    if len(words) > 1:
        view = ",".join(word.strip(",") for word in words)
        raise ValueError(f"{' '.join(words)}: write the axes of a view without spaces, as {view}")
    return words


def _run(arguments: argparse.Namespace) -> int:
    views: list[View | str] = [*one_view(arguments.mesh)]
    if arguments.degrees is not None:
        views += _views_of_degrees(arguments.degrees, arguments.world_size)
    files = {name: getattr(arguments, name) for name in ("html", "svg", "topology")}
    given = [(name, os.path.realpath(file)) for name, file in files.items() if file is not None]
    for (name, file), (other, same) in itertools.combinations(given, 2):
        if file == same:
            raise ValueError(f"--{name} and --{other} are one file, {file}: pass two.")
    topology, node_size = None, arguments.node_size
    if arguments.topology is not None:
        from meshverse.tools.topology import Topology  # imports torch

        topology = Topology.from_file(
            arguments.topology, nodes=arguments.nodes, node_size=node_size
        )
        node_size = None  # the topology has it
    elif arguments.nodes is not None:
        raise ValueError(f"--nodes {arguments.nodes} needs a --topology FILE: pass one.")
    planned = plan(
        [*views, *arguments.view],
        world_size=arguments.world_size,
        backend=arguments.backend,
        rank=arguments.rank,
        node_size=node_size,
        domain_size=arguments.domain_size,
        topology=topology,
        isolate=[name.strip() for names in arguments.isolate for name in names.split(",")],
    )
    if arguments.html is not None:
        _write(arguments.html, planned.to_html())
    if arguments.svg is not None:
        _write(arguments.svg, planned.to_svg())
    # Last, because the reader may close the pipe, which ends the command.
    shown = saves(planned) if arguments.saves else planned
    print(json.dumps(shown.to_dict(), indent=2) if arguments.json else shown)  # noqa: T201
    return 0


def _write(name: str, text: str) -> None:
    Path(name).write_text(text, encoding="utf-8")
    print_beside(f"Wrote {name}")


def _views_of_degrees(text: str, world_size: int | None) -> list[View]:
    degrees: dict[str, int] = {}
    for part in text.split(","):
        name, _, value = (piece.strip() for piece in part.partition("="))
        can_be_rest = name in ("dp", "dp_shard")
        is_size = re.fullmatch(r"-1|[0-9]+" if can_be_rest else "[0-9]+", value)
        if name not in _DEGREES or not is_size or name in degrees:
            raise ValueError(
                f"{part!r} in --degrees {text}: write each degree once as name=size, of the names "
                f"{', '.join(_DEGREES)}; dp or dp_shard may be -1, for the other ranks."
                f"{'' if name in _DEGREES else did_you_mean(name, _DEGREES)}"
            )
        degrees[name] = int(value)
    if "dp" in degrees and "dp_shard" in degrees:
        raise ValueError(
            f"--degrees {text} has dp and dp_shard. dp is dp_replicate times dp_shard: leave one "
            "of them out."
        )
    if -1 in degrees.values():
        if world_size is None:
            raise ValueError(f"--degrees {text} has a size of -1: pass --world-size.")
        degrees = {name: size for name, size in degrees.items() if size != -1}
    replicas = degrees.get("dp_replicate", 1)
    dp: int | None = degrees.get("dp", replicas * degrees.get("dp_shard", 1))
    sizes = {f"{name}_size": degrees.get(name, 1) for name in ("cp", "tp", "pp", "ep")}
    if world_size is None:
        world_size = (dp or 1) * math.prod(degrees.get(name, 1) for name in ("cp", "tp", "pp"))
    elif "dp" not in degrees and "dp_shard" not in degrees:
        dp = None  # the rest of the world
    parallelism = ParallelismSizes(dp_size=dp, dp_replicate_size=replicas, **sizes)
    return trainer_views(parallelism, world_size)
