"""The parts of README.md and docs/benchmarks.md that are figures, filled in from the results.

A part lies between `<!-- figures: NAME -->` and `<!-- end of figures -->`.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness import OURS, STOCK, cold, ratio_of
from page_of_moves import moves
from reports import amount, table
from suites.floors import WHAT

__all__ = ["write"]

_PART = re.compile(r"(<!-- figures: (\w+) -->\n).*?(<!-- end of figures -->)", re.DOTALL)
_FLOOR = "floor"


def write(root: Path, results: Path) -> None:
    """Fill in the figures of every suite that has results.

    Args:
        root: of the repository.
        results: folder with the suites' JSON.
    """
    reports = {path.stem: json.loads(path.read_text()) for path in sorted(results.glob("*.json"))}
    for page in (root / "README.md", root / "docs" / "benchmarks.md"):

        def filled(match: re.Match[str], page: Path = page) -> str:
            start, name, end = match.groups()
            prefix = "" if page.parent == root else "../"
            return f"{start}\n{_PARTS[name](reports, prefix)}\n\n{end}"

        if page.exists():
            page.write_text(_PART.sub(filled, page.read_text()))


_Reports = dict[str, dict[str, Any]]


def _samples(reports: _Reports, suite: str, operation: str, scale: int) -> dict[str, list[float]]:
    for one in reports.get(suite, {"measurements": []})["measurements"]:
        if (one["operation"], one["scale"]) == (operation, scale):
            return dict(one["samples"])
    return {}


def _unit(reports: _Reports, suite: str, operation: str) -> str:
    units = [o["unit"] for o in reports[suite]["measurements"] if o["operation"] == operation]
    return str(units[0])


def _ratio(ratio: float) -> str:
    return f"{ratio:,.0f}x" if ratio >= 20 else f"{ratio:.3g}x"


_README_ROWS = [
    ("operations", "create 4-D mesh"),
    ("operations", "slice again"),
    ("operations", "slice first"),
    ("operations", "unflatten to new groups"),
    ("operations", "unflatten to known groups"),
    ("operations", "flatten to a new group"),
    ("operations", "flatten to a known group"),
    ("operations", "compare equal meshes"),
    ("trainer", "five views of one world"),
    ("trainer", "process groups after five views"),
    ("trainer", "wrap 16 blocks"),
    ("trainer", "wrap 80 layers"),
    ("trainer", "training step"),
]


def _summary(reports: _Reports, prefix: str) -> str:
    """The README's table: stock and Meshverse at 10,240 ranks."""
    rows = []
    for suite, operation in _README_ROWS:
        samples = _samples(reports, suite, operation, 10_240)
        if samples:
            unit = _unit(reports, suite, operation)
            medians = [amount(statistics.median(samples[s]), unit) for s in (STOCK, OURS)]
            ratio = _ratio(ratio_of(samples[STOCK], samples[OURS]))
            when_cold = _samples(reports, suite, cold(operation), 10_240)
            ratio_cold = _ratio(ratio_of(when_cold[STOCK], when_cold[OURS])) if when_cold else ""
            rows.append([operation, *medians, ratio, ratio_cold])
    measured = [reports[suite] for suite in dict(_README_ROWS) if suite in reports]
    where = [f"{one['machine']}; {one['versions']}; {one['date'].split()[0]}" for one in measured]
    places = "\n\n".join(dict.fromkeys(where))  # of one run, there is one
    return f"{table(['operation', STOCK, OURS, 'ratio', 'ratio, cold'], rows)}\n\n{places}"


def _floors(reports: _Reports, prefix: str) -> str:
    """How far every operation is from the least it needs, at 10,240 ranks."""
    rows = []
    for operation, what in WHAT.items():
        samples = _samples(reports, "operations", operation, 10_240)
        if samples:
            ours, floor = samples[OURS], samples[_FLOOR]
            more = statistics.median(ours) - statistics.median(floor)
            medians = [amount(statistics.median(one), "ns") for one in (ours, floor)]
            when_cold = _samples(reports, "operations", cold(operation), 10_240)
            both = [one for one in (samples, when_cold) if one]
            ratios = [_ratio(ratio_of(one[OURS], one[_FLOOR])) for one in both] + [""]
            rows.append([operation, *medians, *ratios[:2], amount(more, "ns"), what])
    header = [OURS, _FLOOR, "ratio", "ratio, cold", "more", "the floor is"]
    return table(["operation", *header], rows)


def _reached(reports: _Reports, prefix: str) -> str:
    """How many figures of each suite were reached, and which were not."""
    rows, missed = [], []
    for name, report in reports.items():
        checks = report["checks"]
        met = sum(check["met"] for check in checks)
        tables = f"[{report['title']}]({prefix}benchmarks/results/{name}.md)"
        rows.append([tables, f"{met} of {len(checks)}", f"{report['duration_s']:.0f} s"])
        missed += [_missed(check) for check in checks if not check["met"]]
    parts = [table(["suite", "reached", "took"], rows)]
    if missed:
        parts.append("Not reached:\n\n" + "\n".join(missed))
    return "\n\n".join(parts)


def _missed(check: dict[str, Any]) -> str:
    def shown(value: float) -> str:
        return _ratio(value) if check["unit"] == "x" else amount(value, check["unit"])

    reach = f"{'at least' if check['at_least'] else 'at most'} {shown(check['limit'])}"
    return f"- {check['claim']}: {shown(check['figure'])}, to be {reach}"


def _plots(reports: _Reports, prefix: str) -> str:
    """Every plot, for light and for dark pages."""
    parts = []
    for name, report in reports.items():
        figures = dict.fromkeys(
            one["figure"] for one in report["measurements"] if one["figure"] and one["samples"]
        )
        for figure in figures:
            stem = f"{prefix}benchmarks/results/{name}-{figure.replace(' ', '_')}"
            parts.append(
                "<picture>\n"
                f'  <source media="(prefers-color-scheme: dark)" srcset="{stem}-dark.svg">\n'
                f'  <img alt="{report["title"]}: {figure}" src="{stem}-light.svg">\n'
                "</picture>"
            )
    return "\n\n".join(parts)


def _left_out(reports: _Reports, prefix: str) -> str:
    """What the suites say they left out."""
    notes = [
        f"- {report['title']}: {note}" for report in reports.values() for note in report["notes"]
    ]
    return "\n".join(notes) or "Nothing."


_PARTS: dict[str, Callable[[_Reports, str], str]] = {
    "summary": _summary,
    "floors": _floors,
    "reached": _reached,
    "moves": moves,
    "plots": _plots,
    "left_out": _left_out,
}
