"""The plan of a Hugging Face model: what is taken, added and left out."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from rounding import largest_error
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from helpers.crew import Crew
from helpers.tiers import in_tiers
from helpers.worlds import fake_world

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

import hf_families  # noqa: E402  (imports transformers)

import meshverse  # noqa: E402
from meshverse.parallel.styles.local_styles import (  # noqa: E402
    LocalParameters,
    ReplicatedWithGradAllreduce,
)
from meshverse.parallel.tensor_parallel.apply import apply_tp_plan  # noqa: E402
from meshverse.parallel.tensor_parallel.hf_plan import get_hf_tp_shard_plan, has_hf_plan  # noqa: E402


def plan_of(family: str, *, tied: bool = False, **settings: bool) -> dict[str, ParallelStyle]:
    return get_hf_tp_shard_plan(hf_families.tiny_model(family, tied=tied), **settings)


def test_llama() -> None:
    plan = plan_of("llama")
    layers = [f"model.layers.*.self_attn.{name}_proj" for name in "qkvo"]
    layers += [f"model.layers.*.mlp.{name}_proj" for name in ("gate", "up", "down")]
    assert set(plan) == {"lm_head", "model.embed_tokens", *layers}
    down = plan["model.layers.*.mlp.down_proj"]
    assert isinstance(down, RowwiseParallel)
    assert down.input_layouts == (Shard(-1),)


def test_logits_are_gathered_or_stay_split() -> None:
    head = plan_of("llama")["lm_head"]
    assert isinstance(head, ColwiseParallel)
    assert head.output_layouts == (Replicate(),)
    assert head.use_local_output
    head = plan_of("llama", split_logits=True)["lm_head"]
    assert isinstance(head, ColwiseParallel)
    assert head.output_layouts == (Shard(-1),)
    assert not head.use_local_output


def test_each_entry_has_a_style_of_its_own() -> None:
    styles = list(plan_of("llama").values())
    assert len({id(style) for style in styles}) == len(styles)


def test_model_without_model() -> None:
    plan = plan_of("gpt_neox")
    assert "gpt_neox.layers.*.attention.query_key_value" in plan
    assert "gpt_neox.embed_in" in plan


def test_inner_model_alone() -> None:
    model = hf_families.tiny_model("llama", tied=False).model
    assert "layers.*.self_attn.q_proj" in get_hf_tp_shard_plan(model)


def test_later_plans_win() -> None:
    model = hf_families.tiny_model("llama", tied=False)
    model._tp_plan = {**model._tp_plan, "lm_head": "rowwise_rep"}
    model.model._tp_plan = {**model.model._tp_plan, "layers.*.mlp.up_proj": "colwise_rep"}
    plan = get_hf_tp_shard_plan(model)
    assert isinstance(plan["lm_head"], RowwiseParallel)
    up = plan["model.layers.*.mlp.up_proj"]
    assert isinstance(up, ColwiseParallel)
    assert up.output_layouts == (Replicate(),)


@pytest.mark.parametrize(("tied", "split"), [(False, True), (True, False)])
def test_embedding_without_a_plan_for_the_head(tied: bool, split: bool) -> None:
    model = hf_families.tiny_model("llama", tied=tied)
    type(model)._tp_plan, class_plan = {}, type(model)._tp_plan
    try:
        model._tp_plan = {}
        plan = get_hf_tp_shard_plan(model)
    finally:
        type(model)._tp_plan = class_plan
    assert ("model.embed_tokens" in plan) == split


def test_entries_of_experts_that_the_model_has_not_are_named_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = hf_families.tiny_model("llama", tied=False)
    absent = {"layers.*.mlp.experts": "moe_tp_experts", "layers.*.mlp.router": "ep_router"}
    model.model._tp_plan = {**model.model._tp_plan, **absent}
    with caplog.at_level(logging.WARNING, logger="meshverse.parallel.tensor_parallel.hf_plan"):
        plan = get_hf_tp_shard_plan(model)
    assert set(plan) == set(plan_of("llama"))
    messages = [record.getMessage() for record in caplog.records if "meshverse" in record.name]
    assert len(messages) == 1
    assert all(f"model.{key}" in messages[0] for key in absent)


def test_entries_of_experts_that_the_model_has_are_refused() -> None:
    model = hf_families.tiny_model("llama", tied=False)
    model.model._tp_plan = {**model.model._tp_plan, "layers.*.mlp": "moe_tp_experts"}
    with pytest.raises(ValueError, match=r"splits experts.*'model\.layers\.\*\.mlp': 'moe_tp"):
        get_hf_tp_shard_plan(model)


def test_no_plan_is_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    assert not has_hf_plan(model)
    with pytest.raises(ValueError, match="Sequential has no tensor-parallel plan"):
        get_hf_tp_shard_plan(model)


def test_parameters_are_split_by_their_module() -> None:
    model = hf_families.tiny_model("llama", tied=False)
    for layer in model.model.layers:
        layer.self_attn.sinks = nn.Parameter(layer.input_layernorm.weight[:4].clone())
    model.model._tp_plan = {
        **model.model._tp_plan,
        "layers.*.self_attn.sinks": "colwise",
        "layers.*.input_layernorm.weight": "sequence_parallel",
    }
    plan = get_hf_tp_shard_plan(model)
    style = plan["model.layers.*.self_attn"]
    assert isinstance(style, LocalParameters)
    assert style.placements == {"sinks": Shard(0)}
    assert not any("input_layernorm" in key for key in plan)


@pytest.mark.parametrize("tp_size", [4, 8])
def test_more_ranks_than_heads_are_refused(tp_size: int) -> None:
    model = hf_families.tiny_model("llama", tied=False)
    before = dict(model.named_parameters())
    config = model.config
    kv, heads = config.num_key_value_heads, config.num_attention_heads
    fit = f"divides num_key_value_heads={kv} and num_attention_heads={heads}: 1 or {kv}"
    message = f"(k|q)_proj computes [24] heads, .* the {tp_size} ranks .*Use a tp_size that {fit}"
    with fake_world(tp_size):
        mesh = meshverse.init_device_mesh("cpu", (tp_size,), mesh_dim_names=("tp",))
        with pytest.raises(ValueError, match=message):
            apply_tp_plan(model, mesh, get_hf_tp_shard_plan(model))
    assert all(each is before[name] for name, each in model.named_parameters())


def test_norm_over_all_heads_is_refused() -> None:
    model = hf_families.tiny_model("llama", tied=False)
    for layer in model.model.layers:
        layer.self_attn.q_norm = nn.LayerNorm(32)
    with pytest.raises(ValueError, match="'q_norm' of LlamaAttention normalizes 32 features"):
        get_hf_tp_shard_plan(model)


def error_without(family: str, kind: type) -> tuple[float, float]:
    """How far gradients are from one process, with the plan and with no styles of a kind."""
    mesh = meshverse.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    expected = hf_families.run(hf_families.tiny_model(family, tied=False))
    errors = []
    for left_out in ((), kind):
        model = hf_families.tiny_model(family, tied=False)
        plan: dict[str, Any] = get_hf_tp_shard_plan(model)
        kept = {key: each for key, each in plan.items() if not isinstance(each, left_out)}
        # With some left out, by torch: apply_tp_plan refuses the plan.
        (parallelize_module if left_out else apply_tp_plan)(model, mesh, kept)
        error, _ = largest_error(hf_families.run(model), expected, floor=1e-2)
        errors.append(error)
    return errors[0], errors[1]


@pytest.mark.parametrize(
    "family", in_tiers(("qwen3", "gemma3_text", "exaone4", "apertus"), short=("gemma3_text",))
)
def test_gradients_of_head_norms_need_their_sum(crew: Crew, family: str) -> None:
    for right, wrong in crew.run(error_without, 2, family, ReplicatedWithGradAllreduce):
        assert right < hf_families.BOUND
        assert wrong > 0.1


VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "norms of heads in cohere": ("cohere", {"use_qk_norm": True}),
    "norms of heads in phi": ("phi", {"qk_layernorm": True}),
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "a vocabulary that does not divide": ("llama", {"vocab_size": 97}),
    "a key for each head": ("llama", {"num_key_value_heads": 4}),
}


@pytest.mark.parametrize(
    "name",
    in_tiers(VARIANTS, short=("a vocabulary that does not divide",)),
)
def test_what_configs_switch_on_equals_one_process(crew: Crew, name: str) -> None:
    for outcome in crew.run(variant, 2, *VARIANTS[name]):
        assert outcome.is_equal, outcome


def variant(family: str, changes: dict[str, Any]) -> hf_families.Outcome:
    return hf_families.compare(family, False, **changes)
