"""Demonstration of Meshverse, in two parts.

1. In a fake world of 10,240 ranks, build a trainer's five views of one world with stock torch and
   with Meshverse, and compare time and process groups.
2. Start 4 real gloo processes that train a small transformer with FSDP2 and tensor parallelism on
   a Meshverse mesh, and compare their losses with one process that trains on the same batches.

Exits with 0 only if both sides of each part agree.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from rich import box
from rich.console import Console
from rich.table import Table
from torch.distributed.tensor import DTensor

from trainer_views import Degrees, answers, count_process_groups, five_views
from transformer import Recipe, parallelize, train
from worlds import fake_world, in_fresh_process, run_ranks

DEGREES = Degrees()
RANK = 777  # the one whose work is shown; all do the same amount
RUNS = 3

RECIPE = Recipe()
MESH_SHAPE = (2, 2)
MESH_AXES = ("dp_shard", "tp")
# Float32 sums in another order differ by some 1e-7 of the loss; a wrong gradient by far more.
RELATIVE_TOLERANCE = 1e-5

LIMIT_S = 90.0


class DemoError(Exception):
    """The two sides of a part do not agree."""


# --- part 1: five views of one world ------------------------------------------------------------


@dataclass(frozen=True)
class BuiltViews:
    """The cost of building the views on one rank.

    Attributes:
        seconds: it took.
        process_groups: of this rank afterwards, the default group included.
        answers: what each view says, by its name.
    """

    seconds: float
    process_groups: int
    answers: dict[str, dict[str, Any]]


def build_views(side: str) -> BuiltViews:
    """Build the views with one side's meshes; runs in a process of its own."""
    if side == "stock":
        from torch.distributed.device_mesh import init_device_mesh
    else:
        from meshverse import init_device_mesh  # only here: stock is to run untouched

    with fake_world(DEGREES.world_size, RANK):
        start = time.perf_counter()
        views = five_views(init_device_mesh, DEGREES)
        seconds = time.perf_counter() - start
        return BuiltViews(
            seconds, count_process_groups(), {name: answers(view) for name, view in views.items()}
        )


def show_views() -> None:
    print(
        f"1. Five views of a world of {DEGREES.world_size:,} ranks (fake world, one rank's work)\n"
        f"   Each side runs {RUNS} times, each time in a fresh process.\n"
    )
    stock, ours = [], []
    for run in range(1, RUNS + 1):
        stock.append(in_fresh_process(build_views, "stock", limit_s=LIMIT_S))
        ours.append(in_fresh_process(build_views, "ours", limit_s=LIMIT_S))
        seconds = f"stock {stock[-1].seconds * 1e3:.1f} ms, ours {ours[-1].seconds * 1e3:.2f} ms"
        print(f"   run {run} of {RUNS}: {seconds}", flush=True)
        check_same_answers(stock[-1].answers, ours[-1].answers)
    axes = sum(len(view["shape"]) for view in ours[0].answers.values())
    print(
        f"   {len(ours[0].answers)} meshes with {axes} axes: coordinates, ranks of every axis and "
        "mesh tensors agree.\n"
    )
    stock_s, ours_s = (statistics.median(one.seconds for one in side) for side in (stock, ours))
    stock_groups, our_groups = stock[0].process_groups, ours[0].process_groups
    table = Table("", "stock torch", "Meshverse", "ratio", box=box.SIMPLE_HEAD)
    for column in table.columns[1:]:
        column.justify = "right"
    table.add_row(
        "time (median)",
        f"{stock_s * 1e3:.1f} ms",
        f"{ours_s * 1e3:.2f} ms",
        f"{stock_s / ours_s:.0f}x",
    )
    table.add_row(
        "process groups, as c10d counts",
        str(stock_groups),
        str(our_groups),
        f"{stock_groups / our_groups:.1f}x",
    )
    Console().print(table)


