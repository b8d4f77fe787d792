"""Replacing a function of Meshverse in every module that has imported it."""

from __future__ import annotations

import sys
from typing import Any

import pytest


def replace_everywhere(patch: pytest.MonkeyPatch, old: Any, new: Any) -> None:
    """Set each global variable of a module of Meshverse that is `old` to `new`."""
    found = [
        (module, attribute)
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] == "meshverse"
        for attribute, value in list(vars(module).items())
        if value is old
    ]
    assert found
    for module, attribute in found:
        patch.setattr(module, attribute, new)
