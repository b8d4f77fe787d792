"""The errors that docs/mismatches.md shows are those that are printed."""

from __future__ import annotations

import re
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from helpers.crew import Crew
from helpers.turns import say_when_compared, wait_for_comparison, wait_until_they_wait
from meshverse import init_device_mesh

_PAGE = Path(__file__).parents[2] / "docs" / "mismatches.md"
_BEGIN = "\n" * 11  # the call is in line 12
_DIFFERENT = _BEGIN + "init_device_mesh('cpu', shape, mesh_dim_names=('dp', 'tp'))"
_OTHER_RANKS = _BEGIN + "init_device_mesh('cpu', (3,), mesh_dim_names=('dp',), ranks=ranks)"


def _samples() -> list[str]:
    """The errors of the page, each as a line of words."""
    blocks = re.findall(r"^```text\n(.*?)^```$", _PAGE.read_text(), re.MULTILINE | re.DOTALL)
    return [" ".join(block.split()) for block in blocks if "Error: " in block]


def _different() -> str:
    """Rank 0 describes its call first, and the others come one after the other."""
    rank = dist.get_rank()
    names = {
        "init_device_mesh": init_device_mesh,
        "shape": (4, 1) if rank == 2 else (2, 2),
    }
    with pytest.MonkeyPatch.context() as patch:
        say_when_compared(patch)
        if rank:
            wait_for_comparison(rank - 1)
        return _printed(_DIFFERENT, names)


def _other_ranks() -> str:
    rank = dist.get_rank()
    ranks = [0, 1, 2] if rank < 2 else [1, 2, 3]
    names = {"init_device_mesh": init_device_mesh, "ranks": ranks}
    if rank == 3:
        return ""  # rank 2 is the first in its group, so that it finds the deadlock
    if rank == 2:
        wait_until_they_wait(0, 1)
    return _printed(_OTHER_RANKS, names)


def _printed(program: str, names: dict[str, Any]) -> str:
    """Return the last lines that Python prints of the error that ends a program."""
    with pytest.raises(RuntimeError) as caught:
        exec(compile(program, "train.py", "exec"), names)
    return "".join(traceback.format_exception_only(caught.value))


def _is_as_shown(message: str, sample: str) -> bool:
    words = re.sub(r"timeout=\d+s", "timeout=1800s", " ".join(message.split()))
    begin, dots, _ = sample.partition("...")
    return bool(dots) and words.startswith(begin.strip())


def test_the_page_shows_two_errors() -> None:
    assert len(_samples()) == 2


def test_ranks_that_build_different_meshes(crew: Crew) -> None:
    different, _ = _samples()
    for message in crew.run(_different, 4):
        assert _is_as_shown(message, different), message


def _waits(message: str) -> set[str]:
    """Return who waits for what. Any rank may find the deadlock, and names itself first."""
    found = re.findall(r"rank \d waits to create [^;(]+", " ".join(message.split()))
    return {each.strip() for each in found}


def test_ranks_that_wait_for_one_another(crew: Crew) -> None:
    _, other_ranks = _samples()
    assert len(_waits(other_ranks)) == 2
    messages = crew.run(_other_ranks, 4)
    assert any(_waits(message) == _waits(other_ranks) for message in messages), messages
    begin, _, rest = " ".join(other_ranks.split()).partition(" deadlock: ")
    end = rest.partition("). ")[2].partition(" ...")[0]
    assert any(begin in message and end in " ".join(message.split()) for message in messages)
