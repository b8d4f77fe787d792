"""The result of an examination: judged from the measurements of all ranks; as data and a table."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from meshverse.planner import Places, Plan, plan
from meshverse.wording import aligned, counted, in_bytes, in_seconds, rank_list

_CLOCK_TOLERANCE = 1.0
"""Seconds by which clocks may differ: logs of the ranks are still in order, leases still hold."""

_SLOW = 2.0
"""Number of times the median of its equals from which on something is called slow."""

# Lines that may differ between ranks of one job: where each of them is.
_OWN = ("LOCAL_WORLD_SIZE", "NCCL_HOSTID", "TORCH_NCCL_DEBUG_INFO", "platform")


@dataclass(frozen=True)
class AxisExamined:
    """The process groups of one axis, or of several axes that share them.

    Attributes:
        axes: their names.
        layout: axis layout over the ranks, `sizes:strides`.
        size: ranks in a group.
        count: how many groups there are.
        is_right: whether the sums of all groups were.
        small_seconds: of an all-reduce of 8 bytes, in the median group.
        large_seconds: of one of `large_bytes`, in the median group.
        large_bytes: its size.
        bytes_per_second: bus bandwidth of the median group: each rank sends and receives
            2 (n - 1) / n of the bytes. None for groups of one rank.
        slow_groups: ranks of groups that take more than twice as long as the median.
        nodes: the largest number of nodes that a group spans.
        planned_nodes: the same if ranks stood in blocks of LOCAL_WORLD_SIZE; None where that is
            not set on rank 0.
    """

    axes: list[str]
    layout: str
    size: int
    count: int
    is_right: bool
    small_seconds: float
    large_seconds: float
    large_bytes: int
    bytes_per_second: float | None
    slow_groups: list[list[int]]
    nodes: int
    planned_nodes: int | None


@dataclass(frozen=True)
class Examination:
    """The state of a job's ranks. `str()` prints it, `to_dict()` gives data.

    Attributes:
        world: number of ranks.
        backend: of all groups.
        hosts: of every rank.
        problems: what is wrong, a sentence each.
        notes: what is slow or not as planned, a sentence each.
        store_seconds: of writing and reading a key of the store: median and largest of the ranks.
        clock_seconds: by which a rank's clock is ahead of rank 0's: smallest and largest.
        compute_seconds: of a product of two 512 x 512 matrices: median and largest of the ranks.
        stragglers: ranks that are slow for themselves, or that slow groups have in common.
        axes: the process groups.
        environment: versions and variables of rank 0.
    """

    world: int
    backend: str
    hosts: list[str]
    problems: list[str]
    notes: list[str]
    store_seconds: tuple[float, float]
    clock_seconds: tuple[float, float]
    compute_seconds: tuple[float, float]
    stragglers: list[int]
    axes: list[AxisExamined]
    environment: dict[str, str]

    @property
    def is_well(self) -> bool:
        """Whether there is no problem."""
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        """Return the same as plain data, ready for JSON."""
        return {**asdict(self), "is_well": self.is_well}

    def to_json(self) -> str:
        """Return `to_dict()` as a JSON document."""
        return json.dumps(self.to_dict(), indent=2)

    @staticmethod
    def from_dict(data: dict[str, Any]) -> Examination:
        """Return the examination that `to_dict` gave."""
        fields = {name: value for name, value in data.items() if name != "is_well"}
        return Examination(**{**fields, "axes": [AxisExamined(**one) for one in data["axes"]]})

    def rows(self) -> list[list[str]]:
        """Return the table of axes, titles first."""
        titles = ["axes", "layout", "size", "groups", "sums", "8 bytes"]
        large = in_bytes(self.axes[0].large_bytes) if self.axes else ""
        titles += [large, "bandwidth", "nodes a group", "slow groups"]
        return [titles, *map(_row, self.axes)]

    def facts(self) -> list[tuple[str, str]]:
        """Return the measurements of the ranks themselves: names and values."""
        hosts = counted(len(set(self.hosts)), "host")
        return [
            ("ranks", f"{self.world:,} on {hosts}, backend {self.backend}"),
            ("versions", ", ".join(f"{n} {self.environment[n]}" for n in ("meshverse", "torch"))),
            ("store", _median_and_largest(self.store_seconds)),
            (
                "clocks",
                f"{self.clock_seconds[0]:+.3f} to {self.clock_seconds[1]:+.3f} s of rank 0's",
            ),
            ("compute", _median_and_largest(self.compute_seconds)),
        ]

    def verdict(self) -> list[str]:
        """Return problems and notes, a line each, and the conclusion."""
        lines = [f"Problem: {problem}" for problem in self.problems]
        lines += [f"Note: {note}" for note in self.notes]
        last = "All is well." if self.is_well else f"{counted(len(self.problems), 'problem')}."
        return [*lines, last]

    def __str__(self) -> str:
        facts = aligned(self.facts())
        table = aligned(self.rows(), right=range(2, 9))
        return "\n".join([*facts, "", *table, "", *self.verdict()])


def _median_and_largest(seconds: Sequence[float]) -> str:
    return f"{in_seconds(seconds[0])} in the median, {in_seconds(seconds[1])} at most"


def _row(axis: AxisExamined) -> list[str]:
    speed = axis.bytes_per_second
    return [
        ", ".join(axis.axes),
        axis.layout,
        f"{axis.size:,}",
        f"{axis.count:,}",
        "right" if axis.is_right else "WRONG",
        in_seconds(axis.small_seconds) if axis.size > 1 else "-",
        in_seconds(axis.large_seconds) if axis.size > 1 else "-",
        "-" if speed is None else f"{in_bytes(int(speed))}/s",
        str(axis.nodes),
        "; ".join(rank_list(ranks) for ranks in axis.slow_groups) or "none",
    ]


# --- judging ------------------------------------------------------------------------------------


def judge(planned: Plan, measured: Sequence[dict[str, Any]]) -> Examination:
    """Say what is wrong and what is slow.

    Args:
        planned: the groups that were made.
        measured: what each rank has measured, in order of rank.
    """
    hosts = [str(each["host"]) for each in measured]
    problems, notes = [], []
    for name, ranks_of in differing([each["environment"] for each in measured]).items():
        values = "; ".join(
            f"{value} on rank{'s' * (len(ranks) > 1)} {rank_list(ranks)}"
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
                f"A group of axis {name} spans up to {counted(axis.nodes, 'host')}. With ranks in "
                f"blocks of LOCAL_WORLD_SIZE it would be {axis.planned_nodes}."
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
    places = Places("host", torch.tensor([number_of[host] for host in hosts]))
    per_node = measured[0]["environment"].get("LOCAL_WORLD_SIZE")
    node_size = None if per_node is None else int(per_node)
    placed = plan(planned.views, backend=planned.backend, places=[places], node_size=node_size)
    examined = []
    for index, group in enumerate(placed.groups):
        seen = [each["groups"][index] for each in measured]
        nodes, *planned_nodes = [crossing.max for crossing in group.crossings]
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
                nodes=nodes,
                planned_nodes=planned_nodes[0] if planned_nodes else None,
            )
        )
    return examined


def differing(environments: Sequence[Mapping[str, str]]) -> dict[str, dict[str, list[int]]]:
    """Find the lines of the ranks' environments that are not equal on all of them.

    Args:
        environments: of all ranks, in order of rank.

    Returns:
        By name of the line, which ranks have which value.
    """
    names = dict.fromkeys(name for each in environments for name in each)
    found: dict[str, dict[str, list[int]]] = {}
    for name in names:
        if name.startswith(_OWN):
            continue
        ranks_of: dict[str, list[int]] = {}
        for rank, each in enumerate(environments):
            ranks_of.setdefault(each.get(name, "not set"), []).append(rank)
        if len(ranks_of) > 1:
            found[name] = ranks_of
    return found


def clock_offsets(readings: Sequence[Sequence[float]]) -> list[float]:
    """Compute the seconds by which each rank's clock is ahead of that of rank 0.

    Args:
        readings: of each rank's clock, at the same moments.
    """
    first = readings[0]
    return [
        statistics.median(mine - base for mine, base in zip(each, first, strict=True))
        for each in readings
    ]


def slow_ranks(seconds: Sequence[float]) -> list[int]:
    """Find ranks that take more than twice as long as the median rank for the same work."""
    typical = statistics.median(seconds)
    return [rank for rank, mine in enumerate(seconds) if mine > _SLOW * typical]


def slow_groups(seconds: Mapping[tuple[int, ...], float]) -> list[tuple[int, ...]]:
    """Find groups of one axis that take more than twice as long as their median.

    Args:
        seconds: by the ranks of a group. Of less than three groups none is called slow.
    """
    if len(seconds) < 3:
        return []
    typical = statistics.median(seconds.values())
    return [ranks for ranks, mine in seconds.items() if mine > _SLOW * typical]


def stragglers(slow: Sequence[Sequence[tuple[int, ...]]]) -> list[int]:
    """Find ranks in slow groups of at least two axes: what these groups have in common.

    Args:
        slow: the slow groups of each axis.
    """
    times = Counter(rank for groups in slow for rank in {r for group in groups for r in group})
    most = max(times.values(), default=0)
    return sorted(rank for rank, count in times.items() if count == most) if most > 1 else []
