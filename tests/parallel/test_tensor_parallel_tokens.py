"""Plans for models built like Llama, with and without sequence parallelism, on real models.

Logits and gradients are those of one process, or the model is refused before it is changed.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)

pytest.importorskip("transformers", reason="transformers is not installed")

import hf_families

import meshverse
from helpers.crew import Crew
from helpers.tiers import in_tiers
from helpers.worlds import fake_world
from meshverse.parallel import (
    ReplicatedWithGradAllreduce,
    apply_expert_parallelism,
    apply_tensor_parallelism,
    apply_tp_plan,
    get_hf_tp_shard_plan,
)
from meshverse.parallel.experts.expert_parallel import check_experts
from meshverse.parallel.tensor_parallel.choice import llama_tp_plan

PLAN = "meshverse.parallel.llama_tp_plan"
EXACT = 1e-5


def error_of(family: str, sequence_parallel: bool, ep: bool = False) -> float | str:
    """The largest relative error of logits and gradients, or why the model is refused."""
    mesh = meshverse.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    whole = hf_families.tiny_model(family, tied=False)
    model = copy.deepcopy(whole)
    handed_out = check_experts(model, 2) if ep else []
    try:
        apply_tensor_parallelism(
            model, mesh, PLAN, sequence_parallel=sequence_parallel, handed_out=handed_out
        )
    except ValueError as error:
        assert not any(isinstance(each, DTensor) for each in model.parameters())
        return str(error)
    if ep:
        apply_expert_parallelism(model, mesh, same_tokens=mesh)
    error, _ = hf_families.largest_error(hf_families.run(model), hf_families.run(whole), floor=1e-2)
    return error


def errors_of(cases: list[tuple[str, bool, bool]]) -> list[float | str]:
    return [error_of(*case) for case in cases]


DENSE = ["llama", "qwen3", "gemma2", "gemma3_text", "exaone4", "apertus"]


@pytest.mark.long
@pytest.mark.parametrize("sequence_parallel", [pytest.param(False, marks=pytest.mark.long), True])
def test_dense_models_equal_one_process(crew: Crew, sequence_parallel: bool) -> None:
    cases = [(family, sequence_parallel, False) for family in DENSE]
    for errors in crew.run(errors_of, 2, cases):
        assert all(isinstance(error, float) and error < EXACT for error in errors), errors


@pytest.mark.parametrize("ep", [pytest.param(False, marks=pytest.mark.long), True])
@pytest.mark.parametrize("sequence_parallel", [False, pytest.param(True, marks=pytest.mark.long)])
@pytest.mark.long
def test_models_with_experts_equal_one_process(
    crew: Crew, sequence_parallel: bool, ep: bool
) -> None:
    families = ["qwen3_moe", "mixtral", "glm4_moe", "gpt_oss"]
    for errors in crew.run(errors_of, 2, [(each, sequence_parallel, ep) for each in families]):
        assert all(isinstance(error, float) and error < EXACT for error in errors), errors


REFUSED = [
    ("olmo2", False, "'q_norm' of Olmo2Attention normalizes 32 features, those of all heads"),
    ("phi3", False, "Phi3ForCausalLM is not built like Llama"),
    ("glm4", True, "the modules ['model.layers.0.mlp.gate_up_proj', 'model.layers.0.mlp.down_proj"),
    ("starcoder2", True, "the modules ['model.layers.0.mlp.c_fc', 'model.layers.0.mlp.c_proj'"),
]


@pytest.mark.parametrize(("family", "sequence_parallel", "reason"), REFUSED)
def test_models_built_otherwise_are_refused(
    family: str, sequence_parallel: bool, reason: str
) -> None:
    with fake_world(2):
        assert reason in str(error_of(family, sequence_parallel))


def given_plan() -> dict[str, ParallelStyle]:
    """A plan as people write it, which says nothing of the norms of heads."""
    columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    plan: dict[str, ParallelStyle] = {
        f"model.layers.*.{each}": ColwiseParallel() for each in columns
    }
    return plan | {"model.layers.*.self_attn.o_proj": RowwiseParallel()}


NORMS = ("model.layers.*.self_attn.q_norm", "model.layers.*.self_attn.k_norm")


def by_number(plan: dict[str, ParallelStyle]) -> dict[str, ParallelStyle]:
    return {key.replace("*", str(layer)): each for layer in (0, 1) for key, each in plan.items()}


def errors_of_given_plans() -> list[float]:
    mesh = meshverse.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    expected = hf_families.run(hf_families.tiny_model("qwen3", tied=False))
    plan = given_plan() | dict.fromkeys(NORMS, ReplicatedWithGradAllreduce())
    errors = []
    for given in (plan, by_number(plan)):
        model = hf_families.tiny_model("qwen3", tied=False)
        apply_tp_plan(model, mesh, given)
        error, _ = hf_families.largest_error(hf_families.run(model), expected, floor=1e-2)
        errors.append(error)
    return errors


def test_given_plans_that_name_the_norms_equal_one_process(crew: Crew) -> None:
    for errors in crew.run(errors_of_given_plans, 2):
        assert max(errors) < EXACT, errors


@pytest.mark.parametrize("numbered", [False, True])
def test_given_plans_that_lack_the_norms_are_refused(numbered: bool) -> None:
    model, plan = hf_families.tiny_model("qwen3", tied=False), given_plan()
    with fake_world(2):
        mesh = meshverse.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        with pytest.raises(ValueError, match=r"no entry for .*'model.layers.0.self_attn.q_norm.w"):
            apply_tp_plan(model, mesh, by_number(plan) if numbered else plan)
    assert not any(isinstance(each, DTensor) for each in model.parameters())


@pytest.mark.parametrize("plan", [llama_tp_plan, None])
def test_other_names_of_norms_are_refused(plan: Any) -> None:
    model = hf_families.tiny_model("llama", tied=False)
    for layer in model.model.layers:
        layer.self_attn.norm_q = nn.RMSNorm(8)
    with fake_world(2):
        mesh = meshverse.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        with pytest.raises(ValueError, match=r"no entry for .*'model.layers.0.self_attn.norm_q.w"):
            apply_tensor_parallelism(model, mesh, plan)
    assert not any(isinstance(each, DTensor) for each in model.parameters())


def given_for_tokens(gathered: bool) -> dict[str, Any]:
    """A plan for a Mixtral that splits tokens, with or without gathering them for experts."""
    split: dict[str, Any] = {"output_layouts": Shard(1), "use_local_output": False}
    plan: dict[str, ParallelStyle] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), **split),
        "model.layers.*.input_layernorm": SequenceParallel(),
        "model.layers.*.self_attn.o_proj": RowwiseParallel(**split),
        "model.layers.*.post_attention_layernorm": SequenceParallel(),
        "model.norm": SequenceParallel(),
        "lm_head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    for name in ("q_proj", "k_proj", "v_proj"):
        plan[f"model.layers.*.self_attn.{name}"] = ColwiseParallel(input_layouts=Shard(1))
    if gathered:
        plan["model.layers.*.mlp"] = PrepareModuleInput(
            input_layouts=Shard(1), desired_input_layouts=Replicate(), use_local_output=True
        )
    return plan


def test_a_given_plan_must_gather_tokens_for_experts() -> None:
    model = hf_families.tiny_model("mixtral", tied=False)
    with fake_world(2):
        mesh = meshverse.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        with pytest.raises(ValueError, match=r"the experts \['model.layers.0.mlp.experts'"):
            apply_tensor_parallelism(model, mesh, given_for_tokens(gathered=False))
        assert not any(isinstance(each, DTensor) for each in model.parameters())
        apply_tensor_parallelism(model, mesh, given_for_tokens(gathered=True))


def test_sequence_parallelism_beside_a_plan_without_it_is_refused() -> None:
    with fake_world(2):
        mesh = meshverse.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        plan = given_plan()
        for given in (plan, lambda model, sequence_parallel: plan):
            model = hf_families.tiny_model("qwen3", tied=False)
            with pytest.raises(ValueError, match="sequence_parallel=True, and the plan for Qwen3"):
                apply_tensor_parallelism(model, mesh, given, sequence_parallel=True)
            assert not any(isinstance(each, DTensor) for each in model.parameters())


def seen_with_embeddings(family: str, sequence_parallel: bool) -> dict[str, Any]:
    """Logits and gradients of a prompt of embeddings, before those of tokens, in a model."""
    model = hf_families.tiny_model(family, tied=False)
    if sequence_parallel:
        mesh = meshverse.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        apply_tensor_parallelism(model, mesh, PLAN, sequence_parallel=True)
    generator = torch.Generator().manual_seed(4)
    prompt = torch.randn(2, 4, 32, generator=generator, requires_grad=True)
    embedded = model.get_input_embeddings()(hf_families.tokens()[:, 4:])
    given = torch.cat([prompt, embedded], dim=1)
    logits = hf_families.full(model(inputs_embeds=given, use_cache=False).logits)
    weights = torch.linspace(-1, 1, logits.numel()).view_as(logits)
    (logits * weights).sum().backward()
    gradients = {name: each.grad for name, each in model.named_parameters()}
    return {"logits": logits.detach(), "prompt": prompt.grad} | {
        name: None if each is None else hf_families.full(each) for name, each in gradients.items()
    }


def error_with_embeddings(family: str) -> tuple[float, str]:
    seen, expected = (seen_with_embeddings(family, each) for each in (True, False))
    return hf_families.largest_error(seen, expected, floor=1e-2)


@pytest.mark.parametrize("family", in_tiers(["llama", "gemma3_text", "mixtral"], ["llama"]))
def test_sequence_parallelism_takes_embeddings(crew: Crew, family: str) -> None:
    for error, worst in crew.run(error_with_embeddings, 2, family):
        assert error < EXACT, worst


@pytest.mark.parametrize("plan", [None, {}])
def test_a_plan_that_splits_only_some_projections_is_refused(plan: Any) -> None:
    """Without a latent of queries, the family's own plan splits keys and values only."""
    if "glm4_moe_lite" not in hf_families.families():
        pytest.skip("this version of transformers lacks glm4_moe_lite")
    model = hf_families.tiny_model("glm4_moe_lite", tied=False, q_lora_rank=None)
    with fake_world(2):
        mesh = meshverse.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        given = None if plan is None else get_hf_tp_shard_plan(model)
        with pytest.raises(ValueError, match=r"no entry for .*'model.layers.0.self_attn.q_proj.w"):
            apply_tensor_parallelism(model, mesh, given)
    assert not any(isinstance(each, DTensor) for each in model.parameters())
