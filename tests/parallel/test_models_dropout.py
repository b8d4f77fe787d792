"""Forwards without dropout, in training mode."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from meshverse.parallel.models.dropout import WithoutDropout


class Attention(nn.Module):
    def __init__(self, *dropout: float, **named: float) -> None:
        super().__init__()
        self.dropout, self.named = dropout, named

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        mask = (None,) * len(self.dropout)
        more: dict[str, Any] = self.named
        return F.scaled_dot_product_attention(hidden, hidden, hidden, *mask, *self.dropout, **more)


@pytest.mark.parametrize(
    "module",
    [
        nn.Dropout(0.5),
        nn.AlphaDropout(0.5),
        Attention(0.5),
        Attention(dropout_p=0.5),
        nn.TransformerEncoderLayer(8, 2, 16, dropout=0.5, batch_first=True),
    ],
)
def test_outputs_do_not_depend_on_the_random_state(module: nn.Module) -> None:
    given = torch.ones(2, 5, 8)
    outputs = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        with WithoutDropout():
            outputs.append(module.train()(given))
    assert torch.equal(*outputs)
    assert not torch.equal(module(given), outputs[0])
