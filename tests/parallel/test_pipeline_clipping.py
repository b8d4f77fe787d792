"""`PipelineSchedule.clip_grad_norm_` where stages' gradients differ in dtype, or there are none."""

from __future__ import annotations

import pytest
import torch
from pipelines import loss_of, make, make_pipeline
from rounding import rounding
from tiny_models import BOUND, batch
from torch import nn

from helpers.crew import Crew

pytest.importorskip("transformers", reason="transformers is not installed")


def clip_beside_a_frozen_stage(dtype: torch.dtype) -> tuple[float, float, float]:
    """The norm, the norm afterwards, and that of one process."""
    alone, model = make().to(dtype), make().to(dtype)
    pipeline = make_pipeline(model)
    for each in (*alone.model.embed_tokens.parameters(), *alone.model.layers[:2].parameters()):
        each.requires_grad_(False)
    (stage,) = pipeline.stages
    if pipeline.schedule._stage.is_first:
        stage.requires_grad_(False)
    for part in batch(0).chunk(4):
        (loss_of(alone(input_ids=part, use_cache=False).logits, part) / 4).backward()
    pipeline.step(batch(0), target=batch(0))
    before = pipeline.clip_grad_norm_(0.1).item()
    expected = nn.utils.clip_grad_norm_(alone.parameters(), 0.1).item()
    return before, pipeline.clip_grad_norm_(0.1).item(), expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_frozen_stage_has_no_part_in_the_norm(crew: Crew, dtype: torch.dtype) -> None:
    # Both run the same layers on the same microbatches, so that the norms alone are summed in
    # other orders: one of each parameter, of all of a stage, and of both. All are rounded to the
    # dtype, and stages' norms to float32. Clipping adds 1e-6 to the norm that it divides by.
    widest = torch.promote_types(dtype, torch.float32)
    narrow = torch.float32 if dtype == torch.float64 else dtype
    tolerance = rounding(narrow, terms=1, steps=3) + rounding(widest, terms=64 * 32, steps=3)
    for before, after, expected in crew.run(clip_beside_a_frozen_stage, 2, dtype):
        assert before == pytest.approx(expected, rel=tolerance)
        assert after == pytest.approx(0.1, rel=tolerance + 1e-6 / expected)


def clip_large_halves() -> tuple[float, float, float]:
    """The norm, the number of elements, and the largest gradient afterwards."""
    pipeline = make_pipeline(make().half())
    parameters = list(pipeline.stages[0].parameters())
    for each in parameters:
        each.grad = torch.full_like(each, 4.0)
    norm = pipeline.clip_grad_norm_(64.0).item()
    largest = max(each.grad.abs().max().item() for each in parameters if each.grad is not None)
    return norm, sum(each.numel() for each in make().parameters()), largest


def test_a_norm_whose_square_is_no_fp16_is_finite(crew: Crew) -> None:
    for norm, elements, largest in crew.run(clip_large_halves, 2):
        expected = 4 * elements**0.5
        assert expected > 256  # whose square is beyond fp16
        eps = torch.finfo(torch.float16).eps
        assert norm == pytest.approx(expected, rel=4 * eps)
        assert largest == pytest.approx(64 / elements**0.5, rel=4 * eps)


def norms_of_each_type() -> tuple[list[float], list[float], list[str]]:
    """Norms of a pipeline, those of one process, and what is said to others."""
    alone = make()
    pipeline = make_pipeline(make())
    pipeline.step(batch(0), target=batch(0))
    for part in batch(0).chunk(4):
        (loss_of(alone(input_ids=part, use_cache=False).logits, part) / 4).backward()
    kinds = (1, 2, 3.5, "inf", "2", float("inf"))
    seen = [pipeline.clip_grad_norm_(1e9, kind).item() for kind in kinds]
    expected = [nn.utils.clip_grad_norm_(alone.parameters(), 1e9, kind).item() for kind in kinds]
    said = []
    for kind in ("large", 0, -1.0, float("nan")):
        with pytest.raises(ValueError, match=r"norm_type|float") as refusal:
            pipeline.clip_grad_norm_(1.0, kind)
        said.append(str(refusal.value))
    return seen, expected, said


def test_kinds_of_norms_are_those_that_torch_takes(crew: Crew) -> None:
    for seen, expected, said in crew.run(norms_of_each_type, 2):
        assert seen == pytest.approx(expected, rel=BOUND)
        assert "could not convert string to float: 'large'" in said[0]
        for message, value in zip(said[1:], ("0.0", "-1.0", "nan"), strict=True):
            assert f"norm_type={value} must be a number above 0" in message
