"""Names of modules' parameters and buffers: which a state dict has, and which wrappers change."""

from __future__ import annotations

import sys

from torch import nn

# Classes by module, which only a program that wraps modules has imported.
_WRAPPERS = {
    "torch._dynamo.eval_frame": "OptimizedModule",
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper": "ActivationWrapper",
}


def is_persistent(module: nn.Module, name: str) -> bool:
    """Return whether a parameter or buffer of a module itself is in its state dict."""
    return name not in module._non_persistent_buffers_set


def changes_names(module: nn.Module) -> bool:
    """Return whether a module wraps another one, to which it gives a name of its own."""
    wrappers = (getattr(sys.modules.get(file), name, None) for file, name in _WRAPPERS.items())
    return isinstance(module, tuple(each for each in wrappers if each is not None))
