"""Megatron-FSDP's helper, with the real package where it is installed.

The package needs no GPU to compute, but asks torch.cuda for streams and the current device. Without
a GPU, those calls are answered by `_cuda_that_only_answers`; all else is real.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import sys
import warnings
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from rounding import rounding
from torch import Tensor, nn

from helpers.tiers import in_tiers
from helpers.worlds import fake_world
from meshverse.parallel import (
    MegatronFSDPConfig,
    MegatronFSDPManager,
    ParallelismSizes,
    apply_fsdp_sharding_recursively,
    compat,
    create_device_meshes,
    create_megatron_fsdp_device_mesh,
    megatron_fsdp_strategy_parallelize,
)
from meshverse.parallel.strategies.megatron_fsdp import fully_shard_arguments

needs_package = pytest.mark.skipif(
    importlib.util.find_spec("megatron_fsdp") is None,
    reason="megatron-fsdp is not installed: pip install megatron-fsdp",
)
# What the package says when it is imported.
pytestmark = pytest.mark.filterwarnings("ignore:Transformer Engine and Apex")
_WIDTH, _BATCH, _STEPS = 8, 8, 3
# The loss is a mean over all features of a batch. Five layers and as many operations between them
# are gone through forward and backward in each step.
_BOUND = rounding(torch.float32, terms=_BATCH * _WIDTH, steps=5 * 2 * 2 * _STEPS)  # about 5e-4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(_WIDTH, 16), nn.Linear(16, _WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(torch.nn.functional.gelu(self.up(hidden)))


class Model(nn.Module):
    _no_split_modules = ("Block",)

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(_WIDTH, _WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


# --- answers of torch.cuda ------------------------------------------------------------------------


class _Stream:
    """A stream and event where there is no GPU: everything has happened already."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def wait(self, stream: Any = None) -> None: ...

    def record_event(self, event: Any = None) -> _Stream:
        return self


@contextlib.contextmanager
def _cuda_that_only_answers() -> Iterator[None]:
    answers = {
        "current_device": lambda: 0,
        "Stream": _Stream,
        "Event": _Stream,
        "current_stream": _Stream,
        "stream": lambda stream: contextlib.nullcontext(),
        "synchronize": lambda device=None: None,
        "empty_cache": lambda: None,
    }
    with (
        mock.patch.multiple(torch.cuda, **answers),
        mock.patch.object(Tensor, "cuda", lambda self: self),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")  # the package's own
        yield


# --- training -----------------------------------------------------------------------------------


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def _train(model: nn.Module, optimizer: Any, shares: int = 1, mine: int = 0) -> list[float]:
    """My share of the loss of each step; the sum over the shares is the loss of the whole batch."""
    losses = []
    for step in range(_STEPS):
        generator = torch.Generator().manual_seed(step)
        inputs, targets = torch.randn(2, _BATCH, _WIDTH, generator=generator)
        output = model(inputs.chunk(shares)[mine])
        loss = (output - targets.chunk(shares)[mine]).square().mean() / shares
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


# --- with the package ----------------------------------------------------------------------------


@needs_package
@pytest.mark.parametrize("stage", in_tiers([0, 1, 2, 3, "optim_grads_params"], short=[3]))
def test_training_equals_one_process(crew, stage) -> None:
    alone = Model()
    expected = _train(alone, _optimizer(alone))
    assert expected[-1] < expected[0]
    shares = crew.run(_train_sharded, 2, {"zero_dp_strategy": stage})
    assert torch.tensor(shares).sum(0).tolist() == pytest.approx(expected, rel=_BOUND)


@needs_package
@pytest.mark.long
def test_context_parallelism_shards_too(crew) -> None:
    alone = Model()
    expected = _train(alone, _optimizer(alone))
    shares = crew.run(_train_sharded, 4, {"activation_checkpointing": True}, 2)
    assert torch.tensor(shares).sum(0).tolist() == pytest.approx(expected, rel=_BOUND)


def _train_sharded(settings: dict[str, Any], cp: int = 1) -> list[float]:
    world_size = torch.distributed.get_world_size()
    # Gloo has no average, so gradients are summed; the shares of the loss are averages already.
    config = MegatronFSDPConfig(calculate_per_token_loss=True, **settings)
    sizes = ParallelismSizes(cp_size=cp)
    mesh, _ = create_device_meshes(config, sizes, world_size=world_size)
    model = Model()
    with _cuda_that_only_answers():
        wrapped, optimizer = MegatronFSDPManager(config, mesh).parallelize(model, _optimizer(model))
        assert type(wrapped).__name__ == "MegatronFSDP"
        assert wrapped.module is model
        mine = torch.distributed.get_rank()
        losses = _train(wrapped, optimizer, world_size, mine)
    stage = settings.get("zero_dp_strategy", 3)
    if stage in (3, "optim_grads_params"):  # each rank holds its part only
        whole = sum(parameter.numel() for parameter in Model().parameters())
        held = sum(each.to_local().numel() for each in wrapped.parameters())
        assert held < whole
    return losses


_OPTIMIZERS: dict[str, tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]] = {
    "decay in moments": (torch.optim.Adam, {"weight_decay": 0.1}),
    "decay in a buffer": (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.1}),
    "dampening": (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.5}),
    "product": (torch.optim.NAdam, {"weight_decay": 0.1}),
}


