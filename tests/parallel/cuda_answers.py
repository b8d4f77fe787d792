"""What Megatron-FSDP asks of torch.cuda, answered where there is no GPU.

The package needs no GPU to compute, but asks for streams and the current device. Those calls, and
nothing else, are replaced.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor


class _Stream:
    """A stream and event where there is no GPU: everything has happened already."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def wait(self, stream: Any = None) -> None: ...

    def record_event(self, event: Any = None) -> _Stream:
        return self


@contextlib.contextmanager
def cuda_that_only_answers() -> Iterator[None]:
    answers = {
        "current_device": lambda: 0,
        "Stream": _Stream,
        "Event": _Stream,
        "current_stream": _Stream,
        "stream": lambda stream: contextlib.nullcontext(),
        "synchronize": lambda device=None: None,
        "empty_cache": lambda: None,
    }
    with (
        mock.patch.multiple(torch.cuda, **answers),
        mock.patch.object(Tensor, "cuda", lambda self: self),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")  # the package's own
        yield
