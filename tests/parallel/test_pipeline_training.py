"""Pipelines with tensor parallelism, FSDP2 and replicas in their stages, against one process."""

from __future__ import annotations

from typing import Any

import pytest
from pipelines import compare

from helpers.crew import Crew

pytest.importorskip("transformers", reason="transformers is not installed")

_TIED = {"tie_word_embeddings": True}

# By name: ranks, degrees, and what else is said to `compare`.
CASES: dict[str, tuple[int, dict[str, int], dict[str, Any]]] = {
    "pp 4": (4, {"pp_size": 4}, {}),
    "pp 4, tied": (4, {"pp_size": 4}, _TIED),
    "pp 2 x dp 2": (4, {"pp_size": 2}, {"accumulate": 2}),
    "pp 2 x dp 2, tied": (4, {"pp_size": 2}, {"accumulate": 2, **_TIED}),
    "pp 2 x tp 2": (4, {"pp_size": 2, "tp_size": 2}, {}),
    "pp 2 of 2 x tp 2, tied": (4, {"pp_size": 2, "tp_size": 2}, {"virtual": 2, **_TIED}),
    "pp 2 of 2 x dp 2": (4, {"pp_size": 2}, {"virtual": 2, "accumulate": 2}),
    "pp 2 x tp 2 x dp 2, tied": (8, {"pp_size": 2, "tp_size": 2}, {"accumulate": 2, **_TIED}),
    "pp 2 of 2 x tp 2 x dp 2": (8, {"pp_size": 2, "tp_size": 2}, {"virtual": 2}),
    "pp 2 x 2 replicas x 2 shards": (8, {"pp_size": 2, "dp_replicate_size": 2}, {}),
    "GPipe": (4, {"pp_size": 2, "tp_size": 2}, {"schedule": "GPipe"}),
    "LoopedBFS": (4, {"pp_size": 2, "tp_size": 2}, {"schedule": "LoopedBFS", "virtual": 2}),
    "checkpointing": (4, {"pp_size": 2}, {"settings": {"activation_checkpointing": True}}),
    "kept after forward": (4, {"pp_size": 2}, {"settings": {"reshard_after_forward": False}}),
    "sliding windows, 2 and 3 layers": (
        4,
        {"pp_size": 2, "tp_size": 2},
        {"family": "gemma2", "num_hidden_layers": 5, "layers_per_stage": (2, 3)},
    ),
}


def compare_case(sizes: dict[str, int], keywords: dict[str, Any]) -> dict[str, float]:
    return compare(sizes, **keywords)


@pytest.mark.parametrize("name", CASES)
def test_a_pipeline_trains_as_one_process_does(eight: Crew, name: str) -> None:
    ranks, sizes, keywords = CASES[name]
    for differences in eight.run(compare_case, ranks, sizes, keywords):
        assert differences["losses"] < 1e-5, differences
        assert differences["norms"] < 1e-5, differences
        assert differences["weights"] < 1e-4, differences
