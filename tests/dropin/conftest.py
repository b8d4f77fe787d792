"""A torch that is left as it was found."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _torch_as_found(uninstalled_afterwards: None) -> None:
    """Every test of this tier may install Meshverse."""


@pytest.fixture
def nothing_compiled() -> Iterator[None]:
    """What is compiled is forgotten afterwards."""
    yield
    torch.compiler.reset()
