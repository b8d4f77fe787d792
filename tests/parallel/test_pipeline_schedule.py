"""Arguments and results of `pipeline_schedule`; other tests compare the training."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from pipelines import EXACT, loss_of, make
from tiny_models import BOUND, batch
from torch import nn

from helpers.crew import Crew
from helpers.tiers import in_tiers
from helpers.worlds import fake_world
from meshverse import init_device_mesh
from meshverse.parallel import (
    ParallelismSizes,
    create_fsdp2_device_mesh,
    fsdp2_strategy_parallelize,
    pipeline_schedule,
    pipeline_stages,
    split_into_stages,
)

pytest.importorskip("transformers", reason="transformers is not installed")


@pytest.mark.parametrize(
    ("virtual", "schedule", "microbatches", "message"),
    [
        (1, "2F2B", 4, r"schedule='2F2B' for 1 stages per rank must be one of \['1F1B', 'GPipe'\]"),
        (1, "Interleaved1F1B", 4, "schedule='Interleaved1F1B' for 1 stages per rank"),
        (2, "1F1B", 4, "schedule='1F1B' for 2 stages per rank.*'Interleaved1F1B'"),
        (1, None, 1, "n_microbatches=1 for 2 stages: 1F1B must have at least one"),
        (2, None, 5, "n_microbatches=5 over 2 ranks run in 2 rounds"),
        (1, None, 0, "n_microbatches=0 must be an int above 0"),
        (1, "GPipe", 2.0, "n_microbatches=2.0"),
    ],
)
def test_schedules_that_cannot_be_are_refused(
    virtual: int, schedule: str | None, microbatches: Any, message: str
) -> None:
    with fake_world(2, 1):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
        stages = pipeline_stages(make(), mesh, virtual=virtual)
        with pytest.raises(ValueError, match=message):
            pipeline_schedule(stages, mesh, loss_of, microbatches, schedule=schedule)


def test_stages_of_others_are_refused() -> None:
    with fake_world(2, 1):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
        model = make()
        for stages in (
            [],
            [model],
            [split_into_stages(model, 2, 0)],
            [split_into_stages(model, 4, 1)],
            [split_into_stages(model, 4, 3), split_into_stages(model, 4, 1)],
        ):
            with pytest.raises(ValueError, match=r"give the list that pipeline_stages\(\)"):
                pipeline_schedule(stages, mesh, loss_of, 4)
        with pytest.raises(ValueError, match=r"has 2 axes, and must have one: give mesh\['pp'\]"):
            pipeline_stages(model, init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "tp")))


@pytest.mark.parametrize("virtual", [0, -1, True, 1.0])
def test_a_number_of_virtual_stages_is_an_int_above_0(virtual: Any) -> None:
    with fake_world(2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
        with pytest.raises(ValueError, match="must be an int above 0"):
            pipeline_stages(make(), mesh, virtual=virtual)


def evaluate(virtual: int) -> tuple[list[float], list[float], list[bool], str]:
    """Losses of a pipeline's eval, whether they are those of the model, and what training did."""
    mesh, _ = create_fsdp2_device_mesh(ParallelismSizes(pp_size=2))
    model, alone = make(), make()
    stages = pipeline_stages(model, mesh["pp"], virtual=virtual)
    for stage in stages:
        fsdp2_strategy_parallelize(stage, mesh, mp_policy=EXACT)
    pipeline = pipeline_schedule(stages, mesh["pp"], loss_of, 4)
    tokens = batch(0)
    mask = torch.ones_like(tokens)
    mask[:, 0] = 0
    keywords = {"attention_mask": mask, "position_ids": torch.arange(6)[None]}
    losses = []
    for _ in range(2):
        losses = [each.item() for each in pipeline.eval(tokens, target=tokens, **keywords)]
    no_gradients = all(each.grad is None for stage in stages for each in stage.parameters())
    other = pipeline_schedule(stages, mesh["pp"], loss_of, 4)
    pipeline.step(tokens, target=tokens, **keywords)
    other.eval(tokens, target=tokens, **keywords)  # its first, which torch tries out
    norm = pipeline.clip_grad_norm_(1.0).item()
    expected = [
        loss_of(
            alone(input_ids=part, use_cache=False, attention_mask=seen, position_ids=None).logits,
            part,
        )
        for part, seen in zip(tokens.chunk(4), mask.chunk(4), strict=True)
    ]
    torch.stack(expected).mean().backward()
    wanted = nn.utils.clip_grad_norm_(alone.parameters(), 1.0).item()
    try:
        pipeline.step(tokens[:6], target=tokens[:6])
    except ValueError as error:
        message = str(error)
    return (
        losses,
        [each.item() for each in expected],
        [no_gradients, abs(norm / wanted - 1) < BOUND],
        message,
    )