def check_same_answers(stock: dict[str, Any], ours: dict[str, Any]) -> None:
    """Raise DemoError if any view says something else in the one than in the other."""
    if stock.keys() != ours.keys():
        raise DemoError(f"stock built the views {list(stock)}, Meshverse {list(ours)}")
    for view, expected in stock.items():
        for question, answer in expected.items():
            if ours[view][question] != answer:
                raise DemoError(
                    f"view {view!r}: {question} differ: stock {str(answer)[:200]}, "
                    f"Meshverse {str(ours[view][question])[:200]}"
                )


# --- part 2: training on real processes ---------------------------------------------------------


def train_rank(send: Callable[[Any], None]) -> None:
    """One rank's training; runs in a process of its own. Rank 0 sends what it sees."""
    import meshverse

    mesh = meshverse.init_device_mesh("cpu", MESH_SHAPE, mesh_dim_names=MESH_AXES)
    model = RECIPE.make_model()
    parallelize(model, mesh)
    for name, parameter in model.named_parameters():
        mesh_of = parameter.device_mesh if isinstance(parameter, DTensor) else None
        if not isinstance(mesh_of, meshverse.DeviceMesh):
            raise DemoError(f"parameter {name} is on {mesh_of!r}, which is no mesh of Meshverse's")
    is_first = dist.get_rank() == 0
    train(RECIPE, model, lambda *step: send(step) if is_first else None, mesh)
    if is_first:
        send(str(mesh.universe.explain()))


def show_training() -> None:
    ranks = MESH_SHAPE[0] * MESH_SHAPE[1]
    axes = ", ".join(f"{axis}={n}" for axis, n in zip(MESH_AXES, MESH_SHAPE, strict=True))
    print(f"\n2. Training on {ranks} gloo processes, FSDP2 + tensor parallel ({axes})")

    torch.set_num_threads(1)  # as the ranks, so that both sides sum in a similar order
    expected = train(RECIPE, RECIPE.make_model(), lambda step, loss: None)
    print(f"   One process is done; {ranks} processes start, each with its own torch.\n")
    columns = ("step", "one process", f"{ranks} processes", "difference")
    print("   " + "".join(f"{column:>14}" for column in columns), flush=True)

    losses: list[float] = []
    explanation: list[str] = []

    def receive(message: tuple[int, float] | str) -> None:
        if isinstance(message, str):
            explanation.append(message)
            return
        step, loss = message
        losses.append(loss)
        one, difference = expected[step], relative_difference(loss, expected[step])
        print(f"   {step + 1:>14}{one:>14.6f}{loss:>14.6f}{difference:>14.1e}", flush=True)

    run_ranks(train_rank, processes=ranks, receive=receive, limit_s=LIMIT_S)
    check_same_losses(losses, expected)
    print("\n   " + explanation[0].replace("\n", "\n   "))


def relative_difference(loss: float, expected: float) -> float:
    return abs(loss - expected) / abs(expected)


def check_same_losses(losses: Sequence[float], expected: Sequence[float]) -> None:
    """Raise DemoError if a step is missing or its loss differs by more than the tolerance."""
    if len(losses) != len(expected):
        raise DemoError(f"rank 0 reported {len(losses)} of {len(expected)} steps")
    differences = list(map(relative_difference, losses, expected))
    worst = max(differences)
    # Not `worst > tolerance`: a loss that is not a number must fail too.
    if not all(difference <= RELATIVE_TOLERANCE for difference in differences):
        raise DemoError(
            f"losses differ by up to {worst:.1e} of the loss, more than {RELATIVE_TOLERANCE:.0e}"
        )
    print(
        f"\n   {len(losses)} steps: losses agree to {worst:.1e} of the loss at worst "
        f"(tolerance {RELATIVE_TOLERANCE:.0e})."
    )


# --- both ---------------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.parse_args()
    start = time.perf_counter()
    try:
        show_views()
        show_training()
    except DemoError as error:  # anything else, such as a rank that raised, ends with its traceback
        print(f"\nFAILED: {error}", file=sys.stderr)
        return 1
    print(f"\nBoth parts agree. Done in {time.perf_counter() - start:.0f} s.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
