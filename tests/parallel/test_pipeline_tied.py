"""Embeddings that are tied to the head of another stage: frozen, and trained over several steps."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from pipelines import EXACT, loss_of, make
from tiny_models import BOUND, batch, full
from torch import Tensor, nn

from helpers.crew import Crew
from meshverse import init_device_mesh
from meshverse.parallel import (
    ParallelismSizes,
    PipelineSchedule,
    create_fsdp2_device_mesh,
    fsdp2_strategy_parallelize,
    pipeline_schedule,
    pipeline_stages,
)

pytest.importorskip("transformers", reason="transformers is not installed")


def make_tied_pipeline(frozen_on: tuple[int, ...] = ()) -> PipelineSchedule:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    stages = pipeline_stages(make(tied=True).double(), mesh)
    if dist.get_rank() in frozen_on:
        tied_in(stages[0]).requires_grad_(False)
    return pipeline_schedule(stages, mesh, loss_of, 4)


def tied_in(stage: nn.Module) -> nn.Parameter:
    return stage.get_parameter("lm_head.weight" if dist.get_rank() else "model.embed_tokens.weight")


def train_with_frozen_embeddings() -> tuple[bool, float, float]:
    """Whether the tied parameter has a gradient, the norm, and that of one process."""
    alone = make(tied=True).double()
    alone.model.embed_tokens.weight.requires_grad_(False)
    pipeline = make_tied_pipeline(frozen_on=(0, 1))
    for step in range(2):
        for part in batch(step).chunk(4):
            (loss_of(alone(input_ids=part, use_cache=False).logits, part) / 4).backward()
        pipeline.step(batch(step), target=batch(step))
    has_gradient = tied_in(pipeline.stages[0]).grad is not None
    expected = nn.utils.clip_grad_norm_(alone.parameters(), 1.0).item()
    return has_gradient, pipeline.clip_grad_norm_(1.0).item(), expected


def test_embeddings_that_are_frozen_on_both_stages_are_left_alone(crew: Crew) -> None:
    for has_gradient, norm, expected in crew.run(train_with_frozen_embeddings, 2):
        assert not has_gradient
        assert norm == pytest.approx(expected, rel=BOUND)


def freeze_on_one_stage(rank: int) -> str:
    try:
        make_tied_pipeline(frozen_on=(rank,))
    except ValueError as error:
        return str(error)
    return "accepted"


@pytest.mark.parametrize("rank", [0, 1])
def test_embeddings_that_are_frozen_on_one_stage_are_refused(crew: Crew, rank: int) -> None:
    first, last = crew.run(freeze_on_one_stage, 2, rank)
    states = ("frozen", "trained") if rank == 0 else ("trained", "frozen")
    own, theirs = (f"(64, 32), torch.float64, {state}" for state in states)
    assert first.startswith("model.embed_tokens.weight is tied to a parameter of another")
    assert f"they differ: {own} on this stage, and {theirs} on the" in first
    assert last.startswith("lm_head.weight is tied to a parameter of another")
    assert f"they differ: {theirs} on this stage, and {own} on the" in last
    assert "mesh and requires_grad" in first
    assert "mesh and requires_grad" in last


def accumulate() -> list[Tensor]:
    """The gradient of the tied parameter after each of four steps that add up."""
    pipeline = make_tied_pipeline()
    seen = []
    for step in range(4):
        pipeline.step(batch(step), target=batch(step))
        gradient = tied_in(pipeline.stages[0]).grad
        assert gradient is not None
        seen.append(gradient.clone())
    return seen


@pytest.mark.long
def test_the_two_gradients_stay_equal_to_the_last_bit(crew: Crew) -> None:
    first, last = crew.run(accumulate, 2)
    alone = make(tied=True).double()
    for step, (one, other) in enumerate(zip(first, last, strict=True)):
        for part in batch(step).chunk(4):
            (loss_of(alone(input_ids=part, use_cache=False).logits, part) / 4).backward()
        assert torch.equal(one, other)
        expected = alone.model.embed_tokens.weight.grad
        assert (one - expected).norm() < BOUND * expected.norm()


def accumulate_over_two_schedules() -> tuple[float, float]:
    """Return how far FSDP2's gradients of two schedules' first steps are from their sum."""
    mesh, _ = create_fsdp2_device_mesh(ParallelismSizes(pp_size=2))
    (stage,) = pipeline_stages(make(tied=True), mesh["pp"])
    fsdp2_strategy_parallelize(stage, mesh, mp_policy=EXACT)
    batches = batch(0), batch(1)[:, :3]  # a schedule's batches have one shape
    both = [pipeline_schedule([stage], mesh["pp"], loss_of, 4) for _ in batches]
    seen = []
    for order in ((0, 1), (0,), (1,)):
        for each in order:
            both[each].step(batches[each], target=batches[each])
        seen.append([full(parameter.grad) for parameter in stage.parameters()])
        stage.zero_grad()
    errors = [(a - b - c).norm().item() for a, b, c in zip(*seen, strict=True)]
    return max(errors), min(each.norm().item() for each in seen[0])


def test_the_first_step_of_a_schedule_keeps_earlier_gradients(crew: Crew) -> None:
    for error, smallest in crew.run(accumulate_over_two_schedules, 2):
        assert error < BOUND * smallest


def train_after_replacing_parameters() -> tuple[list[float], Tensor]:
    """Return norms after a step, with tied parameters that were replaced, and their gradient."""
    norms = []
    for replaced in (False, True):
        pipeline = make_tied_pipeline()
        (stage,) = pipeline.stages
        if replaced:
            values = {name: value.clone() for name, value in stage.state_dict().items()}
            stage.load_state_dict(values, assign=True)
        pipeline.step(batch(0), target=batch(0))
        norms.append(pipeline.clip_grad_norm_(1.0).item())
    gradient = tied_in(stage).grad
    assert gradient is not None
    return norms, gradient


def test_tied_parameters_may_be_replaced_after_the_schedule_is_created(crew: Crew) -> None:
    (first_norms, first), (_, last) = crew.run(train_after_replacing_parameters, 2)
    assert first_norms[0] == first_norms[1]
    assert torch.equal(first, last)


def train_on_embeddings() -> tuple[float, float]:
    """Return how far the tied gradient is from that of one process, and the norm of that."""
    alone = make(tied=True).double()
    pipeline = make_tied_pipeline()
    generator = torch.Generator().manual_seed(3)
    embedded = torch.randn(8, 6, 32, generator=generator, dtype=torch.float64)
    pipeline.step(embedded, target=batch(0))
    for part, target in zip(embedded.chunk(4), batch(0).chunk(4), strict=True):
        (loss_of(alone(inputs_embeds=part, use_cache=False).logits, target) / 4).backward()
    gradient, expected = tied_in(pipeline.stages[0]).grad, alone.lm_head.weight.grad
    assert gradient is not None
    return (gradient - expected).norm().item(), expected.norm().item()


def test_a_first_stage_that_is_given_embeddings_has_the_gradient_of_the_head(crew: Crew) -> None:
    for difference, size in crew.run(train_on_embeddings, 2):
        assert difference < BOUND * size
