"""The errors that docs/universe.md shows are those that are printed."""

from __future__ import annotations

import re
import time
from pathlib import Path

import torch.distributed as dist

from helpers.crew import Crew
from helpers.differing import ending_of
from meshverse import init_device_mesh

_PAGE = Path(__file__).parents[2] / "docs" / "universe.md"
_BEGIN = "\n" * 11  # the call is in line 12
_DIFFERENT = _BEGIN + "init_device_mesh('cpu', shape, mesh_dim_names=('dp', 'tp'))"
_OTHER_RANKS = _BEGIN + "init_device_mesh('cpu', (3,), mesh_dim_names=('dp',), ranks=ranks)"


def _samples() -> list[str]:
    """The errors of the page, each as a line of words."""
    blocks = re.findall(r"^```text\n(.*?)^```$", _PAGE.read_text(), re.MULTILINE | re.DOTALL)
    return [" ".join(block.split()) for block in blocks if block.startswith("RuntimeError")]


def _different() -> str:
    rank = dist.get_rank()
    time.sleep(rank / 2)  # rank 0 comes first, and rank 2 finds the difference
    names = {
        "init_device_mesh": init_device_mesh,
        "shape": (4, 1) if rank == 2 else (2, 2),
    }
    return ending_of(lambda: exec(compile(_DIFFERENT, "train.py", "exec"), names)).message


def _other_ranks() -> str:
    rank = dist.get_rank()
    ranks = [0, 1, 2] if rank < 2 else [1, 2, 3]
    names = {"init_device_mesh": init_device_mesh, "ranks": ranks}
    time.sleep(0.6 * rank)  # rank 2 finds the cycle: when it notes its wait, the others have
    return ending_of(lambda: exec(compile(_OTHER_RANKS, "train.py", "exec"), names)).message


def _is_as_shown(message: str, sample: str) -> bool:
    words = " ".join(f"RuntimeError: {message}".split()).replace("timeout=40s", "timeout=1800s")
    begin, dots, _ = sample.partition("...")
    return bool(dots) and words.startswith(begin.strip())


def test_ranks_that_build_different_meshes(four: Crew) -> None:
    different, _ = _samples()
    message = four.run(_different, 4)[2]
    assert _is_as_shown(message, different), message


def test_ranks_that_wait_for_one_another(four: Crew) -> None:
    _, other_ranks = _samples()
    messages = four.run(_other_ranks, 4)
    assert any(_is_as_shown(message, other_ranks) for message in messages), messages
