"""A small Llama, trained on four real processes by `fsdp2_strategy_parallelize`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from rounding import training_error
from tiny_models import BOUND, batch, full, full_weights, make_model, train
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor

from helpers.crew import Crew
from helpers.tiers import in_tiers
from helpers.worlds import fake_world
from meshverse.parallel import (
    ParallelismSizes,
    create_fsdp2_device_mesh,
    fsdp2_strategy_parallelize,
    get_flat_mesh,
    unshard_fsdp2_model,
)

pytest.importorskip("transformers", reason="transformers is not installed")

_EXACT = MixedPrecisionPolicy()


def make_llama(*, tied: bool) -> nn.Module:
    return make_model("llama", num_hidden_layers=3, tie_word_embeddings=tied)


def compare(sizes: dict[str, int], tied: bool, settings: dict[str, Any]) -> dict[str, float]:
    """Return the largest relative errors after training, by what differs from one process."""
    mesh, _ = create_fsdp2_device_mesh(ParallelismSizes(**sizes), world_size=dist.get_world_size())
    alone, model = make_llama(tied=tied).double(), make_llama(tied=tied).double()
    before = full_weights(alone)
    expected = train(alone)
    stage = mesh["dp_replicate", "dp_shard", "cp", "tp"]  # whose model is the whole one here
    same = fsdp2_strategy_parallelize(model, stage, mp_policy=_EXACT, **settings)
    assert same is model
    assert all(isinstance(layer, FSDPModule) for layer in model.model.layers)
    assert tied == (model.lm_head.weight is model.model.embed_tokens.weight)

    data = get_flat_mesh(mesh, "dp_cp")  # each of its ranks has sequences of its own
    losses = train(model, data)

    with unshard_fsdp2_model(model):
        parameters = {name: full(each).detach().clone() for name, each in model.named_parameters()}
    error, _ = training_error(parameters, full_weights(alone), before)
    off = max(abs(seen / wanted - 1) for seen, wanted in zip(losses, expected, strict=True))
    return {"losses": off, "parameters": error}


MESHES: dict[str, tuple[int, dict[str, int]]] = {
    "tp 2 x dp 2": (4, {"tp_size": 2}),
    "2 replicas x 2 shards": (4, {"dp_replicate_size": 2}),
    "cp 2 x dp 2": (4, {"cp_size": 2}),
    "pp 2 x dp 2": (4, {"pp_size": 2}),
    "tp 2 x 2 replicas x 2 shards": (8, {"tp_size": 2, "dp_replicate_size": 2}),
    "tp 2 x cp 2 x dp 2": (8, {"tp_size": 2, "cp_size": 2}),
}


def check(everyone: list[dict[str, float]]) -> None:
    for differences in everyone:
        assert max(differences.values()) < BOUND, differences


@pytest.mark.parametrize("name", in_tiers(MESHES, ["tp 2 x dp 2"], [*MESHES][::3]))
@pytest.mark.long
def test_training_with_tied_embeddings_equals_one_process(crew: Crew, name: str) -> None:
    ranks, sizes = MESHES[name]
    check(crew.run(compare, ranks, sizes, True, {}))


SETTINGS: dict[str, dict[str, Any]] = {
    "checkpointing": {"activation_checkpointing": True},
    "reshard": {"reshard_after_forward": True},
    "offload": {"cpu_offload": True},
}


@pytest.mark.parametrize("name", in_tiers(SETTINGS, short=("offload",)))
@pytest.mark.long
def test_training_with_setting_equals_one_process(crew: Crew, name: str) -> None:
    check(crew.run(compare, 4, {"tp_size": 2}, False, SETTINGS[name]))


def by_default() -> tuple[list[bool], torch.dtype, torch.dtype]:
    """Which layers are sharded after forward, and the dtypes of logits and gradients."""
    mesh, _ = create_fsdp2_device_mesh(ParallelismSizes(), world_size=dist.get_world_size())
    model = fsdp2_strategy_parallelize(make_llama(tied=False), mesh)
    logits = model(input_ids=batch(0), use_cache=False).logits
    sharded = [isinstance(layer.mlp.up_proj.weight, DTensor) for layer in model.model.layers]
    logits.float().sum().backward()
    return sharded, logits.dtype, model.lm_head.weight.grad.dtype


def with_outputs_in_float32() -> tuple[list[torch.dtype], torch.dtype]:
    """The dtypes of the last layer's output and of logits, under a policy of one's own."""
    mesh, _ = create_fsdp2_device_mesh(ParallelismSizes(), world_size=dist.get_world_size())
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    model = fsdp2_strategy_parallelize(make_llama(tied=False), mesh, mp_policy=policy)
    seen: list[torch.dtype] = []
    model.model.norm.register_forward_pre_hook(lambda _, given: seen.append(given[0].dtype))
    return seen, model(input_ids=batch(0), use_cache=False).logits.dtype


def test_only_the_models_outputs_are_in_their_own_precision(crew: Crew) -> None:
    assert crew.run(with_outputs_in_float32, 2) == [([torch.bfloat16], torch.float32)] * 2


def test_defaults(crew: Crew) -> None:
    for sharded, logits, gradients in crew.run(by_default, 2):
        assert sharded == [True, True, False]
        assert (logits, gradients) == (torch.float32, torch.float32)


@pytest.mark.parametrize(
    ("tp_size", "settings", "error", "message"),
    [
        (
            4,
            {},
            ValueError,
            r"num_key_value_heads=2 of Llama.* tp_size=4, .* and num_attention_heads=4: 1 or 2\.",
        ),
        (2, {"activation_checkpointing": "some"}, ValueError, "activation_checkpointing='some'"),
        (
            2,
            {"activation_checkpointing": True, "activation_checkpointing_scope": "smell"},
            ValueError,
            "activation_checkpointing_scope='smell'",
        ),
        (2, {"cpu_offload": True, "offload_policy": OffloadPolicy()}, ValueError, "contradict"),
        (2, {"sequence_parallel": True}, ValueError, "Llama.*'s own plan does not support"),
        (2, {"tp_shard_plan": {"lm_head": "colwise"}}, TypeError, "'lm_head': 'colwise'"),
        (2, {"tp_mesh_name": "tensor"}, KeyError, "'tensor'"),
        (2, {"dp_cp_mesh_name": "data"}, KeyError, "'data'"),
    ],
)
def test_refusals_leave_the_model_as_it_was(
    tp_size: int, settings: dict[str, Any], error: type[Exception], message: str
) -> None:
    model = make_llama(tied=False)
    before, modules = dict(model.named_parameters()), [type(each) for each in model.modules()]
    with fake_world(8):
        mesh, _ = create_fsdp2_device_mesh(ParallelismSizes(tp_size=tp_size), world_size=8)
        with pytest.raises(error, match=message):
            fsdp2_strategy_parallelize(model, mesh, **settings)
    after = dict(model.named_parameters())
    assert all(after[name] is each for name, each in before.items())
    assert [type(each) for each in model.modules()] == modules
    assert not any("forward" in vars(each) for each in model.modules())


def test_several_pipeline_stages_are_refused() -> None:
    model = make_llama(tied=False)
    before = dict(model.named_parameters())
    with fake_world(8):
        mesh, _ = create_fsdp2_device_mesh(ParallelismSizes(pp_size=2))
        with pytest.raises(
            ValueError,
            match=r'pp=2, but Llama.* Split it .*mesh\["dp_replicate", "dp_shard", "cp", "tp"',
        ):
            fsdp2_strategy_parallelize(model, mesh)
        assert all(dict(model.named_parameters())[name] is each for name, each in before.items())
        fsdp2_strategy_parallelize(model, mesh["dp_replicate", "dp_shard", "cp", "tp"])
    assert isinstance(model, FSDPModule)


@pytest.mark.parametrize("cp_size", [1, 2])
def test_what_context_parallelism_leaves_to_do_is_said(
    caplog: pytest.LogCaptureFixture, cp_size: int
) -> None:
    with fake_world(8):
        mesh, _ = create_fsdp2_device_mesh(ParallelismSizes(cp_size=cp_size))
        fsdp2_strategy_parallelize(make_llama(tied=False), mesh)
    assert ("meshverse.parallel.context_parallel(mesh" in caplog.text) == (cp_size > 1)


def test_a_model_is_sharded_once() -> None:
    with fake_world(8):
        mesh, _ = create_fsdp2_device_mesh(ParallelismSizes(), world_size=8)
        model = fsdp2_strategy_parallelize(make_llama(tied=False), mesh)
        with pytest.raises(ValueError, match=r"LlamaForCausalLM is sharded already: \['itself', "):
            fsdp2_strategy_parallelize(model, mesh, activation_checkpointing=True)
    assert not any("forward" in vars(each) for each in model.modules())
