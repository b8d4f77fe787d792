"""Plots of a suite's JSON: against the scale where there are several, bars where there is one."""

from __future__ import annotations

import io
import json
import math
import statistics
from pathlib import Path
from typing import Any

from matplotlib import pyplot as plot
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

from reports import amount

__all__ = ["draw"]

# Drawn in the first colors; a reader with a dark scheme gets the second.
_SIDES = {
    "#c2410c": "#fb923c",
    "#1d4ed8": "#60a5fa",
    "#6b7280": "#9ca3af",
    "#15803d": "#4ade80",
    "#7e22ce": "#c084fc",
    "#0e7490": "#22d3ee",
}
_PAPER, _INK, _LINES = "#ffffff", "#1f2328", "#d0d7de"
_DARK = {**_SIDES, _PAPER: "#0d1117", _INK: "#e6edf3", _LINES: "#30363d"}
_MARKERS = "osd^vP"
_FLOOR = "floor"
# Of one color and marker in every plot; a color has one meaning.
_KNOWN_SIDES = [
    "stock",
    "Meshverse",
    _FLOOR,
    "Meshverse, not compared",
    "through one rank",
    "its core",
]


def draw(folder: Path, name: str) -> list[Path]:
    """Draw each figure of a suite as an SVG that follows the reader's color scheme.

    Args:
        folder: where the suite's JSON lies and the plots go.
        name: of the suite.

    Returns:
        The files written.
    """
    report = json.loads((folder / f"{name}.json").read_text())
    figures: dict[str, list[dict[str, Any]]] = {}
    for one in report["measurements"]:
        if one["figure"] and one["samples"]:
            figures.setdefault(one["figure"], []).append(one)
    for old in folder.glob(f"{name}-*.*"):
        old.unlink()
    written = []
    for figure, measurements in figures.items():
        with plot.rc_context(_style()):
            drawn = _panels(measurements, report["scale"])
            drawn.suptitle(f"{report['title']}: {figure}")
            text = io.StringIO()
            drawn.savefig(text, format="svg", metadata={"Date": None})
            plot.close(drawn)
        path = folder / f"{name}-{figure.replace(' ', '_')}.svg"
        path.write_text(_with_schemes(text.getvalue()))
        written.append(path)
    return written


def _with_schemes(svg: str) -> str:
    """Have an SVG take its colors from variables, of which a dark scheme has others."""
    light = [f"--c{index}: {color};" for index, color in enumerate(_DARK)]
    dark = [f"--c{index}: {color};" for index, color in enumerate(_DARK.values())]
    for index, color in enumerate(_DARK):
        svg = svg.replace(color, f"var(--c{index})")
    schemes = (
        f"svg {{ {' '.join(light)} }}\n"
        f"@media (prefers-color-scheme: dark) {{ svg {{ {' '.join(dark)} }} }}\n"
    )
    style = '<style type="text/css">'
    assert style in svg, "matplotlib writes a style sheet"
    return svg.replace(style, style + schemes, 1)


def _style() -> dict[str, Any]:
    return {
        **dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), _PAPER),
        **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), _INK),
        **dict.fromkeys(("axes.edgecolor", "grid.color", "legend.edgecolor"), _LINES),
        "axes.prop_cycle": plot.cycler(color=list(_SIDES)),
        "legend.facecolor": _PAPER,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.linewidth": 0.6,
        "font.size": 10,
        "svg.fonttype": "none",  # text as text, not as outlines
        "svg.hashsalt": "meshverse",  # the same figures give the same file
    }


def _panels(measurements: list[dict[str, Any]], scale: str) -> Any:
    """Return a panel for each operation, with a line for each side."""
    operations = list(dict.fromkeys(one["operation"] for one in measurements))
    sides = list(dict.fromkeys(side for one in measurements for side in one["samples"]))
    columns = min(3, len(operations)) if len(operations) != 4 else 2
    rows = math.ceil(len(operations) / columns)
    figure, axes = plot.subplots(
        rows, columns, figsize=(4.4 * columns, 3.1 * rows), layout="constrained", squeeze=False
    )
    for panel, operation in zip(axes.flat, operations, strict=False):
        of = [one for one in measurements if one["operation"] == operation]
        if len(of) > 1:
            _lines(panel, of, sides, scale)
        else:
            _bars(panel, of[0], sides)
        panel.set_title(operation, fontsize=10)
    for panel in axes.flat[len(operations) :]:
        panel.set_visible(False)
    handles: dict[str, Any] = {}
    for panel in axes.flat:
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    figure.legend(
        handles.values(), handles, loc="outside lower center", ncols=len(sides), frameon=False
    )
    return figure