@pytest.mark.parametrize("virtual", in_tiers([1, 2], [1]))
def test_evaluation_leaves_no_gradients(crew: Crew, virtual: int) -> None:
    answers = crew.run(evaluate, 4, virtual)
    for rank, (losses, expected, right, message) in enumerate(answers):
        assert right == [True, True]
        assert losses == pytest.approx(expected if rank > 1 else [], rel=BOUND)
        assert "6 sequences with 6 targets does not divide into 4 microbatches" in message


class Counts(nn.Module):
    """A module around another one that counts its calls, in a buffer and in attributes."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.register_buffer("seen", torch.zeros(()))
        self.number, self.tensor, self.shapes = 0, torch.zeros(()), list[torch.Size]()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        self.number += 1
        self.tensor += 1
        self.shapes.append(hidden.shape)
        self.late = getattr(self, "late", 0) + 1  # there after the first call only
        output: torch.Tensor = self.inner(hidden)
        return output


def count_microbatches(virtual: int) -> list[list[float]]:
    """Return the counts of all layers of a rank after each batch; their places stay the same."""
    mesh, _ = create_fsdp2_device_mesh(ParallelismSizes(pp_size=2))
    model: Any = make()
    for layer in model.model.layers:
        layer.mlp = Counts(layer.mlp)
    stages = pipeline_stages(model, mesh["pp"], virtual=virtual)
    counts = [each for stage in stages for each in stage.modules() if isinstance(each, Counts)]
    places = [(each.seen, each.tensor, each.shapes) for each in counts]
    pipeline = pipeline_schedule(stages, mesh["pp"], loss_of, 4)
    tokens, seen = batch(0), []
    for run in (pipeline.step, pipeline.eval) * 2:
        run(tokens, target=tokens)
        seen.append([count for each in counts for count in _counts(each)])
    for each, (buffer, tensor, shapes) in zip(counts, places, strict=True):
        assert (each.seen is buffer, each.tensor is tensor, each.shapes is shapes) == (True,) * 3
    return seen


def _counts(counter: Counts) -> list[float]:
    numbers = counter.number, counter.late, len(counter.shapes)
    return [counter.seen.item(), counter.tensor.item(), *numbers]


@pytest.mark.parametrize("virtual", [1, 2])
def test_what_torch_tries_out_leaves_buffers_and_attributes(crew: Crew, virtual: int) -> None:
    for seen in crew.run(count_microbatches, 2, virtual):
        assert seen == [[count] * 2 * 5 for count in (4, 8, 12, 16)]


def norms(norm_type: float) -> tuple[float, float]:
    """The norm of a tied model's gradients over its stages, and that of one process."""
    mesh, _ = create_fsdp2_device_mesh(ParallelismSizes(pp_size=2, tp_size=2))
    alone = make(tied=True)
    stages = pipeline_stages(make(tied=True), mesh["pp"])
    fsdp2_strategy_parallelize(stages[0], mesh, mp_policy=EXACT)
    pipeline = pipeline_schedule(stages, mesh["pp"], summed, 4)
    pipeline.step(batch(0), target=batch(0))
    summed(alone(input_ids=batch(0), use_cache=False).logits, batch(0)).backward()
    expected = nn.utils.get_total_norm([each.grad for each in alone.parameters()], norm_type)
    return pipeline.clip_grad_norm_(1.0, norm_type).item(), expected.item()


