"""Tensor parallelism of Hugging Face families with a plan, against one process.

`make test` compares a few, `make test-all` one for each form of plans and of attention, and
`make families` all of them, and writes the table in docs/huggingface_families.md of what was seen.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

import pytest
import torch

import meshverse
from helpers.crew import Crew
from helpers.tiers import in_tiers
from meshverse.parallel import apply_tp_plan, get_hf_tp_shard_plan

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from hf_families import (  # noqa: E402  (imports transformers)
    BOUND,
    RANKS,
    Outcome,
    compare_both,
    families,
    full,
    model_class,
    tiny_model,
    tokens,
)
from hf_table import read_table, render_table, write_table  # noqa: E402

_HEAD = [
    "| family | model | split parameters, untied | tied | split, % | of layers, % |",
    "| --- | --- | --- | --- | --- | --- |",
]
_DOCUMENT = Path(__file__).parents[2] / "docs" / "huggingface_families.md"
_TABLE = f"transformers {transformers.__version__}"
_SECONDS = 600  # for a family, on a busy machine

# A plan of plain styles; a shared key, and experts.
_SHORT = ("llama",)
# Norms of heads, sets of styles that many plans have, and kinds of attention in them.
_LONG = ("deepseek_v2", "qwen3", "gpt_neox", "gemma3n_text", "deepseek_v3", "qwen3_next", "gpt_oss")

# Its experts, which the plan hands out, take a weight for every expert.
_REFUSED = {"gpt_oss"} if transformers.__version__.startswith("4.") else set()

pytestmark = [pytest.mark.processes, pytest.mark.timeout(3600)]

Compared = list[tuple[Outcome, Outcome]]  # by rank: untied, and tied


@pytest.fixture(scope="module")
def compared(crew: Crew) -> Callable[[str], Compared]:
    """Compare a family on real ranks, once."""
    return cache(lambda family: crew.run(compare_both, RANKS, family, timeout=_SECONDS))


def check(family: str, ranks: Compared) -> None:
    for untied, tied in ranks:
        for outcome in (untied, tied):
            if family in _REFUSED:
                assert "Use transformers 5.0 or newer" in outcome.refusal
                continue
            assert outcome.is_equal, outcome
            assert outcome.share > 0
            if family in (*_SHORT, *_LONG) and family != "gpt_oss":  # whose plan may have no layers
                assert outcome.share_of_layers > 0
        assert not untied.tied


def rows(outcomes: Mapping[str, Compared]) -> dict[str, str]:
    """Rows of the table, by family."""
    found = {}
    for name, ((*pair,), *_) in outcomes.items():
        counts = " | ".join(f"{each.split} of {each.parameters}" for each in pair)
        shares = f"{pair[0].share:.0f} | {pair[0].share_of_layers:.0f}"
        seen = pair[0].refusal or f"{counts} | {shares}"
        found[name] = f"| {name} | `{model_class(name).__name__}` | {seen} |"
    return found


@pytest.mark.parametrize(
    "family",
    in_tiers(
        families(),
        short=[name for name in _SHORT if name in families()],
        long=[name for name in _LONG if name in families()],
    ),
)
def test_split_family_equals_one_process(compared: Callable[[str], Compared], family: str) -> None:
    check(family, compared(family))
    committed = read_table(_DOCUMENT, _TABLE)
    if committed is not None and "MESHVERSE_WRITE_TABLES" not in os.environ:
        assert committed[family] == rows({family: compared(family)})[family]


def logits_with_a_cache(family: str) -> float:
    """The relative error of logits, of tokens after others whose keys are in a cache."""
    whole = tiny_model(family, tied=False).eval()
    split = copy.deepcopy(whole)
    mesh = meshverse.init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",))
    apply_tp_plan(split, mesh, get_hf_tp_shard_plan(split))
    seen = []
    for model in (split, whole):
        cache = None
        for given in tokens()[:, :7].split([3, 3, 1], dim=1):
            with torch.no_grad():
                output = model(input_ids=given, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            assert cache is not None
        assert cache.get_seq_length() == 7
        seen.append(full(output.logits))
    return float((seen[0] - seen[1]).norm() / seen[1].norm())


_CACHED = ("llama", "doge", "llama4_text", "deepseek_v3", "gemma3n_text", "gpt_neox")


@pytest.mark.parametrize(
    "family", in_tiers([each for each in _CACHED if each in families()], short=["llama"])
)
def test_a_filled_cache_equals_one_process(crew: Crew, family: str) -> None:
    for error in crew.run(logits_with_a_cache, RANKS, family, timeout=_SECONDS):
        assert error < BOUND


@pytest.mark.sweep
def test_table_says_what_was_seen(compared: Callable[[str], Compared]) -> None:
    """Compares the families of the other tiers, too: `make families` runs this tier alone."""
    outcomes = {family: compared(family) for family in families()}
    refused = {name for name, ranks in outcomes.items() if ranks[0][0].refusal}
    if "MESHVERSE_WRITE_TABLES" in os.environ:
        write_table(_DOCUMENT, _TABLE, render_table(rows(outcomes), refused, _HEAD, "families"))
    assert refused == _REFUSED
    for family, ranks in outcomes.items():
        check(family, ranks)
    assert len(outcomes) > 40
    assert len([ranks for ranks in outcomes.values() if ranks[0][0].share_of_layers > 0]) > 40
    assert len([ranks for ranks in outcomes.values() if ranks[0][1].tied]) > 30
    committed = read_table(_DOCUMENT, _TABLE)
    if committed is None:
        pytest.skip(f"docs/huggingface_families.md has no table for {_TABLE}")
    assert committed == rows(outcomes)
