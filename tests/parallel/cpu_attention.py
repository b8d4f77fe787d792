"""CPU kernels of an attention that torch has for GPUs only, written out.

torch's context parallelism runs attention over parts of sequences with kernels that return the
logarithm of the sum of exponentials too. torch has none of them for CPUs, so its ring of exchanges
cannot run there. With these kernels it can, on gloo.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

_EFFICIENT = torch.ops.aten._scaled_dot_product_efficient_attention


def _scores(query: Tensor, key: Tensor, is_causal: bool, scale: float | None) -> Tensor:
    scores = query @ key.mT * (query.size(-1) ** -0.5 if scale is None else scale)
    if is_causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
    return scores


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    assert attn_bias is None
    assert dropout_p == 0
    scores = _scores(query, key, is_causal, scale)
    logsumexp = scores.logsumexp(-1)
    weights = (scores - logsumexp[..., None]).exp()
    return weights @ value, logsumexp.float(), torch.tensor(0), torch.tensor(0)


def _backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: None,
    out: Tensor,
    logsumexp: Tensor,
    philox_seed: Tensor,
    philox_offset: Tensor,
    dropout_p: float,
    grad_input_mask: list[bool],
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor, None]:
    weights = (_scores(query, key, is_causal, scale) - logsumexp[..., None]).exp()
    of_weights = grad_out @ value.mT - (grad_out * out).sum(-1, keepdim=True)
    factor = query.size(-1) ** -0.5 if scale is None else scale
    of_scores = weights * of_weights * factor
    return of_scores @ key, of_scores.mT @ query, weights.mT @ grad_out, None


# torch replaces the function of this name in torch.nn.functional while sequences are split.
def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention by the kernels of this module."""
    assert attn_mask is None
    if enable_gqa:
        key, value = (
            each.repeat_interleave(query.size(1) // each.size(1), 1) for each in (key, value)
        )
    out, *_ = _EFFICIENT(query, key, value, None, True, dropout_p, is_causal, scale=scale)
    return out


@contextlib.contextmanager
def attention_for_cpus() -> Iterator[None]:
    """Have torch's attention on CPUs use the kernels of this module."""
    with (
        torch.library._scoped_library("aten", "IMPL") as library,
        pytest.MonkeyPatch.context() as patch,
    ):
        library.impl(_EFFICIENT.default, _forward, "CPU")
        backward = torch.ops.aten._scaled_dot_product_efficient_attention_backward
        library.impl(backward.default, _backward, "CPU")
        patch.setattr(F, "scaled_dot_product_attention", scaled_dot_product_attention)
        yield