def summed(logits: Any, tokens: torch.Tensor) -> torch.Tensor:
    whole = logits.full_tensor() if hasattr(logits, "full_tensor") else logits
    return loss_of(whole, tokens)


@pytest.mark.long
@pytest.mark.parametrize("norm_type", in_tiers([1.0, 2.0, float("inf")], [2.0]))
def test_norms_over_stages_equal_one_process(crew: Crew, norm_type: float) -> None:
    for seen, expected in crew.run(norms, 4, norm_type):
        assert seen == pytest.approx(expected, rel=BOUND)


class Raising:
    """Hook that raises in the second microbatch after it is armed."""

    n_left = -1

    def __call__(self, *_: object) -> None:
        self.n_left -= 1
        if self.n_left == 0:
            raise KeyboardInterrupt


def raise_in_a_batch() -> list[str]:
    """Return what is said by a batch that raises on both ranks, and by what comes after it."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    stages = pipeline_stages(make(), mesh)
    raising = Raising()
    stages[0].register_forward_pre_hook(raising)
    pipeline = pipeline_schedule(stages, mesh, loss_of, 4, schedule="GPipe")
    tokens = batch(0)
    pipeline.step(tokens, target=tokens)
    # The first rank sends one microbatch and then raises, the last one raises when it has it.
    raising.n_left = 2 - mesh.get_local_rank()
    return [
        said_by(pipeline.step, tokens, target=tokens),
        said_by(pipeline.step, tokens, target=tokens),
        said_by(pipeline.eval, tokens, target=tokens),
        said_by(pipeline_schedule, stages, mesh, loss_of, 4),
    ]


def said_by(call: Callable[..., Any], *arguments: Any, **keywords: Any) -> str:
    try:
        call(*arguments, **keywords)
    except (KeyboardInterrupt, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


def test_a_pipeline_in_which_a_batch_raised_is_refused(crew: Crew) -> None:
    for first, *others in crew.run(raise_in_a_batch, 2):
        assert "KeyboardInterrupt" in first or "failed to run forward" in first
        assert len(others) == 3
        for each in others:
            assert "RuntimeError: A batch raised in this pipeline of 2 ranks" in each
            assert "call meshverse.revive() with this schedule" in each


@pytest.mark.parametrize("schedule", ["1F1B", "GPipe"])
def test_a_pipeline_of_one_stage_goes_on_after_a_batch_raised(schedule: str) -> None:
    def loss(logits: Any, tokens: torch.Tensor) -> torch.Tensor:
        raising()
        return loss_of(logits, tokens)

    raising, tokens = Raising(), batch(0)
    with fake_world(1):
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("pp",))
        stages = pipeline_stages(make(), mesh)
        pipeline = pipeline_schedule(stages, mesh, loss, 4, schedule=schedule)
        seen = []
        for n_left in (-1, 3, -1):
            raising.n_left = n_left
            with pytest.raises(KeyboardInterrupt) if n_left > 0 else nullcontext():
                pipeline.step(tokens, target=tokens)
            seen.append([each.grad for each in stages[0].parameters()])
            stages[0].zero_grad()
        assert all(map(torch.equal, seen[0], seen[2]))
        with torch.no_grad(), pytest.raises(RuntimeError, match="needs gradients, which are"):
            pipeline.step(tokens, target=tokens)
        pipeline.step(tokens, target=tokens)


def tie_differently() -> str:
    mesh, _ = create_fsdp2_device_mesh(ParallelismSizes(pp_size=2))
    (stage,) = pipeline_stages(make(tied=True), mesh["pp"])
    if mesh.get_local_rank("pp"):
        stage.double()
    try:
        pipeline_schedule([stage], mesh["pp"], loss_of, 4)
    except ValueError as error:
        return str(error)
    return "accepted"


def test_tied_parameters_that_differ_are_refused(crew: Crew) -> None:
    messages = crew.run(tie_differently, 2)
    assert all("tied to a parameter of another pipeline stage" in each for each in messages)
    assert "torch.float64, trained on the" in messages[0]
