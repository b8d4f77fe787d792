"""Parts of a model that FSDP2 and tensor parallelism would lose, silently: kept, or refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from helpers.crew import Crew
from helpers.worlds import fake_world
from meshverse.parallel import (
    FSDP2Config,
    FSDP2Manager,
    LocalParameters,
    ParallelismSizes,
    apply_activation_checkpointing,
    apply_tp_plan,
    create_fsdp2_device_mesh,
    fsdp2_strategy_parallelize,
)

_GATHERED = ColwiseParallel(output_layouts=Replicate())


class _Layer(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.linear(hidden).tanh()


class _Model(nn.Module):
    """An embedding, two layers and a head."""

    def __init__(self, layer: Callable[[], nn.Module] = _Layer, **settings: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 4, **settings)
        self.layers = nn.ModuleList([layer() for _ in range(2)])
        self.head = nn.Linear(4, 8, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


def _shard(model: nn.Module, **settings: Any) -> nn.Module:
    mesh, _ = create_fsdp2_device_mesh(ParallelismSizes())
    return fsdp2_strategy_parallelize(model, mesh, **settings)


def _is_whole(model: nn.Module) -> bool:
    return not any(isinstance(each, DTensor) for each in model.parameters())


# --- attributes of parameters ---------------------------------------------------------------------


def test_attributes_of_parameters_are_kept() -> None:
    model = _Model()
    for name, parameter in model.named_parameters():
        parameter.own_name = name
    with fake_world(4):
        mesh, _ = create_fsdp2_device_mesh(ParallelismSizes(tp_size=2))
        fsdp2_strategy_parallelize(model, mesh, tp_plan={"head": _GATHERED})
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        assert parameter.own_name == name


def test_a_tensor_parallel_plan_keeps_attributes() -> None:
    model = _Model()
    model.head.weight.no_weight_decay = True
    with fake_world(2):
        mesh, _ = create_fsdp2_device_mesh(ParallelismSizes(tp_size=2))
        apply_tp_plan(model, mesh["tp"], {"head": _GATHERED})
    assert isinstance(model.head.weight, DTensor)
    assert model.head.weight.no_weight_decay


def test_a_style_of_its_own_keeps_attributes() -> None:
    model = _Model()
    model.scale = nn.Parameter(torch.ones(4))
    model.scale.no_weight_decay = True
    with fake_world(2):
        mesh, _ = create_fsdp2_device_mesh(ParallelismSizes(tp_size=2))
        parallelize_module(model, mesh["tp"], LocalParameters({"scale": Shard(0)}))
    assert isinstance(model.scale, DTensor)
    assert model.scale.no_weight_decay


# --- memory that is held twice --------------------------------------------------------------------


def _hold_in_list(model: _Model) -> None:
    model.tied = [model.head.weight]


def _hold_detached(model: _Model) -> None:
    model.layers[0].cached = {"head": model.head.weight.detach()}


def _share_memory(model: _Model) -> None:
    model.head.weight.data = model.embedding.weight.data


class _Head:
    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def project(self, hidden: Tensor) -> Tensor:
        return hidden @ self.weight.t()


def _hold_in_object(model: _Model) -> None:
    model.output = _Head(model.head.weight)


def _hold_in_method(model: _Model) -> None:
    model.output = _Head(model.head.weight).project


def _hold_in_partial(model: _Model) -> None:
    model.output = partial(nn.functional.linear, weight=model.head.weight)


def _hold_in_closure(model: _Model) -> None:
    weight = model.head.weight
    model.output = lambda hidden: hidden @ weight.t()


def _hold_in_set(model: _Model) -> None:
    model.output = {model.head.weight}


def _hold_in_other_module(model: _Model) -> None:
    model.output = [nn.Linear(4, 4, bias=False)]
    model.output[0].weight = model.head.weight


def _hold_in_optimizer(model: _Model) -> None:
    model.output = torch.optim.SGD(model.parameters(), lr=0.1)


class _Noticing(nn.Module):
    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)


def _hold_where_attributes_are_noticed(model: _Model) -> None:
    model.output = _Noticing()
    model.output.held = [model.head.weight]


@dataclass(slots=True)
class _Slots:
    weight: Tensor


def _hold_in_slots(model: _Model) -> None:
    model.output = _Slots(model.head.weight)


def _hold_in_hook(model: _Model) -> None:
    weight = model.head.weight
    model.layers[1].register_forward_hook(lambda *given: given[2] + weight.sum())


def _hold_in_buffer(model: _Model) -> None:
    model.register_buffer("output", model.head.weight.detach())


_OUTPUT = "the attribute 'output' holds it too"
_HOLDERS = {
    "object": (_hold_in_object, _OUTPUT),
    "method": (_hold_in_method, _OUTPUT),
    "partial": (_hold_in_partial, _OUTPUT),
    "closure": (_hold_in_closure, _OUTPUT),
    "set": (_hold_in_set, _OUTPUT),
    "slots": (_hold_in_slots, _OUTPUT),
    "hook": (_hold_in_hook, "a forward hook of 'layers.1' holds it too"),
    "other module": (_hold_in_other_module, _OUTPUT),
    "noticing": (_hold_where_attributes_are_noticed, "the attribute 'output.held' holds it too"),
    "buffer": (_hold_in_buffer, "the buffer 'output' has the same memory"),
    "tied": (_hold_in_list, "the attribute 'tied' holds it too, without registering it"),
    "cached": (_hold_detached, "the attribute 'layers.0.cached' holds it too"),
    "shared": (_share_memory, "the parameter 'embedding.weight' has the same memory"),
}


@pytest.mark.parametrize("kind", _HOLDERS)
def test_a_parameter_that_is_held_elsewhere_is_refused(kind: str) -> None:
    hold, words = _HOLDERS[kind]
    model = _Model()
    hold(model)
    with fake_world(2):
        with pytest.raises(ValueError, match=f"cannot shard 'head.weight': {words}"):
            _shard(model)
        mesh, _ = create_fsdp2_device_mesh(ParallelismSizes(tp_size=2))
        with pytest.raises(ValueError, match=f"head.weight cannot be split: {words}"):
            apply_tp_plan(model, mesh["tp"], {"head": _GATHERED})
    assert _is_whole(model)


def test_an_optimizer_that_the_model_holds_is_refused() -> None:
    model = _Model()
    _hold_in_optimizer(model)
    with fake_world(2), pytest.raises(ValueError, match=f"cannot shard '.*': {_OUTPUT}"):
        _shard(model)
    assert _is_whole(model)


def test_what_has_memory_of_its_own_is_not_refused() -> None:
    model = _Model()
    model.whole = [model, partial(model.forward, None)]  # itself: whose parameters are replaced
    model.kinds = {"layer": nn.Linear, "torch": torch}
    model.chain = {}
    model.chain["again"] = [model.chain]
    model.recurrent = nn.LSTM(4, 4)  # lists its parameters itself, and notices new ones
    model.normed = torch.nn.utils.spectral_norm(nn.Linear(4, 4))  # computes "weight" by a hook
    model.start = model.head.weight.detach().clone()
    model.head.bias = nn.Parameter(torch.empty(0))
    whole = torch.zeros(8)
    model.first, model.second = nn.Parameter(whole[:4]), nn.Parameter(whole[4:])
    model.layers[1].linear.weight = model.layers[0].linear.weight = nn.Parameter(torch.eye(4))
    model.layers = nn.ModuleList([model.layers[0]])
    with fake_world(2):
        _shard(model)
    assert not _is_whole(model)


# --- embeddings -----------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{"max_norm": 1.0}, {"sparse": True}])
def test_embeddings_that_cannot_be_split_are_refused(settings: dict[str, Any]) -> None:
    model, (name,) = _Model(**settings), settings
    with fake_world(2):
        with pytest.raises(ValueError, match=rf"cannot shard the embedding 'embedding'.*{name}="):
            _shard(model)
        mesh, _ = create_fsdp2_device_mesh(ParallelismSizes(tp_size=2))
        with pytest.raises(ValueError, match=rf"embedding cannot be split by .*{name}="):
            apply_tp_plan(model, mesh["tp"], {"embedding": _GATHERED})
        apply_tp_plan(model, mesh["tp"], {"head": _GATHERED})  # leaves it alone
    assert isinstance(model.embedding.weight, nn.Parameter)
    assert type(model.embedding.weight.data) is Tensor


# --- dtypes ---------------------------------------------------------------------------------------


def test_several_trainable_dtypes_in_a_layer_are_refused() -> None:
    model = _Model()
    model.layers[1].linear.bias.data = model.layers[1].linear.bias.data.double()
    with fake_world(2):
        with pytest.raises(ValueError, match=r"its layer 'layers.1' has trainable parameters of"):
            _shard(model)
        assert _is_whole(model)
        model.layers[1].linear.bias.requires_grad_(False)
        _shard(model)


def test_layers_may_have_dtypes_of_their_own() -> None:
    model = _Model()
    model.layers[1].double()
    with fake_world(2):
        _shard(model)
    model = _Model()
    model.head.double()
    with fake_world(2), pytest.raises(ValueError, match=r"its rest, outside of its layers, has"):
        _shard(model)


def test_what_reapply_trainability_freezes_is_not_asked_for_its_dtype() -> None:
    model = _Model()
    model.head.double()
    with fake_world(2):
        _shard(model, reapply_trainability=lambda model: model.head.requires_grad_(False))


def test_a_lazy_parameter_is_refused() -> None:
    model = _Model()
    model.head = nn.LazyLinear(8)
    with fake_world(2), pytest.raises(ValueError, match=r"'head.weight', which has no shape yet"):
        _shard(model)


# --- layers without a forward ---------------------------------------------------------------------


class _Parts(nn.Module):
    """A layer whose parts the model calls itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)


