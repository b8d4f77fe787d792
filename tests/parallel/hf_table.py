"""The table of families in docs/huggingface.md: one for each version of transformers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from hf_families import Outcome, model_class


def render_table(version: str, outcomes: Mapping[str, tuple[Outcome, Outcome]]) -> str:
    """What became of each family, as Markdown.

    Args:
        version: of transformers.
        outcomes: by family, untied and tied.
    """
    equal = {name: pair for name, pair in outcomes.items() if not pair[0].refusal}
    refused = {name: pair[0] for name, pair in outcomes.items() if pair[0].refusal}
    lines = [
        f"{len(equal)} families equal one process, {len(refused)} are refused.",
        "",
        "| family | model | split parameters, untied | tied |",
        "| --- | --- | --- | --- |",
    ]
    for name, (untied, tied) in equal.items():
        counts = (f"{each.split} of {each.parameters}" for each in (untied, tied))
        lines.append(f"| {name} | `{model_class(name).__name__}` | {' | '.join(counts)} |")
    lines += ["", "| refused family | model | entries that split experts |", "| --- | --- | --- |"]
    for name, outcome in refused.items():
        entries = ", ".join(f"`{entry}`" for entry in outcome.entries)
        lines.append(f"| {name} | `{model_class(name).__name__}` | {entries} |")
    return "\n".join(lines)


def read_table(document: Path, version: str) -> str | None:
    """The table of a version, as it stands in the document; None if it has none."""
    _, _, rest = document.read_text().partition(_begin(version))
    return rest.partition(_end(version))[0].strip() if rest else None


def write_table(document: Path, version: str, table: str) -> None:
    """Put the table of a version in the place of its former one, or at the end."""
    text = document.read_text()
    section = f"{_begin(version)}\n{table}\n{_end(version)}"
    if _begin(version) in text:
        before, _, rest = text.partition(_begin(version))
        text = before + section + rest.partition(_end(version))[2]
    else:
        text = f"{text.rstrip()}\n\n### transformers {version}\n\n{section}\n"
    document.write_text(text)


def _begin(version: str) -> str:
    return f"<!-- begin: transformers {version} -->"


def _end(version: str) -> str:
    return f"<!-- end: transformers {version} -->"