def _lines(panel: Any, measurements: list[dict[str, Any]], sides: list[str], scale: str) -> None:
    measurements = sorted(measurements, key=lambda one: one["scale"])
    unit = measurements[0]["unit"]
    points = {side: _points(measurements, side) for side in sides}
    if len(points.get(_FLOOR, [])) == 1:  # a lone mark is no line to compare with
        del points[_FLOOR]
    low, high = _decades([value for of in points.values() for _, value in of])
    for side, of in points.items():
        index = _index(side, sides)
        style = {"color": f"C{index}", "marker": _MARKERS[index % len(_MARKERS)], "markersize": 5}
        positive = [point for point in of if point[1] > 0]
        if of:
            panel.plot(*zip(*positive, strict=True) if positive else ([], []), label=side, **style)
        for at, value in (point for point in of if point[1] <= 0):  # no logarithm: at the bottom
            panel.plot(at, low, linestyle="none", fillstyle="none", clip_on=False, **style)
            above = {"xytext": (0, 5), "textcoords": "offset points", "ha": "center"}
            panel.annotate(amount(value, unit), (at, low), color=f"C{index}", fontsize=8, **above)
    panel.set(xscale="log", yscale="log", xlabel=scale, ylabel=_label(unit), ylim=(low, high))
    panel.xaxis.set_major_locator(FixedLocator([one["scale"] for one in measurements]))
    panel.xaxis.set_minor_locator(NullLocator())
    panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    panel.tick_params(axis="x", labelsize=8)
    panel.yaxis.set_major_locator(LogLocator(numticks=10))
    panel.yaxis.set_minor_locator(NullLocator())
    panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: amount(value, unit)))


def _points(measurements: list[dict[str, Any]], side: str) -> list[tuple[int, float]]:
    """Scale and median of a side. No floor that is above what was measured: it is none there."""
    points = []
    for one in measurements:
        medians = {name: statistics.median(of) for name, of in one["samples"].items() if of}
        if side in medians and (side != _FLOOR or medians[side] <= min(medians.values())):
            points.append((one["scale"], medians[side]))
    return points


def _decades(values: list[float]) -> tuple[float, float]:
    """Powers of ten below and above; at least two decades apart, so that a flat line looks flat."""
    positive = [value for value in values if value > 0] or [1.0]
    low, high = math.floor(math.log10(min(positive))), math.ceil(math.log10(max(positive)))
    if len(positive) < len(values):  # zeros are at the bottom, below all others
        low -= 1
    if high - low < 2:
        high = low + 2
    return 10.0**low, 10.0**high


def _bars(panel: Any, measurement: dict[str, Any], sides: list[str]) -> None:
    unit = measurement["unit"]
    for index, side in enumerate(sides):
        for _, value in _points([measurement], side):
            bar = panel.bar(index, value, color=f"C{_index(side, sides)}", label=side, width=0.7)
            panel.bar_label(bar, [amount(value, unit)], padding=2)
    panel.set_xticks([])
    panel.set_ylabel(_label(unit))
    panel.yaxis.set_major_formatter(
        FuncFormatter(lambda value, _: amount(value, unit) if value else "0")
    )
    panel.margins(y=0.15)
    panel.grid(False, axis="x")


def _index(side: str, sides: list[str]) -> int:
    """Return the index of a side's color and marker."""
    order = [*_KNOWN_SIDES, *(one for one in sides if one not in _KNOWN_SIDES)]
    return order.index(side)


def _label(unit: str) -> str:
    return {"ns": "time", "bytes": "memory"}.get(unit, unit)
