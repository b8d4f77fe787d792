"""The part of the documentation on moving weights, filled in from the suite's results."""

from __future__ import annotations

import statistics
from typing import Any

from harness import OURS, STOCK, ratio_of
from reports import amount, table

__all__ = ["moves"]

_ONE_RANK, _FLOOR, _CORE = "through one rank", "floor", "its core"
_SIDES = (STOCK, _ONE_RANK, OURS, _FLOOR)
_PROCESSES = 8
_MOVES_RAN_ON = (
    "Real gloo processes on one machine, 8 ranks; times: wall clock from barrier to barrier; bytes "
    "and memory: no clock. Medians."
)
_PLANS_RAN_ON = "Arithmetic without process groups; processor time of one thread. Medians."


def moves(reports: dict[str, dict[str, Any]], prefix: str) -> str:
    """Return the costs of resharding on real processes, and of its plan in large jobs."""
    if "reshard" not in reports:
        return "Not measured yet."
    report = reports["reshard"]
    measured = report["measurements"]
    moved = [one for one in measured if one["scale"] == _PROCESSES]
    planned = [one for one in measured if _CORE in one["samples"]]
    where = f"Measured on {report['machine']}; {report['versions']}; {report['date'].split()[0]}"
    load = f"load average at the end {report['load average at the end']}."
    return "\n\n".join(
        [
            f"*{_MOVES_RAN_ON}*",
            table(
                [
                    "to be moved",
                    *_SIDES,
                    f"{STOCK} / {OURS}",
                    f"{_ONE_RANK} / {OURS}",
                ],
                map(_move, moved),
            ),
            f"*{_PLANS_RAN_ON}*",
            table(["of 1,000 tensors", "trainers", OURS, _CORE], map(_plan, planned)),
            f"{where}; {load}",
        ]
    )


def _move(one: dict[str, Any]) -> list[str]:
    samples = one["samples"]
    ratios = [
        f"{ratio_of(samples[side], samples[OURS]):.3g}x" if OURS in samples else ""
        for side in (STOCK, _ONE_RANK)
    ]
    return [one["operation"], *(_median(one, side) for side in _SIDES), *ratios]


def _plan(one: dict[str, Any]) -> list[str]:
    medians = [_median(one, side) for side in (OURS, _CORE)]
    return [one["operation"], f"{one['scale']:,}", *medians]


def _median(one: dict[str, Any], side: str) -> str:
    samples = one["samples"].get(side)
    return amount(statistics.median(samples), one["unit"]) if samples else ""
