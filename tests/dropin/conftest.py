"""A torch that is left as it was found."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.distributed.tensor.debug import _clear_sharding_prop_cache


@pytest.fixture(autouse=True)
def _torch_as_found(uninstalled_afterwards: None) -> Iterator[None]:
    """Every test of this tier may install Meshverse, and leave stock meshes to DTensor's caches."""
    yield
    _clear_sharding_prop_cache()


@pytest.fixture
def nothing_compiled() -> Iterator[None]:
    """Forget compiled code afterwards."""
    yield
    torch.compiler.reset()
