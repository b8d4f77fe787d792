"""Stages of a model: which layers they have, what they give, and what is refused."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from pipelines import make
from tiny_models import batch, make_model
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from helpers.worlds import fake_world
from meshverse import init_device_mesh
from meshverse.parallel import (
    FSDP2Config,
    FSDP2Manager,
    ParallelismSizes,
    apply_tp_plan,
    create_device_meshes,
    pipeline_stages,
    split_into_stages,
)
from meshverse.parallel.pipeline.stage import layers_of_stages

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
BaseModelOutputWithPast = transformers.modeling_outputs.BaseModelOutputWithPast


def test_stages_have_each_parameter_once_under_its_own_name() -> None:
    model = make(5)
    stages = [split_into_stages(model, 3, index) for index in range(3)]
    names = [dict(stage.named_parameters()) for stage in stages]
    assert sum(map(len, names)) == len(dict(model.named_parameters()))
    assert {**names[0], **names[1], **names[2]} == dict(model.named_parameters())
    assert "model.embed_tokens.weight" in names[0]
    assert {"model.norm.weight", "lm_head.weight"} <= names[2].keys()
    layers = [sorted({name.split(".")[2] for name in each if ".layers." in name}) for each in names]
    assert layers == [["0", "1"], ["2", "3"], ["4"]]
    assert all(type(stage) is type(model) for stage in stages)


def chain(stages: list[nn.Module], tokens: Tensor, **keywords: Any) -> Tensor:
    hidden = tokens
    for stage in stages:
        hidden = stage(hidden, **keywords)
    return hidden


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_masks_and_positions_go_to_every_stage(family: str) -> None:
    model = make_model(family, num_hidden_layers=4)
    tokens = batch(0)
    mask = torch.ones_like(tokens)
    mask[:4, :2] = 0
    keywords = {"attention_mask": mask, "position_ids": torch.arange(tokens.size(1))[None] + 3}
    expected = model(input_ids=tokens, use_cache=False, **keywords).logits
    plain = model(input_ids=tokens, use_cache=False).logits
    stages = [split_into_stages(model, 4, index) for index in range(4)]
    assert torch.equal(chain(stages, tokens, **keywords), expected)
    assert not torch.allclose(expected, plain)
    assert torch.equal(chain(stages, tokens), plain)


def test_a_copy_of_a_stage_runs_its_own_layers() -> None:
    model = make()
    first = split_into_stages(model, 2, 0)
    other = copy.deepcopy(first)
    before = first(batch(0))
    with torch.no_grad():
        for parameter in first.parameters():
            parameter.zero_()
    assert torch.equal(other(batch(0)), before)


def test_a_model_on_the_meta_device_is_split() -> None:
    with torch.device("meta"):
        model = make()
    stage = split_into_stages(model, 2, 1)
    assert all(each.is_meta for each in stage.parameters())
    assert stage.to_empty(device="cpu")(torch.zeros(2, 3, 32)).shape == (2, 3, 64)


def test_one_stage_is_the_whole_model() -> None:
    model = make()
    stage = split_into_stages(model, 1, 0)
    assert dict(stage.named_parameters()) == dict(model.named_parameters())
    assert torch.equal(stage(batch(0)), model(input_ids=batch(0), use_cache=False).logits)


def test_embeddings_are_taken_for_tokens() -> None:
    model = make()
    stages = [split_into_stages(model, 2, index) for index in range(2)]
    embedded = model.get_input_embeddings()(batch(0))
    assert torch.equal(chain(stages, embedded), chain(stages, batch(0)))


@pytest.mark.parametrize(
    "keyword",
    [
        *({"labels": batch(0)}, {"labels": None}, {"use_cache": None}, {"inputs_embeds": None}),
        *({"return_dict": False}, {"cache": transformers.DynamicCache()}),
        {"caches": [{"first": transformers.DynamicCache()}]},
    ],
)
def test_what_needs_all_layers_is_no_keyword_of_a_stage(keyword: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=f"pipeline stage, and takes no \\['{next(iter(keyword))}'"):
        split_into_stages(make(), 2, 1)(torch.zeros(2, 3, 32), **keyword)


def test_layers_are_dealt_out_evenly() -> None:
    for n_layers in range(1, 12):
        for n_stages in range(1, n_layers + 1):
            ranges = layers_of_stages(n_layers, n_stages)
            assert [layer for each in ranges for layer in each] == list(range(n_layers))
            assert max(map(len, ranges)) - min(map(len, ranges)) <= 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((5, 0), "5 stages for 4 layers: every stage must have at least one"),
        ((2, 2), "index=2 must be the index of a stage, 0 to 1"),
        ((2, -1), "index=-1"),
        ((0, 0), "n_stages=0 must be an int above 0"),
        ((2, 0, (1, 2)), r"layers_per_stage=\(1, 2\) for 2 stages and 4 layers"),
        ((2, 0, (4, 0)), r"layers_per_stage=\(4, 0\)"),
        ((2, 0, (4,)), r"layers_per_stage=\(4,\)"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(arguments: tuple[Any, ...], message: str) -> None:
    layers = arguments[2] if len(arguments) > 2 else None
    with pytest.raises(ValueError, match=message):
        split_into_stages(make(), *arguments[:2], layers_per_stage=layers)


class OneParameter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 2)])


def shares_a_layer() -> nn.Module:
    model = make()
    model.model.layers[3] = model.model.layers[0]
    return model


def scaled_between_layers() -> nn.Module:
    """A model that does something between its layers, which no stage would do."""
    model = make()
    inner = model.model

    class Scaled(type(inner)):  # type: ignore[misc]
        def forward(self, *arguments: Any, **keywords: Any) -> Any:
            halves = nn.ModuleList(self.layers)
            embedded = self.embed_tokens(keywords["input_ids"])
            rotary = self.rotary_emb(embedded, torch.arange(embedded.size(1))[None])
            for layer in halves:
                embedded = layer(embedded, position_embeddings=rotary) * 0.5
            return type("Output", (), {"last_hidden_state": self.norm(embedded)})()

    inner.__class__ = Scaled
    return model


def scaled_between_layers_in(mode: str) -> Callable[[], nn.Module]:
    """Make a model that does so in one mode only, and is in the other one."""

    def make_one() -> nn.Module:
        model = make()
        inner = model.model

        class Scaled(type(inner)):  # type: ignore[misc]
            def forward(self, *, input_ids: Any = None, inputs_embeds: Any = None, **_: Any) -> Any:
                hidden = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
                rotary = self.rotary_emb(hidden, torch.arange(hidden.size(1))[None])
                for layer in self.layers:
                    hidden = layer(hidden, position_embeddings=rotary)
                    hidden = hidden * 0.5 if self.training == (mode == "training") else hidden
                return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden))

        inner.__class__ = Scaled
        return model.train(mode != "training")

    return make_one


def tells_layers_where_hidden_states_came_from() -> nn.Module:
    """A model that gives its layers another argument if it gets no tokens."""
    model = make()
    inner = model.model

    class Telling(type(inner)):  # type: ignore[misc]
        def forward(self, *, input_ids: Any = None, inputs_embeds: Any = None, **_: Any) -> Any:
            scale = 2.0 if inputs_embeds is None else 1.0
            hidden = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
            rotary = self.rotary_emb(hidden, torch.arange(hidden.size(1))[None])
            for layer in self.layers:
                hidden = layer(hidden, position_embeddings=rotary, scale=scale)
            return type("Output", (), {"last_hidden_state": self.norm(hidden)})()

    inner.__class__ = Telling
    return model


def adds_the_embedding_after_the_layers() -> nn.Module:
    model = make()
    inner = model.model

    class Adding(type(inner)):  # type: ignore[misc]
        def forward(self, *, input_ids: Any = None, inputs_embeds: Any = None, **_: Any) -> Any:
            first = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
            rotary = self.rotary_emb(first, torch.arange(first.size(1))[None])
            hidden = first
            for layer in self.layers:
                hidden = layer(hidden, position_embeddings=rotary)
            return type("Output", (), {"last_hidden_state": self.norm(hidden + first)})()

    inner.__class__ = Adding
    return model


def adds_the_states_of_all_layers() -> nn.Module:
    model = make()
    inner = model.model

    class Adding(type(inner)):  # type: ignore[misc]
        def forward(self, *, input_ids: Any = None, inputs_embeds: Any = None, **_: Any) -> Any:
            hidden = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
            rotary, total = self.rotary_emb(hidden, torch.arange(hidden.size(1))[None]), 0
            for layer in self.layers:
                hidden = layer(hidden, position_embeddings=rotary)
                total = total + hidden
            return type("Output", (), {"last_hidden_state": self.norm(total)})()

    inner.__class__ = Adding
    return model


def masks_padding_by_its_tokens() -> nn.Module:
    """A model that hides padding without a mask: later stages have no tokens."""
    model = make()
    inner = model.model

    class Masking(type(inner)):  # type: ignore[misc]
        def forward(self, *, input_ids: Any = None, **keywords: Any) -> Any:
            if input_ids is not None:
                keywords["attention_mask"] = (input_ids != 0).long()
            return super().forward(input_ids=input_ids, **keywords)

    inner.__class__ = Masking
    return model


def turns_around_what_came_from_tokens() -> nn.Module:
    model = make()
    inner = model.model

    class Turning(type(inner)):  # type: ignore[misc]
        def forward(self, *, input_ids: Any = None, **keywords: Any) -> Any:
            output = super().forward(input_ids=input_ids, **keywords)
            if input_ids is not None:
                output.last_hidden_state = output.last_hidden_state.flip(1)
            return output

    inner.__class__ = Turning
    return model


def with_own_forward(around: Callable[..., Any]) -> Callable[[], nn.Module]:
    """Make a model whose own forward is a function of itself, torch's forward and keywords."""

    def make_one() -> nn.Module:
        model = make()
        of_class = type(model).forward

        class Around(type(model)):  # type: ignore[misc]
            def forward(self, **keywords: Any) -> Any:
                return around(self, partial(of_class, self), **keywords)

        model.__class__ = Around
        return model

    return make_one