@needs_package
@pytest.mark.parametrize("name", in_tiers(_OPTIMIZERS, ["decay in moments", "product"]))
def test_the_first_step_of_an_optimizer_equals_one_process(crew, name) -> None:
    alone = Model()
    make, settings = _OPTIMIZERS[name]
    expected = _train(alone, make(alone.parameters(), lr=0.01, **settings))
    shares, kept = zip(*crew.run(_train_with, 2, name), strict=True)
    assert torch.tensor(shares).sum(0).tolist() == pytest.approx(expected, rel=_BOUND)
    # A checkpoint of the optimizer is loaded into the state that is there.
    assert all(kept) if name.startswith("decay") else not any(kept)


def _train_with(name: str) -> tuple[list[float], int]:
    mesh = create_megatron_fsdp_device_mesh(ParallelismSizes(), world_size=2)
    model = Model()
    make, settings = _OPTIMIZERS[name]
    with _cuda_that_only_answers():
        wrapped, optimizer = megatron_fsdp_strategy_parallelize(
            model,
            mesh,
            make(model.parameters(), lr=0.01, **settings),
            calculate_per_token_loss=True,
        )
        assert optimizer is not None
        kept = len(optimizer.state)
        return _train(wrapped, optimizer, 2, torch.distributed.get_rank()), kept


@needs_package
@pytest.mark.long
def test_frozen_parameters_need_no_optimizer(crew) -> None:
    alone = Model()
    expected = _train(alone, _optimizer(alone.head))
    shares = crew.run(_train_the_head, 2)
    assert torch.tensor(shares).sum(0).tolist() == pytest.approx(expected, rel=_BOUND)


def _train_the_head() -> list[float]:
    mesh = create_megatron_fsdp_device_mesh(ParallelismSizes(), world_size=2)
    model = Model()
    model.layers.requires_grad_(False)
    with _cuda_that_only_answers():
        wrapped, optimizer = megatron_fsdp_strategy_parallelize(
            model, mesh, _optimizer(model.head), calculate_per_token_loss=True
        )
        return _train(wrapped, optimizer, 2, torch.distributed.get_rank())


@needs_package
def test_without_an_optimizer_only_the_model_is_wrapped(crew) -> None:
    assert crew.run(_wrap_the_model, 2) == [("MegatronFSDP", None, ["Linear"])] * 2


def _wrap_the_model() -> tuple[str, None, list[str]]:
    mesh = create_megatron_fsdp_device_mesh(ParallelismSizes(), world_size=2)
    with _cuda_that_only_answers():
        wrapped, optimizer = megatron_fsdp_strategy_parallelize(
            Model(), mesh, megatron_fsdp_unit_modules=["torch.nn.Linear"]
        )
    assert optimizer is None
    return type(wrapped).__name__, optimizer, [unit.__name__ for unit in wrapped.fsdp_unit_modules]


@needs_package
def test_groups_that_get_lost_are_named(crew) -> None:
    for messages in crew.run(_several_groups, 2):
        assert len(messages) == 1
        assert "'weight_decay': 0.0" in messages[0]
        assert "2 groups are lost" in messages[0]


