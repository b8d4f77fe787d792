"""Which layers drop their activations, and compute them again."""

from __future__ import annotations

import contextlib
import copy
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from towers import BLOCKS, Block, Model, Tower

from meshverse.parallel import apply_activation_checkpointing


def calls(model: Model) -> dict[str, int]:
    """How often each block ran for one forward and backward."""
    for name in BLOCKS:
        block = model.get_submodule(name)
        block(torch.ones(2, 4, requires_grad=True)).sum().backward()
    return {name: model.get_submodule(name).calls for name in BLOCKS}


@pytest.mark.parametrize("mode", [True, "full", "selective"])
def test_layers_run_again_in_backward(mode: Any) -> None:
    model = Model()
    names = list(model.state_dict())
    apply_activation_checkpointing(model, mode)
    assert calls(model) == dict.fromkeys(BLOCKS, 2)
    assert list(model.state_dict()) == names


def test_a_copy_of_a_checkpointed_model_has_its_own_layers() -> None:
    model = nn.Sequential(nn.ModuleList([Block()]))
    apply_activation_checkpointing(model, "selective")
    given = torch.ones(1, 4, requires_grad=True)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        nn.init.zeros_(copied[0][0].linear.weight)
        nn.init.zeros_(copied[0][0].linear.bias)
        assert not copied[0][0](given).any()
    assert model[0][0](given).any()


@pytest.mark.parametrize(
    ("scope", "again"),
    [
        ("vision", {name for name in BLOCKS if "vision" in name}),
        (["language", "audio"], {name for name in BLOCKS if "vision" not in name}),
        ("language,audio", {name for name in BLOCKS if "vision" not in name}),
        (None, set(BLOCKS)),
        ("auto", set(BLOCKS)),
    ],
)
def test_scope_chooses_layers(scope: Any, again: set[str]) -> None:
    model = Model()
    apply_activation_checkpointing(model, "full", scope)
    assert {name for name, count in calls(model).items() if count == 2} == again


@pytest.mark.parametrize(
    ("name", "scope"),
    [
        ("vision_tower", "vision"),
        ("visual", "vision"),
        ("audio_tower", "audio"),
        ("multi_modal_projector", "multimodal"),
        ("language_model", "language"),
        ("model", "language"),
    ],
)
def test_parts_of_multimodal_models(name: str, scope: str) -> None:
    for asked in ("vision", "audio", "multimodal", "language"):
        model = nn.Module()
        model.add_module(name, Tower(nn.ModuleList([Block()])))
        wrong = pytest.raises(ValueError, match="would do nothing")
        with contextlib.nullcontext() if asked == scope else wrong:
            apply_activation_checkpointing(model, "full", asked)
        layer = model.get_submodule(f"{name}.layers.0")
        assert ("forward" in vars(layer)) == (asked == scope)


def test_selective_keeps_matrix_products() -> None:
    products = []

    class Count(TorchDispatchMode):
        def __torch_dispatch__(
            self, operator: Any, types: Any, arguments: Any = (), kwargs: Any = None
        ) -> Any:
            products.append(operator is torch.ops.aten.addmm.default)
            return operator(*arguments, **kwargs or {})

    counts = []
    for mode in ("full", "selective"):
        model = nn.Sequential(nn.ModuleList([Block()]))
        apply_activation_checkpointing(model, mode)
        products.clear()
        output = model[0][0](torch.ones(2, 4, requires_grad=True)).sum()
        with Count():
            output.backward()
        counts.append(sum(products))
    assert counts == [1, 0]


def test_cache_is_off_and_unknown_modes_are_refused() -> None:
    model = Model()
    model.config = SimpleNamespace(use_cache=True)
    with pytest.raises(ValueError, match="mode='some' must be 'full', True or 'selective'"):
        apply_activation_checkpointing(model, "some")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="activation_checkpointing_scope='smell'"):
        apply_activation_checkpointing(model, "full", "smell")
    assert model.config.use_cache
    assert calls(model) == dict.fromkeys(BLOCKS, 1)
    apply_activation_checkpointing(model)
    assert not model.config.use_cache


class Chatty(nn.Module):
    """A layer with keywords that torch's `checkpoint` and our own function have too."""

    def forward(self, hidden: Tensor, *, debug: float, settings: float, forward: float) -> Tensor:
        return hidden.sin() * debug * settings * forward


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_a_layer_gets_all_its_keywords(mode: Any) -> None:
    model = nn.Sequential(nn.ModuleList([Chatty()]))
    apply_activation_checkpointing(model, mode)
    given = torch.zeros(3, requires_grad=True)
    model[0][0](given, debug=2, settings=3, forward=5).sum().backward()
    assert given.grad is not None
    assert given.grad.tolist() == [30] * 3


def test_layers_are_checkpointed_once() -> None:
    model = Model()
    model.again = nn.ModuleList([model.stages[1][0]])  # in two lists
    apply_activation_checkpointing(model, "full", "vision")
    apply_activation_checkpointing(model, "full", "language")
    with pytest.raises(ValueError, match=r"Model in the scope .* are checkpointed already"):
        apply_activation_checkpointing(model)
    assert calls(model) == dict.fromkeys(BLOCKS, 2)


class _Normed(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), norm

    def forward(self, hidden: Tensor) -> Tensor:
        output: Tensor = self.norm(self.linear(hidden))
        return output


@pytest.mark.parametrize("mode", ["full", "selective"])
@pytest.mark.parametrize(
    "norm", [nn.BatchNorm1d(4), nn.SyncBatchNorm(4), nn.InstanceNorm1d(4, track_running_stats=True)]
)
def test_running_statistics_are_not_updated_twice(norm: nn.Module, mode: Any) -> None:
    model = nn.Sequential(nn.ModuleList([_Normed(norm)]))
    with pytest.raises(ValueError, match=r"layer '0.0' .* statistics of its \w+ 'norm' twice"):
        apply_activation_checkpointing(model, mode)
    assert "forward" not in vars(model[0][0])


def test_norms_without_running_statistics_may_be_checkpointed() -> None:
    model = nn.Sequential(nn.ModuleList([_Normed(nn.BatchNorm1d(4, track_running_stats=False))]))
    apply_activation_checkpointing(model)
    model[0][0](torch.randn(3, 4, requires_grad=True)).sum().backward()
    assert model[0][0].linear.weight.grad is not None
