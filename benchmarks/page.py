"""The parts of README.md and of the pages in docs/ that are figures, filled in from the results.

A part lies between `<!-- figures: NAME -->` and `<!-- end of figures -->`.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from harness import OURS, STOCK, cold, ratio_of
from reports import amount, table

__all__ = ["write"]

_PART = re.compile(r"(<!-- figures: (\w+) -->\n).*?(<!-- end of figures -->)", re.DOTALL)


def write(root: Path, results: Path) -> None:
    """Fill in the figures of every suite that has results.

    Args:
        root: of the repository.
        results: folder with the suites' JSON.
    """
    reports = {path.stem: json.loads(path.read_text()) for path in sorted(results.glob("*.json"))}
    for page in (root / "README.md", *sorted((root / "docs").glob("*.md"))):

        def filled(match: re.Match[str], page: Path = page) -> str:
            start, name, end = match.groups()
            prefix = "" if page.parent == root else "../"
            return f"{start}\n{_PARTS[name](reports, prefix)}\n\n{end}"

        text = page.read_text()
        if (new := _PART.sub(filled, text)) != text:
            page.write_text(new)


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


_FAKE = "one rank of a world whose backend does nothing; processor time of its thread"
_RAN_ON = {
    "operations": _FAKE,
    "trainer": _FAKE,
    "parallel_meshes": _FAKE,
    "memory": "one rank of a world whose backend does nothing; bytes held, no clock",
    "one_graph": "one rank of a world whose backend does nothing; processor time",
    "layouts": "arithmetic without process groups; processor time of one thread",
    "keys": "options and look-ups without process groups; processor time of one thread",
    "processes": "real gloo processes on one machine; wall clock from barrier to barrier",
    "store": "one TCPStore over loopback, asked by a few clients for all ranks; wall clock",
    "waiting": "threads that play waiting ranks, a store in memory; wall clock",
    "hang": "four gloo processes, wall clock; dumps: one process, wall clock",
    "experts": "two gloo processes; processor time of one thread",
    "reshard": "gloo processes on one machine, wall clock; plans: processor time of one thread",
    "restarts": "`torchrun` and two gloo processes, rank 0 of which kills itself at step 150; "
    "stock: dcp.save to disk every 100 steps; ours: Snapshot.save after each step; wall clock",
    "snapshot": "two gloo processes, wall clock of the slower; stock: dcp.async_save to memory",
    "gpu": "NCCL, all ranks on one GPU; wall clock from barrier to barrier",
}
"""Backend, ranks and clock of each suite, for captions."""

_SCALES = (8, 64, 1_024, 10_240)
_AT_A_GLANCE = {
    ("trainer", "process groups after five views"): "process groups per rank",
    ("trainer", "five views of one world"): "create the five views",
    ("operations", "slice again"): "slice an axis again",
    ("trainer", "wrap 16 blocks"): "wrap 16 blocks with FSDP2 and TP",
    ("trainer", "training step"): "eager training step of these",
}
"""Suite and operation, and what README calls it."""
_AT_EACH_SIZE = [
    ("trainer", "process groups after five views"),
    ("trainer", "five views of one world"),
    ("operations", "create 4-D mesh"),
    ("operations", "slice first"),
    ("operations", "slice again"),
    ("operations", "unflatten to new groups"),
    ("operations", "unflatten to known groups"),
    ("operations", "flatten to a new group"),
    ("operations", "flatten to a known group"),
    ("operations", "compare equal meshes"),
    ("operations", "hash first in a world"),
    ("operations", "get_group"),
    ("memory", "five views, resident"),
    ("trainer", "wrap 16 blocks"),
    ("trainer", "training step"),
    ("trainer", "compiled training step"),
    ("trainer", "compiled call"),
]
_OF_PROCESSES = [
    "set up five views",
    "process groups",
    "threads",
    "descriptors",
    "resident memory",
    "store operations",
]
_ON_ONE_GPU = ["process groups", "device memory of a rank", "set up"]
_SUMMARY_ROWS = [
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
    """Return README's table: stock and Meshverse at 10,240 ranks."""
    rows = []
    for suite, operation in _SUMMARY_ROWS:
        samples = _samples(reports, suite, operation, 10_240)
        if samples:
            unit = _unit(reports, suite, operation)
            medians = [amount(statistics.median(samples[s]), unit) for s in (STOCK, OURS)]
            ratio = _ratio(ratio_of(samples[STOCK], samples[OURS]))
            when_cold = _samples(reports, suite, cold(operation), 10_240)
            ratio_cold = _ratio(ratio_of(when_cold[STOCK], when_cold[OURS])) if when_cold else ""
            rows.append([operation, *medians, ratio, ratio_cold])
    figures = table(["operation", STOCK, OURS, "ratio", "ratio, cold"], rows)
    return f"{figures}\n\n{_where(reports, dict(_SUMMARY_ROWS))}"