def _several_groups() -> list[str]:
    mesh = create_megatron_fsdp_device_mesh(ParallelismSizes(), world_size=2)
    model = Model()
    groups = [
        {"params": list(model.layers.parameters()), "weight_decay": 0.0},
        {"params": list(model.head.parameters())},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    with _cuda_that_only_answers(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        megatron_fsdp_strategy_parallelize(model, mesh, optimizer)
    return [str(each.message) for each in caught if "groups are lost" in str(each.message)]


@needs_package
@pytest.mark.parametrize("name", ["fully_shard", "fully_shard_model"])
def test_arguments_are_those_of_the_installed_version(name) -> None:
    import megatron_fsdp

    shard = getattr(megatron_fsdp, name)
    known = set(inspect.signature(shard).parameters)
    config = MegatronFSDPConfig(
        zero_dp_strategy=2, grad_reduce_in_fp32=True, preserve_fp32_weights=True, nccl_ub=True
    )
    arguments = fully_shard_arguments(config, shard, megatron_fsdp)
    assert set(arguments) <= known
    assert {"device_mesh", "dp_shard_dim", "tp_dim", "device", "fsdp_unit_modules"} <= known
    assert (arguments["zero_dp_strategy"], arguments["nccl_ub"]) == (2, True)
    policy = arguments["mixed_precision_policy"]
    assert (policy.main_params_dtype, policy.main_grads_dtype) == (torch.float32, torch.float32)


# --- of any version, or none ---------------------------------------------------------------------


def _older(
    module: Any,
    init_model_with_meta_device: bool = False,
    grad_reduce_in_fp32: bool = False,
    preserve_fp32_weights: bool = False,
    check_for_nan_in_grad: bool = True,
    zero_dp_strategy: int = 3,
) -> None:
    """The signature of a version that has its precision as arguments, and few others."""


_OLD_PACKAGE = SimpleNamespace(__version__="0.0.1")


def test_arguments_for_an_older_version() -> None:
    config = MegatronFSDPConfig(
        grad_reduce_in_fp32=True, init_fsdp_with_meta_device=True, check_for_nan_in_grad=False
    )
    assert fully_shard_arguments(config, _older, _OLD_PACKAGE) == {  # type: ignore[arg-type]
        "init_model_with_meta_device": True,
        "grad_reduce_in_fp32": True,
        "preserve_fp32_weights": False,
        "check_for_nan_in_grad": False,
        "zero_dp_strategy": 3,
    }


@pytest.mark.parametrize("setting", [{"fsdp_double_buffer": True}, {"overlap_grad_reduce": False}])
def test_a_setting_the_version_does_not_know_is_refused(setting: dict[str, bool]) -> None:
    config = MegatronFSDPConfig(**setting)
    with pytest.raises(ValueError, match=rf"0\.0\.1 has no argument for {setting}"):
        fully_shard_arguments(config, _older, _OLD_PACKAGE)  # type: ignore[arg-type]


def test_a_check_that_the_version_lacks_can_be_off() -> None:
    def without(module: Any) -> None:
        """A signature without settings."""

    config = MegatronFSDPConfig(check_for_nan_in_grad=False)
    assert fully_shard_arguments(config, without, _OLD_PACKAGE) == {}  # type: ignore[arg-type]


def test_without_the_package_the_cure_is_named(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "megatron_fsdp", None)  # as if it were not installed
    model = Model()
    before = list(model.parameters())
    with fake_world(4, 1):
        mesh = create_megatron_fsdp_device_mesh(ParallelismSizes(), world_size=4)
        with pytest.raises(ImportError, match="pip install megatron-fsdp"):
            megatron_fsdp_strategy_parallelize(model, mesh)
    assert all(now is then for now, then in zip(model.parameters(), before, strict=True))


class _Package(ModuleType):
    """As much of the package as refusals see."""

    __version__ = "0.0.1"
    fully_shard = staticmethod(_older)
    fully_shard_model = staticmethod(_older)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"megatron_fsdp_unit_modules": ["nowhere.Block"]}, ImportError, "nowhere"),
        (
            {"megatron_fsdp_unit_modules": [nn.Conv1d]},
            ValueError,
            "Model has no modules of .*Conv1",
        ),
        (
            {"optimizer": torch.optim.SGD([torch.zeros(3)])},
            ValueError,
            r"1 parameters .*\[\(3,\)\]",
        ),
        ({"optimizer": [torch.zeros(3)]}, TypeError, "optimizer=.* of type list must be Optimizer"),
        ({"tp_shard_plan": 3}, TypeError, "tp_shard_plan=3 of type int"),
        ({"reapply_trainability": "no"}, TypeError, "reapply_trainability='no' of type str"),
        ({"nccl_ub": True}, ValueError, "nccl_ub"),
        ({"no_such_setting": 1}, TypeError, "no_such_setting"),
        ({"dp_shard_dim": "data"}, KeyError, "'data'"),
        ({"tp_dim": "tensor"}, KeyError, "'tensor'"),
    ],
)
def test_bad_arguments_leave_the_model_as_it_was(monkeypatch, settings, error, message) -> None:
    monkeypatch.setitem(sys.modules, "megatron_fsdp", _Package("megatron_fsdp"))
    model = Model()
    before = list(model.parameters())
    with fake_world(4, 1):
        mesh = create_megatron_fsdp_device_mesh(ParallelismSizes(tp_size=2), world_size=4)
        with pytest.raises(error, match=message):
            megatron_fsdp_strategy_parallelize(model, mesh, **settings)
    assert all(now is then for now, then in zip(model.parameters(), before, strict=True))


