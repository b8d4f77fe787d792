"""Split and sharded models in transformers' own callers: generate(), pipeline() and Trainer."""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

pytest.importorskip("transformers", reason="transformers is not installed")

import transformers
from rounding import rounding
from tiny_models import BOUND, VOCABULARY, make_model

from helpers.crew import Crew
from helpers.forked import SECONDS, printed_by, torchrun
from helpers.tiers import in_tiers
from meshverse.parallel import (
    ParallelismSizes,
    create_fsdp2_device_mesh,
    fsdp2_strategy_parallelize,
    get_flat_mesh,
)

_HERE = Path(__file__).parent
_NEW, _PAD = 6, 0
# Two layers and a head, of about a dozen operations each, go forward.
_CLOSE = rounding(torch.float32, terms=VOCABULARY, steps=3 * 12)
_LLAMA_PLAN = "meshverse.parallel.llama_tp_plan"
_MESHES = {"tp": (2, {"tp_size": 2}), "fsdp2": (2, {}), "tp and fsdp2": (4, {"tp_size": 2})}
_WAYS: dict[str, dict[str, Any]] = {
    "whole": {},
    "split in training": {"split_logits": True},
    "by tokens": {"sequence_parallel": True, "tp_shard_plan": _LLAMA_PLAN},
}


def split(model: nn.Module, sizes: dict[str, int], settings: dict[str, Any]) -> Any:
    """Split a model over a mesh, which is returned."""
    mesh, _ = create_fsdp2_device_mesh(ParallelismSizes(**sizes))
    fsdp2_strategy_parallelize(model, mesh, mp_policy=MixedPrecisionPolicy(), **settings)
    return mesh


def make(family: str) -> Any:
    """A model with large weights, whose logits are far from each other."""
    model: Any = make_model(family, tie_word_embeddings=False).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(10)
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = _PAD, None
    return model


def prompts() -> dict[str, Tensor]:
    """Prompts of several lengths, padded on the left."""
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(2, VOCABULARY, (4, 7), generator=generator)
    mask = torch.ones_like(tokens)
    for row, padding in enumerate((0, 3, 1, 5)):
        tokens[row, :padding], mask[row, :padding] = _PAD, 0
    return {"input_ids": tokens, "attention_mask": mask}


def tokens_of(model: Any, given: dict[str, Tensor], **settings: Any) -> Tensor:
    """Greedy tokens, of which none are a choice that rounding could change."""
    output = model.generate(
        **given,
        do_sample=False,
        max_new_tokens=_NEW,
        output_logits=True,
        return_dict_in_generate=True,
        **settings,
    )
    first, second = torch.stack(output.logits).topk(2).values.unbind(-1)
    assert (first - second).min() > _CLOSE * first.abs().max()
    return output.sequences


def generated(family: str, sizes: dict[str, int], settings: dict[str, Any]) -> list[str]:
    """Which ways to generate give other tokens than one process."""
    whole = make(family)
    model = copy.deepcopy(whole)
    data = get_flat_mesh(split(model, sizes, settings), "dp_cp")
    given = prompts()
    rows = slice(data.get_local_rank(), None, data.size())
    mine = {name: each[rows] for name, each in given.items()}
    expected = tokens_of(whole, given)
    # One share ends before another, and its ranks go on until all have ended. (Without a cache,
    # transformers cannot do that.)
    end = int(expected[0, -3])
    ways: dict[str, dict[str, Any]] = {
        "cache": {"use_cache": True},
        "no cache": {"use_cache": False},
        "static cache": {
            "use_cache": True,
            "cache_implementation": "static",
            "disable_compile": True,
        },
        "end": {"use_cache": True, "eos_token_id": end},
    }
    wrong = []
    for name, way in ways.items():
        wanted, seen = tokens_of(whole, given, **way)[rows], tokens_of(model, mine, **way)
        length = min(wanted.size(1), seen.size(1))
        ends = wanted[:, length:].eq(_PAD).all()  # all rows of this share had ended
        if not torch.equal(seen[:, :length], wanted[:, :length]) or not ends:
            wrong.append(f"{name}: {seen.tolist()}, not {wanted.tolist()}")
    return wrong


_CASES = [
    (family, mesh, way)
    for family in ("llama", "gemma2", "qwen3")
    for mesh in _MESHES
    for way in _WAYS
    if way == "whole" or "tp" in mesh
]


_SHORT = [
    ("qwen3", "tp", "split in training"),
]


@pytest.mark.parametrize(
    ("family", "mesh", "way"),
    in_tiers(_CASES, _SHORT, _CASES[::9]),
)
def test_greedy_tokens_equal_one_process(crew: Crew, family: str, mesh: str, way: str) -> None:
    ranks, sizes = _MESHES[mesh]
    for wrong in crew.run(generated, ranks, family, sizes, _WAYS[way]):
        assert not wrong, wrong


def sampled(sizes: dict[str, int]) -> list[list[int]]:
    """Tokens that this rank samples."""
    model = make("llama")
    torch.manual_seed(dist.get_rank())  # ranks of tp get one state nevertheless
    split(model, sizes, {})
    tokens = model.generate(**prompts(), do_sample=True, temperature=20.0, max_new_tokens=_NEW)
    return tokens.tolist()


@pytest.mark.long
def test_ranks_of_tp_sample_the_same(crew: Crew) -> None:
    first, second, *others = crew.run(sampled, 4, {"tp_size": 2})
    assert [first, second] == [second, first]
    assert others[0] == others[1] != first


def words() -> Any:
    """A tokenizer with a word for each token."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, "w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="w0", eos_token="w1", padding_side="left"
    )


def piped(sizes: dict[str, int]) -> tuple[Any, Any]:
    """Results of pipeline() with the split model, and with the whole one."""
    whole = make("llama")
    model = copy.deepcopy(whole)
    split(model, sizes, {})
    texts = ["w5 w6 w7 w8", "w9 w3", "w20"]
    settings = {"max_new_tokens": _NEW, "do_sample": False, "batch_size": 3}
    seen, expected = (
        transformers.pipeline("text-generation", model=each, tokenizer=words())(texts, **settings)
        for each in (model, whole)
    )
    return seen, expected


@pytest.mark.long
def test_of_a_pipeline_of_transformers(crew: Crew) -> None:
    for seen, expected in crew.run(piped, 4, {"tp_size": 2}):
        assert seen == expected


@pytest.mark.long
@pytest.mark.processes
def test_of_trainers_evaluation(tmp_path: Path) -> None:
    paths = [str(_HERE), str(_HERE.parent), str(_HERE.parents[1] / "python")]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    job = torchrun(4, _HERE / "trainer_job.py", folder=tmp_path, env=env)
    status, out, err = job.communicate(SECONDS)
    assert status == 0, out + err + printed_by(0, tmp_path, "stderr")
    loss, expected, difference = json.loads(printed_by(0, tmp_path).splitlines()[-1])
    assert loss == pytest.approx(expected, rel=BOUND)
    assert difference < BOUND
