"""Savings of a job by sharing, against torch's `DeviceMesh`: counts, and published figures.

Only the numbers of groups and communicators are computed from the job. What a communicator costs
depends on the GPUs, the network and NCCL's version, so each cost is a range between two published
figures, and `Saves.sources` names both. The savings are upper bounds: NCCL creates a communicator
at the first collective of a group, so a group that a program never uses costs nothing with torch
either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from meshverse.explain.communicator_memory import COMMUNICATOR_BYTES
from meshverse.wording import aligned, in_bytes, paragraph

from .plan import Plan, PlannedGroup, head

_T = TypeVar("_T")

# nvidia/nccl#964, on 4 A100 with NVLink.
_MEASURED_BYTES_OF_PAIR, _MEASURED_BYTES = 544_000_000, 688_000_000
# Seconds to create one communicator: nvidia/nccl#534, 16.3 s for 8 and 41.7 s for 7.
_LEAST_SECONDS, _MOST_SECONDS = 2.0, 6.0

_ISSUE = "https://github.com/NVIDIA/nccl/issues/"

_SOURCES = {
    "process groups": (
        "computed from the views. torch's DeviceMesh creates a group for each axis of each view. "
        "The default group, of all ranks, is not counted"
    ),
    "device memory": (
        "from the default buffers in NCCL's user guide (NCCL_BUFFSIZE) for a ring over 16 channels "
        "(147 MiB each) to a user's measurement on 4 A100 with NVLink: 544 MB for 2 ranks "
        f"and 688 MB for more ({_ISSUE}964)"
    ),
    "start-up": (
        "a user's measurements: from 2.0 s a communicator, with 8 ranks, to 6.0 s, on 16 machines. "
        f"A maintainer of NCCL calls 5 to 6 s a lot more than it should be ({_ISSUE}534)"
    ),
}
_MEASURED = "your measurement, which plan() got as communicator_bytes="

UNKNOWN = (
    (
        "Whether the views share at all: their meshes must derive from one mesh or be created with "
        "universe=, or the job must run with --share world. Separate calls of init_device_mesh "
        "save nothing."
    ),
    (
        "Which groups the program uses, so the savings are upper bounds. A group without a "
        "collective costs nothing, unless the default group is bound to a device or has torch "
        "2.15's default backend: NCCL then creates its communicator at once."
    ),
    (
        "Your GPUs, network and version of NCCL. The published figures are from 2021 and 2023. An "
        f"all-to-all takes more memory ({_ISSUE}1685), and communicators that NCCL splits from "
        "another may start faster."
    ),
    (
        "Which axes must overlap. Collectives of axes that share a communicator run one after the "
        "other; each axis with an isolate= tag gets its own again."
    ),
    "Meshverse itself was measured on one GPU only.",
)
"""Sentences about what the figures leave out."""


class Range(NamedTuple):
    """A cost, between two published figures."""

    least: float
    most: float


@dataclass(frozen=True)
class Saves:
    """Costs of one rank's process groups with torch's `DeviceMesh` and with Meshverse.

    `str()` gives a table with its sources, `to_dict()` data. Each attribute but the first is a
    pair: (torch's, Meshverse's).

    Attributes:
        plan: the plan that the costs are of; they are its rank's.
        groups: number of process groups, besides the default group.
        communicators: number of those that have more than one rank.
        memory: device memory of these communicators in bytes; None unless the backend is nccl.
        start: seconds to create them one after the other; None unless the backend is nccl.
        sources: source of each figure, by the title of its row.
    """

    plan: Plan
    groups: tuple[int, int]
    communicators: tuple[int, int]
    memory: tuple[Range, Range] | None
    start: tuple[Range, Range] | None
    sources: Mapping[str, str]

    @property
    def shared(self) -> list[PlannedGroup]:
        """The groups that torch would create several times, and Meshverse once."""
        return [group for group in self.plan.groups if group.created and group.stock_copies > 1]

    def to_dict(self) -> dict[str, Any]:
        """Return the costs as plain data, ready for JSON."""
        ranges = {"memory": self.memory, "start": self.start}
        counts = {"groups": self.groups, "communicators": self.communicators}
        costs = counts | {
            name: None if both is None else tuple(each._asdict() for each in both)
            for name, both in ranges.items()
        }
        return {
            "rank": self.plan.mine.rank,
            **{
                name: both and dict(zip(("torch", "meshverse"), both, strict=True))
                for name, both in costs.items()
            },
            "shared": [
                {"axes": list(one.axes), "size": one.size, "torch": one.stock_copies}
                for one in self.shared
            ],
            "sources": dict(self.sources),
            "unknown": list(UNKNOWN),
        }

    def __str__(self) -> str:
        return "\n".join(_text(self))


def saves(plan: Plan) -> Saves:
    """Return what sharing saves the plan's rank, in numbers and in published figures.

    Args:
        plan: plan of a job, from `meshverse.tools.planner.plan`.
    """
    created = [group for group in plan.groups if group.created]
    used = [group for group in created if group.size > 1]
    communicators = _both(lambda copies: sum(map(copies, used)))
    memory = start = None
    sources = dict(_SOURCES)
    if plan.backend == "nccl":
        estimate = COMMUNICATOR_BYTES["nccl"]
        is_measured = any(group.bytes_each != estimate for group in used)
        if is_measured:
            sources["device memory"] = _MEASURED
        memory = _both(
            lambda copies: Range(
                sum(copies(group) * (group.bytes_each or 0) for group in used),
                sum(
                    copies(group) * (group.bytes_each or 0 if is_measured else _published(group))
                    for group in used
                ),
            )
        )
        torchs, ours = (Range(n * _LEAST_SECONDS, n * _MOST_SECONDS) for n in communicators)
        start = torchs, ours
    groups = _both(lambda copies: sum(map(copies, created)))
    return Saves(plan, groups, communicators, memory, start, sources)


def _both(cost: Callable[[Callable[[PlannedGroup], int]], _T]) -> tuple[_T, _T]:
    """Return a cost with torch's `DeviceMesh` and with Meshverse, from the copies of a group."""
    return cost(lambda group: group.stock_copies), cost(lambda group: 1)


