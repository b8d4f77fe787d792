"""Selective checkpointing of layers that change kept products in place: gradients are the same."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from helpers.crew import Crew
from helpers.tiers import in_tiers
from meshverse.parallel import apply_activation_checkpointing

WIDTH = 8


def mm(layer: Layer, hidden: Tensor) -> Tensor:
    return F.linear(hidden, layer.first.weight)


def addmm(layer: Layer, hidden: Tensor) -> Tensor:
    return layer.first(hidden)


def bmm(layer: Layer, hidden: Tensor) -> Tensor:
    return layer.first(hidden) @ layer.square.expand(*hidden.shape[:-2], WIDTH, WIDTH)


def attention(layer: Layer, hidden: Tensor) -> Tensor:
    # Its own output cannot be changed, with or without checkpointing: its backward needs it.
    query = layer.first(hidden).unflatten(-1, (2, -1)).transpose(-3, -2)
    output = F.scaled_dot_product_attention(*[query[None]] * 3)[0]
    return layer.second(output.transpose(-3, -2).flatten(-2))


KEPT = {each.__name__: each for each in (mm, addmm, bmm, attention)}


def double_data(kept: Tensor, hidden: Tensor) -> None:
    kept.data.mul_(2)


CHANGES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "div_": lambda kept, hidden: kept.div_(4),
    "add_": lambda kept, hidden: kept.add_(hidden),
    "silu_": lambda kept, hidden: F.silu(kept, inplace=True),
    "masked_fill_": lambda kept, hidden: kept.masked_fill_(hidden > 0, -1.0),
    "copy_": lambda kept, hidden: kept[..., :4].copy_(hidden[..., 4:]),
    "slice": lambda kept, hidden: kept[..., 1::2].mul_(3),
    "index_put_": lambda kept, hidden: kept.index_put_((torch.tensor([0]),), torch.tensor(0.5)),
    "transposed": lambda kept, hidden: kept.mT.exp_(),
    "detached": lambda kept, hidden: kept.detach().mul_(2),
    "data": double_data,
}


class Layer(nn.Module):
    def __init__(self, kept: str, change: str) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.square = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)
        self.kept, self.change = kept, change

    def forward(self, hidden: Tensor) -> Tensor:
        product = KEPT[self.kept](self, hidden)
        CHANGES[self.change](product, hidden)
        return hidden + self.second(product.sigmoid())


def gradients(layers: Any, shape: tuple[int, ...]) -> list[Tensor]:
    torch.manual_seed(1)
    given = torch.randn(shape, requires_grad=True)
    hidden = given
    for layer in layers:
        hidden = layer(hidden)
    hidden.sin().sum().backward()
    return [given.grad, *(each.grad for each in layers.parameters() if each.grad is not None)]


def compare(layers: nn.ModuleList, shape: tuple[int, ...], *, compiled: bool) -> None:
    plain = copy.deepcopy(layers)
    apply_activation_checkpointing(nn.Sequential(layers), "selective")
    for layer in layers if compiled else ():
        layer.compile(backend="aot_eager")
    expected, seen = gradients(plain, shape), gradients(layers, shape)
    for one, other in zip(expected, seen, strict=True):
        torch.testing.assert_close(other, one)


SHAPES = [(5, WIDTH), (2, 5, WIDTH)]
_CASES = list(product(KEPT, CHANGES, SHAPES))
_SHORT = [
    ("mm", "add_", SHAPES[1]),
    ("bmm", "div_", SHAPES[1]),
    ("mm", "div_", SHAPES[0]),
    ("addmm", "silu_", SHAPES[0]),
    ("addmm", "data", SHAPES[1]),
    ("attention", "add_", SHAPES[1]),
]


@pytest.mark.parametrize(("kept", "change", "shape"), in_tiers(_CASES, _SHORT, _CASES[::5]))
def test_a_change_after_a_kept_product(kept: str, change: str, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    compare(nn.ModuleList(Layer(kept, change) for _ in range(2)), shape, compiled=False)


@pytest.fixture
def nothing_compiled() -> Iterator[None]:
    """Forget compiled code afterwards."""
    yield
    torch.compiler.reset()


@pytest.mark.long
@pytest.mark.parametrize(("kept", "change", "shape"), in_tiers(_CASES, _CASES[::7], []))
@pytest.mark.filterwarnings("ignore")  # torch's own, while it compiles
@pytest.mark.usefixtures("nothing_compiled")
def test_a_change_in_a_compiled_layer(kept: str, change: str, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    compare(nn.ModuleList([Layer(kept, change)]), shape, compiled=True)


class TwoOutputs(nn.Module):
    def __init__(self, *, bias: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=bias)

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        product = self.linear(hidden)
        return product, product.exp()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_change_after_the_layer(bias: bool, shape: tuple[int, ...]) -> None:
    layer = TwoOutputs(bias=bias)
    plain = copy.deepcopy(layer)
    apply_activation_checkpointing(nn.Sequential(nn.ModuleList([layer])), "selective")
    for each in (plain, layer):
        first, second = each(torch.ones(shape))
        first += 1
        (first * second).sum().backward()
    torch.testing.assert_close(layer.linear.weight.grad, plain.linear.weight.grad)


_COMPILED = list(product([False, True], SHAPES, ["aot_eager", "inductor"]))
_COMPILED_SHORT = [(False, SHAPES[1], "aot_eager")]


@pytest.mark.parametrize(
    ("bias", "shape", "backend"), in_tiers(_COMPILED, _COMPILED_SHORT, _COMPILED[::5])
)
@pytest.mark.filterwarnings("ignore")  # torch's own, while it compiles
@pytest.mark.usefixtures("nothing_compiled")
def test_a_change_after_a_compiled_layer(bias: bool, shape: tuple[int, ...], backend: str) -> None:
    layer = TwoOutputs(bias=bias)
    plain = copy.deepcopy(layer)
    apply_activation_checkpointing(nn.Sequential(nn.ModuleList([layer])), "selective")
    layer.compile(backend=backend)
    for each in (plain, layer):
        first, second = each(torch.ones(shape))
        first += 1
        (first * second).sum().backward()
    torch.testing.assert_close(layer.linear.weight.grad, plain.linear.weight.grad)


class SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, given: Tensor) -> Tensor:
        dist.all_reduce(given)  # c10d's operators do not declare what they write
        return given.view_as(given)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return gradient


class Reduced(TwoOutputs):
    def forward(self, hidden: Tensor) -> Any:
        return SumOverRanks.apply(self.linear(hidden)).exp()


def reduce_in_place() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    layer = Reduced(bias=False)
    plain = copy.deepcopy(layer)
    apply_activation_checkpointing(nn.Sequential(nn.ModuleList([layer])), "selective")
    for each in (plain, layer):
        each(torch.ones(2, 5, WIDTH) * (1 + dist.get_rank())).sum().backward()
    assert plain.linear.weight.grad is not None
    assert layer.linear.weight.grad is not None
    return plain.linear.weight.grad, layer.linear.weight.grad


def test_a_collective_in_place(crew: Crew) -> None:
    for expected, seen in crew.run(reduce_in_place, 2):
        torch.testing.assert_close(seen, expected)


def tiny(family: str) -> nn.Module:
    pytest.importorskip("transformers", reason="transformers is not installed")
    import hf_families
    import transformers

    if family == "gemma3n":
        model = hf_families.tiny_model("gemma3n_text", tied=False)
        model.set_attn_implementation("sdpa")  # type: ignore[operator]
        return model
    torch.manual_seed(0)
    config = transformers.FalconConfig(
        vocab_size=96,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        alibi=family == "falcon-alibi",
        attn_implementation="eager",
    )
    return transformers.FalconForCausalLM(config)


@pytest.mark.parametrize(
    "family", in_tiers(["gemma3n", "falcon", "falcon-alibi"], ["gemma3n", "falcon"])
)
def test_models_with_changes_in_place(family: str) -> None:
    model = tiny(family)
    plain = copy.deepcopy(model)
    apply_activation_checkpointing(model, "selective")
    given = torch.arange(2 * 12).reshape(2, 12)
    for each in (plain, model):
        each(input_ids=given, use_cache=False).logits.sin().sum().backward()
    seen = dict(model.named_parameters())
    for name, one in plain.named_parameters():
        if one.grad is not None:
            torch.testing.assert_close(seen[name].grad, one.grad, msg=name)


class Count(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, operator: Any, types: Any, arguments: Any = (), kwargs: Any = None
    ) -> Any:
        self.names.append(str(operator))
        return operator(*arguments, **kwargs or {})


class Flash(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout

    def forward(self, hidden: Tensor) -> Tensor:
        attend = torch.ops.aten._scaled_dot_product_flash_attention
        return attend(hidden, hidden, hidden, self.dropout)[0].exp()


@pytest.mark.parametrize(("dropout", "again"), [(0.0, 0), (0.5, 1)])
def test_attention_with_dropout_is_computed_again(dropout: float, again: int) -> None:
    # Its random numbers are drawn again, so that those of later operators are the same.
    layer = Flash(dropout)
    apply_activation_checkpointing(nn.Sequential(nn.ModuleList([layer])), "selective")
    hidden = torch.empty(1, 2, 16, 8, device="meta", requires_grad=True, dtype=torch.bfloat16)
    output = layer(hidden).sum()
    with Count() as count:
        output.backward()
    name = "aten._scaled_dot_product_flash_attention.default"
    assert count.names.count(name) == again


def test_other_operators_or_a_second_backward_are_refused() -> None:
    layer = Layer("mm", "add_")
    apply_activation_checkpointing(nn.Sequential(nn.ModuleList([layer])), "selective")
    output = layer(torch.ones(2, WIDTH)).sum()
    layer.kept = "addmm"
    with pytest.raises(RuntimeError, match=r"product 1 is aten.addmm.default, but was aten.mm"):
        output.backward()
    twice = TwoOutputs(bias=True)
    apply_activation_checkpointing(nn.Sequential(nn.ModuleList([twice])), "selective")
    output = twice(torch.ones(2, WIDTH))[1].sum()
    output.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="A second backward through a layer needs results"):
        output.backward()
