"""Pipeline stages of Hugging Face families: equal to the whole model, or refused by name.

One family for each way to call layers; with MESHVERSE_ALL_FAMILIES in the environment, all of them.
`make families` runs all, and writes the tables in docs/huggingface.md.
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import pytest

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from hf_families import Outcome, families, model_class  # noqa: E402  (imports transformers)
from hf_table import read_table, write_table  # noqa: E402
from pipeline_families import REPRESENTATIVES, compare_stages  # noqa: E402

_DOCUMENT = Path(__file__).parents[2] / "docs" / "huggingface.md"
_TABLE = f"transformers {transformers.__version__}, pipeline stages"
_SWEPT = families() if "MESHVERSE_ALL_FAMILIES" in os.environ else REPRESENTATIVES

pytestmark = pytest.mark.timeout(1800)


@pytest.fixture(scope="module")
def outcomes() -> dict[str, tuple[Outcome, Outcome]]:
    """What became of each family, untied and tied."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers' own, of tiny sizes
        return {
            name: (compare_stages(name, tied=False), compare_stages(name, tied=True))
            for name in _SWEPT
        }


def test_each_family_equals_the_whole_model_or_says_why_not(
    outcomes: dict[str, tuple[Outcome, Outcome]],
) -> None:
    wrong = {
        name: pair
        for name, pair in outcomes.items()
        if any(not each.refusal and each.error > 1e-5 for each in pair)
        or bool(pair[0].refusal) != bool(pair[1].refusal)
    }
    assert not wrong
    equal = [pair for pair in outcomes.values() if not pair[0].refusal]
    assert len(equal) > len(outcomes) / 2
    assert all(each.parameters > 8 for pair in equal for each in pair)


def test_table_says_which_are_refused(outcomes: dict[str, tuple[Outcome, Outcome]]) -> None:
    rows = {
        name: f"| {name} | `{model_class(name).__name__}` | {_reason(pair[0].refusal)} |"
        for name, pair in outcomes.items()
        if pair[0].refusal
    }
    complete = set(outcomes) == set(families())
    if "MESHVERSE_WRITE_TABLES" in os.environ and complete:
        counts = f"{len(outcomes) - len(rows)} families equal one process, {len(rows)} are refused."
        head = ["| refused family | model | reason |", "| --- | --- | --- |"]
        write_table(_DOCUMENT, _TABLE, "\n".join([counts, "", *head, *rows.values()]))
    committed = read_table(_DOCUMENT, _TABLE)
    if committed is None:
        pytest.skip(f"docs/huggingface.md has no table for {_TABLE}")
    assert {name: row for name, row in committed.items() if name in outcomes} == rows


def _reason(refusal: str) -> str:
    return refusal.partition(": ")[2].partition(". Train it")[0]
