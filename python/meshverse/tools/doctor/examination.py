"""Result of an examination, from the measurements of all ranks; as data and as a table."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from meshverse.tools.planner import Places, Plan, plan
from meshverse.wording import aligned, counted, in_bytes, in_seconds, rank_list

_CLOCK_TOLERANCE = 1.0
"""Seconds by which clocks may differ without a problem: logs of several ranks can be compared."""

_SLOW = 2.0
"""Ratio to the median above which a rank or a group is called slow."""

# Lines of the environment report that depend on the host, so that ranks may disagree on them.
_OWN = ("LOCAL_WORLD_SIZE", "NCCL_HOSTID", "TORCH_NCCL_DEBUG_INFO", "platform")


@dataclass(frozen=True)
class AxisExamined:
    """Measurements of the process groups of one axis, or of several axes that share them.

    Attributes:
        axes: names of the axes.
        layout: axis layout over the ranks, `sizes:strides`.
        size: number of ranks in a group.
        count: number of groups.
        is_right: whether all-reduces gave the right sums in all groups.
        small_seconds: time of an all-reduce of 8 bytes; the median over all ranks.
        large_seconds: time of an all-reduce of `large_bytes`; the median over the groups.
        large_bytes: size of the large all-reduce on each rank.
        bytes_per_second: bus bandwidth of the large all-reduce, for which each of n ranks sends and
            receives 2 (n - 1) / n of the bytes. None for groups of one rank.
        slow_groups: ranks of each group that takes more than twice the median.
        nodes: largest number of hosts that a group spans.
        planned_nodes: the same number if each host had LOCAL_WORLD_SIZE consecutive ranks; None if
            this variable is not set on rank 0.
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
    """Result of an examination of a job's ranks. `str()` gives tables, `to_dict()` data.

    Attributes:
        world: number of ranks.
        backend: backend of all groups.
        hosts: host name of every rank.
        problems: problems found, one sentence each.
        notes: what is slow or not as planned, one or two sentences each.
        store_seconds: time to write and read a key of the store: median and maximum of the ranks.
        clock_seconds: lead of a rank's clock over that of rank 0: minimum and maximum.
        compute_seconds: time of a product of two 512 x 512 matrices: median and maximum.
        stragglers: ranks that are slow alone, or that slow groups of several axes have in common.
        axes: measurements of the process groups.
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
        """Whether no problem was found."""
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        """Return the examination as plain data, ready for JSON."""
        return {**asdict(self), "is_well": self.is_well}

    def to_json(self) -> str:
        """Return `to_dict()` as a JSON document."""
        return json.dumps(self.to_dict(), indent=2)

    @staticmethod
    def from_dict(data: dict[str, Any]) -> Examination:
        """Return an examination from the result of `to_dict`."""
        fields = {name: value for name, value in data.items() if name != "is_well"}
        return Examination(**{**fields, "axes": [AxisExamined(**one) for one in data["axes"]]})

    def rows(self) -> list[list[str]]:
        """Return the rows of the table of axes; the first has the titles."""
        titles = ["axes", "layout", "size", "groups", "sums", "8 bytes"]
        large = in_bytes(self.axes[0].large_bytes) if self.axes else ""
        titles += [large, "bandwidth", "nodes per group", "slow groups"]
        return [titles, *map(_row, self.axes)]

    def facts(self) -> list[tuple[str, str]]:
        """Return measurements of single ranks, as pairs of a name and a value."""
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
        """Return a line for each problem and note, and a last line with the conclusion."""
        lines = [f"Problem: {problem}" for problem in self.problems]
        lines += [f"Note: {note}" for note in self.notes]
        last = "No problem." if self.is_well else f"{counted(len(self.problems), 'problem')}."
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


# --- conclusions from the measurements ----------------------------------------------------------


def judge(planned: Plan, measured: Sequence[dict[str, Any]]) -> Examination:
    """Return the examination: what is wrong and what is slow.

    Args:
        planned: plan of the groups that were created.
        measured: measurements of each rank, in order of rank.
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
                f"A group of axis {name} spans up to {counted(axis.nodes, 'host')}. With "
                "LOCAL_WORLD_SIZE consecutive ranks on each host, it would span "
                f"{axis.planned_nodes}."
            )
    compute = [float(each["compute_seconds"]) for each in measured]
    slow = slow_ranks(compute)
    notes += [
        f"Rank {rank} on {hosts[rank]} is slow: it multiplies matrices in "
        f"{compute[rank] / statistics.median(compute):.1f} times the median time."
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
    """Find the lines of the environment reports on which the ranks disagree.

    Args:
        environments: environment report of each rank, in order of rank.

    Returns:
        By name of the line and by value, the ranks that have this value.
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
        readings: for each rank, readings of its clock at the same moments on all ranks.
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
    """Find groups of one axis that take more than twice the median; none of fewer than three.

    Args:
        seconds: time of each group, by its ranks.
    """
    if len(seconds) < 3:
        return []
    typical = statistics.median(seconds.values())
    return [ranks for ranks, mine in seconds.items() if mine > _SLOW * typical]


def stragglers(slow: Sequence[Sequence[tuple[int, ...]]]) -> list[int]:
    """Find the ranks that are in slow groups of the most axes, if those are at least two.

    Args:
        slow: slow groups of each axis.
    """
    times = Counter(rank for groups in slow for rank in {r for group in groups for r in group})
    most = max(times.values(), default=0)
    return sorted(rank for rank, count in times.items() if count == most) if most > 1 else []
