"""Tensor parallelism of models in wrappers: PEFT's, and those with a value head."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel

pytest.importorskip("transformers", reason="transformers is not installed")

import hf_families
import transformers
import wrapped_models
from tiny_models import batch, full, full_weights, make_optimizer

import meshverse
from helpers.crew import Crew
from helpers.tiers import in_tiers
from helpers.worlds import fake_world
from meshverse.parallel import (
    ParallelismSizes,
    apply_tensor_parallelism,
    create_fsdp2_device_mesh,
    fsdp2_strategy_parallelize,
    get_flat_mesh,
    pipeline_schedule,
    pipeline_stages,
    register_tp_plan,
    split_into_stages,
)
from meshverse.parallel.tensor_parallel import choice

LLAMA_PLAN = "meshverse.parallel.llama_tp_plan"
EXACT = 1e-5
KINDS = [
    "lora",
    "lora of attention",
    "lora with head",
    "lora in place",
    "model",
    "pretrained_model",
]


def error_of(kind: str, family: str, settings: dict[str, Any]) -> tuple[float, int, int]:
    """The largest relative error, and the numbers of split and of all parameters."""
    mesh = meshverse.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    whole = wrapped_models.make(kind, family)
    model = copy.deepcopy(whole)
    apply_tensor_parallelism(model, mesh, **settings)
    frozen = {name for name, each in whole.named_parameters() if not each.requires_grad}
    assert frozen == {name for name, each in model.named_parameters() if not each.requires_grad}
    error, _ = hf_families.largest_error(hf_families.run(model), hf_families.run(whole), floor=1e-2)
    split = [isinstance(each, DTensor) for each in model.parameters()]
    return error, sum(split), len(split)


_CASES = [(kind, plan) for kind in KINDS for plan in ("own", "llama")]
_SHORT = [("lora", "own")]


@pytest.mark.parametrize(("kind", "plan"), in_tiers(_CASES, _SHORT, _CASES[::2]))
def test_wrapped_models_equal_one_process(crew: Crew, kind: str, plan: str) -> None:
    settings = {} if plan == "own" else {"tp_shard_plan": LLAMA_PLAN}
    for error, split, count in crew.run(error_of, 2, kind, "qwen3", settings):
        assert error < EXACT
        assert split > count // 2, (split, count)


@pytest.mark.long
def test_lora_under_sequence_parallelism_equals_one_process(crew: Crew) -> None:
    settings = {"tp_shard_plan": LLAMA_PLAN, "sequence_parallel": True}
    for kind in ("lora", "lora in place"):
        for error, _, _ in crew.run(error_of, 2, kind, "qwen3", settings):
            assert error < EXACT


@pytest.mark.parametrize("family", in_tiers(["olmo2", "exaone4", "deepseek_v3"], ["olmo2"]))
def test_lora_in_models_whose_plans_gather(crew: Crew, family: str) -> None:
    for error, _, _ in crew.run(error_of, 2, "lora", family, {}):
        assert error < EXACT


@pytest.mark.parametrize("family", in_tiers(["deepseek_v2", "deepseek_v3"], ["deepseek_v2"]))
def test_lora_of_layers_that_stay_whole_equals_one_process(crew: Crew, family: str) -> None:
    for error, split, _ in crew.run(error_of, 2, "lora of latents", family, {}):
        assert error < EXACT
        assert split


def vision_model() -> nn.Module:
    """A tiny vision-language model, the same each time."""
    text = hf_families.tiny_config("qwen3", tied=False).to_dict()
    config = transformers.Qwen3VLConfig(
        text_config={name: text[name] for name in text if name.startswith(("num_", "head_dim"))}
        | {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48},
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 48,
            "depth": 2,
            "num_heads": 4,
            "out_hidden_size": 32,
        },
    )
    torch.manual_seed(0)
    return transformers.Qwen3VLForConditionalGeneration(config)


def test_a_plan_that_splits_no_layer_is_refused() -> None:
    model = vision_model()
    with fake_world(2):
        mesh = meshverse.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        with pytest.raises(ValueError, match=r"splits none of its \d layers: it names \['lm_head'"):
            apply_tensor_parallelism(model, mesh)
        assert not any(isinstance(each, DTensor) for each in model.parameters())
        given = {"model.language_model.layers.*.mlp.gate_proj": ColwiseParallel()}
        with pytest.raises(ValueError, match="sequence_parallel"):
            apply_tensor_parallelism(model, mesh, given, sequence_parallel=True)


def with_dora(layer: Any) -> None:
    layer.lora_magnitude_vector["default"] = nn.Linear(4, 1)


def with_embedding(layer: Any) -> None:
    layer.lora_embedding_A["default"] = nn.Parameter(torch.ones(2, 2))


def with_nonlinear(layer: Any) -> None:
    layer.lora_A["default"] = nn.Sequential(nn.Linear(32, 4))


def with_other_base(layer: Any) -> None:
    layer.base_layer = nn.Conv1d(32, 32, 1)


@pytest.mark.parametrize("change", [with_dora, with_embedding, with_nonlinear, with_other_base])
def test_other_adapters_are_refused_by_name(change: Any) -> None:
    model = wrapped_models.make("lora")
    change(model.base_model.model.model.layers[1].self_attn.q_proj)
    with fake_world(2):
        mesh = meshverse.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        with pytest.raises(
            ValueError, match=r"layers\.1\.self_attn\.q_proj .*LoraLinear.* cannot be"
        ):
            apply_tensor_parallelism(model, mesh)
        assert not any(isinstance(each, DTensor) for each in model.parameters())


def test_a_registered_plan_is_found_in_wrappers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "_registered", {})
    model = wrapped_models.make("pretrained_model", "llama")
    up = {"model.layers.*.mlp.up_proj": ColwiseParallel(output_layouts=Replicate())}
    register_tp_plan(transformers.LlamaForCausalLM, lambda *_: up)
    with fake_world(2):
        mesh = meshverse.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        apply_tensor_parallelism(model, mesh)
    split = [name for name, each in model.named_parameters() if isinstance(each, DTensor)]
    assert split == [f"pretrained_model.model.layers.{each}.mlp.up_proj.weight" for each in (0, 1)]


def trained(sizes: dict[str, int], kind: str) -> tuple[float, set[str]]:
    """The largest difference of weights to one process, after training; and what was trained."""
    mesh, _ = create_fsdp2_device_mesh(ParallelismSizes(**sizes))
    alone, model = wrapped_models.make(kind), wrapped_models.make(kind)
    first = full_weights(alone)
    exact = torch.distributed.fsdp.MixedPrecisionPolicy()
    fsdp2_strategy_parallelize(model, mesh, mp_policy=exact)
    data = get_flat_mesh(mesh, "dp_cp")
    for each, share in ((alone, slice(None)), (model, data.get_local_rank())):
        optimizer = make_optimizer(each)
        for step in range(3):
            tokens = batch(step) if each is alone else batch(step).chunk(data.size())[share]
            hf_families.full(each(input_ids=tokens).logits).float().logsumexp(-1).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    expected, seen = full_weights(alone), full_weights(model)
    assert expected.keys() == seen.keys()
    changed = {name for name, each in expected.items() if not torch.equal(each, first[name])}
    return max((seen[name] - each).abs().max().item() for name, each in expected.items()), changed


@pytest.mark.long
@pytest.mark.parametrize("kind", in_tiers(["lora", "pretrained_model"], ["lora"], []))
def test_training_under_fsdp2_equals_one_process(crew: Crew, kind: str) -> None:
    for difference, changed in crew.run(trained, 4, {"tp_size": 2}, kind):
        assert difference < 1e-5
        assert changed
        assert kind != "lora" or all(".lora_" in name for name in changed)


def test_a_wrapper_in_a_pipeline_is_refused_with_the_reason() -> None:
    model = wrapped_models.make("lora", "llama")
    with pytest.raises(
        ValueError, match=r"a wrapper around LlamaForCausalLM at 'base_model\.model'"
    ):
        split_into_stages(model, 2, 0)


def of_two_stages() -> float:
    """How far LoRA's gradients on a stage are from those of one process."""
    mesh, _ = create_fsdp2_device_mesh(ParallelismSizes(pp_size=2, tp_size=2))
    whole = wrapped_models.make("lora in place", "llama")
    (stage,) = pipeline_stages(copy.deepcopy(whole), mesh["pp"])
    apply_tensor_parallelism(stage, mesh["tp"])
    tokens = hf_families.tokens()[:, :8]

    def loss_of(logits: Any, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(full(logits).flatten(0, 1), target.flatten())

    pipeline_schedule([stage], mesh["pp"], loss_of, n_microbatches=2).step(tokens, target=tokens)
    loss_of(whole(input_ids=tokens).logits, tokens).backward()
    wanted = dict(whole.named_parameters())
    seen = {name: each for name, each in stage.named_parameters() if each.grad is not None}
    assert seen
    return max(
        (full(each.grad) - wanted[name].grad).abs().max().item() for name, each in seen.items()
    )


@pytest.mark.long
def test_lora_layers_in_pipeline_stages_equal_one_process(crew: Crew) -> None:
    for difference in crew.run(of_two_stages, 4):
        assert difference < 1e-6


@pytest.mark.long
def test_peft_itself_equals_one_process(crew: Crew) -> None:
    pytest.importorskip("peft", reason="peft is not installed")
    for error, split, count in crew.run(error_of_peft, 2):
        assert error < EXACT
        assert split > count // 2


def with_peft(
    family: str, tied: bool = False, changes: dict[str, Any] | None = None, **settings: Any
) -> nn.Module:
    import peft

    settings = {"target_modules": [*wrapped_models.ATTENTION, *wrapped_models.MLP]} | settings
    config = peft.LoraConfig(r=4, init_lora_weights=False, **settings)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT's own, of patterns and deprecated names
        model = hf_families.tiny_model(family, tied=tied, **changes or {})
        return peft.get_peft_model(model, config)


def error_of_peft(plan: str = "own", tied: bool = False, **more: Any) -> tuple[float, int, int]:
    mesh = meshverse.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    whole = with_peft("qwen3", tied, **more)
    model = copy.deepcopy(whole)
    apply_tensor_parallelism(
        model, mesh, **({} if plan == "own" else {"tp_shard_plan": LLAMA_PLAN})
    )
    frozen = {name for name, each in whole.named_parameters() if not each.requires_grad}
    assert frozen == {name for name, each in model.named_parameters() if not each.requires_grad}
    error, _ = hf_families.largest_error(hf_families.run(model), hf_families.run(whole), floor=1e-2)
    split = [isinstance(each, DTensor) for each in model.parameters()]
    return error, sum(split), len(split)


def error_of_saved(plan: str, tied: bool, modules: list[str]) -> tuple[float, int, int]:
    return error_of_peft(plan, tied, modules_to_save=modules)


_SAVED = [
    (plan, tied, modules)
    for plan in ("own", "llama")
    for tied in (False, True)
    for modules in (["lm_head"], ["embed_tokens"], ["lm_head", "embed_tokens"])
]


@pytest.mark.parametrize(
    ("plan", "tied", "modules"),
    in_tiers(_SAVED, [("own", False, ["lm_head", "embed_tokens"])]),
)
def test_saved_heads_and_embeddings_are_split_with_their_copies(
    crew: Crew, plan: str, tied: bool, modules: list[str]
) -> None:
    pytest.importorskip("peft", reason="peft is not installed")
    for error, split, count in crew.run(error_of_saved, 2, plan, tied, modules):
        assert error < EXACT
        assert split > count // 2


_WRAPPED: dict[str, tuple[str, dict[str, Any], str]] = {
    "all-linear": (
        "qwen3_moe",
        {"target_modules": "all-linear"},
        r"experts Qwen3MoeExperts are wrapped by PEFT's ParamWrapper",
    ),
    "parameters": (
        "qwen3_moe",
        {"target_parameters": ["mlp.experts.down_proj"]},
        r"experts Qwen3MoeExperts are wrapped by PEFT's ParamWrapper",
    ),
    "tokens": (
        "qwen3",
        {"trainable_token_indices": [1, 80]},
        r"embed_tokens \(TrainableTokensWrapper\) trains some tokens only",
    ),
}


@pytest.mark.parametrize("name", _WRAPPED)
def test_what_peft_wraps_and_cannot_be_split_is_refused_by_name(name: str) -> None:
    pytest.importorskip("peft", reason="peft is not installed")
    family, settings, message = _WRAPPED[name]
    if family == "qwen3_moe" and transformers.__version__.startswith("4."):
        pytest.skip("transformers 4 has no stacked experts")
    model = with_peft(family, **settings)
    plan = model.get_base_model().tp_plan
    if name == "tokens" and "model.embed_tokens" not in plan:
        pytest.skip("this transformers splits no embedding of the family")
    before = {own: id(each) for own, each in model.named_parameters()}
    with fake_world(4):
        mesh, _ = create_fsdp2_device_mesh(ParallelismSizes(tp_size=2))
        with pytest.raises(ValueError, match=message):
            apply_tensor_parallelism(model, mesh["tp"])
    assert {own: id(each) for own, each in model.named_parameters()} == before


_NOT_DISTRIBUTED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "bias": (
        {},
        {"target_parameters": ["mlp.experts.down_proj_bias"]},
        r"PEFT adapts 'down_proj_bias' of its experts, .* \['gate_up_proj', 'down_proj'\] can be",
    ),
    "rows": (
        {"hidden_size": 30},
        {"target_parameters": ["mlp.experts.down_proj"]},
        r"lora_B of the adapter 'default' of down_proj has 30 rows, which 4 ranks",
    ),
}


