"""Hugging Face families whose experts are handed out to ranks, with FSDP2 and TP.

One family for each form of experts; with MESHVERSE_ALL_FAMILIES in the environment, all of them.
`make families` runs all, and writes the tables in docs/huggingface.md.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from pathlib import Path

import pytest

from helpers.crew import Crew

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

import hf_expert_families  # noqa: E402  (imports transformers)
from hf_expert_families import REPRESENTATIVES, expert_families  # noqa: E402
from hf_families import Outcome  # noqa: E402
from hf_table import expert_rows, read_table, render_table, write_table  # noqa: E402

TOLERANCE = 1e-5  # in float32
PRECISE_TOLERANCE = 1e-6  # in float64, in which some models compute a little in float32
_DOCUMENT = Path(__file__).parents[2] / "docs" / "huggingface.md"
_TABLE = f"transformers {transformers.__version__}, experts handed out"
_REFUSED = ("aria_text",)  # by version 4 of transformers, whose experts it keeps in its own way
_CHUNK = 6  # families in one world: few enough for its time limit
_SECONDS = 300

MESHES: dict[str, tuple[int, dict[str, int]]] = {
    "ep 2": (2, {"ep_size": 2}),
    "ep 2 x fsdp 2": (4, {"ep_size": 2}),
    "ep 2 x tp 2": (4, {"ep_size": 2, "tp_size": 2}),
}

pytestmark = [pytest.mark.processes, pytest.mark.timeout(1800)]


def swept() -> tuple[str, ...]:
    """The families to compare."""
    if "MESHVERSE_ALL_FAMILIES" in os.environ:
        return expert_families()
    return tuple(name for name in expert_families() if name in REPRESENTATIVES)


def _cannot_have_tp(family: str, sizes: Mapping[str, int]) -> bool:
    return "tp_size" in sizes and family not in hf_expert_families.families()


def compare_some(names: list[str], sizes: dict[str, int]) -> dict[str, tuple[Outcome, Outcome]]:
    """What becomes of each family untied, and tied."""
    compare = hf_expert_families.compare_sharded
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers' own, of tiny sizes
        return {name: (compare(name, False, sizes), compare(name, True, sizes)) for name in names}


@pytest.fixture(scope="module", params=MESHES)
def outcomes(request: pytest.FixtureRequest) -> dict[str, list[tuple[Outcome, Outcome]]]:
    """By family, what every rank of a mesh saw."""
    ranks, sizes = MESHES[request.param]
    names = [name for name in swept() if not _cannot_have_tp(name, sizes)]
    crew = Crew(ranks)
    seen: dict[str, list[tuple[Outcome, Outcome]]] = {}
    for start in range(0, len(names), _CHUNK):
        some = names[start : start + _CHUNK]
        answers = crew.run(compare_some, ranks, some, sizes, timeout=_SECONDS)
        seen |= {name: [answer[name] for answer in answers] for name in some}
    crew.stop()
    return seen


def test_each_family_equals_one_process_or_says_why_not(
    outcomes: dict[str, list[tuple[Outcome, Outcome]]],
) -> None:
    wrong = {}
    for family, ranks in outcomes.items():
        for outcome in (each for pair in ranks for each in pair):
            refused = family in _REFUSED and transformers.__version__ < "5"
            if refused != bool(outcome.refusal) or (
                outcome.error > TOLERANCE
                or outcome.precise_error > PRECISE_TOLERANCE
                or outcome.tied != outcome.was_tied
                or (not refused and outcome.split < 2)
            ):
                wrong[family] = outcome
    assert outcomes
    assert not wrong


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_auxiliary_losses_equal_one_process(four: Crew, family: str) -> None:
    if family not in expert_families():
        pytest.skip("it has no plan in this version of transformers")
    for difference, error, worst in four.run(
        hf_expert_families.auxiliary_loss, 4, family, {"ep_size": 2}, timeout=_SECONDS
    ):
        assert difference < 1e-5
        assert error < TOLERANCE, worst


def test_table_says_what_was_seen(outcomes: dict[str, list[tuple[Outcome, Outcome]]]) -> None:
    untied = {name: ranks[0][0] for name, ranks in outcomes.items()}
    rows = expert_rows(untied)
    refused = {name for name, outcome in untied.items() if outcome.refusal}
    complete = set(outcomes) == set(expert_families())
    if "MESHVERSE_WRITE_TABLES" in os.environ and complete:
        write_table(_DOCUMENT, _TABLE, render_table(rows, refused, experts=True))
    committed = read_table(_DOCUMENT, _TABLE)
    if committed is None:
        pytest.skip(f"docs/huggingface.md has no table for {_TABLE}")
    assert {name: committed.get(name) for name in rows} == rows
    assert not complete or committed == rows
