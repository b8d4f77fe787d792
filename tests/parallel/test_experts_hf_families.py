"""Hugging Face families whose experts are handed out to ranks, with FSDP2 and TP.

Families are trained on a share of a batch for each rank, and compared with one process that has
all of it. `make test` compares a few, `make test-all` one for each form of experts, and
`make families` all of them on every mesh, which writes the table in docs/huggingface_families.md.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

import pytest

from helpers.crew import Crew
from helpers.tiers import in_tiers

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

import hf_families  # noqa: E402  (imports transformers)
from hf_expert_families import auxiliary_loss, compare_both  # noqa: E402
from hf_families import BOUND, Outcome, families, model_class, tiny_model  # noqa: E402
from hf_table import read_table, render_table, write_table  # noqa: E402

_HEAD = ["| family | model | parameters of experts |", "| --- | --- | --- |"]
_DOCUMENT = Path(__file__).parents[2] / "docs" / "huggingface_families.md"
_TABLE = f"transformers {transformers.__version__}, experts handed out"
_IS_OLD = transformers.__version__.startswith("4.")
_NOT_OLD = ("llama4", "llama4_text")  # of version 4, those with experts as version 5 has them
_SECONDS = 600  # for a family, on a busy machine

MESHES: dict[str, tuple[int, dict[str, int]]] = {
    "ep 2": (2, {"ep_size": 2}),
    "ep 2 x fsdp 2": (4, {"ep_size": 2}),
    "ep 2 x tp 2": (4, {"ep_size": 2, "tp_size": 2}),
}

# Each form of experts that transformers has, and what may go with it.
_FORMS = (
    *("aria_text", "deepseek_v3", "dots1", "gpt_oss", "inkling_text", "llama4_text"),
    *("longcat_flash", "mixtral", "nemotron_h", "qwen3_moe"),
)
_SHORT = {"ep 2": ("mixtral",)}
# Experts are the same on every mesh; what is around them differs.
_LONG = {
    "ep 2": ("gpt_oss",),
    "ep 2 x fsdp 2": ("mixtral",),
    "ep 2 x tp 2": _FORMS[::4],
}

pytestmark = [pytest.mark.processes, pytest.mark.timeout(3600)]

Compared = list[tuple[Outcome, Outcome]]  # by rank: untied, and tied


@cache
def candidates() -> tuple[str, ...]:
    """The model types with a plan whose configs have experts."""
    causal = hf_families.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES  # importing a config takes a while
    with_plan = {name for name in causal if _has_expert_plan(name)}
    return tuple(filter(_may_have_experts, sorted(with_plan.union(families()))))


def _has_expert_plan(family: str) -> bool:
    config_class = transformers.CONFIG_MAPPING[family]
    return bool(getattr(config_class, "base_model_ep_plan", None))


def _may_have_experts(family: str) -> bool:
    config = transformers.CONFIG_MAPPING[family]().get_text_config()
    return any("expert" in name for name in config.to_dict())


def has_experts(family: str) -> bool:
    """Whether a family's tiny model has experts: its config may leave them out."""
    names = (name for name, _ in tiny_model(family, tied=False).named_modules())
    return any(re.fullmatch(r"(.*\.)?experts", name) for name in names)


def cases() -> dict[str, tuple[str, str]]:
    """The mesh and the family of each case, by name."""
    return {
        f"{mesh}-{family}": (mesh, family)
        for mesh, (_, sizes) in MESHES.items()
        for family in candidates()
        if "tp_size" not in sizes or family in families()
    }


def named(tier: Mapping[str, tuple[str, ...]]) -> list[str]:
    """Names of the cases of a tier that this version of transformers has."""
    names = [f"{mesh}-{family}" for mesh, some in tier.items() for family in some]
    return [name for name in names if name in cases()]


# --- all families --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def compared(crew: Crew) -> Callable[[str], Compared]:
    """Compare a family on the real ranks of a mesh, once."""

    def compare_case(case: str) -> Compared:
        mesh, family = cases()[case]
        ranks, sizes = MESHES[mesh]
        return crew.run(compare_both, ranks, family, sizes, timeout=_SECONDS)

    return cache(compare_case)