@pytest.mark.skipif(transformers.__version__.startswith("4."), reason="experts are a list")
@pytest.mark.parametrize("name", _NOT_DISTRIBUTED)
def test_adapters_that_cannot_be_distributed_with_experts_are_refused_by_name(name: str) -> None:
    pytest.importorskip("peft", reason="peft is not installed")
    changes, settings, message = _NOT_DISTRIBUTED[name]
    model = with_peft("gpt_oss", changes=changes, target_modules=["q_proj"], **settings)
    before = {own: id(each) for own, each in model.named_parameters()}
    with fake_world(4):
        mesh, _ = create_fsdp2_device_mesh(ParallelismSizes())
        with pytest.raises(ValueError, match=message):
            fsdp2_strategy_parallelize(model, mesh, ep_size=4)
    assert {own: id(each) for own, each in model.named_parameters()} == before


def error_of_adapted_experts(family: str, sizes: dict[str, int], settings: dict[str, Any]) -> float:
    """The largest relative error, of the adapters of experts among others."""
    experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    whole = with_peft(family, target_modules=["q_proj"], target_parameters=experts)
    model = copy.deepcopy(whole)
    mesh, _ = create_fsdp2_device_mesh(ParallelismSizes(**sizes))
    fsdp2_strategy_parallelize(model, mesh, mp_policy=MixedPrecisionPolicy(), **settings)
    seen, expected = hf_families.run(model), hf_families.run(whole)
    if settings.get("ep_size", 1) > 1:
        held = {name: each for name, each in model.named_parameters() if "experts" in name}
        assert all(
            each.to_local().numel() * settings["ep_size"] <= each.numel() for each in held.values()
        )
    adapters = [each for name, each in expected.items() if "experts" in name and "lora_" in name]
    assert adapters
    assert all(each is not None and each.any() for each in adapters)
    error, _ = hf_families.largest_error(seen, expected, floor=1e-2)
    return error


_ADAPTED: dict[str, tuple[int, str, dict[str, int], dict[str, Any]]] = {
    "fsdp2": (2, "qwen3_moe", {}, {}),
    "tp and fsdp2": (4, "qwen3_moe", {"tp_size": 2}, {"tp_shard_plan": LLAMA_PLAN}),
    "ep": (4, "qwen3_moe", {}, {"ep_size": 2}),
    "ep and tp": (4, "qwen3_moe", {"tp_size": 2}, {"ep_size": 2}),
    "an expert a rank": (4, "qwen3_moe", {}, {"ep_size": 4}),
    "features first": (2, "gpt_oss", {}, {"ep_size": 2}),
    "an expert a rank, features first": (4, "gpt_oss", {}, {"ep_size": 4}),
}


@pytest.mark.long
@pytest.mark.skipif(transformers.__version__.startswith("4."), reason="experts are a list")
@pytest.mark.parametrize("name", in_tiers(_ADAPTED, ["ep and tp"]))
def test_adapters_of_experts_equal_one_process(crew: Crew, name: str) -> None:
    pytest.importorskip("peft", reason="peft is not installed")
    ranks, *case = _ADAPTED[name]
    for error in crew.run(error_of_adapted_experts, ranks, *case):
        assert error < EXACT