def shows_the_last_position(model: Any, run: Any, *, input_ids: Any = None, **keywords: Any) -> Any:
    output = run(input_ids=input_ids, **keywords)
    if input_ids is not None:
        output.logits = output.logits.roll(1, 1)
    return output


def embeds_twice_as_much(model: Any, run: Any, *, input_ids: Any = None, **keywords: Any) -> Any:
    if input_ids is not None:
        keywords["inputs_embeds"] = 2 * model.model.embed_tokens(input_ids)
    return run(**keywords)


def scales_attention(model: Any, run: Any, **keywords: Any) -> Any:
    return run(scale=2.0, **keywords)


def runs_twice(model: Any, run: Any, **keywords: Any) -> Any:
    return run(**keywords) and run(**keywords)


def with_head(task: str) -> Callable[[], nn.Module]:
    """Make a Llama for another task."""

    def make_one() -> nn.Module:
        config = make().config
        config.pad_token_id, config.num_labels = 0, 3
        return getattr(transformers, f"LlamaFor{task}")(config)  # type: ignore[no-any-return]

    return make_one


def leaves_out_layers() -> nn.Module:
    model = make()
    model.config.layerdrop = 0.1
    return model


def with_a_forward_of_its_own() -> nn.Module:
    model = make()
    model.forward = partial(type(model).forward, model)
    return model


