"""Reports of a suite's measurements, as Markdown to read and JSON to keep."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from harness import OURS, STOCK, Check, Measurement, Outcome, ratio_of

__all__ = ["Report", "amount", "table"]


@dataclass(frozen=True)
class Report:
    """One suite, measured.

    Attributes:
        name: of its files.
        title: its heading.
        method: how it was measured.
        scale: what the measurements' scale counts.
        outcome: what was measured.
        circumstances: where, when and with what.
        seconds: that it took.
    """

    name: str
    title: str
    method: str
    scale: str
    outcome: Outcome
    circumstances: dict[str, str]
    seconds: float

    def save(self, folder: Path) -> None:
        """Write the Markdown and the JSON; `plots.draw` reads the latter."""
        folder.mkdir(exist_ok=True)
        (folder / f"{self.name}.md").write_text(self.markdown())
        (folder / f"{self.name}.json").write_text(json.dumps(self.data(), indent=1) + "\n")

    def markdown(self) -> str:
        """Return all tables."""
        parts = [f"# {self.title}"]
        if self.outcome.measurements:
            parts.append(figures_table(self.outcome.measurements, self.scale))
        if self.outcome.checks:
            parts += ["## Targets", checks_table(self.outcome.checks)]
        facts = {
            **self.circumstances,
            "method": self.method + "; medians, a ratio's that of the repetitions' ratios",
            "duration": f"{self.seconds:.0f} s",
        }
        notes = [f"- {note}" for note in self.outcome.notes]
        parts.append("\n".join([*notes, *(f"- {name}: {value}" for name, value in facts.items())]))
        return "\n\n".join(parts) + "\n"

    def data(self) -> dict[str, Any]:
        """Everything, samples included."""
        return {
            "title": self.title,
            "scale": self.scale,
            "method": self.method,
            **self.circumstances,
            "duration_s": round(self.seconds, 1),
            "measurements": [
                {
                    **asdict(one),
                    "samples": {side: [_short(s) for s in of] for side, of in one.samples.items()},
                }
                for one in self.outcome.measurements
            ],
            "checks": [
                {**asdict(one), "figure": float(f"{one.figure:.4g}"), "met": one.is_met}
                for one in self.outcome.checks
            ],
            "notes": self.outcome.notes,
        }


def _short(sample: float) -> float:
    return float(f"{sample:.5g}")


def figures_table(measurements: Sequence[Measurement], scale: str) -> str:
    """Medians of each side; how many times ours stock is, and how many times the others ours is."""
    sides = list(dict.fromkeys(side for one in measurements for side in one.samples))
    pairs = [(STOCK, OURS)] if STOCK in sides else []
    pairs += [(OURS, side) for side in sides if side not in (STOCK, OURS)]
    rows = []
    for one in measurements:
        medians = [amount(one.median(s), one.unit) if s in one.samples else "" for s in sides]
        ratios = [
            _ratio(ratio_of(one.samples[over], one.samples[under]))
            if over in one.samples and under in one.samples and one.median(under) > 0
            else ""
            for over, under in pairs
        ]
        rows.append([one.operation, f"{one.scale:,}", *medians, *ratios])
    return table(["operation", scale, *sides, *(" / ".join(pair) for pair in pairs)], rows)


def checks_table(checks: Sequence[Check]) -> str:
    """Return the table of limits: measured, and whether each was met."""
    rows = [
        [
            one.claim,
            f"**{_checked(one, one.figure)}**",
            f"{'≥' if one.at_least else '≤'} {_checked(one, one.limit)}",
            "yes" if one.is_met else "**no**",
        ]
        for one in checks
    ]
    return table(["claim", "measured", "target", "met"], rows)


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table; all columns but the first are aligned right."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _checked(check: Check, value: float) -> str:
    return _ratio(value) if check.unit == "x" else amount(value, check.unit)


def _ratio(ratio: float) -> str:
    return f"{ratio:,.0f}x" if ratio >= 20 else f"{ratio:.2f}x"


def amount(value: float, unit: str) -> str:
    """Return a value with a unit that suits its size."""
    if unit == "ns":
        return _scaled(value, [(1e9, "s"), (1e6, "ms"), (1e3, "µs")], "ns")
    if unit == "bytes":
        return _scaled(value, [(1e9, "GB"), (1e6, "MB"), (1e3, "kB")], "bytes")
    return f"{value:,.0f}" if value == round(value) else f"{value:,.1f}"


def _scaled(value: float, units: list[tuple[float, str]], smallest: str) -> str:
    for factor, unit in units:
        if abs(value) >= factor:
            return (
                f"{value / factor:.3g} {unit}"
                if value < 1000 * factor
                else (f"{value / factor:,.0f} {unit}")
            )
    return "1 byte" if (value, smallest) == (1, "bytes") else f"{value:.0f} {smallest}"
