"""Buffers of modules: which of them a state dict has."""

from __future__ import annotations

from torch import nn


def is_persistent(module: nn.Module, name: str) -> bool:
    """Return whether a parameter or buffer of a module itself is in its state dict."""
    return name not in module._non_persistent_buffers_set
