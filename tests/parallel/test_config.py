"""The configs: defaults, checks and `to_dict`."""

from __future__ import annotations

import re
from dataclasses import fields
from math import inf, nan

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.parallel import DistributedDataParallel

from helpers.worlds import fake_world
from meshverse.parallel import DDPConfig, FSDP2Config, MegatronFSDPConfig


def test_fsdp2_defaults() -> None:
    settings = FSDP2Config().to_dict()
    policy = settings.pop("mp_policy")
    assert (policy.param_dtype, policy.reduce_dtype) == (torch.bfloat16, torch.float32)
    assert (policy.output_dtype, policy.cast_forward_inputs) == (torch.bfloat16, True)
    assert settings == {
        "sequence_parallel": False,
        "tp_plan": None,
        "patch_is_packed_sequence": False,
        "offload_policy": None,
        "activation_checkpointing": False,
        "activation_checkpointing_scope": ("all",),
        "reshard_after_forward": None,
        "enable_compile": False,
        "enable_fsdp2_prefetch": False,
        "reduce_unused_parameters": False,
        "fsdp2_backward_prefetch_depth": 2,
        "fsdp2_forward_prefetch_depth": 1,
        "split_logits": False,
    }


def test_megatron_fsdp_defaults() -> None:
    settings = MegatronFSDPConfig().to_dict()
    assert settings.pop("megatron_fsdp_unit_modules") is None
    assert settings.pop("zero_dp_strategy") == 3
    on = {"overlap_grad_reduce", "overlap_param_gather", "check_for_nan_in_grad"}
    off = {"init_fsdp_with_meta_device", "grad_reduce_in_fp32", "preserve_fp32_weights"}
    off |= {"report_nan_in_param_grad", "average_in_collective", "disable_bucketing", "nccl_ub"}
    off |= {"calculate_per_token_loss", "keep_fp8_transpose_cache", "fsdp_double_buffer"}
    off |= {"activation_checkpointing"}
    assert settings == dict.fromkeys(on, True) | dict.fromkeys(off, False)


def test_ddp_defaults_are_torchs() -> None:
    settings = DDPConfig().to_dict()
    assert settings == {
        "bucket_cap_mb": None,
        "broadcast_buffers": True,
        "find_unused_parameters": False,
        "static_graph": False,
        "gradient_as_bucket_view": False,
    }


@pytest.mark.filterwarnings("ignore:`broadcast_buffers` is deprecated:FutureWarning")
def test_ddp_takes_its_config() -> None:
    config = DDPConfig(bucket_cap_mb=3, find_unused_parameters=True, gradient_as_bucket_view=True)
    with fake_world(2):
        model = DistributedDataParallel(nn.Linear(2, 2), **config.to_dict())
    assert model.find_unused_parameters
    assert model.gradient_as_bucket_view
    assert model.bucket_bytes_cap == 3 * 2**20


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (FSDP2Config, "autocast_dtype"),
        (FSDP2Config, "defer_fsdp_grad_sync"),
        (FSDP2Config, "enable_async_tensor_parallel"),
        (DDPConfig, "autocast_dtype"),
        (DDPConfig, "activation_checkpointing"),
    ],
)
def test_what_only_a_training_loop_could_do_is_no_setting(config, name) -> None:
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
        config(**{name: None})


@pytest.mark.parametrize("config", [FSDP2Config(), MegatronFSDPConfig(), DDPConfig()])
def test_to_dict_makes_an_equal_config(config) -> None:
    settings = config.to_dict()
    assert list(settings) == [each.name for each in fields(config)]
    assert type(config)(**settings) == config
    for name, value in settings.items():
        assert value is getattr(config, name)


def test_configs_share_no_policy() -> None:
    assert FSDP2Config().mp_policy is not FSDP2Config().mp_policy