def compiled() -> nn.Module:
    model = make()
    model.compile(backend="eager")
    return model


def on_meta(make_one: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def make_on_meta() -> nn.Module:
        return make_one().to("meta")

    return make_on_meta


def _of_transformers(name: str, **settings: Any) -> nn.Module:
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 4, "intermediate_size": 48}
    config = getattr(transformers, f"{name}Config")(**sizes, num_attention_heads=4, **settings)
    return getattr(transformers, f"{name}ForCausalLM")(config)  # type: ignore[no-any-return]


def adds_positions_to_the_embedding() -> nn.Module:
    return _of_transformers("BioGpt")


def embeds_hidden_states_too() -> nn.Module:
    special = dict.fromkeys((f"{each}_token_id" for each in ("bos", "cls", "eos", "sep")), 1)
    return _of_transformers("ModernBertDecoder", pad_token_id=0, **special)


@pytest.mark.parametrize(
    ("make_one", "message"),
    [
        (adds_positions_to_the_embedding, "it fails on hidden states, without its embedding"),
        (embeds_hidden_states_too, "it fails on hidden states, without its embedding"),
        (tells_layers_where_hidden_states_came_from, "its layers get another 'scale' without its"),
        (OneParameter, "OneParameter has no list of as many layers"),
        (shares_a_layer, r"are one parameter, in stages \[0, 1\]"),
        (adds_the_embedding_after_the_layers, "its output depends on hidden states before"),
        (adds_the_states_of_all_layers, "its output depends on hidden states before"),
        (on_meta(adds_the_states_of_all_layers), "its output depends on hidden states before"),
        (masks_padding_by_its_tokens, r"its Masking reads its tokens .*\(aten\.ne\.Scalar\)"),
        (on_meta(masks_padding_by_its_tokens), r"Masking reads its tokens besides embedding them"),
        (turns_around_what_came_from_tokens, "something else after its layers if it gets hidden"),
        (with_own_forward(shows_the_last_position), "own forward does something else if it gets"),
        (with_own_forward(embeds_twice_as_much), "own forward gives its LlamaModel other tensors"),
        (with_own_forward(scales_attention), "own forward gives its layers another 'scale' than"),
        (with_own_forward(runs_twice), "its own forward calls its LlamaModel 2 times"),
        (with_head("SequenceClassification"), r"own forward reads its tokens .*\(aten\.ne\.Scalar"),
        (on_meta(with_head("SequenceClassification")), "its own forward reads its tokens"),
        (with_head("QuestionAnswering"), "returns neither logits nor last_hidden_state"),
        (leaves_out_layers, r"config\.layerdrop=0\.1 leaves out layers at random\. Set it to 0"),
        (with_a_forward_of_its_own, "forward of its LlamaForCausalLM was replaced on the object"),
        (compiled, "its LlamaForCausalLM is compiled, and would run all layers"),
        (scaled_between_layers, "states that its layers get are not the output of the layer"),
        (scaled_between_layers_in("training"), "in training mode, the hidden states that its lay"),
        (scaled_between_layers_in("evaluation"), "in evaluation mode, the hidden states that it"),
        (lambda: split_into_stages(make(), 2, 0), "is a stage already, .*Split the whole model"),
    ],
)
def test_models_that_cannot_be_split_are_refused_and_left_alone(
    make_one: Any, message: str
) -> None:
    model = make_one()
    before, modules = dict(model.named_parameters()), list(model.modules())
    with pytest.raises(ValueError, match=message):
        split_into_stages(model, 2, 0)
    assert dict(model.named_parameters()) == before
    assert list(model.modules()) == modules
    assert not any(module._forward_hooks for module in model.modules())