def _published(group: PlannedGroup) -> int:
    return _MEASURED_BYTES_OF_PAIR if group.size == 2 else _MEASURED_BYTES


def _text(costs: Saves) -> Iterator[str]:
    yield from head(costs.plan)
    yield f"Rank {costs.plan.mine.rank}, if the program uses every group:"
    rows = [["", "torch", "Meshverse", "saved"]]
    for what, counts in (("process groups", costs.groups), ("communicators", costs.communicators)):
        torchs, ours = counts
        rows.append([what, f"{torchs:,}", f"{ours:,}", f"{torchs - ours:,}"])
    for what, ranges, shown in (
        ("device memory", costs.memory, lambda size: in_bytes(int(size))),
        ("start-up", costs.start, lambda seconds: f"{seconds:,.0f} s"),
    ):
        if ranges is not None:
            saved = Range(*(torchs - ours for torchs, ours in zip(*ranges, strict=True)))
            cells = (" to ".join(dict.fromkeys(map(shown, each))) for each in (*ranges, saved))
            rows.append([what, *cells])
    yield from aligned(rows, right=range(1, 4))
    if shared := costs.shared:
        yield "Created once, where torch creates several:"
        rows = [["axes", "size", "torch creates"]]
        rows += [[" ".join(one.axes), f"{one.size:,}", f"x{one.stock_copies}"] for one in shared]
        yield from aligned(rows, right=range(1, 3))
    if costs.memory is None:
        yield f"For communicators of backend {costs.plan.backend}, there are no figures."
    yield ""
    for title, source in costs.sources.items():
        if title == "process groups" or costs.memory is not None:
            yield from paragraph(f"{title}: {source}.")
    yield "Not known:"
    for sentence in UNKNOWN:
        yield from paragraph(f"- {sentence}", indent="  ")
