"""Bad input of `step` and `eval`: every rank raises, before anything is sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from pipelines import loss_of, make, make_pipeline
from tiny_models import BATCH, BOUND, LENGTH, batch, make_model

from helpers.crew import Crew
from helpers.versions import AT_LEAST_2_12
from helpers.worlds import fake_world
from meshverse import init_device_mesh
from meshverse.parallel import pipeline_schedule, pipeline_stages

pytest.importorskip("transformers", reason="transformers is not installed")
from transformers import DynamicCache, LlamaForCausalLM


def said_by(call: Callable[..., Any], *arguments: Any, **keywords: Any) -> str:
    try:
        call(*arguments, **keywords)
    except (TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


def train_between_refusals() -> tuple[list[str], list[bool], float]:
    """Return the errors for batches of other shapes, and whether training was as without them."""
    pipeline, undisturbed = make_pipeline(make()), make_pipeline(make())
    tokens = batch(0)
    longer = torch.cat([tokens, tokens], 1)
    said = []
    for call in (pipeline.step, pipeline.eval):
        said.append(said_by(call, tokens[:6], target=tokens[:6]))  # is no first batch
        call(tokens, target=tokens)
        others = (longer, tokens[:4], tokens.int())
        said += [said_by(call, other, target=other) for other in others]
        call(tokens, target=tokens)
    undisturbed.step(tokens, target=tokens)
    undisturbed.step(tokens, target=tokens)
    pairs = zip(pipeline.stages[0].parameters(), undisturbed.stages[0].parameters(), strict=True)
    same = [torch.equal(one.grad, other.grad) for one, other in pairs]  # type: ignore[arg-type]
    return said, same, pipeline.clip_grad_norm_(1.0).item()


def test_batches_have_the_shape_and_dtype_of_the_first(crew: Crew) -> None:
    for said, same, norm in crew.run(train_between_refusals, 2):
        for divides, longer, smaller, other_dtype in (said[:4], said[4:]):
            assert "6 sequences with 6 targets does not divide" in divides
            first = "after a first one of shape (8, 6), torch.int64"
            assert f"A batch of shape (8, 12), torch.int64, {first}" in longer
            assert f"A batch of shape (4, 6), torch.int64, {first}" in smaller
            assert f"A batch of shape (8, 6), torch.int32, {first}" in other_dtype
            assert "all batches must have one shape and dtype" in longer
        assert len(same) > 8
        assert all(same)
        assert norm > 0


def losses_of_strided_tokens() -> list[list[float]]:
    tokens = batch(0)
    strided = torch.cat([tokens, tokens], 1)[:, :LENGTH]
    assert not strided.is_contiguous()
    batches = (tokens, strided)
    steps = [make_pipeline(make()).step(each, target=each) for each in batches]
    return [[loss.item() for loss in losses] for losses in steps]


def test_a_batch_may_be_part_of_a_larger_tensor(crew: Crew) -> None:
    answers = crew.run(losses_of_strided_tokens, 2)
    assert answers[0] == [[], []]
    whole, part = answers[1]
    assert whole == part
    assert whole


def evaluate_shorter_batches() -> list[list[float]]:
    pipeline = make_pipeline(make())
    pipeline.step(batch(0), target=batch(0))
    short = batch(1)[:4, :3]
    return [[each.item() for each in pipeline.eval(short, target=short)] for _ in range(2)]


def test_eval_has_a_shape_of_its_own(crew: Crew) -> None:
    model = make()
    with torch.no_grad():
        expected = [
            loss_of(model(input_ids=part, use_cache=False).logits, part).item()
            for part in batch(1)[:4, :3].chunk(4)
        ]
    first, last = crew.run(evaluate_shorter_batches, 2)
    assert first == [[], []]
    assert last[0] == last[1] == pytest.approx(expected, rel=BOUND)


@pytest.mark.skipif(not AT_LEAST_2_12, reason="torch 2.11 checks the shape of one stage, too")
def test_one_stage_alone_takes_batches_of_any_shape() -> None:
    with fake_world(1):
        pipeline = make_pipeline(make(), pp_size=1)
        for tokens in (batch(0), batch(0)[:4, :3], batch(1).int()):
            assert len(pipeline.step(tokens, target=tokens.long())) == 4


_SQUARE = torch.zeros(BATCH, BATCH, dtype=torch.int64)
_TOKENS = torch.arange(LENGTH)

# By name: inputs, targets, keywords, what is said.
REFUSED: dict[str, tuple[Any, Any, dict[str, Any], str]] = {
    "no batch": (_TOKENS, _TOKENS, {}, "Inputs of shape (6,) and targets of shape (6,)"),
    "one target": (batch(0), torch.tensor(1), {}, "targets of shape ()"),
    "empty": (batch(0)[:0], batch(0)[:0], {}, "A batch of 0 sequences with 0 targets"),
    "mask of fewer sequences": (
        batch(0),
        batch(0),
        {"attention_mask": torch.ones(4, LENGTH)},
        "attention_mask has the shape (4, 6), and the batch has 8 sequences",
    ),
    "mask of more sequences": (
        batch(0),
        batch(0),
        {"attention_mask": torch.ones(16, LENGTH)},
        "attention_mask has the shape (16, 6), and the batch has 8 sequences",
    ),
    "masks in a dictionary": (
        batch(0),
        batch(0),
        {"attention_mask": {"full_attention": torch.ones(4, 1, LENGTH, LENGTH)}},
        "attention_mask has the shape (4, 1, 6, 6)",
    ),
    "positions of each token": (
        batch(0),
        batch(0),
        {"position_ids": _TOKENS},
        "or 1 if all sequences share it, as position_ids[None]",
    ),
    "as many tokens as sequences": (
        _SQUARE,
        _SQUARE,
        {"position_ids": torch.arange(BATCH)},
        "it could have one per sequence or per token. Give position_ids",
    ),
    "sections of positions, as many as sequences": (
        batch(0),
        batch(0),
        {"position_ids": _TOKENS.expand(BATCH, BATCH, LENGTH)},
        "position_ids has the shape (8, 8, 6), and the batch has 8 sequences of 6 tokens",
    ),
    "one element": (
        batch(0),
        batch(0),
        {"cache_position": torch.zeros(1, dtype=torch.int64)},
        "cache_position has the shape (1,)",
    ),
    "a number": (batch(0), batch(0), {"scale": torch.tensor(2.0)}, "single number as scale.item()"),
    "what needs all layers": (
        batch(0),
        batch(0),
        {"output_hidden_states": True},
        "TypeError: LlamaForCausalLM is a pipeline stage, and takes no ['output_hidden_states']",
    ),
    "what the last stage alone refuses": (
        batch(0),
        batch(0),
        {"use_cache": None, "inputs_embeds": None},
        "takes no ['use_cache', 'inputs_embeds']: they need all layers",
    ),
    "a list of one number per sequence": (
        batch(0),
        batch(0),
        {"scale": [1.0] * BATCH},
        "scale has a list of 8 entries, and the batch has 8 sequences: each of the 4 microbatches",
    ),
    "a tuple in a dictionary": (
        batch(0),
        batch(0),
        {"options": {"names": ("a",) * BATCH}},
        "Give options as a tensor of shape (batch, ...)",
    ),
    "a list of pairs": (
        batch(0),
        batch(0),
        {"sizes": [[1, 2]] * BATCH},
        "sizes has a list of 8 entries",
    ),
    "a cache": (
        batch(0),
        batch(0),
        {"cache": DynamicCache()},
        "takes no ['cache']: their values are ['DynamicCache']. Stages and microbatches would",
    ),
}


def refuse(pairs: list[tuple[Any, Any, dict[str, Any]]]) -> tuple[list[tuple[str, str]], bool]:
    """Return the errors of `step` and `eval` for each, and whether they go on afterwards."""
    pipeline = make_pipeline(make())
    said = [
        (
            said_by(pipeline.step, inputs, target=target, **keywords),
            said_by(pipeline.eval, inputs, target=target, **keywords),
        )
        for inputs, target, keywords in pairs
    ]
    losses = pipeline.step(batch(0), target=batch(0))
    return said, all(loss.isfinite() for loss in losses)


def test_what_cannot_be_split_by_the_batch_is_refused_on_all_ranks(crew: Crew) -> None:
    for said, goes_on in crew.run(refuse, 2, [case[:3] for case in REFUSED.values()]):
        for (in_step, in_eval), (name, case) in zip(said, REFUSED.items(), strict=True):
            assert case[3] in in_step, name
            assert in_eval == in_step
        assert goes_on


class FewKeywords(LlamaForCausalLM):  # type: ignore[misc]
    """A model whose own forward, which only the last stage runs, takes few keywords."""

    def forward(
        self, input_ids: Any = None, inputs_embeds: Any = None, use_cache: Any = None
    ) -> Any:
        return super().forward(input_ids, inputs_embeds=inputs_embeds, use_cache=use_cache)


def give_an_unknown_keyword() -> str:
    pipeline = make_pipeline(FewKeywords(make().config))
    return said_by(pipeline.step, batch(0), target=batch(0), scale=2.0)


def test_keywords_that_one_stage_does_not_know_are_refused_on_all(crew: Crew) -> None:
    for said in crew.run(give_an_unknown_keyword, 2):
        assert "['scale'] are no parameters of FewKeywords.forward" in said


def losses_with_keywords() -> list[list[float]]:
    """Losses with masks of all sequences and of each, in a dictionary too."""
    pipeline = make_pipeline(make_model("gemma2", num_hidden_layers=4))
    tokens = batch(0)
    return [
        [each.item() for each in pipeline.eval(tokens, target=tokens, **keywords)]
        for keywords in _masked()
    ]


def _masked() -> list[dict[str, Any]]:
    mask = torch.full((1, 1, LENGTH, LENGTH), -1e4).triu(1)
    kinds = {"full_attention": mask, "sliding_attention": mask - mask.mT.tril(-3)}
    return [{"attention_mask": kinds}, {"position_ids": _TOKENS[None] + 2}]


def test_tensors_for_all_sequences_are_given_to_each_microbatch(crew: Crew) -> None:
    model = make_model("gemma2", num_hidden_layers=4)
    with torch.no_grad():
        expected = [
            [
                loss_of(model(input_ids=part, use_cache=False, **keywords).logits, part).item()
                for part in batch(0).chunk(4)
            ]
            for keywords in _masked()
        ]
    for seen, wanted in zip(crew.run(losses_with_keywords, 2)[1], expected, strict=True):
        assert seen == pytest.approx(wanted, rel=BOUND)


class Ignoring(LlamaForCausalLM):  # type: ignore[misc]
    """A model that takes keywords of any name."""

    def forward(self, input_ids: Any = None, inputs_embeds: Any = None, **keywords: Any) -> Any:
        return super().forward(input_ids, inputs_embeds=inputs_embeds, use_cache=False)


def test_lists_that_are_not_as_long_as_the_batch_are_given_to_each_microbatch() -> None:
    tokens, masks = batch(0), [torch.ones(BATCH, LENGTH)] * BATCH
    with fake_world(1):
        pipeline = make_pipeline(Ignoring(make().config), pp_size=1)
        pipeline.step(tokens, target=tokens, layers=[0, 1, 2], masks=masks)
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("pp",))
        stages = pipeline_stages(Ignoring(make().config), mesh)
        pipeline_schedule(stages, mesh, loss_of, 1).step(tokens, target=tokens, each=[1.0] * BATCH)
