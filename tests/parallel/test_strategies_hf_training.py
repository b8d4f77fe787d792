"""A small Llama, trained on four real processes by `fsdp2_strategy_parallelize`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from rounding import training_error
from tiny_models import BOUND, batch, full, full_weights, make_model, train
from torch import nn
from torch.distributed.device_mesh import init_device_mesh as torch_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
)
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from helpers.crew import Crew
from helpers.tiers import in_tiers
from helpers.worlds import fake_world
from meshverse.parallel import (
    FSDP2Config,
    FSDP2Manager,
    MegatronFSDPConfig,
    MegatronFSDPManager,
    ParallelismSizes,
    create_fsdp2_device_mesh,
    fsdp2_strategy_parallelize,
    get_flat_mesh,
    megatron_fsdp_strategy_parallelize,
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


def dtypes_of_outputs() -> list[tuple[list[torch.dtype], torch.dtype]]:
    """The dtypes of the last layer's output and of logits, under policies of one's own."""
    mesh, _ = create_fsdp2_device_mesh(ParallelismSizes(), world_size=dist.get_world_size())
    found = []
    for dtypes in ((torch.bfloat16, torch.float32), (None, torch.bfloat16)):
        policy = MixedPrecisionPolicy(dtypes[0], output_dtype=dtypes[1])
        model = fsdp2_strategy_parallelize(make_llama(tied=False), mesh, mp_policy=policy)
        seen: list[torch.dtype] = []
        model.model.norm.register_forward_pre_hook(
            lambda _, given, s=seen: s.append(given[0].dtype)
        )
        found.append((seen, model(input_ids=batch(0), use_cache=False).logits.dtype))
    return found


def test_only_the_models_outputs_are_in_their_own_precision(crew: Crew) -> None:
    wanted = [([torch.bfloat16], torch.float32), ([torch.float32], torch.bfloat16)]
    assert crew.run(dtypes_of_outputs, 2) == [wanted] * 2


def test_defaults(crew: Crew) -> None:
    for sharded, logits, gradients in crew.run(by_default, 2):
        assert sharded == [True, True, False]
        assert (logits, gradients) == (torch.float32, torch.float32)


_BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
_WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"mp_policy": torch.bfloat16}, TypeError, "mp_policy=torch.bfloat16 of type dtype must"),
    ({"mp_policy": MixedPrecisionPolicy("bf16")}, TypeError, "mp_policy.param_dtype='bf16' of"),  # type: ignore[arg-type]
    ({"param_dtype": "bfloat16"}, TypeError, "param_dtype='bfloat16' of type str must be dtype"),
    ({"param_dtype": torch.int8}, ValueError, "param_dtype=torch.int8 must be of floating-point"),
    ({"param_dtype": torch.float32, "mp_policy": _BF16}, ValueError, "contradicts mp_policy"),
    ({"offload_policy": True}, TypeError, "offload_policy=True of type bool must be Offload"),
    ({"cpu_offload": 1}, TypeError, "cpu_offload=1 of type int must be bool"),
    ({"fsdp2_forward_prefetch_depth": 1.5}, TypeError, "depth=1.5 of type float must be int"),
    ({"fsdp2_backward_prefetch_depth": -1}, ValueError, "depth=-1 must be 0 or more layers"),
    ({"reshard_after_forward": 2}, TypeError, "reshard_after_forward=2 of type int must be bool"),
    ({"reapply_trainability": 5}, TypeError, "reapply_trainability=5 of type int must be a func"),
    ({"tp_shard_plan": {}, "tp_plan": "a.plan"}, ValueError, "contradicts tp_plan=a.plan"),
    ({"tp_shard_plan": ["q"]}, TypeError, r"tp_shard_plan=\['q'\] of type list must be str or"),
]
if not torch.accelerator.is_available():
    _WRONG.append(({"offload_policy": CPUOffloadPolicy()}, ValueError, "pins memory only for an"))


@pytest.mark.parametrize(
    ("tp_size", "settings", "error", "message"),
    [
        (
            4,
            {},
            ValueError,
            r"k_proj computes 2 heads, .* 4 ranks .*=2 and num_attention_heads=4: 1 or 2\.",
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
        *((2, *wrong) for wrong in _WRONG),
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


def test_heads_that_the_plan_does_not_split_need_not_be_divisible() -> None:
    model = make_llama(tied=False)  # with 2 heads of keys
    plan: dict[str, ParallelStyle] = {}
    plan |= {f"model.layers.*.mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")}
    plan["model.layers.*.mlp.down_proj"] = RowwiseParallel()
    with fake_world(8):
        mesh, _ = create_fsdp2_device_mesh(ParallelismSizes(tp_size=4))
        fsdp2_strategy_parallelize(model, mesh, tp_shard_plan=plan)
    assert model.model.layers[0].mlp.up_proj.weight.placements[-1] == Shard(0)


def test_axes_that_overlap_are_refused() -> None:
    model, names = make_llama(tied=False), {"dp_shard_cp_mesh_name": "dp_shard"}
    with fake_world(4):
        mesh, _ = create_fsdp2_device_mesh(ParallelismSizes(tp_size=2))
        with pytest.raises(ValueError, match="axes must not overlap"):
            fsdp2_strategy_parallelize(model, mesh, tp_mesh_name="dp_shard", **names)
    assert all(type(each) is nn.Parameter for each in model.parameters())


def test_meshes_of_torch_are_refused_by_name() -> None:
    model, config = make_llama(tied=False), FSDP2Config()
    with fake_world(4):
        mesh, _ = create_fsdp2_device_mesh(ParallelismSizes())
        other = torch_mesh("cpu", (4, 1), mesh_dim_names=("dp_shard_cp", "tp"))
        message = "device_mesh=.* of type torch.distributed.device_mesh.DeviceMesh must be a Mesh"
        for call in (
            lambda: fsdp2_strategy_parallelize(model, other),
            lambda: FSDP2Manager(config, other),
            lambda: MegatronFSDPManager(MegatronFSDPConfig(), other),
            lambda: megatron_fsdp_strategy_parallelize(model, other),
        ):
            with pytest.raises(TypeError, match=message):
                call()
        for call in (
            lambda: fsdp2_strategy_parallelize(model, mesh, moe_mesh=other),
            lambda: FSDP2Manager(config, mesh, other),
        ):
            with pytest.raises(TypeError, match=r"moe_mesh=.*must be a Meshverse mesh"):
                call()
        for manager in (FSDP2Manager, MegatronFSDPManager):
            with pytest.raises(TypeError, match=r"config=.* of type dict must be "):
                manager({}, mesh)  # type: ignore[arg-type]
    assert all(type(each) is nn.Parameter for each in model.parameters())


def test_a_model_is_sharded_once() -> None:
    with fake_world(8):
        mesh, _ = create_fsdp2_device_mesh(ParallelismSizes(), world_size=8)
        model = fsdp2_strategy_parallelize(make_llama(tied=False), mesh)
        with pytest.raises(ValueError, match="LlamaForCausalLM is sharded already"):
            fsdp2_strategy_parallelize(model, mesh, activation_checkpointing=True)
    assert not any("forward" in vars(each) for each in model.modules())
