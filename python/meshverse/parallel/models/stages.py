"""What a model says that is one stage of a pipeline, and what stands for the layers of the others.

Example:
    >>> StageOf(index=0, count=2, layers=range(0, 4)).is_last
    False
    >>> stage_of(nn.Linear(2, 2)) is None
    True
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

__all__ = ["AbsentModule", "StageOf", "mark_as_stage", "stage_of"]

_MARK = "_meshverse_pipeline_stage"


@dataclass(frozen=True)
class StageOf:
    """Which part of a model a stage has.

    Attributes:
        index: of the stage.
        count: of all stages of the model.
        layers: numbers of the decoder layers that it has.
        tied: name of the parameter that the first and the last stage both have: the embedding's on
            the first, the head's on the last, None on the others and of models that are not tied.
        model_has_experts: whether the whole model has experts, in this stage or in others.
    """

    index: int
    count: int
    layers: range
    tied: str | None = None
    model_has_experts: bool = False

    @property
    def is_first(self) -> bool:
        """Whether it has the embedding."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether it has the head."""
        return self.index == self.count - 1


class AbsentModule(nn.Module):
    """Stands where a module was that another stage has. It has no parameters."""


def mark_as_stage(model: nn.Module, stage: StageOf) -> None:
    """Let a model say which stage it is."""
    setattr(model, _MARK, stage)


def stage_of(model: nn.Module) -> StageOf | None:
    """Which stage a model is; None for a whole model."""
    stage: Any = getattr(model, _MARK, None)
    return stage if isinstance(stage, StageOf) else None
