"""Which layers drop their activations, and compute them again."""

from __future__ import annotations

import contextlib
import copy
import pickle
import random
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm
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


class _OwnNorm(nn.Module):
    """A batch norm whose kernel changes buffers without a new version."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("variance", torch.ones(4))

    def forward(self, hidden: Tensor) -> Tensor:
        return F.batch_norm(hidden, self.mean, self.variance, training=self.training)


class _Counted(nn.Module):
    """A layer that assigns another tensor to its buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, hidden: Tensor) -> Tensor:
        if self.training:
            self.seen = self.seen + 1
        return hidden


_CHANGES = {
    "BatchNorm1d": (lambda: nn.BatchNorm1d(4), "norm.running_mean"),
    "InstanceNorm1d": (lambda: nn.InstanceNorm1d(3, track_running_stats=True), "norm.running_mean"),
    "spectral_norm": (
        lambda: spectral_norm(nn.Linear(4, 4)),
        "norm.parametrizations.weight.0._u",
    ),
    "a kernel": (_OwnNorm, "norm.mean"),
    "another tensor": (_Counted, "norm.seen"),
}


@pytest.mark.parametrize("mode", ["full", "selective"])
@pytest.mark.parametrize("name", _CHANGES)
def test_a_forward_that_changes_a_buffer_is_refused(name: str, mode: Any) -> None:
    make, buffer = _CHANGES[name]
    model = nn.Sequential(nn.ModuleList([_Normed(make())])).eval()
    apply_activation_checkpointing(model, mode)
    model.train()
    given = torch.randn(3, 4, requires_grad=True)
    words = f"layer '0.0' (_Normed) changes its buffer '{buffer}'. Backward would run it again"
    with pytest.raises(RuntimeError, match=re.escape(words)):
        model[0][0](given)
    with torch.no_grad():
        model[0][0](given)
    model.eval()
    model[0][0](given).sum().backward()
    assert given.grad is not None


@pytest.mark.parametrize("mode", ["full", "selective"])
@pytest.mark.parametrize(
    "norm", [nn.BatchNorm1d(4), nn.SyncBatchNorm(4), nn.InstanceNorm1d(4, track_running_stats=True)]
)
def test_running_statistics_are_not_updated_twice(norm: nn.Module, mode: Any) -> None:
    model = nn.Sequential(nn.ModuleList([_Normed(norm)]))
    with pytest.raises(ValueError, match=r"layer '0.0' .* statistics of its \w+ 'norm' twice"):
        apply_activation_checkpointing(model, mode)
    assert "forward" not in vars(model[0][0])


def test_a_change_in_a_later_forward_is_refused() -> None:
    layer = _Normed(_Counted().eval())
    apply_activation_checkpointing(nn.Sequential(nn.ModuleList([layer])))
    layer(torch.ones(3, 4))
    layer.train()
    with pytest.raises(RuntimeError, match=r"changes its buffer 'norm.seen'"):
        layer(torch.ones(3, 4))


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # torch's own, while it compiles
@pytest.mark.parametrize("mode", ["full", "selective"])
def test_compiled_layers_change_buffers_once_or_are_refused(mode: Any) -> None:
    graph, broken = _Normed(nn.BatchNorm1d(4)), _Normed(_Counted())
    try:
        for layer in (graph, broken):
            apply_activation_checkpointing(nn.Sequential(nn.ModuleList([layer.eval()])), mode)
            layer.train()
            layer.compile(backend="aot_eager")
        graph(torch.ones(3, 4)).sum().backward()
        assert graph.norm.num_batches_tracked == 1
        with pytest.raises(RuntimeError, match=r"changes its buffer 'norm.seen'"):
            broken(torch.ones(3, 4))
    finally:
        torch.compiler.reset()


@pytest.mark.parametrize("kind", ["torch", "random", "numpy", "numpy before 1.17"])
def test_layers_with_a_random_generator_are_refused(kind: str) -> None:
    make: dict[str, Callable[[], object]] = {
        "torch": torch.Generator,
        "random": random.Random,
        "numpy": np.random.default_rng,
        "numpy before 1.17": np.random.RandomState,
    }
    model = nn.Sequential(nn.ModuleList([_Normed(nn.Identity())]))
    model[0][0].norm.drawn_by = [make[kind]()]
    words = r"layer '0.0' of Sequential has the \w+ 'norm.drawn_by': .*draw other random numbers"
    with pytest.raises(ValueError, match=words):
        apply_activation_checkpointing(model)
    assert "forward" not in vars(model[0][0])
    model[0][0].norm.drawn_by = torch.default_generator  # checkpointing restores its state
    apply_activation_checkpointing(model)


class _Noisy(nn.Module):
    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.draw = draw

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden.sin() * self.draw()


