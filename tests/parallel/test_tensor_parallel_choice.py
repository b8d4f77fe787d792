"""The plan that a model gets: given, registered, its own, or that of a Llama."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel
from torch.nn import functional as F
from tp_models import MLP

import meshverse
from meshverse.parallel import (
    apply_tensor_parallelism,
    apply_tp_plan,
    register_tp_plan,
)
from meshverse.parallel.tensor_parallel import choice

pytestmark = pytest.mark.usefixtures("world")


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            self.add_module(name, nn.Linear(8, 8))

    def forward(self, hidden: Tensor) -> Tensor:
        mixed = self.q_proj(hidden) * self.k_proj(hidden) + self.v_proj(hidden)
        output: Tensor = self.o_proj(mixed)
        return output


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attn = Attention()


class LikeLlama(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(16, 8)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.lm_head = nn.Linear(8, 16)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed_tokens(tokens)
        for layer in self.layers:
            hidden = hidden + layer.self_attn(hidden)
        output: Tensor = self.lm_head(hidden)
        return output


class Derived(MLP):
    pass


def mesh() -> meshverse.DeviceMesh:
    return meshverse.init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))["tp"]


def split(model: nn.Module) -> set[str]:
    return {name for name, each in model.named_parameters() if isinstance(each, DTensor)}


UP = {"up.weight"}
GATHERED = ColwiseParallel(output_layouts=Replicate())
plan_value: dict[str, ParallelStyle] = {"up": GATHERED}


def plan_function() -> dict[str, ParallelStyle]:
    return {"up": GATHERED}


def plan_for(model: nn.Module, sequence_parallel: bool) -> dict[str, ParallelStyle]:
    assert isinstance(model, nn.Module)
    if sequence_parallel:
        return {"up": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())}
    return {"down": RowwiseParallel()}


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(choice, "_registered", {})
    return


@pytest.mark.parametrize("given", [{"up": GATHERED}, f"{__name__}.plan_value", plan_function])
def test_given_plan(given: Any) -> None:
    model = MLP()
    apply_tensor_parallelism(model, mesh(), given)
    assert split(model) == UP


def test_given_function_of_the_model() -> None:
    for sequence_parallel, expected in ((True, UP), (False, {"down.weight"})):
        model = MLP()
        apply_tensor_parallelism(
            model, mesh(), f"{__name__}.plan_for", sequence_parallel=sequence_parallel
        )
        assert split(model) == expected


def test_entries_for_no_module_are_refused_with_the_nearest() -> None:
    model = MLP()
    with pytest.raises(ValueError, match=r"MLP has no modules \['dwon'\].*\{'dwon': 'down'\}"):
        apply_tensor_parallelism(
            model, mesh(), {"up": ColwiseParallel(), "dwon": RowwiseParallel()}
        )
    assert not split(model)
    layers = nn.ModuleDict({"layers": nn.ModuleList([MLP(), MLP()])})
    with pytest.raises(ValueError, match=r"\{'layers\.\*\.pu': 'layers\.\*\.up'\}"):
        apply_tp_plan(layers, mesh(), {"layers.*.pu": ColwiseParallel()})


def test_entries_for_no_module_are_left_out_if_asked(caplog: pytest.LogCaptureFixture) -> None:
    model = MLP()
    entries = {"up": GATHERED, "dwon": RowwiseParallel()}
    apply_tp_plan(model, mesh(), entries, strict=False)
    assert split(model) == UP
    assert "MLP has no modules ['dwon']" in caplog.text


def test_what_is_no_plan_is_refused() -> None:
    model = MLP()
    with pytest.raises(TypeError, match="it must be a dict of parallel styles"):
        apply_tensor_parallelism(model, mesh(), f"{__name__}.UP")
    assert not split(model)


@pytest.mark.usefixtures("registry")
def test_registered_plan_is_of_derived_classes_too() -> None:
    register_tp_plan(MLP, plan_for)
    model = Derived()
    apply_tensor_parallelism(model, mesh())
    assert split(model) == {"down.weight"}
    register_tp_plan(Derived, lambda model, sequence_parallel: {"up": GATHERED})
    model = Derived()
    apply_tensor_parallelism(model, mesh())
    assert split(model) == UP


@pytest.mark.usefixtures("registry")
def test_a_registered_plan_may_split_nothing() -> None:
    register_tp_plan(LikeLlama, lambda model, sequence_parallel: {})
    model = LikeLlama()
    apply_tensor_parallelism(model, mesh())
    assert not split(model)


@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize("build", [MLP, lambda: nn.Sequential(MLP())])
def test_a_registered_function_without_a_plan_is_named(build: Callable[[], nn.Module]) -> None:
    register_tp_plan(MLP, lambda model, sequence_parallel: None)  # type: ignore[arg-type, return-value]
    with pytest.raises(TypeError, match=r"registered for MLP by register_tp_plan\(\) gives None"):
        apply_tensor_parallelism(build(), mesh())


@pytest.mark.usefixtures("registry")
def test_plans_registered_for_modules_complete_the_plan_of_the_model() -> None:
    hf_families = pytest.importorskip("hf_families", reason="transformers is not installed")
    model = hf_families.tiny_model("llama", tied=False)
    model.tower = MLP()
    register_tp_plan(MLP, lambda model, sequence_parallel: {"up": GATHERED})
    register_tp_plan(type(model.model.layers[0].mlp), lambda model, sequence_parallel: {})
    own = {"lm_head.weight", "model.embed_tokens.weight", "tower.up.weight"}
    attention = {f"self_attn.{name}_proj.weight" for name in "qkvo"}
    apply_tensor_parallelism(model, mesh())
    assert split(model) == own | {f"model.layers.{n}.{each}" for n in (0, 1) for each in attention}


@pytest.mark.usefixtures("registry")
def test_given_plan_beats_the_registered_one() -> None:
    register_tp_plan(MLP, plan_for)
    model = MLP()
    apply_tensor_parallelism(model, mesh(), plan_function)
    assert split(model) == UP


def test_default_is_of_a_llama_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    model = LikeLlama()
    with caplog.at_level(logging.WARNING):
        apply_tensor_parallelism(model, mesh())
    assert "embed_tokens.weight" in split(model)
    assert model.layers[1].self_attn.q_proj.weight.placements == (Shard(0),)
    assert model.layers[1].self_attn.o_proj.weight.placements == (Shard(1),)
    assert "LikeLlama" in caplog.text
    assert "register_tp_plan" in caplog.text


class NeedsMore(LikeLlama):
    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        return super().forward(tokens) * mask


def test_the_plan_of_a_llama_is_refused_where_it_cannot_be_tried() -> None:
    model, given = NeedsMore(), "meshverse.parallel.llama_tp_plan"
    with pytest.raises(
        ValueError, match=rf"NeedsMore .*layers.\*.self_attn.*tp_shard_plan='{given}'"
    ):
        apply_tensor_parallelism(model, mesh())
    assert not split(model)
    apply_tensor_parallelism(model, mesh(), given)
    assert "layers.0.self_attn.q_proj.weight" in split(model)


class ReadsEmbedding(LikeLlama):
    def forward(self, tokens: Tensor) -> Tensor:
        hidden = super().forward(tokens).to(self.lm_head.weight.dtype) @ self.lm_head.weight
        return F.linear(hidden, self.embed_tokens.weight)


class ReadsDtype(LikeLlama):
    """Reads what each rank's part of a weight has, too."""

    def forward(self, tokens: Tensor) -> Tensor:
        weight = self.lm_head.weight
        output = super().forward(tokens).to(weight, copy=True).type_as(weight)
        return output if torch.result_type(output, weight) == weight.dtype else output.double()


def test_the_plan_of_a_llama_may_be_for_a_model_that_reads_dtypes_of_weights() -> None:
    model = ReadsDtype()
    apply_tensor_parallelism(model, mesh())
    assert "lm_head.weight" in split(model)


def test_the_plan_of_a_llama_is_refused_where_weights_are_read_outside_their_layers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, given = ReadsEmbedding(), "meshverse.parallel.llama_tp_plan"
    with pytest.raises(ValueError, match=r"Llama's cannot .*'lm_head.weight' is read"):
        apply_tensor_parallelism(model, mesh())
    assert not split(model)
    with caplog.at_level(logging.WARNING):
        apply_tensor_parallelism(model, mesh(), given)
    assert "'lm_head.weight' is read outside its layer" in caplog.text
    assert "embed_tokens.weight" in split(model)


def test_no_llama_is_refused() -> None:
    with pytest.raises(ValueError, match="MLP is not built like Llama"):
        apply_tensor_parallelism(MLP(), mesh())
