"""Tensor parallelism of every Hugging Face family with a plan, against one process.

The table in docs/huggingface.md says what was seen. After a change that is meant, `make families`
writes it anew.
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import pytest

from helpers.crew import Crew

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

import hf_families  # noqa: E402  (imports transformers)
from hf_families import RANKS, Outcome, families  # noqa: E402
from hf_table import read_table, render_table, tensor_rows, write_table  # noqa: E402

TOLERANCE = 1e-5  # in float32
PRECISE_TOLERANCE = 1e-6  # in float64, in which some models compute a little in float32
_DOCUMENT = Path(__file__).parents[2] / "docs" / "huggingface.md"
_TABLE = f"transformers {transformers.__version__}"
_CHUNK = 8  # families in one world: few enough for its time limit
_SECONDS = 300

pytestmark = [pytest.mark.processes, pytest.mark.timeout(1800)]


def compare_some(names: list[str]) -> dict[str, tuple[Outcome, Outcome]]:
    """What becomes of each family untied, and tied."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers' own, of tiny sizes
        return {
            name: (hf_families.compare(name, False), hf_families.compare(name, True))
            for name in names
        }


@pytest.fixture(scope="module")
def outcomes() -> dict[str, list[tuple[Outcome, Outcome]]]:
    """By family, what every rank saw."""
    crew = Crew(RANKS)
    seen: dict[str, list[tuple[Outcome, Outcome]]] = {}
    for start in range(0, len(families()), _CHUNK):
        names = list(families()[start : start + _CHUNK])
        answers = crew.run(compare_some, RANKS, names, timeout=_SECONDS)
        seen |= {name: [answer[name] for answer in answers] for name in names}
    crew.stop()
    return seen


def test_many_families_are_compared(outcomes: dict[str, list[tuple[Outcome, Outcome]]]) -> None:
    split = [ranks[0] for ranks in outcomes.values() if not ranks[0][0].refusal]
    assert len(split) > 40
    assert len([pair for pair in split if pair[1].tied]) > 30


@pytest.mark.parametrize("family", families())
def test_split_family_equals_one_process(
    outcomes: dict[str, list[tuple[Outcome, Outcome]]], family: str
) -> None:
    for untied, tied in outcomes[family]:
        for outcome in (untied, tied):
            assert not outcome.refusal
            assert outcome.error < TOLERANCE, f"{outcome.worst}: {outcome}"
            assert outcome.precise_error < PRECISE_TOLERANCE, f"{outcome.precise_worst}: {outcome}"
            assert outcome.split > 1
            assert outcome.tied == outcome.was_tied
        assert not untied.tied


def test_table_says_what_was_seen(outcomes: dict[str, list[tuple[Outcome, Outcome]]]) -> None:
    rows = tensor_rows({name: ranks[0] for name, ranks in outcomes.items()})
    refused = {name for name, ranks in outcomes.items() if ranks[0][0].refusal}
    if "MESHVERSE_WRITE_TABLES" in os.environ:
        write_table(_DOCUMENT, _TABLE, render_table(rows, refused, experts=False))
    committed = read_table(_DOCUMENT, _TABLE)
    if committed is None:
        pytest.skip(f"docs/huggingface.md has no table for {_TABLE}")
    assert committed == rows
