"""What `meshverse doctor` found: as data, and as tables for people."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from meshverse.report.tables import aligned, in_bytes, in_seconds, shortened_ranks

__all__ = ["AxisExamined", "Examination"]


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
        """The same as plain data, ready for JSON."""
        return {**asdict(self), "is_well": self.is_well}

    def to_json(self) -> str:
        """`to_dict()` as a JSON document."""
        return json.dumps(self.to_dict(), indent=2)

    @staticmethod
    def from_dict(data: dict[str, Any]) -> Examination:
        """What `to_dict` gave."""
        fields = {name: value for name, value in data.items() if name != "is_well"}
        return Examination(**{**fields, "axes": [AxisExamined(**one) for one in data["axes"]]})

    def rows(self) -> list[list[str]]:
        """The table of axes, titles first."""
        titles = ["axes", "layout", "size", "groups", "sums", "8 bytes"]
        large = in_bytes(self.axes[0].large_bytes) if self.axes else ""
        titles += [large, "bandwidth", "nodes a group", "slow groups"]
        return [titles, *map(_row, self.axes)]

    def facts(self) -> list[tuple[str, str]]:
        """What was measured of the ranks themselves: names and values."""
        return [
            ("ranks", f"{self.world:,} on {len(set(self.hosts)):,} hosts, backend {self.backend}"),
            ("versions", ", ".join(f"{n} {self.environment[n]}" for n in ("meshverse", "torch"))),
            ("store", _median_and_largest(self.store_seconds)),
            (
                "clocks",
                f"{self.clock_seconds[0]:+.3f} to {self.clock_seconds[1]:+.3f} s of rank 0's",
            ),
            ("compute", _median_and_largest(self.compute_seconds)),
        ]

    def verdict(self) -> list[str]:
        """Problems and notes, a line each, and the last word."""
        lines = [f"Problem: {problem}" for problem in self.problems]
        lines += [f"Note: {note}" for note in self.notes]
        last = "All is well." if self.is_well else f"{len(self.problems)} problems."
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
        "; ".join(shortened_ranks(ranks) for ranks in axis.slow_groups) or "none",
    ]
