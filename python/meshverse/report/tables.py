"""Tables and numbers as text for people."""

from __future__ import annotations

from collections.abc import Collection, Sequence

_SHOWN_RANKS = 8


def aligned(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """Rows as lines whose columns begin at the same place.

    Args:
        rows: of equally many cells.
        right: indices of columns that end at the same place instead: numbers.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if index in right else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append(f"  {'  '.join(cells)}".rstrip())
    return lines


def shortened_ranks(ranks: Sequence[int]) -> str:
    """Ranks in one short line: all of a few, else the first ones and the last."""
    if len(ranks) <= _SHOWN_RANKS:
        return ", ".join(map(str, ranks)) or "none"
    return f"{', '.join(map(str, ranks[: _SHOWN_RANKS - 2]))}, ... {ranks[-1]}"


def in_bytes(count: int) -> str:
    """A number of bytes with its unit, such as "147 MiB"."""
    size, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:,.0f} {unit}" if size >= 100 or size == int(size) else f"{size:,.1f} {unit}"


def in_seconds(seconds: float) -> str:
    """A time with its unit, such as "12.3 ms"."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"