@pytest.mark.parametrize(
    ("config", "value", "error"),
    [
        *((FSDP2Config, {name: "no"}, TypeError) for name in ("enable_compile", "split_logits")),
        (FSDP2Config, {"sequence_parallel": 1}, TypeError),
        (FSDP2Config, {"reshard_after_forward": 2}, TypeError),
        (FSDP2Config, {"tp_plan": 7}, TypeError),
        (FSDP2Config, {"mp_policy": torch.bfloat16}, TypeError),
        (FSDP2Config, {"offload_policy": True}, TypeError),
        (FSDP2Config, {"fsdp2_forward_prefetch_depth": True}, TypeError),
        (FSDP2Config, {"fsdp2_forward_prefetch_depth": -1}, ValueError),
        (FSDP2Config, {"activation_checkpointing_scope": False}, TypeError),
        (MegatronFSDPConfig, {"nccl_ub": 1}, TypeError),
        (MegatronFSDPConfig, {"megatron_fsdp_unit_modules": "torch.nn.Linear"}, TypeError),
        (MegatronFSDPConfig, {"megatron_fsdp_unit_modules": nn.Linear}, TypeError),
        (DDPConfig, {"static_graph": None}, TypeError),
        (DDPConfig, {"bucket_cap_mb": "25"}, TypeError),
        (DDPConfig, {"bucket_cap_mb": True}, TypeError),
        *((DDPConfig, {"bucket_cap_mb": each}, ValueError) for each in (0, -1, nan, inf)),
    ],
)
def test_wrong_values_are_refused_by_name(config, value, error) -> None:
    ((name, given),) = value.items()
    with pytest.raises(error, match=f"^{name}={re.escape(repr(given))} .*must be"):
        config(**value)


def test_what_is_in_a_policy_or_list_is_checked() -> None:
    for dtype, error in (("bf16", TypeError), (torch.int8, ValueError)):
        with pytest.raises(error, match=r"^mp_policy.reduce_dtype=.*must be"):
            FSDP2Config(mp_policy=MixedPrecisionPolicy(reduce_dtype=dtype))
    with pytest.raises(TypeError, match="in megatron_fsdp_unit_modules=3 of type int must be str"):
        MegatronFSDPConfig(megatron_fsdp_unit_modules=[3])


@pytest.mark.parametrize("mode", [False, True, "full", "selective"])
def test_ways_of_checkpointing(mode) -> None:
    assert FSDP2Config(activation_checkpointing=mode).activation_checkpointing == mode


@pytest.mark.parametrize("mode", [None, 0, 1, 1.0, "none", "Full", ""])
def test_other_ways_of_checkpointing_are_refused(mode) -> None:
    with pytest.raises(ValueError, match=f"activation_checkpointing={mode!r} must be one of"):
        FSDP2Config(activation_checkpointing=mode)


@pytest.mark.parametrize("mode", ["full", "selective", None, 1])
def test_megatron_fsdp_checkpoints_every_layer_or_none(mode) -> None:
    with pytest.raises(ValueError, match=f"activation_checkpointing={mode!r} must be True"):
        MegatronFSDPConfig(activation_checkpointing=mode)


def test_no_policy_is_the_default_one() -> None:
    assert FSDP2Config(mp_policy=None) == FSDP2Config()


@pytest.mark.parametrize("stage", [-1, 4, None, "zero", "optim_params", True, 2.0, "2"])
def test_other_stages_of_zero_are_refused(stage) -> None:
    with pytest.raises(ValueError, match=f"zero_dp_strategy={stage!r} must be one of"):
        MegatronFSDPConfig(zero_dp_strategy=stage)


@pytest.mark.parametrize(
    ("scope", "parts"),
    [
        ("all", ("all",)),
        (["all"], ("all",)),
        (None, ("all",)),
        ("auto", ("all",)),
        ("default", ("all",)),
        ("", ("all",)),
        ([], ("all",)),
        (["auto", "all"], ("all",)),
        ("vision", ("vision",)),
        ("vision,audio", ("vision", "audio")),
        ("audio + Vision", ("audio", "vision")),
        (("language", "audio", "language"), ("language", "audio")),
        (["language,vision", "audio"], ("language", "vision", "audio")),
        ({"multimodal"}, ("multimodal",)),
    ],
)
def test_scopes(scope, parts) -> None:
    config = FSDP2Config(activation_checkpointing_scope=scope)
    assert config.activation_checkpointing_scope == parts


@pytest.mark.parametrize(
    ("scope", "message"),
    [
        ("text", r"activation_checkpointing_scope='text': unknown parts \['text'\]"),
        (["vision", "text"], r"unknown parts \['text'\]"),
        ("vision,text", r"activation_checkpointing_scope='vision,text': unknown parts \['text'\]"),
        (["vision", 3], r"unknown parts \['3'\]"),
        (["all", "vision"], r"activation_checkpointing_scope=\['all', 'vision'\]: 'all' includes"),
        ("auto,vision", r"activation_checkpointing_scope='auto,vision': 'all' includes"),
    ],
)
def test_other_scopes_are_refused(scope, message) -> None:
    with pytest.raises(ValueError, match=message):
        FSDP2Config(activation_checkpointing_scope=scope)
