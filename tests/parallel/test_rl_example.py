"""examples/rl.py under torchrun: what the generators make is what the trainers would have made."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

_EXAMPLE = Path(__file__).parents[2] / "examples" / "rl.py"


def test_the_generator_has_the_trainers_weights() -> None:
    # The example itself asserts that both generate the same, at every step.
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    ended = subprocess.run(
        [*launcher, "--nproc-per-node", "8", str(_EXAMPLE), "--tp", "2", "--steps", "3"],
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    rewards = re.findall(r"^step (\d) reward ([\d.]+) ", ended.stdout, re.MULTILINE)
    assert [step for step, _ in rewards] == ["1", "2", "3"]
    assert "Rank 0 receives 0 B in each run" in ended.stdout
