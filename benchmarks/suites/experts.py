"""Experts on other ranks: what the host spends on sending tokens there, beside transformers."""

from __future__ import annotations

import importlib.util
import time
import warnings
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

import meshverse
from crews import in_crew
from harness import OURS, Check, Outcome, Run

__all__ = ["METHOD", "SCALE", "TITLE", "run"]

TITLE = "Experts on other ranks"
METHOD = (
    "processor time of one thread of one of two gloo processes, a fresh pair for each side, "
    "the least of some batches: a layer of a norm and transformers' experts of "
    "Mixtral (8 of width 32, of which each token chooses 2), handed out to the two. The floor is "
    "the same layer with all experts on each rank. Waiting for the other rank does not count"
)
SCALE = "tokens of a rank"
_THEIRS, _FLOOR = "transformers", "floor"
_SIDES = (_FLOOR, _THEIRS, OURS)
_TOKENS = [32, 512, 4_096]
_EXPERTS, _CHOICES, _WIDTH = 8, 2, 32
_MODES = ("eager", "compiled")
_LIMIT_S = 300


def run(run: Run) -> Outcome:
    """Measure each side at each number of tokens."""
    outcome = Outcome()
    if importlib.util.find_spec("transformers.distributed.expert_parallel") is None:
        outcome.notes.append("Skipped: transformers 5.23 or newer is not installed.")
        return outcome
    counts, repetitions = run.choose(_TOKENS, [512]), run.choose(3, 1)
    cases = [(n, side) for n in range(repetitions) for side in _SIDES]
    expected: list[list[float]] = []
    for step, (_, side) in enumerate(cases):
        run.tell(step, len(cases), side)
        result, _ = in_crew(2, _measure, side, counts, limit_s=_LIMIT_S)
        expected = expected or result.answers
        torch.testing.assert_close(torch.tensor(result.answers), torch.tensor(expected))
        for (operation, tokens), ns in result.times.items():
            outcome.of(operation, tokens).add(side, ns)
    outcome.checks = _checks(outcome)
    return outcome


class _Measured(NamedTuple):
    times: dict[tuple[str, int], float]  # by operation and number of tokens
    answers: list[list[float]]


class _Layer(nn.Module):
    """The part of a layer around its experts that takes time of the host."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.norm, self.experts = nn.LayerNorm(_WIDTH), experts

    def forward(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        return hidden + self.experts(self.norm(hidden), chosen, weights)


def _measure(rank: int, store: Any, side: str, counts: list[int]) -> _Measured:
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    mesh = meshverse.init_device_mesh("cpu", (1, 2), mesh_dim_names=("tp", "ep"))
    layer = _Layer(_experts())
    if side == OURS:
        from meshverse.parallel import apply_expert_parallelism

        apply_expert_parallelism(layer, mesh["ep"])
    elif side == _THEIRS:
        from transformers.distributed.expert_parallel import apply_expert_parallelism

        names = ("gate_up_proj", "down_proj")
        plan = {f"experts.{name}": "grouped_gemm" for name in names}
        plan["experts"] = "ep_dispatch_experts"
        apply_expert_parallelism(layer, mesh["ep"], mesh["tp"], plan)
    result = _Measured({}, [])
    for tokens in counts:
        batch, loops = _batch(rank, tokens), max(3, 4_000 // tokens)
        for mode in _MODES:
            torch.compiler.reset()  # or the second number of tokens would be compiled otherwise
            forward = partial(torch.compile(layer) if mode == "compiled" else layer, *batch)
            result.answers.append(forward().detach().sum(-1)[:16].tolist())
            result.times[f"forward, {mode}", tokens] = _timed(forward, loops)
            result.times[f"step, {mode}", tokens] = _timed(partial(_step, forward), loops)
    return result


def _step(forward: Callable[[], Tensor]) -> None:
    forward().square().sum().backward()


def _experts() -> nn.Module:
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    sizes = {"num_local_experts": _EXPERTS, "hidden_size": _WIDTH, "intermediate_size": _WIDTH}
    config = SimpleNamespace(**sizes, hidden_act="silu", _experts_implementation="grouped_mm")
    experts = MixtralExperts(config)
    torch.manual_seed(3)
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=0.1)
    return experts


def _batch(rank: int, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, the experts that each token chooses, unevenly, and their weights."""
    generator = torch.Generator().manual_seed(rank)
    hidden = torch.randn(tokens, _WIDTH, generator=generator)
    scores = torch.randn(tokens, _EXPERTS, generator=generator) + torch.arange(_EXPERTS) / 4
    weights, chosen = scores.softmax(-1).topk(_CHOICES)
    return hidden.requires_grad_(), chosen, weights.detach()


def _timed(call: Callable[[], Any], loops: int) -> float:
    """Nanoseconds of this thread's processor time for one call, the least of some batches."""
    for _ in range(3):
        call()
    times = []
    for _ in range(5):
        dist.barrier()
        start = time.thread_time_ns()
        for _ in range(loops):
            call()
        times.append((time.thread_time_ns() - start) / loops)
    return min(times)


def _checks(outcome: Outcome) -> list[Check]:
    return [
        Check.within(
            f"{one.operation}, {one.scale:,} tokens: of transformers'",
            1.1,
            one.samples[_THEIRS],
            one.samples[OURS],
        )
        for one in outcome.measurements
    ]