class Counting(nn.Module):
    """A module around another one that counts its calls in buffers and containers, and draws."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.calls, self.kept = inner, [0], {"last": torch.ones(1)}
        self.norm = nn.BatchNorm1d(1, affine=False)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, given: Tensor) -> Tensor:
        self.calls[0] += 1
        self.seen += 1
        self.norm(torch.rand(2, 1))
        output: Tensor = self.inner(given)
        self.kept["last"] = output
        return output


def counts() -> nn.Module:
    model = make()
    model.model.embed_tokens = Counting(model.model.embed_tokens)
    model.model.norm, model.lm_head = Counting(model.model.norm), Counting(model.lm_head)
    model.lm_head(model.model.norm(torch.ones(1, model.config.hidden_size)))
    return model


def counts_and_is_refused() -> nn.Module:
    model = counts()
    model.model.layers[3] = model.model.layers[0]
    return model


@pytest.mark.parametrize("make_one", [counts, counts_and_is_refused])
def test_a_trial_leaves_what_a_forward_changes(make_one: Callable[[], nn.Module]) -> None:
    model, state = make_one(), torch.get_rng_state()
    counting = [each for each in model.modules() if isinstance(each, Counting)]
    before = [([*each.calls], {**each.kept}) for each in counting]
    with nullcontext() if make_one is counts else pytest.raises(ValueError, match="one parameter"):
        split_into_stages(model, 2, 0)
    assert [(each.calls, each.kept) for each in counting] == before
    for each in counting:
        assert int(each.norm.num_batches_tracked) == int(each.seen) == each.calls[0]
    assert torch.equal(torch.get_rng_state(), state)


def test_a_model_that_a_trial_cannot_copy_is_refused() -> None:
    model = make()
    model.model.lock = threading.Lock()
    with pytest.raises(ValueError, match="a trial cannot copy the attributes of LlamaModel"):
        split_into_stages(model, 2, 0)


@pytest.mark.parametrize("inside", [False, True])
def test_hooks_around_the_whole_model_are_refused_and_do_not_run(*, inside: bool) -> None:
    model, calls = make(), []
    hooked = model.model if inside else model
    for register in (hooked.register_forward_hook, hooked.register_full_backward_pre_hook):
        handle = register(lambda *arguments: calls.append(arguments))
        with pytest.raises(ValueError, match=f"its {type(hooked).__name__} has hooks around its"):
            split_into_stages(model, 2, 0)
        handle.remove()
    split_into_stages(model, 2, 0)
    assert not calls


def test_each_stage_has_hooks_of_its_own() -> None:
    model, calls = make(), []
    first, last = (split_into_stages(model, 2, index) for index in range(2))
    first.register_forward_hook(lambda module, *_: calls.append(module))
    first.model.register_forward_pre_hook(lambda module, *_: calls.append(module))
    chain([first, last], batch(0))
    assert calls == [first.model, first]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_model_is_split_in_any_mode_of_autograd(mode: Callable[[], Any]) -> None:
    model = make()
    with mode():
        stages = [split_into_stages(model, 2, index) for index in range(2)]
    chain(stages, batch(0)).sum().backward()


def test_other_heads_are_split() -> None:
    model = with_head("TokenClassification")().eval()
    stages = [split_into_stages(model, 2, index) for index in range(2)]
    expected = model(input_ids=batch(0), use_cache=False).logits
    assert torch.equal(chain(stages, batch(0)), expected)


class Scaled(transformers.LlamaForCausalLM):  # type: ignore[misc]
    """A model with a parameter and a buffer of its own."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.scale = nn.Parameter(torch.full((1,), 2.0))
        self.register_buffer("shift", torch.ones(1))

    def forward(self, **keywords: Any) -> Any:
        output = super().forward(**keywords)
        output.logits = output.logits * self.scale + self.shift
        return output


