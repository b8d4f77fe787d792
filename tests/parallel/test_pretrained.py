"""`load_pretrained` and `save_pretrained` on real ranks, against transformers' own."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.crew import Crew
from helpers.tiers import in_tiers

pytest.importorskip("transformers", minversion="5.0", reason="it has no conversions")

from checkpoints import ARRANGEMENTS, round_trip  # noqa: E402  (imports transformers)

_CASES = [
    *(("llama", each, True) for each in ARRANGEMENTS if not each.startswith("ep")),
    *(("mixtral", each, False) for each in ARRANGEMENTS),
    *(("gpt_oss", each, False) for each in ARRANGEMENTS if "tp" not in each),
    ("qwen3_moe", "ep 2 x tp 2", True),
]
_SHORT = [
    ("llama", "tp 2 x fsdp 2", True),
    ("llama", "pp 2 x tp 2", True),
    ("mixtral", "ep 2 x tp 2", False),
    ("gpt_oss", "ep 4", False),
]


@pytest.mark.parametrize(("family", "arrangement", "tied"), in_tiers(_CASES, _SHORT))
def test_a_checkpoint_makes_a_round_trip_bit_by_bit(
    crew: Crew, tmp_path: Path, family: str, arrangement: str, tied: bool
) -> None:
    assert crew.run(round_trip, 4, family, arrangement, tied, str(tmp_path)) == [""] * 4