def test_layers_without_a_forward_are_refused() -> None:
    model = _Model(_Parts)
    words = r"cannot shard the layer 'layers\.0'.*has no forward"
    with fake_world(2), pytest.raises(ValueError, match=words):
        _shard(model)
    with pytest.raises(ValueError, match=r"\['layers.0', 'layers.1'\] of _Model, which have no fo"):
        apply_activation_checkpointing(model)
    with pytest.raises(ValueError, match="layers without a forward"):
        FSDP2Manager(FSDP2Config(enable_compile=True), None).maybe_compile(model)
    model.layers[0].forward = model.layers[1].forward = lambda hidden: hidden
    apply_activation_checkpointing(model)


# --- outputs --------------------------------------------------------------------------------------


class _State:
    """A class of the program's own."""

    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


@dataclass
class _Data:
    hidden: Tensor


class _Wraps(_Layer):
    kind: Any = _State

    def forward(self, given: Any) -> Any:
        return self.kind(super().forward(getattr(given, "hidden", given)))


class _WrapsData(_Wraps):
    kind = _Data


class _OfWraps(_Model):
    def forward(self, tokens: Tensor) -> Tensor:
        hidden: Any = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden.hidden)


def _train(layer: Callable[[], nn.Module]) -> str:
    torch.manual_seed(0)
    model, tokens = _OfWraps(layer), torch.arange(6)
    torch.manual_seed(0)
    whole = _OfWraps(layer)
    mesh, _ = create_fsdp2_device_mesh(ParallelismSizes())
    fsdp2_strategy_parallelize(model, mesh, param_dtype=torch.float32)
    with torch.no_grad():
        model(tokens)
    try:
        model(tokens).square().mean().backward()
    except TypeError as error:
        return str(error)
    whole(tokens).square().mean().backward()
    for mine, other in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.full_tensor(), other.grad)
    return "right"


def test_a_layer_whose_output_fsdp2_cannot_see_is_refused(crew: Crew) -> None:
    for words in crew.run(_train, 2, _Wraps):
        assert words.startswith(
            "FSDP2 finds no tensor in the output of the layer 'layers.0' of FSDP_OfWraps, a _State."
        )


def test_a_dataclass_is_seen_where_torch_sees_it(crew: Crew) -> None:
    from meshverse._torch_compat.module_hooks import FSDP2_SEES_DATACLASSES

    for words in crew.run(_train, 2, _WrapsData):
        assert (words == "right") == FSDP2_SEES_DATACLASSES, words
