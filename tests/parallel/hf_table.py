"""The tables of families in docs/huggingface.md: two for each version of transformers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from hf_families import Outcome, model_class

_TENSOR_HEAD = ["| family | model | split parameters, untied | tied |", "| --- | --- | --- | --- |"]
_EXPERT_HEAD = ["| family | model | parameters of experts |", "| --- | --- | --- |"]
_REFUSED_HEAD = ["| refused family | model | reason |", "| --- | --- | --- |"]


def tensor_rows(outcomes: Mapping[str, tuple[Outcome, Outcome]]) -> dict[str, str]:
    """What became of each family, untied and tied, under tensor parallelism: its row."""
    rows = {}
    for name, pair in outcomes.items():
        counts = " | ".join(f"{each.split} of {each.parameters}" for each in pair)
        rows[name] = f"| {name} | `{model_class(name).__name__}` | {pair[0].refusal or counts} |"
    return rows


def expert_rows(outcomes: Mapping[str, Outcome]) -> dict[str, str]:
    """What became of each family whose experts are handed out: its row."""
    return {
        name: f"| {name} | `{model_class(name).__name__}` | "
        f"{_reason(each.refusal) or f'{each.split} of {each.parameters}'} |"
        for name, each in outcomes.items()
    }


def _reason(refusal: str) -> str:
    """The first sentence, without the degree that was asked for."""
    return re.sub(r"^ep=\d+: ", "", refusal).partition(". ")[0]


def render_table(rows: Mapping[str, str], refused: set[str], *, experts: bool) -> str:
    """Rows as a Markdown table, those of refused families in one of their own.

    Args:
        rows: by family.
        refused: which families are.
        experts: of the families whose experts are handed out.
    """
    equal = [row for name, row in rows.items() if name not in refused]
    what = "families with experts" if experts else "families"
    lines = [f"{len(equal)} {what} equal one process, {len(refused)} are refused.", ""]
    lines += [*(_EXPERT_HEAD if experts else _TENSOR_HEAD), *equal]
    if refused:
        lines += ["", *_REFUSED_HEAD, *(rows[name] for name in rows if name in refused)]
    return "\n".join(lines)


def read_table(document: Path, name: str) -> dict[str, str] | None:
    """The rows of a table, by family, as they stand in the document; None if it has none."""
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
        text = f"{text.rstrip()}\n\n### {name}\n\n{section}\n"
    document.write_text(text)


def _begin(name: str) -> str:
    return f"<!-- begin: {name} -->"


def _end(name: str) -> str:
    return f"<!-- end: {name} -->"
