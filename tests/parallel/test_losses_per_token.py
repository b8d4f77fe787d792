"""Losses per token of sequences of uneven lengths: over ranks, microbatches, stages and experts.

Losses and gradients are those of one process that reads all sequences one by one.
"""

from __future__ import annotations

import contextlib
import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

pytest.importorskip("transformers", reason="transformers is not installed")

import hf_families
from rounding import largest_error
from tiny_models import BOUND, full, make_model

from helpers.crew import Crew
from helpers.tiers import in_tiers
from helpers.worlds import fake_world
from meshverse.parallel import (
    LossPerToken,
    ParallelismSizes,
    create_fsdp2_device_mesh,
    fsdp2_strategy_parallelize,
    get_flat_mesh,
    pipeline_schedule,
    pipeline_stages,
)

# Tokens of each sequence, in the order of ranks and of their two microbatches.
_LENGTHS = [2, 9, 3, 5, 8, 2, 12, 6]
_LONGEST, _IGNORED = max(_LENGTHS), -100
_N_TOKENS = sum(_LENGTHS) - len(_LENGTHS)  # the first token of a sequence is not predicted


def sequences() -> list[Tensor]:
    generator = torch.Generator().manual_seed(11)
    return [torch.randint(60, (length,), generator=generator) for length in _LENGTHS]


