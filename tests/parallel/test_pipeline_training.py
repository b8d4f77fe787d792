"""Pipelines with tensor parallelism, FSDP2 and replicas in their stages, against one process."""

from __future__ import annotations

from typing import Any

import pytest
from pipelines import compare

from helpers.crew import Crew

pytest.importorskip("transformers", reason="transformers is not installed")


def check(everyone: list[dict[str, float]]) -> None:
    for differences in everyone:
        assert differences["losses"] < 1e-5, differences
        assert differences["norms"] < 1e-5, differences
        assert differences["weights"] < 1e-4, differences


MESHES: dict[str, tuple[int, dict[str, int], int]] = {
    "pp 4": (4, {"pp_size": 4}, 1),
    "pp 2 x dp 2": (4, {"pp_size": 2}, 1),
    "pp 2 x tp 2": (4, {"pp_size": 2, "tp_size": 2}, 1),
    "pp 2 of 2 x tp 2": (4, {"pp_size": 2, "tp_size": 2}, 2),
    "pp 2 of 2 x dp 2": (4, {"pp_size": 2}, 2),
    "pp 2 x tp 2 x dp 2": (8, {"pp_size": 2, "tp_size": 2}, 1),
    "pp 2 of 2 x tp 2 x dp 2": (8, {"pp_size": 2, "tp_size": 2}, 2),
    "pp 2 x 2 replicas x 2 shards": (8, {"pp_size": 2, "dp_replicate_size": 2}, 1),
    "pp 4 x tp 2": (8, {"pp_size": 4, "tp_size": 2}, 1),
}


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("name", MESHES)
def test_a_pipeline_trains_as_one_process_does(eight: Crew, name: str, tied: bool) -> None:
    ranks, sizes, virtual = MESHES[name]
    fields = {"tie_word_embeddings": tied}
    check(eight.run(compare_tied, ranks, sizes, virtual, fields))


def compare_tied(sizes: dict[str, int], virtual: int, fields: dict[str, Any]) -> dict[str, float]:
    return compare(sizes, virtual, accumulate=2, **fields)


def compare_settings(sizes: dict[str, int], keywords: dict[str, Any]) -> dict[str, float]:
    return compare(sizes, **keywords)


SETTINGS: dict[str, dict[str, Any]] = {
    "GPipe": {"schedule": "GPipe"},
    "LoopedBFS": {"schedule": "LoopedBFS", "virtual": 2},
    "checkpointing": {"settings": {"activation_checkpointing": True}},
    "kept after forward": {"settings": {"reshard_after_forward": False}},
    "sliding windows": {"family": "gemma2", "num_hidden_layers": 5},
    "normalized queries": {"family": "qwen3"},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings(eight: Crew, name: str) -> None:
    check(eight.run(compare_settings, 4, {"pp_size": 2, "tp_size": 2}, SETTINGS[name]))
