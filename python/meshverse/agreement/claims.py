"""What a rank says it is about to make, and how two ranks' words differ.

Example: rank 0 makes init_device_mesh (dp=2, tp=2), rank 3 makes (dp=4, tp=1). The difference is

    axis dp: 2 on rank 0, 4 on rank 3
    axis tp: 2 on rank 0, 1 on rank 3
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import NamedTuple

import torch

__all__ = ["Claim", "Statement", "differences", "users_line"]

_OWN = tuple(
    os.path.dirname(os.path.abspath(file)) + os.sep
    for file in (os.path.dirname(__file__), torch.__file__)
)
_PACKAGES = tuple(f"{os.sep}{folder}{os.sep}" for folder in ("site-packages", "dist-packages"))
# Python's library, and code that has no file: of imports, and of graphs that torch.compile makes.
_PYTHONS_OWN = (os.path.dirname(os.__file__) + os.sep, "<frozen ", "<eval_with_key>")


class Statement(NamedTuple):
    """What a rank is about to make, in words.

    Attributes:
        call: what the user called, such as "init_device_mesh".
        sizes: of the new axes, by name, in their order.
        facts: what else matters, by name.
        line: file and line of the user's program that called.
    """

    call: str
    sizes: Mapping[str, int]
    facts: Mapping[str, str]
    line: str

    def __str__(self) -> str:
        sizes = ", ".join(f"{name}={size}" for name, size in self.sizes.items())
        facts = ", ".join(f"{name} {fact}" for name, fact in self.facts.items())
        return f"{self.call} ({sizes}) at {self.line}: {facts}"

    def compared(self) -> dict[str, str]:
        """All of it by name, but for the line, which may differ."""
        axes = {f"axis {name}": str(size) for name, size in self.sizes.items()}
        order = {"order of axes": ", ".join(self.sizes)}
        return {"call": self.call, **axes, **order, **self.facts}


class Claim(NamedTuple):
    """What one rank says it is about to make.

    Attributes:
        rank: whose.
        digest: equal if and only if the ranks agree.
        statement: for people.
    """

    rank: int
    digest: str
    statement: Statement

    def to_line(self) -> str:
        """One line of text, for the store."""
        return f"{self.rank} {self.digest} {json.dumps(self.statement)}"

    @classmethod
    def read(cls, line: str) -> Claim:
        """What `to_line` wrote."""
        rank, digest, text = line.split(" ", 2)
        return cls(int(rank), digest, Statement(*json.loads(text)))


def differences(claims: Sequence[Claim]) -> list[str]:
    """What the claims of several ranks differ in, a line each."""
    compared = [claim.statement.compared() for claim in claims]
    names = dict.fromkeys(name for each in compared for name in each)
    lines = {}
    for name in names:
        ranks_of: dict[str, list[int]] = {}
        for claim, each in zip(claims, compared, strict=True):
            ranks_of.setdefault(each.get(name, "none"), []).append(claim.rank)
        if len(ranks_of) > 1:
            told = (f"{what} on {_in_words(ranks)}" for what, ranks in ranks_of.items())
            lines[name] = f"{name}: {', '.join(told)}"
    if any(name.startswith("axis ") for name in lines):  # then these follow from them
        lines.pop("strides", None)
        if not compared[0].keys() ^ compared[-1].keys():
            lines.pop("order of axes", None)
    return list(lines.values())


def _in_words(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def users_line() -> str:
    """File and line of the user's program that is being run.

    It is outside of this package, torch, Python and other installed packages. If the program itself
    is installed, it is the innermost line in a package that is neither this one nor torch.
    """
    frame: FrameType | None = sys._getframe(1)
    in_package = ""
    while frame is not None:
        file = frame.f_code.co_filename
        line = f"{file}:{frame.f_lineno}"
        if file.startswith(_OWN):
            pass
        elif any(folder in file for folder in _PACKAGES):  # which may lie in Python's own library
            in_package = in_package or line
        elif not file.startswith(_PYTHONS_OWN):
            return line
        frame = frame.f_back
    return in_package or f"thread {threading.current_thread().name!r}"