def padded(some: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Inputs and targets of sequences, shape (sequences, tokens); padding is on the right."""
    shape = len(some), _LONGEST - 1
    inputs, targets = torch.zeros(shape, dtype=torch.long), torch.full(shape, _IGNORED)
    for row, tokens in enumerate(some):
        inputs[row, : len(tokens) - 1], targets[row, : len(tokens) - 1] = tokens[:-1], tokens[1:]
    return inputs, targets


def packed(some: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, targets and positions of sequences in one row."""
    inputs = torch.cat([tokens[:-1] for tokens in some])
    targets = torch.cat([tokens[1:] for tokens in some])
    positions = torch.cat([torch.arange(len(tokens) - 1) for tokens in some])
    return inputs[None], targets[None], positions[None]


def expected_of(model: nn.Module) -> dict[str, Tensor | None]:
    """The loss and gradients of one process."""
    total = 0.0
    for tokens in sequences():
        logits = model(input_ids=tokens[None, :-1], use_cache=False).logits[0]
        loss = cross_entropy(logits, tokens[1:], reduction="sum") / _N_TOKENS
        loss.backward()
        total += loss.item()
    gradients = {name: each.grad for name, each in model.named_parameters()}
    return {"loss": torch.tensor(total), **gradients}


def make(family: str) -> nn.Module:
    if family == "qwen3_moe":
        return hf_families.tiny_model(family, tied=False)
    return make_model(family, num_hidden_layers=2, tie_word_embeddings=False)


def run_microbatches(model: Any, loss_of: LossPerToken, mine: list[Tensor], way: str) -> float:
    """Forward and backward of this rank's sequences, in two microbatches; the whole loss."""
    halves = [mine[: len(mine) // 2], mine[len(mine) // 2 :]]
    losses = []
    if way == "labels":
        every = []
        for half in halves:
            inputs, targets = padded(half)
            labels = torch.cat([torch.full_like(targets[:, :1], _IGNORED), targets], dim=1)
            every.append((torch.cat([inputs, inputs[:, :1]], dim=1), labels))
        count = loss_of.count(*(labels[:, 1:] for _, labels in every))
        for inputs, labels in every:
            output = model(input_ids=inputs, labels=labels, num_items_in_batch=count)
            output.loss.backward()
            losses.append(output.loss)
    else:
        batches = [packed(half) if way == "packed" else (*padded(half), None) for half in halves]
        loss_of.count(*(targets for _, targets, _ in batches))
        for inputs, targets, positions in batches:
            output = model(input_ids=inputs, position_ids=positions, use_cache=False)
            loss = loss_of(output.logits, targets)
            loss.backward()
            losses.append(loss)
    assert int(loss_of.tokens) == _N_TOKENS  # type: ignore[arg-type]
    return loss_of.total(*losses)


def error_of(family: str, sizes: dict[str, int], way: str, settings: dict[str, Any]) -> float:
    """The largest relative error of the loss and of this rank's gradients."""
    whole = make(family)
    model = copy.deepcopy(whole)
    expected = expected_of(whole)
    mesh, moe_mesh = create_fsdp2_device_mesh(ParallelismSizes(**sizes))
    is_pipeline = mesh["pp"].size() > 1
    (stage,) = pipeline_stages(model, mesh["pp"]) if is_pipeline else (model,)
    fsdp2_strategy_parallelize(
        stage, mesh, moe_mesh=moe_mesh, mp_policy=MixedPrecisionPolicy(), **settings
    )
    data = get_flat_mesh(mesh, "dp_cp")
    mine = sequences()
    share = len(mine) // data.size()
    mine = mine[data.get_local_rank() * share :][:share]
    loss_of = LossPerToken([stage], mesh)
    with loss_parallel() if settings else contextlib.nullcontext():
        if is_pipeline:
            inputs, targets = padded(mine)
            loss_of.count(targets)
            pipeline = pipeline_schedule([stage], mesh["pp"], loss_of, 2)
            loss = loss_of.total(*pipeline.step(inputs, target=targets))
        else:
            loss = run_microbatches(stage, loss_of, mine, way)
    seen = {name: full(each.grad) for name, each in stage.named_parameters()}
    error, _ = largest_error(seen, {name: expected[name] for name in seen}, floor=1e-2)
    return max(error, abs(loss / float(expected["loss"]) - 1))  # type: ignore[arg-type]


_SPLIT = {"split_logits": True}
_CASES: dict[str, tuple[int, str, dict[str, int], str, dict[str, Any]]] = {
    "fsdp2": (2, "llama", {}, "padded", {}),
    "2 replicas": (4, "llama", {"dp_replicate_size": 2}, "padded", {}),
    "tp and fsdp2": (4, "llama", {"tp_size": 2}, "labels", {}),
    "tp and fsdp2, split": (4, "llama", {"tp_size": 2}, "packed", _SPLIT),
    "tp and fsdp2, split, labels": (4, "llama", {"tp_size": 2}, "labels", _SPLIT),
    "packed": (2, "llama", {}, "packed", {}),
    "experts": (4, "qwen3_moe", {"ep_size": 2}, "packed", {}),
    "experts and tp": (4, "qwen3_moe", {"ep_size": 2, "tp_size": 2}, "padded", {}),
    "pipeline": (4, "llama", {"pp_size": 2}, "padded", {}),
    "pipeline and tp": (8, "llama", {"pp_size": 2, "tp_size": 2}, "padded", _SPLIT),
}


@pytest.mark.long
@pytest.mark.parametrize("name", in_tiers(_CASES, short=("tp and fsdp2, split",)))
def test_equals_one_process(crew: Crew, name: str) -> None:
    ranks, *case = _CASES[name]
    for error in crew.run(error_of, ranks, *case):
        assert error < BOUND


def test_what_is_not_sharded_is_refused() -> None:
    with fake_world(4):
        mesh, _ = create_fsdp2_device_mesh(ParallelismSizes())
        with pytest.raises(ValueError, match="Linear is not sharded with FSDP2, but the 4 ranks"):
            LossPerToken(nn.Linear(2, 2), mesh)


class Around(nn.Module):
    """A module that has a loss inside."""

    def __init__(self, inside: LossPerToken) -> None:
        super().__init__()
        self.inside = inside

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        return self.inside(logits, targets)


def test_pipelines_refuse_another_function_around_it() -> None:
    tokens = torch.stack([each[:2] for each in sequences()])
    with fake_world(1):
        mesh, _ = create_fsdp2_device_mesh(ParallelismSizes())
        (stage,) = pipeline_stages(make("llama"), mesh["pp"])
        loss_of = LossPerToken(nn.ModuleList([stage]), mesh)
        for other in (Around(loss_of), partial(loss_of), lambda *given: loss_of(*given)):
            loss_of.count(tokens)
            pipeline = pipeline_schedule([stage], mesh["pp"], other, 2)
            with pytest.raises(
                ValueError, match=r"gradients are summed, but .* be averaged\. Give"
            ):
                pipeline.step(tokens, target=tokens)
            assert len(pipeline.eval(tokens, target=tokens)) == 2
        assert all(each.grad is None for each in stage.parameters())
        pipeline = pipeline_schedule([stage], mesh["pp"], loss_of, 2)
        loss_of.count(tokens)
        with pytest.raises(ValueError, match=r"Targets of shape \(8, 1\) for inputs of shape"):
            pipeline.step(tokens, target=tokens[:, 1:])
        total = sum(pipeline.step(tokens, target=tokens))
        expected = cross_entropy(stage(tokens).flatten(0, 1), tokens.flatten())
        assert total == pytest.approx(expected.item(), rel=BOUND)


def test_pipelines_refuse_one_that_was_not_created_for_all_stages() -> None:
    tokens = torch.stack([each[:2] for each in sequences()])
    with fake_world(4):
        mesh, _ = create_fsdp2_device_mesh(ParallelismSizes(pp_size=2))
        stages = pipeline_stages(make("llama"), mesh["pp"])
        fsdp2_strategy_parallelize(stages[0], mesh)
        other = fully_shard(nn.Linear(2, 2), mesh=mesh["dp_shard"])
        loss_of = LossPerToken(other, mesh)
        pipeline = pipeline_schedule(stages, mesh["pp"], loss_of, 2)
        with pytest.raises(ValueError, match="was not created for all of these stages: FSDP2"):
            pipeline.step(tokens, target=tokens)


def test_targets_of_another_shape_are_refused() -> None:
    with fake_world(1):
        mesh, _ = create_fsdp2_device_mesh(ParallelismSizes())
        loss_of = LossPerToken(nn.Linear(2, 2), mesh)
        loss_of.count(torch.zeros(2, 3))
        for shape in ((3, 2), (6,), (2, 2)):
            with pytest.raises(ValueError, match=r"must have the shape \(2, 3\), one target for"):
                loss_of(torch.zeros(2, 3, 5), torch.zeros(shape, dtype=torch.long))


def test_tokens_must_be_counted_first() -> None:
    with fake_world(1):
        mesh, _ = create_fsdp2_device_mesh(ParallelismSizes())
        loss_of = LossPerToken(nn.Linear(2, 2), mesh)
        logits, targets = torch.zeros(1, 3, 5), torch.full((1, 3), _IGNORED)
        with pytest.raises(RuntimeError, match=r"Call count\(\*targets\)"):
            loss_of(logits, targets)
        assert loss_of.count() == loss_of.count(targets) == 1
        assert loss_of(logits, targets) == 0  # nothing is predicted


def test_targets_that_were_not_counted_are_refused() -> None:
    with fake_world(1):
        mesh, _ = create_fsdp2_device_mesh(ParallelismSizes())
        loss_of = LossPerToken(nn.Linear(2, 2), mesh)
        logits, targets = torch.zeros(1, 3, 5), torch.ones(1, 3, dtype=torch.long)
        for _ in range(2):
            loss_of.count(targets, targets)
            with torch.no_grad():
                assert loss_of(logits, targets) == loss_of(logits, targets)
            assert loss_of(logits, targets) == loss_of(logits, targets)
            for _ in range(2):
                with pytest.raises(
                    RuntimeError, match="3 targets, but only 0 counted ones are left"
                ):
                    loss_of(logits, targets)


def test_a_loss_may_be_checkpointed() -> None:
    with fake_world(1):
        mesh, _ = create_fsdp2_device_mesh(ParallelismSizes())
        loss_of = LossPerToken(nn.Linear(2, 2), mesh)
        logits, targets = torch.zeros(1, 3, 5, requires_grad=True), torch.ones(1, 3).long()
        loss_of.count(targets)
        checkpoint(loss_of, logits, targets, use_reentrant=False).backward()
        assert logits.grad is not None


def test_several_losses_of_each_target_are_allowed_if_it_is_said() -> None:
    with fake_world(1):
        mesh, _ = create_fsdp2_device_mesh(ParallelismSizes())
        loss_of = LossPerToken(nn.Linear(2, 2), mesh, losses_per_target=2)
        logits, targets = torch.zeros(1, 3, 5), torch.ones(1, 3, dtype=torch.long)
        loss_of.count(targets)
        assert loss_of(logits, targets) == loss_of(logits, targets)
        with pytest.raises(RuntimeError, match="pass losses_per_target="):
            loss_of(logits, targets)
        for wrong in (0, 1.5, True):
            with pytest.raises(ValueError, match="must be an int above 0"):
                LossPerToken(nn.Linear(2, 2), mesh, losses_per_target=wrong)


def test_a_loss_is_compiled_as_one_graph() -> None:
    with fake_world(1):
        mesh, _ = create_fsdp2_device_mesh(ParallelismSizes())
        loss_of = LossPerToken(nn.Linear(2, 2), mesh)
        logits, targets = torch.zeros(1, 3, 5), torch.ones(1, 3, dtype=torch.long)
        loss_of.count(targets)
        compiled = torch.compile(lambda *given: loss_of(*given), backend="eager", fullgraph=True)
        assert compiled(logits, targets) == loss_of(logits, targets)