def _where(reports: _Reports, suites: Iterable[str], names: dict[str, str] | None = None) -> str:
    """Machine, versions and date of suites; one line for all of them, if it is the same.

    Args:
        reports: the suites' results.
        suites: names of suites.
        names: what the lines call each suite; by default its title.
    """
    titles: dict[str, list[str]] = {}
    for suite in suites:
        if suite in reports:
            one = reports[suite]
            where = f"{one['machine']}; {one['versions']}; {one['date'].split()[0]}"
            titles.setdefault(where, []).append(names[suite] if names else f'"{one["title"]}"')
    if len(titles) == 1:
        return f"Measured on {next(iter(titles))}."
    return "\n".join(f"- {' and '.join(of)}: {where}" for where, of in titles.items())


def _side_by_side(
    reports: _Reports, rows: list[tuple[str, str]], scales: Iterable[int], scale: str
) -> str:
    """Return a column for each scale that was measured: stock's median, then ours."""
    cells = {
        scale: [_pair(reports, suite, operation, scale) for suite, operation in rows]
        for scale in scales
    }
    cells = {scale: of for scale, of in cells.items() if any(of)}
    header = ["stock → Meshverse", *(f"{one:,} {scale}" for one in cells)]
    body = [
        [operation, *(of[row] or "-" for of in cells.values())]
        for row, (_, operation) in enumerate(rows)
    ]
    return table(header, body)


def _pair(reports: _Reports, suite: str, operation: str, scale: int) -> str:
    samples = _samples(reports, suite, operation, scale)
    if not samples.get(STOCK) or not samples.get(OURS):
        return ""
    unit = _unit(reports, suite, operation)
    return " → ".join(amount(statistics.median(samples[side]), unit) for side in (STOCK, OURS))


def _glance(reports: _Reports, prefix: str) -> str:
    """README's table: what a job has of it at its size."""
    rows = _side_by_side(reports, list(_AT_A_GLANCE), _SCALES, "ranks")
    for (_, operation), words in _AT_A_GLANCE.items():
        rows = rows.replace(f"| {operation} |", f"| {words} |")
    return rows.replace("stock →", "torch →")


def _measured(reports: _Reports, prefix: str) -> str:
    """README's line about real processes, and where all its figures were measured."""
    pairs = [
        f"{words} {pair}"
        for words, operation in (("set-up", "set up five views"), ("threads", "threads"))
        if (pair := _pair(reports, "processes", operation, 8))
    ]
    real = [f"On 8 real gloo processes, five views: {', '.join(pairs)}."] if pairs else []
    names = {"processes": "the gloo processes"}
    for suite in {suite for suite, _ in _AT_A_GLANCE}:
        numbers = [str(row) for row, (of, _) in enumerate(_AT_A_GLANCE, start=1) if of == suite]
        names[suite] = (
            f"Row{'s' * (len(numbers) > 1)} {', '.join(numbers)} of the table of five views"
        )
    suites = dict.fromkeys([*(suite for suite, _ in _AT_A_GLANCE), "processes"])
    return "\n\n".join([*real, _where(reports, suites, names)])


def _sizes(reports: _Reports, prefix: str) -> str:
    """Return the same with more rows."""
    rows = _side_by_side(reports, _AT_EACH_SIZE, _SCALES, "ranks")
    return f"{_caption('trainer')}\n\n{rows}\n\n{_where(reports, dict(_AT_EACH_SIZE))}"


