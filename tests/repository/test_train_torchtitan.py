"""torchtitan's own trainer on our meshes: the program that compares it with stock meshes."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

_TOOLS = Path(__file__).parents[2] / "tools"
_SECONDS = 1500  # two runs of four processes that import torchtitan, on a machine that is busy


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.skipif(
    importlib.util.find_spec("torchtitan") is None,
    reason="torchtitan is not installed: install it, and what its import needs, to run its trainer",
)
def test_torchtitan_trains_the_same_with_both_meshes() -> None:
    command = [sys.executable, str(_TOOLS / "train_torchtitan.py"), "--processes", "4"]
    ended = subprocess.run(
        [*command, "--steps", "2"], capture_output=True, text=True, timeout=_SECONDS, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "class of the meshes: torch.distributed.device_mesh, meshverse" in ended.stdout


@pytest.mark.parametrize("what", ["losses", "norms", "weights"])
def test_a_difference_on_one_rank_is_reported(
    what: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(_TOOLS)
    import train_torchtitan as program

    def ranks(of_the_first: dict[str, Any]) -> list[dict[str, Any]]:
        rank = {"losses": [(1.5).hex()], "norms": [(0.5).hex()], "weights": "digest"}
        rank |= {"groups": 2, "class": "module", "about": "versions"}
        return [rank | of_the_first, rank]

    assert program.report({program.STOCK: ranks({}), program.OURS: ranks({})}) == 0
    changed = {what: [(0.25).hex()] if what != "weights" else "other"}
    assert program.report({program.STOCK: ranks({}), program.OURS: ranks(changed)}) == 1
    assert "False" in capsys.readouterr().out
