"""Which part of torch is calling."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import torch

_OUR_PACKAGE = __name__.partition(".")[0]
_STOCK_MODULE = "torch.distributed.device_mesh"
_FSDP2_PACKAGE = "torch.distributed.fsdp._fully_shard"


def fsdp2_is_creating() -> bool:
    """Whether FSDP2 itself creates the mesh that is being constructed. 2.13.

    This looks at the caller: the innermost frame that is neither ours nor in the file of torch's
    mesh class. Importing FSDP2 to replace its functions would take 0.7 s.
    """
    for module, _ in _callers():
        if module != _STOCK_MODULE:
            return module.startswith(_FSDP2_PACKAGE + ".")
    return False


def name_of_constructor() -> str:
    """Return what the program called to get the mesh that is being constructed, for messages.

    torch's `init_device_mesh` is such a function; others construct a `DeviceMesh` themselves.
    """
    is_torchs = next(_callers(), None) == (_STOCK_MODULE, "init_device_mesh")
    return "init_device_mesh" if is_torchs else "DeviceMesh"


def _callers() -> Iterator[tuple[str, str]]:
    """Yield the module and the name of each function outside of this package, the innermost first.

    It is torch's or the program's.
    """
    frame = inspect.currentframe()
    while frame is not None:
        module = str(frame.f_globals.get("__name__"))
        if module.partition(".")[0] != _OUR_PACKAGE:
            yield module, frame.f_code.co_name
        frame = frame.f_back


def is_in_backward() -> bool:
    """Whether this thread runs autograd's backward. 2.11-2.15."""
    return bool(torch._C._current_graph_task_id() != -1)
