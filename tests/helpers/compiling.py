"""Helpers of tests that compile, beside the fixture `nothing_compiled`."""

from __future__ import annotations

import pytest

__all__ = ["COMPILES"]

# The warnings are from torch itself while it compiles; none of them is about meshes.
COMPILES = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.usefixtures("nothing_compiled"),
]
