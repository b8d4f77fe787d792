"""Pipeline stages of Hugging Face families: equal to the whole model, or refused by name.

`make test` compares one, `make test-all` one for each way in which models call their layers, and
`make families` all of them; it writes the table of those that are refused in
docs/huggingface_families.md.
"""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

import pytest
import torch
from rounding import largest_error
from torch import Tensor, nn

from helpers.tiers import in_tiers
from meshverse.parallel import split_into_stages

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from hf_families import (  # noqa: E402  (imports transformers)
    Outcome,
    families,
    full,
    model_class,
    run,
    tiny_model,
    tokens,
)
from hf_table import read_table, render_table, write_table  # noqa: E402

_DOCUMENT = Path(__file__).parents[2] / "docs" / "huggingface_families.md"
_TABLE = f"transformers {transformers.__version__}, pipeline stages"

_SHORT = ("gemma3_text", "gemma3n_text", "gpt_neox")
_LONG = (*("cohere2", "deepseek_v3", "gemma4_text", "gpt_oss", "phi4_multimodal", "qwen3_next"),)

pytestmark = pytest.mark.timeout(3600)

Compared = tuple[Outcome, Outcome]  # untied, and tied


def compare_stages(family: str, *, tied: bool) -> Outcome:
    """Compare a tiny model with its two stages, one after the other."""
    whole = tiny_model(family, tied=tied)
    model = copy.deepcopy(whole)
    try:
        stages = [split_into_stages(model, 2, index) for index in range(2)]
    except ValueError as error:
        return Outcome(str(error))
    expected = run(whole)
    error, worst = largest_error(run_stages(stages), expected, floor=1e-2)
    return Outcome(error=error, worst=worst, parameters=len(expected) - 1)


def run_stages(stages: list[nn.Module]) -> dict[str, Tensor | None]:
    """As `hf_families.run`, of stages one after the other."""
    hidden = tokens()
    torch.manual_seed(20)
    for stage in stages:
        hidden = stage(hidden)
    generator = torch.Generator().manual_seed(20)
    weights = torch.randn(tokens().numel(), hidden.size(-1), generator=generator)
    (hidden * weights.view_as(hidden)).sum().backward()
    seen: dict[str, Tensor | None] = {"logits": hidden.detach()}
    names = dict.fromkeys(name for stage in stages for name, _ in stage.named_parameters())
    objects: set[int] = set()
    for name in names:
        for stage in stages:
            parameter = dict(stage.named_parameters()).get(name)
            if parameter is not None and id(parameter) not in objects:
                objects.add(id(parameter))
                seen[name] = None if parameter.grad is None else full(parameter.grad)
    return seen


@pytest.fixture(scope="module")
def compared() -> Callable[[str], Compared]:
    """Compare a family untied, and tied, once."""

    def compare_both(family: str) -> Compared:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # transformers' own, of tiny sizes
            return compare_stages(family, tied=False), compare_stages(family, tied=True)

    return cache(compare_both)


def check(pair: Compared) -> None:
    assert bool(pair[0].refusal) == bool(pair[1].refusal)
    for outcome in pair:
        assert outcome.refusal or (outcome.is_equal and outcome.parameters > 8), outcome


def rows(outcomes: Mapping[str, Compared]) -> dict[str, str]:
    """Rows of the table, by family: of those that are refused."""
    return {
        name: f"| {name} | `{model_class(name).__name__}` | {_reason(pair[0].refusal)} |"
        for name, pair in outcomes.items()
        if pair[0].refusal
    }


def _reason(refusal: str) -> str:
    return refusal.partition(": ")[2].partition(". Train it")[0]


@pytest.mark.parametrize(
    "family",
    in_tiers(
        families(),
        short=[name for name in _SHORT if name in families()],
        long=[name for name in _LONG if name in families()],
    ),
)
def test_each_family_equals_the_whole_model_or_says_why_not(
    compared: Callable[[str], Compared], family: str
) -> None:
    check(compared(family))
    committed = read_table(_DOCUMENT, _TABLE)
    if committed is not None and "MESHVERSE_WRITE_TABLES" not in os.environ:
        assert committed.get(family) == rows({family: compared(family)}).get(family)


@pytest.mark.sweep
def test_table_says_which_are_refused(compared: Callable[[str], Compared]) -> None:
    """Compares the families of the other tiers, too: `make families` runs this tier alone."""
    outcomes = {family: compared(family) for family in families()}
    refused = rows(outcomes)
    if "MESHVERSE_WRITE_TABLES" in os.environ:
        all_rows = dict.fromkeys(outcomes, "") | refused
        write_table(_DOCUMENT, _TABLE, render_table(all_rows, set(refused), [], "families"))
    for pair in outcomes.values():
        check(pair)
    assert len(refused) < len(outcomes) / 2
    committed = read_table(_DOCUMENT, _TABLE)
    if committed is None:
        pytest.skip(f"docs/huggingface_families.md has no table for {_TABLE}")
    assert committed == refused