def _processes(reports: _Reports, prefix: str) -> str:
    """Return the tables of real gloo processes: time and resources."""
    rows = [("processes", operation) for operation in _OF_PROCESSES]
    figures = _side_by_side(reports, rows, (4, 8, 16, 32), "ranks")
    return f"{_caption('processes')}\n\n{figures}\n\n{_where(reports, ['processes'])}"


def _lost_ranks(reports: _Reports, prefix: str) -> str:
    """Return what a killed rank costs a job, and what a save costs."""
    killed = [
        ("restarts", operation)
        for operation in (
            "from SIGKILL to the next whole step",
            "steps computed again",
            "a step, saves included",
        )
    ]
    saved = [
        ("snapshot", operation)
        for operation in ("until save returns", "until it is written", "bytes of a rank's step")
    ]
    parts = [
        f"{_caption('restarts')}\n\n{_side_by_side(reports, killed, (2,), 'ranks')}",
        f"{_caption('snapshot')}\n\n{_side_by_side(reports, saved, (16, 256), 'MB of a rank')}",
        _where(reports, ["restarts", "snapshot"]),
    ]
    return "\n\n".join(parts)


def _one_gpu(reports: _Reports, prefix: str) -> str:
    """Return the table of communicators on one GPU, and on which."""
    if not reports.get("gpu", {}).get("measurements"):
        return ""
    rows = [("gpu", f"{operation}, unbound") for operation in _ON_ONE_GPU]
    figures = _side_by_side(reports, rows, (2, 4, 8), "ranks").replace(", unbound", "")
    gpu = " ".join(reports["gpu"]["notes"])
    return f"{_caption('gpu')}\n\n{figures}\n\n{gpu}. {_where(reports, ['gpu'])}"


def _caption(suite: str) -> str:
    words = _RAN_ON[suite]
    return f"*{words[0].upper()}{words[1:]}. Medians.*"


def _reached(reports: _Reports, prefix: str) -> str:
    """Return how many figures of each suite met their target, and which did not."""
    rows, missed = [], []
    for name, report in reports.items():
        if not report["measurements"]:  # skipped, for want of a GPU
            continue
        checks = report["checks"]
        met = sum(check["met"] for check in checks)
        tables = f"[{report['title']}]({prefix}benchmarks/results/{name}.md)"
        rows.append([tables, f"{met} of {len(checks)}", f"{report['duration_s']:.0f} s"])
        missed += [_missed(check) for check in checks if not check["met"]]
    parts = [table(["suite", "targets met", "took"], rows)]
    if missed:
        parts.append("Targets missed:\n\n" + "\n".join(missed))
    return "\n\n".join(parts)


def _missed(check: dict[str, Any]) -> str:
    def shown(value: float) -> str:
        return _ratio(value) if check["unit"] == "x" else amount(value, check["unit"])

    reach = f"{'at least' if check['at_least'] else 'at most'} {shown(check['limit'])}"
    return f"- {check['claim']}: {shown(check['figure'])} (target: {reach})"


def _plots(reports: _Reports, prefix: str) -> str:
    """Return every plot."""
    parts = []
    for name, report in reports.items():
        drawn = [one for one in report["measurements"] if one["figure"] and one["samples"]]
        figures = dict.fromkeys(one["figure"] for one in drawn)
        if figures:
            scales = sorted({one["scale"] for one in drawn})
            sizes = f"{scales[0]:,} to {scales[-1]:,}" if len(scales) > 1 else f"{scales[0]:,}"
            ran_on = f"{_RAN_ON.get(name, report['method'])}; {sizes} {report['scale']}"
            parts.append(f"**{report['title']}.** {ran_on[0].upper()}{ran_on[1:]}.")
        for figure in figures:
            stem = f"{prefix}benchmarks/results/{name}-{figure.replace(' ', '_')}"
            parts.append(f"![{report['title']}: {figure}]({stem}.svg)")
    return "\n\n".join(parts)


_PARTS: dict[str, Callable[[_Reports, str], str]] = {
    "glance": _glance,
    "measured": _measured,
    "processes": _processes,
    "sizes": _sizes,
    "summary": _summary,
    "one_gpu": _one_gpu,
    "reached": _reached,
    "plots": _plots,
    "lost_ranks": _lost_ranks,
}
