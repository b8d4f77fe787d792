"""An object of the core that no constructor has made cannot be had: reading it would crash."""

from __future__ import annotations

import copyreg

import pytest

from helpers.forked import Forked
from meshverse import _core

_CLASSES = [
    "AxisLayout",
    "GroupCache",
    "HeldLock",
    "Holders",
    "Layout",
    "OptionsKey",
    "RankArray",
    "RankGroups",
    "RankMap",
]


def test_all_classes_are_tried() -> None:
    assert sorted(n for n, c in vars(_core).items() if isinstance(c, type)) == _CLASSES


_READ = """
import copyreg, sys
from meshverse import _core

kind = getattr(_core, sys.argv[1])
ways = {"new": lambda: kind.__new__(kind), "copyreg": lambda: copyreg.__newobj__(kind)}
ways["object"] = lambda: object.__new__(kind)
try:
    made = ways[sys.argv[2]]()
except TypeError as error:
    print("refused")
else:  # one that is as good as any other
    print(repr(made) and len(dir(made)) > 0 and made == made)
"""


@pytest.mark.parametrize("way", ["new", "copyreg", "object"])
@pytest.mark.parametrize("name", _CLASSES)
def test_an_object_is_made_whole_or_not_at_all(name: str, way: str) -> None:
    assert copyreg.__newobj__ is not None
    status, out, err = Forked(["-c", _READ, name, way]).communicate()
    assert (status, out.strip()) in [(0, "refused"), (0, "True")], err