@pytest.mark.parametrize("draw", [random.random, np.random.rand, np.random.randn])
def test_backward_draws_the_same_numbers_of_the_host_again(draw: Callable[[], float]) -> None:
    def gradients(layer: nn.Module) -> list[Tensor]:
        random.seed(0)
        np.random.seed(0)  # noqa: NPY002  (it is what the layer draws from)
        found = []
        for _ in range(3):  # of two normal numbers, NumPy keeps one for the next call
            given = torch.ones(3, requires_grad=True)
            output = layer(layer(given))
            draw()  # as the program does between forward and backward
            output.sum().backward()
            found.append(given.grad)
        return [*found, torch.tensor([random.random(), np.random.rand()])]  # noqa: NPY002

    plain, layer = _Noisy(draw), _Noisy(draw)
    apply_activation_checkpointing(nn.Sequential(nn.ModuleList([layer])))
    assert all(map(torch.equal, gradients(plain), gradients(layer)))


class _Sharing(nn.Module):
    """A layer that finds in a shared object what an earlier layer left there."""

    def __init__(self, shared: Any, change: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.shared, self.change = shared, change

    def forward(self, hidden: Tensor) -> Tensor:
        self.change(self.shared, hidden)
        return hidden.sin()


_SHARED: dict[str, tuple[Callable[[], Any], Callable[[Any, Tensor], Any], str]] = {
    "a dict": (dict, lambda box, hidden: box.update(value=hidden), "dict 'layers.0.shared'"),
    "an object": (
        SimpleNamespace,
        lambda box, hidden: setattr(box, "value", hidden),
        "SimpleNamespace 'layers.0.shared'",
    ),
    "a dict in a config": (
        lambda: SimpleNamespace(box={}),
        lambda config, hidden: config.box.update(value=hidden),
        "dict 'layers.0.shared.box'",
    ),
}


@pytest.mark.parametrize("name", _SHARED)
def test_a_change_of_an_object_that_layers_share_is_refused(name: str) -> None:
    make, change, words = _SHARED[name]
    shared = make()
    model = nn.ModuleDict({"layers": nn.ModuleList(_Sharing(shared, change) for _ in range(2))})
    apply_activation_checkpointing(model)
    for copied in (model, copy.deepcopy(model)):
        with pytest.raises(RuntimeError, match=f"with gradients in the {words}, which other"):
            copied["layers"][1](torch.ones(3, requires_grad=True))


_HARMLESS: dict[str, tuple[Callable[[], Any], Callable[[Any, Tensor], Any]]] = {
    "a counter": (SimpleNamespace, lambda box, hidden: setattr(box, "count", hidden.size(0))),
    "a cache": (dict, lambda box, hidden: box.update(table=hidden.detach().cos())),
    "statistics": (list, lambda box, hidden: box.append(float(hidden.norm().detach()))),
    "losses that are summed": (list, lambda box, hidden: box.append(hidden.norm())),
}


@pytest.mark.parametrize("name", _HARMLESS)
def test_what_changes_no_gradient_is_allowed_in_a_shared_object(name: str) -> None:
    make, change = _HARMLESS[name]
    shared = make()
    layers = nn.ModuleList(_Sharing(shared, change) for _ in range(2))
    apply_activation_checkpointing(nn.Sequential(layers))
    given = torch.ones(3, requires_grad=True)
    layers[1](layers[0](given)).sum().backward()
    assert torch.allclose(given.grad, given.sin().cos() * given.cos())


class _Holding(nn.Module):
    """A layer with a buffer whose memory has gaps, or whose values are conjugated."""

    def __init__(self, buffer: Tensor) -> None:
        super().__init__()
        self.register_buffer("buffer", buffer)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden * self.buffer.sum().real


@pytest.mark.parametrize(
    "buffer",
    [
        torch.arange(8.0)[::2],
        torch.arange(8.0).view(4, 2)[:, 0],
        torch.ones(()).expand(4),
        torch.ones(4, dtype=torch.complex64).conj(),
        torch.ones(4, dtype=torch.complex64).conj().imag,
        torch.ones(0),
    ],
)
def test_buffers_may_have_any_strides(buffer: Tensor) -> None:
    layer = _Holding(buffer)
    apply_activation_checkpointing(nn.Sequential(nn.ModuleList([layer])))
    given = torch.ones(3, requires_grad=True)
    layer(given).sum().backward()
    assert given.grad is not None


def _set_again(config: Any, hidden: Tensor) -> None:
    config.length = hidden.size(0) * 1000  # equal to the number there, but another object


def test_layers_may_share_an_object_that_they_leave_as_it_is() -> None:
    config = SimpleNamespace(length=3000, box={})
    layers = nn.ModuleList(_Sharing(config, _set_again) for _ in range(2))
    apply_activation_checkpointing(nn.Sequential(layers))
    given = torch.ones(3, requires_grad=True)
    for layer in layers:
        layer(given).sum().backward()
    assert given.grad is not None


def test_a_layer_may_change_an_object_of_its_own() -> None:
    layers = nn.ModuleList(_Sharing([], lambda box, hidden: box.append(1)) for _ in range(2))
    apply_activation_checkpointing(nn.Sequential(layers))
    layers[0](torch.ones(3, requires_grad=True)).sum().backward()
    assert layers[0].shared == [1, 1]


def test_norms_without_running_statistics_may_be_checkpointed() -> None:
    model = nn.Sequential(nn.ModuleList([_Normed(nn.BatchNorm1d(4, track_running_stats=False))]))
    apply_activation_checkpointing(model)
    model[0][0](torch.randn(3, 4, requires_grad=True)).sum().backward()
    assert model[0][0].linear.weight.grad is not None