def test_the_state_of_an_optimizer_is_not_lost() -> None:
    model = Model()
    optimizer = _optimizer(model)
    _train(model, optimizer)
    with fake_world(2):
        for sizes in (ParallelismSizes(), ParallelismSizes(tp_size=2)):
            mesh = create_megatron_fsdp_device_mesh(sizes, world_size=2)
            with pytest.raises(ValueError, match="has the state of 10 parameters, which would be"):
                megatron_fsdp_strategy_parallelize(model, mesh, optimizer)
    assert len(optimizer.state) == 10


@pytest.mark.parametrize("tp_size", [1, 2])
def test_an_optimizer_of_some_parameters_is_refused(monkeypatch, tp_size) -> None:
    monkeypatch.setitem(sys.modules, "megatron_fsdp", _Package("megatron_fsdp"))
    model = Model()
    model.layers[1].requires_grad_(False)
    before = list(model.parameters())
    with fake_world(4, 1):
        mesh = create_megatron_fsdp_device_mesh(ParallelismSizes(tp_size=tp_size), world_size=4)
        with pytest.raises(
            ValueError, match=r"lacks 4 parameters of Model .*\['layers.0.up.weight', .*Freeze"
        ):
            megatron_fsdp_strategy_parallelize(model, mesh, _optimizer(model.head))
    assert all(now is then for now, then in zip(model.parameters(), before, strict=True))


def test_a_model_without_unit_modules(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "megatron_fsdp", _Package("megatron_fsdp"))
    with fake_world(4, 1):
        mesh = create_megatron_fsdp_device_mesh(ParallelismSizes(), world_size=4)
        with pytest.raises(
            ValueError, match=r"Linear has no modules of .*_no_split_modules.*fsdp_unit_modules"
        ):
            megatron_fsdp_strategy_parallelize(nn.Linear(2, 2), mesh)


def test_one_data_parallel_rank_is_tensor_parallelism_only(crew) -> None:
    assert crew.run(_tensor_parallel_only, 2) == [True] * 2


def _tensor_parallel_only() -> bool:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    alone, model = Model(), Model()
    mesh = create_megatron_fsdp_device_mesh(ParallelismSizes(tp_size=2), world_size=2)
    plan = {"layers.*.up": ColwiseParallel(), "layers.*.down": RowwiseParallel()}
    with pytest.warns(UserWarning, match="'dp' has size 1"):
        same, optimizer = megatron_fsdp_strategy_parallelize(
            model, mesh, _optimizer(model), tp_shard_plan=plan
        )
    assert same is model
    assert model.layers[0].up.weight.to_local().shape == (8, _WIDTH)
    # The optimizer trains the parameters that are there now.
    expected = _train(alone, _optimizer(alone))
    assert _train(model, optimizer) == pytest.approx(expected, rel=_BOUND)
    return True


def test_one_process_is_left_alone_but_for_checkpointing() -> None:
    model = Model()
    optimizer = _optimizer(model)
    calls = []
    model.layers[0].up.register_forward_pre_hook(lambda *_: calls.append(1))
    config = MegatronFSDPConfig(activation_checkpointing=True)
    assert MegatronFSDPManager(config, None).parallelize(model, optimizer) == (model, optimizer)
    model(torch.ones(1, _WIDTH, requires_grad=True)).sum().backward()
    assert len(calls) == 2  # once more in backward


def test_the_older_name() -> None:
    assert compat.nvfsdp_strategy_parallelize is megatron_fsdp_strategy_parallelize
    assert compat.apply_fsdp2_sharding_recursively is apply_fsdp_sharding_recursively