def test_only_the_last_stage_has_what_the_model_itself_owns() -> None:
    model = Scaled(make().config)
    stages = [split_into_stages(model, 3, index) for index in range(3)]
    assert [len({"scale", "shift"} & stage.state_dict().keys()) for stage in stages] == [0, 0, 2]
    expected = model(input_ids=batch(0), use_cache=False).logits
    assert torch.equal(chain(stages, batch(0)), expected)


class Skipping(type(make().model)):  # type: ignore[misc]
    """An inner model that leaves out its first layers, once `n_skipped` is set."""

    n_skipped = 0

    def forward(self, **keywords: Any) -> Any:
        layers = self.layers
        self.layers = layers[self.n_skipped :]
        try:
            return super().forward(**keywords)
        finally:
            self.layers = layers


def test_a_model_that_leaves_out_layers_of_other_stages_raises() -> None:
    model = make()
    model.model.__class__ = Skipping
    last = split_into_stages(model, 2, 1)
    hidden = torch.zeros(2, 3, 32)
    last(hidden)
    last.model.n_skipped = 1
    with pytest.raises(RuntimeError, match="called layers of other stages 1 times, and has 2 of"):
        last(hidden)


def test_a_loss_over_all_routers_is_refused() -> None:
    model = make()
    model.config.output_router_logits = True
    with pytest.raises(ValueError, match="output_router_logits=True adds a loss over the routers"):
        split_into_stages(model, 2, 0)


def test_splitting_takes_no_random_numbers() -> None:
    model = make()
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    split_into_stages(model, 2, 0)
    assert torch.equal(torch.rand(2), expected)


