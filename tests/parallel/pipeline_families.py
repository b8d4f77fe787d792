"""Hugging Face families split into pipeline stages, and compared with the whole model."""

from __future__ import annotations

import copy

import torch
from hf_families import Outcome, families, full, largest_error, run, tiny_model, tokens
from torch import Tensor

from meshverse.parallel import split_into_stages

# One for each way in which models call their layers; all of them in `make families`.
REPRESENTATIVES = tuple(
    name
    for name in (
        "apertus",
        "cohere2",
        "deepseek_v3",
        "deepseek_v4",
        "gemma3_text",
        "gemma3n_text",
        "gemma4_text",
        "glm_moe_dsa",
        "gpt_neox",
        "gpt_oss",
        "granite",
        "llama4",
        "longcat_flash",
        "olmo3",
        "phi4_multimodal",
        "qwen3_next",
    )
    if name in families()
)


def compare_stages(family: str, *, tied: bool) -> Outcome:
    """The largest difference between a tiny model and its two stages, one after the other."""
    whole = tiny_model(family, tied=tied)
    model = copy.deepcopy(whole)
    try:
        stages = [split_into_stages(model, 2, index) for index in range(2)]
    except ValueError as error:
        return Outcome(str(error))
    expected = run(whole)
    seen = run_stages(stages)
    error, worst = largest_error(seen, expected, floor=1e-2)
    return Outcome(error=error, worst=worst, parameters=len(expected) - 1)


def run_stages(stages: list[torch.nn.Module]) -> dict[str, Tensor | None]:
    """As `hf_families.run`, of stages one after the other."""
    hidden = tokens()
    torch.manual_seed(20)
    for stage in stages:
        hidden = stage(hidden)
    generator = torch.Generator().manual_seed(20)
    weights = torch.randn(tokens().numel(), hidden.size(-1), generator=generator)
    (hidden * weights.view_as(hidden)).sum().backward()
    seen: dict[str, Tensor | None] = {"logits": hidden.detach()}
    names = dict.fromkeys(name for stage in stages for name, _ in stage.named_parameters())
    objects: set[int] = set()
    for name in names:
        for stage in stages:
            parameter = dict(stage.named_parameters()).get(name)
            if parameter is not None and id(parameter) not in objects:
                objects.add(id(parameter))
                seen[name] = None if parameter.grad is None else full(parameter.grad)
    return seen
