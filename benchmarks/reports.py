"""What was measured, where and how: as Markdown to read, JSON to keep, and a plot."""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

import meshverse
from harness import Result

__all__ = ["Quantity", "Report"]


@dataclass(frozen=True)
class Quantity:
    """Something that is counted rather than timed, once for each side."""

    title: str
    unit: str
    baseline: int
    subject: int
    at_most: int

    @property
    def is_met(self) -> bool:
        return self.subject <= self.at_most


@dataclass(frozen=True)
class Report:
    """One suite of benchmarks.

    Attributes:
        name: of its files.
        title: its heading.
        command: what was run.
        repetitions: of each comparison.
        results: what was timed.
        quantities: what was counted.
        method: where, and by which clock.
    """

    name: str
    title: str
    command: str
    repetitions: int
    results: Sequence[Result]
    quantities: Sequence[Quantity]
    method: str = "one rank of a fake world; processor time"

    def save(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        (folder / f"{self.name}.md").write_text(self.markdown())
        (folder / f"{self.name}.json").write_text(json.dumps(self.data(), indent=1) + "\n")
        self._save_plot(folder / f"{self.name}.svg")

    def markdown(self) -> str:
        sides = (self._label("baseline"), self._label("subject"))
        rows: list[tuple[str, ...]] = [
            ("operation", *sides, "ratio", "middle half", "reach", "met")
        ]
        rows += [_result_row(result, sides) for result in self.results]
        rows += [_quantity_row(quantity) for quantity in self.quantities]
        table = [f"| {' | '.join(row)} |" for row in rows]
        table.insert(1, "|---" + "|---:" * 4 + "|---|---|")
        facts = [f"- {name}: {value}" for name, value in self._circumstances().items()]
        return "\n".join([f"# {self.title}", "", *table, "", *facts, ""])

    def data(self) -> dict[str, Any]:
        return {
            "title": self.title,
            **self._circumstances(),
            "results": [
                {
                    "operation": result.comparison.title,
                    "baseline": result.comparison.baseline.label,
                    "subject": result.comparison.subject.label,
                    "baseline_ns": result.baseline_ns,
                    "subject_ns": result.subject_ns,
                    "ratio": result.ratio,
                    "bound": asdict(result.comparison.bound),
                    "met": result.is_met,
                }
                for result in self.results
            ],
            "quantities": [{**asdict(one), "met": one.is_met} for one in self.quantities],
        }

    def _circumstances(self) -> dict[str, str]:
        return {
            "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
            "command": f"`{self.command}`",
            "machine": f"{_processor()}, {os.cpu_count()} cores, {platform.system()}",
            "load average at the end": "{:.1f}, {:.1f}, {:.1f}".format(*os.getloadavg()),
            "versions": f"Meshverse {meshverse.__version__}, torch {torch.__version__}, "
            f"Python {platform.python_version()}",
            "method": f"{self.method}; {self.repetitions} repetitions of both sides in turn; "
            "medians, the ratio's that of the repetitions' ratios",
        }

    def _label(self, side: str) -> str:
        """What all comparisons call their baseline or subject, or just that."""
        labels = {getattr(result.comparison, side).label for result in self.results}
        return labels.pop() if len(labels) == 1 else side

    def _save_plot(self, path: Path) -> None:
        from matplotlib import pyplot as plot

        plot.rcParams["svg.fonttype"] = "none"  # text as text, not as outlines
        plot.rcParams["svg.hashsalt"] = self.name  # the same figures give the same file
        figure, axes = plot.subplots(figsize=(8, 0.6 * len(self.results) + 1))
        titles = [result.comparison.title for result in self.results]
        for offset, side in ((-0.2, "baseline_ns"), (0.2, "subject_ns")):
            times_us = [statistics.median(getattr(result, side)) / 1e3 for result in self.results]
            places = [index + offset for index in range(len(titles))]
            label = self._label(side.removesuffix("_ns"))
            bars = axes.barh(places, times_us, height=0.38, label=label)
            axes.bar_label(bars, [_time(time_us * 1e3) for time_us in times_us], padding=3)
        axes.set(xscale="log", xlabel="microseconds an operation", title=self.title)
        axes.set_yticks(range(len(titles)), titles)
        axes.invert_yaxis()
        axes.margins(x=0.15)
        axes.legend()
        figure.savefig(path, bbox_inches="tight", metadata={"Date": None})
        plot.close(figure)


def _result_row(result: Result, headings: tuple[str, str]) -> tuple[str, ...]:
    comparison = result.comparison
    baseline = comparison.baseline.label
    whose = "" if baseline in headings else f" ({baseline})"
    low, _, high = statistics.quantiles(result.ratios, n=4)
    return (
        comparison.title,
        _time(statistics.median(result.baseline_ns)) + whose,
        _time(statistics.median(result.subject_ns)),
        f"**{_ratio(result.ratio)}**",
        f"{_ratio(low)} to {_ratio(high)}",
        str(comparison.bound),
        "yes" if result.is_met else "no",
    )


def _quantity_row(quantity: Quantity) -> tuple[str, ...]:
    return (
        quantity.title,
        f"{quantity.baseline:,} {quantity.unit} (stock)",
        f"{quantity.subject:,} {quantity.unit}",
        f"**{_ratio(quantity.baseline / quantity.subject)}**",
        "",
        f"≤ {quantity.at_most:,} {quantity.unit}",
        "yes" if quantity.is_met else "no",
    )


def _ratio(ratio: float) -> str:
    return f"{ratio:,.0f}x" if ratio >= 20 else f"{ratio:.2f}x"


def _time(nanoseconds: float) -> str:
    for factor, unit in ((1e9, "s"), (1e6, "ms"), (1e3, "µs")):
        if nanoseconds >= factor:
            return f"{nanoseconds / factor:.3g} {unit}"
    return f"{nanoseconds:.0f} ns"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
