"""Tables of families in docs/huggingface_families.md: three for each version of transformers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

_REFUSED_HEAD = ["| refused family | model | reason |", "| --- | --- | --- |"]


def render_table(rows: Mapping[str, str], refused: set[str], head: list[str], what: str) -> str:
    """Render rows as a Markdown table, those of refused families in one of their own.

    Args:
        rows: by family.
        refused: which families are.
        head: of the table of the others; none if it says no more than how many they are.
        what: the families are called.
    """
    equal = [row for name, row in rows.items() if name not in refused]
    lines = [f"{len(equal)} {what} equal one process, {len(refused)} are refused.", ""]
    lines += [*head, *equal] if head else []
    if refused:
        lines += [*([""] if head else []), *_REFUSED_HEAD]
        lines += [rows[name] for name in rows if name in refused]
    return "\n".join(lines)


def read_table(document: Path, name: str) -> dict[str, str] | None:
    """Return the rows of a table, by family, as they stand in the document; None if it has none."""
    _, _, rest = document.read_text().partition(_begin(name))
    if not rest:
        return None
    rows = re.findall(r"^\| (\w+) \| `.*$", rest.partition(_end(name))[0], re.MULTILINE)
    lines = rest.partition(_end(name))[0].splitlines()
    return {row: next(line for line in lines if line.startswith(f"| {row} |")) for row in rows}


def write_table(document: Path, name: str, table: str) -> None:
    """Put a table in the place of its former one, or at the end."""
    text = document.read_text()
    section = f"{_begin(name)}\n{table}\n{_end(name)}"
    if _begin(name) in text:
        before, _, rest = text.partition(_begin(name))
        text = before + section + rest.partition(_end(name))[2]
    else:
        text = f"{text.rstrip()}\n\n## {name}\n\n{section}\n"
    document.write_text(text)


def _begin(name: str) -> str:
    return f"<!-- begin: {name} -->"


def _end(name: str) -> str:
    return f"<!-- end: {name} -->"
