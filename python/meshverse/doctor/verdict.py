"""What the measurements of all ranks say of a job."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import torch

from meshverse.planner import Places, Plan, plan
from meshverse.report.tables import shortened_ranks

from .examination import AxisExamined, Examination
from .outliers import clock_offsets, differing, slow_groups, slow_ranks, stragglers

__all__ = ["judge"]

_CLOCK_TOLERANCE = 1.0
"""Seconds by which clocks may differ: logs of the ranks are still in order, leases still hold."""


def judge(planned: Plan, measured: Sequence[dict[str, Any]]) -> Examination:
    """What is wrong and what is slow.

    Args:
        planned: the groups that were made.
        measured: what each rank has measured, in order of rank.
    """
    hosts = [str(each["host"]) for each in measured]
    problems, notes = [], []
    for name, ranks_of in differing([each["environment"] for each in measured]).items():
        values = "; ".join(
            f"{value} on rank{'s' * (len(ranks) > 1)} {shortened_ranks(ranks)}"
            for value, ranks in ranks_of.items()
        )
        problems.append(f"{name} is not the same on all ranks: {values}.")
    offsets = clock_offsets([each["clock"] for each in measured])
    for rank, offset in enumerate(offsets):
        if abs(offset) > _CLOCK_TOLERANCE:
            problems.append(
                f"The clock of rank {rank} on {hosts[rank]} is {offset:+.1f} s off that of rank 0."
            )
    axes = _judge_axes(planned, measured, hosts)
    for axis in axes:
        name = ", ".join(axis.axes)
        if not axis.is_right:
            problems.append(f"An all-reduce along axis {name} gave a wrong sum.")
        if axis.planned_nodes not in (None, axis.nodes):
            notes.append(
                f"A group of axis {name} spans up to {axis.nodes} hosts. With ranks in blocks of "
                f"LOCAL_WORLD_SIZE it would be {axis.planned_nodes}."
            )
    compute = [float(each["compute_seconds"]) for each in measured]
    slow = slow_ranks(compute)
    notes += [
        f"Rank {rank} on {hosts[rank]} computes {compute[rank] / statistics.median(compute):.1f} "
        "times as long as the median rank."
        for rank in slow
    ]
    common = stragglers([[tuple(group) for group in axis.slow_groups] for axis in axes])
    notes += [f"Rank {rank} on {hosts[rank]} is in slow groups of several axes." for rank in common]
    stores = [float(each["store_seconds"]) for each in measured]
    return Examination(
        world=planned.world,
        backend=planned.backend,
        hosts=hosts,
        problems=problems,
        notes=notes,
        store_seconds=(statistics.median(stores), max(stores)),
        clock_seconds=(min(offsets), max(offsets)),
        compute_seconds=(statistics.median(compute), max(compute)),
        stragglers=sorted({*slow, *common}),
        axes=axes,
        environment=measured[0]["environment"],
    )


def _judge_axes(
    planned: Plan, measured: Sequence[dict[str, Any]], hosts: Sequence[str]
) -> list[AxisExamined]:
    number_of = {host: number for number, host in enumerate(dict.fromkeys(hosts))}
    places = [Places("node", torch.tensor([number_of[host] for host in hosts]))]
    per_node = measured[0]["environment"].get("LOCAL_WORLD_SIZE")
    real = plan(planned.views, backend=planned.backend, places=places)
    meant = None
    if per_node is not None:
        meant = plan(planned.views, backend=planned.backend, node_size=int(per_node))
    examined = []
    for index, group in enumerate(planned.groups):
        seen = [each["groups"][index] for each in measured]
        large = {tuple(one["ranks"]): float(one["large_seconds"]) for one in seen}
        seconds, size = statistics.median(large.values()), group.size
        moved = 2 * (size - 1) / size * seen[0]["large_bytes"]
        examined.append(
            AxisExamined(
                axes=list(group.axes),
                layout=group.layout,
                size=size,
                count=group.count,
                is_right=all(one["is_right"] for one in seen),
                small_seconds=statistics.median(one["small_seconds"] for one in seen),
                large_seconds=seconds,
                large_bytes=seen[0]["large_bytes"],
                bytes_per_second=moved / seconds if size > 1 else None,
                slow_groups=[list(ranks) for ranks in slow_groups(large)],
                nodes=real.groups[index].crossings[0].max,
                planned_nodes=None if meant is None else meant.groups[index].crossings[0].max,
            )
        )
    return examined
