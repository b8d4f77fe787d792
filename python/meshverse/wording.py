"""Wording of messages and reports: ranks, counts, bytes, seconds, tables, and similar names."""

from __future__ import annotations

import itertools
import shutil
import sys
import textwrap
from collections.abc import Collection, Iterable, Sequence
from difflib import get_close_matches
from html import escape

_SHOWN_RANKS = 8


def rank_list(ranks: Sequence[int]) -> str:
    """Return ranks as one short line: up to eight ranks, or else the first six and the last.

    >>> rank_list([3, 4]), rank_list(range(10))
    ('3, 4', '0, 1, 2, 3, 4, 5, ... 9')
    """
    if len(ranks) <= _SHOWN_RANKS:
        return ", ".join(map(str, ranks)) or "none"
    return f"{', '.join(map(str, ranks[: _SHOWN_RANKS - 2]))}, ... {ranks[-1]}"


def rank_ranges(ranks: Iterable[int]) -> str:
    """Return ranks, sorted, as one short line; at least three consecutive ones as a range.

    >>> rank_ranges([4, 5, 6, 7]), rank_ranges([1, 5]), rank_ranges(range(0, 40, 2))
    ('4-7', '1, 5', '0, 2, 4, 6, 8, 10, ... 38')
    """
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1][1:] = [rank]
        else:
            runs.append([rank])
    parts: list[str] = []
    for run in runs:
        first, last = run[0], run[-1]
        parts += [f"{first}-{last}"] if last > first + 1 else map(str, dict.fromkeys(run))
    if len(parts) > _SHOWN_RANKS:
        parts[_SHOWN_RANKS - 2 : -1] = []
        parts[-1] = f"... {parts[-1]}"
    return ", ".join(parts) or "none"


def did_you_mean(name: object, known: Iterable[object]) -> str:
    """Return a hint for the end of a message about an unknown name; "" if no name is similar.

    >>> did_you_mean("dp_shrad", ["dp_replicate", "dp_shard"])
    " Did you mean 'dp_shard'?"
    """
    near = get_close_matches(str(name), [str(one) for one in known], n=1)
    return f" Did you mean {near[0]!r}?" if near else ""


def printable(name: str) -> str:
    """Return a name without characters that control a terminal or that XML forbids."""
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in name)


def several(noun: str) -> str:
    """Return the plural of a noun: "nodes", "switches", "meshes"."""
    return f"{noun}es" if noun.endswith(("ch", "s", "sh", "x")) else f"{noun}s"


def counted(count: int, noun: str) -> str:
    """Return a count with its noun: "1 rank", "10,240 ranks"."""
    return f"{count:,} {noun if count == 1 else several(noun)}"


def aligned(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """Return the rows of a table as lines with aligned columns, which fit the terminal.

    If the rows are wider than the terminal of the standard output, or than the variable COLUMNS
    says, the widest cells continue on further lines.

    Args:
        rows: cells of each row, as many in every row.
        right: indices of the columns that are aligned on the right, such as numbers.
    """
    columns = [*zip(*rows, strict=True)]
    widths = [max(map(len, column)) for column in columns]
    longest_words = [max(map(len, " ".join(column).split(" "))) for column in columns]
    while sum(widths) + 2 * len(widths) > _columns():
        can_shrink = [index for index, width in enumerate(widths) if width > longest_words[index]]
        if not can_shrink:
            break
        widths[max(can_shrink, key=widths.__getitem__)] -= 1
    lines = []
    for row in rows:
        wrapped = [
            [cell] if len(cell) <= width else textwrap.wrap(cell, width, break_on_hyphens=False)
            for cell, width in zip(row, widths, strict=True)
        ]
        for line in itertools.zip_longest(*wrapped, fillvalue=""):
            cells = [
                cell.rjust(width) if index in right else cell.ljust(width)
                for index, (cell, width) in enumerate(zip(line, widths, strict=True))
            ]
            lines.append(f"  {'  '.join(cells)}".rstrip())
    return lines


def wrapped(lines: Iterable[str]) -> list[str]:
    """Return lines of text, each continued on further lines where it is wider than the terminal."""
    width = max(40, _columns())
    return [part for line in lines for part in textwrap.wrap(line, width, break_on_hyphens=False)]


CELL = "padding:.2em .6em"
"""CSS of a table's cell, so that columns stay apart in pages that have no style of their own."""


def html_table(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> str:
    """Return a table as HTML, for notebooks, some of which align all cells on the right.

    Args:
        rows: cells of each row as plain text; titles first.
        right: as in `aligned`.
    """

    def line(row: Sequence[str], of_titles: bool) -> str:
        cells = []
        for index, text in enumerate(row):
            side = "right" if index in right else "left"
            tag = "th" if of_titles or index == 0 else "td"
            scope = f' scope="{"col" if of_titles else "row"}"' * (tag == "th")
            cells.append(f'<{tag}{scope} style="text-align:{side};{CELL}">{escape(text)}</{tag}>')
        return f"<tr>{''.join(cells)}</tr>"

    titles, *body = rows
    return (
        f'<div style="overflow-x:auto"><table><thead>{line(titles, True)}</thead>'
        f"<tbody>{''.join(line(row, False) for row in body)}</tbody></table></div>"
    )


def paragraph(text: str, indent: str = "") -> list[str]:
    """Return a text as lines that fit the terminal, or 100 characters if there is none.

    Args:
        text: sentences without line breaks.
        indent: start of each line but the first.
    """
    width = min(_columns(), 100)
    return textwrap.wrap(
        text,
        width,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _columns() -> int:
    """Return the width of the terminal, or that of COLUMNS; without both, no limit."""
    return shutil.get_terminal_size((sys.maxsize, 0)).columns


def in_bytes(count: int) -> str:
    """Return a number of bytes with its unit, such as "147 MiB"."""
    size, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:,.0f} {unit}" if size >= 100 or size == int(size) else f"{size:,.1f} {unit}"


def in_seconds(seconds: float) -> str:
    """Return a duration with its unit, such as "12.3 ms"."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"