def has_no_layers_to_split(mesh: str, family: str) -> bool:
    """Whether tensor parallelism refuses a family: the table is of experts alone."""
    has_tp = "tp_size" in MESHES[mesh][1]
    return has_tp and family == "gpt_oss" and hf_families.GPT_OSS_SPLITS_NO_LAYERS


def check(mesh: str, family: str, ranks: Compared) -> None:
    for outcome in (each for pair in ranks for each in pair):
        if has_no_layers_to_split(mesh, family):
            assert "tensor-parallel plan splits none of its 2 layers" in outcome.refusal
        elif _IS_OLD and family not in _NOT_OLD:
            assert outcome.refusal
        else:
            assert outcome.is_equal, outcome
            assert outcome.split > 1


def rows(untied: Mapping[str, Outcome]) -> dict[str, str]:
    """Rows of the table, by family."""
    return {
        name: f"| {name} | `{model_class(name).__name__}` | "
        f"{_reason(each.refusal) or f'{each.split} of {each.parameters}'} |"
        for name, each in untied.items()
    }


def _reason(refusal: str) -> str:
    """The first sentence, without the degree that was asked for."""
    return re.sub(r"^ep=\d+: ", "", refusal).partition(". ")[0]


@pytest.mark.parametrize("case", in_tiers(cases(), short=named(_SHORT), long=named(_LONG)))
def test_each_family_equals_one_process_or_says_why_not(
    compared: Callable[[str], Compared], case: str
) -> None:
    mesh, family = cases()[case]
    if not has_experts(family):
        pytest.skip(f"the tiny model of {family} has no experts")
    check(mesh, family, compared(case))
    committed = read_table(_DOCUMENT, _TABLE)
    if has_no_layers_to_split(mesh, family) or "MESHVERSE_WRITE_TABLES" in os.environ:
        return
    if committed is not None:
        assert committed[family] == rows({family: compared(case)[0][0]})[family]


@pytest.mark.sweep
@pytest.mark.parametrize("mesh", MESHES)
def test_table_says_what_was_seen(compared: Callable[[str], Compared], mesh: str) -> None:
    """Compares the families of the other tiers, too: `make families` runs this tier alone."""
    here = {family: case for case, (where, family) in cases().items() if where == mesh}
    outcomes = {family: compared(here[family]) for family in filter(has_experts, here)}
    for family, ranks in outcomes.items():
        check(mesh, family, ranks)
    outcomes = {name: it for name, it in outcomes.items() if not has_no_layers_to_split(mesh, name)}
    untied = rows({family: ranks[0][0] for family, ranks in outcomes.items()})
    refused = {family for family, ranks in outcomes.items() if ranks[0][0].refusal}
    is_complete = outcomes.keys() == set(filter(has_experts, candidates()))  # but for plans of TP
    if "MESHVERSE_WRITE_TABLES" in os.environ and is_complete:
        table = render_table(untied, refused, _HEAD, "families with experts")
        write_table(_DOCUMENT, _TABLE, table)
    committed = read_table(_DOCUMENT, _TABLE)
    if committed is None:
        pytest.skip(f"docs/huggingface_families.md has no table for {_TABLE}")
    assert {family: committed.get(family) for family in untied} == untied
    assert not is_complete or committed == untied


# --- a loss of routers ---------------------------------------------------------------------------


@pytest.mark.parametrize("family", in_tiers(("mixtral", "qwen3_moe"), short=("mixtral",)))
def test_auxiliary_losses_equal_one_process(crew: Crew, family: str) -> None:
    if family not in candidates():
        pytest.skip("it has no plan in this version of transformers")
    for difference, error, worst in crew.run(
        auxiliary_loss, 4, family, {"ep_size": 2}, timeout=_SECONDS
    ):
        assert difference < BOUND
        assert error < BOUND, worst
