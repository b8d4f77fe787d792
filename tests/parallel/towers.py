"""A model with lists and dictionaries of layers, in parts of a multimodal model."""

from __future__ import annotations

from torch import Tensor, nn


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.calls = 0

    def forward(self, hidden: Tensor) -> Tensor:
        self.calls += 1
        return self.linear(hidden).sin()


class Tower(nn.Module):
    def __init__(self, layers: nn.ModuleList | nn.ModuleDict) -> None:
        super().__init__()
        self.layers = layers
        self.norm = nn.LayerNorm(4)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.vision_tower = Tower(nn.ModuleList([Block(), Block()]))
        self.language_model = Tower(nn.ModuleDict({"a": Block(), "b": Block()}))
        self.stages = nn.ModuleList([nn.ModuleList([Block()]), nn.ModuleList([Block(), Block()])])


BLOCKS = {
    "vision_tower.layers.0",
    "vision_tower.layers.1",
    "language_model.layers.a",
    "language_model.layers.b",
    "stages.0.0",
    "stages.1.0",
    "stages.1.1",
}