def test_a_plan_for_the_whole_model_splits_a_stage() -> None:
    plan = {
        "model.embed_tokens": RowwiseParallel(),
        "model.layers.0.mlp.up_proj": ColwiseParallel(),
        "model.layers.*.mlp.down_proj": RowwiseParallel(),
        "lm_head": ColwiseParallel(output_layouts=Replicate()),
    }
    with fake_world(8):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",), ranks=[0, 5])
        model = make()
        last = split_into_stages(model, 2, 1)
        apply_tp_plan(last, mesh, plan)
        split = {name for name, each in last.named_parameters() if isinstance(each, DTensor)}
        with pytest.raises(ValueError, match="has no modules"):
            apply_tp_plan(split_into_stages(make(), 2, 1), mesh, {"lm_haed": ColwiseParallel()})
    assert split == {
        "lm_head.weight",
        "model.layers.2.mlp.down_proj.weight",
        "model.layers.3.mlp.down_proj.weight",
    }


def test_the_manager_takes_stages_with_the_whole_mesh() -> None:
    with fake_world(8, 5):
        config = FSDP2Config()
        meshes = create_device_meshes(config, ParallelismSizes(pp_size=2, tp_size=2))
        manager = FSDP2Manager(config, *meshes)
        (stage,) = pipeline_stages(make(), meshes[0]["pp"])
        assert manager.parallelize(stage) is stage
        assert isinstance(stage, FSDPModule)
        weights = dict(stage.named_parameters())
        assert weights["lm_head.weight"].device_mesh.mesh_dim_names == ("dp_shard", "tp")
        with pytest.raises(ValueError, match=r"LlamaForCausalLM is not split .*pipeline_stages"):
            manager.parallelize(make())
        with pytest.raises(ValueError, match="stage 0 of 2, but this rank has the index 1 of pp=2"):
            manager.parallelize(split_into_stages(make(), 2, 0))


def test_a_sharded_model_is_refused() -> None:
    with fake_world(8):
        config = FSDP2Config()
        model = make()
        FSDP2Manager(config, *create_device_meshes(config, ParallelismSizes())).parallelize(model)
        with pytest.raises(ValueError, match=r"is distributed already\. Split it into"):
            split_into_stages(model, 2, 0)


class Communicating(transformers.models.llama.modeling_llama.LlamaDecoderLayer):  # type: ignore[misc]
    """A layer that adds what the first layer left in a dict."""

    def forward(self, hidden_states: Tensor, **keywords: Any) -> Any:
        output = super().forward(hidden_states, **keywords)
        self.box.setdefault("first", output)
        return output + self.box["first"]


class Clearing(transformers.LlamaModel):  # type: ignore[misc]
    """A model that clears this dict after each forward."""

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        output = super().forward(*arguments, **keywords)
        self.layers[-1].box.clear()
        return output


def make_communicating(boxes: list[dict[str, Tensor]]) -> nn.Module:
    model = make()
    for layer, box in zip(model.model.layers, boxes, strict=True):
        layer.__class__, layer.box = Communicating, box
    return model


@pytest.mark.parametrize(
    ("index", "kind"), [(0, transformers.LlamaModel), (0, Clearing), (1, transformers.LlamaModel)]
)
def test_a_change_of_an_object_that_layers_of_several_stages_share_is_refused(
    index: int, kind: type[nn.Module]
) -> None:
    model = make_communicating([{}] * 4)
    model.model.__class__ = kind
    stage = split_into_stages(model, 2, index)
    words = f"dict 'model.layers.{2 * index}.box', to which layers of other pipeline stages refer"
    with pytest.raises(RuntimeError, match=words):
        stage(torch.ones(8, 6, 32) if index else batch(0))


def test_layers_of_one_stage_may_share_objects() -> None:
    boxes = [dict[str, Tensor]() for _ in range(2)]
    whole = split_into_stages(make_communicating(boxes[:1] * 4), 1, 0)
    assert whole(batch(0)).isfinite().all()
    stages = [*boxes[:1] * 2, *boxes[1:] * 2]
    assert split_into_stages(make_communicating(stages), 2, 0)(batch(0)).isfinite().all()
