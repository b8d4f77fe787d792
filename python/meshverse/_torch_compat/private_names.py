"""The oldest supported torch, and the private names of torch that Meshverse needs.

Each name was checked on torch 2.11 to 2.15. `require_supported_torch` runs at import, before any of
these names is used. So with a torch that lacks one, the import fails with an error that names it.
"""

from __future__ import annotations

import inspect
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import _guards as guards
from torch._C import _distributed_c10d as c10d_core
from torch._functorch import pyfunctorch as functorch
from torch._library import opaque_object
from torch._subclasses import fake_tensor
from torch.distributed import device_mesh as stock_module
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh as StockDeviceMesh
from torch.utils import _python_dispatch as python_dispatch

__all__ = [
    "HAS_PRESERVE_RANK_ORDER",
    "MESHES_ARE_OPAQUE",
    "BackendOptions",
    "ProcessGroup",
    "StockDeviceMesh",
    "TorchLayout",
    "c10d",
    "c10d_core",
    "c_extension",
    "fake_tensor",
    "functorch",
    "guards",
    "opaque_object",
    "python_dispatch",
    "require_supported_torch",
    "stock_module",
    "torch_ops",
]

c_extension: Any = torch._C
torch_ops: Any = torch._ops

ProcessGroup: TypeAlias = dist.ProcessGroup
BackendOptions: TypeAlias = Any
"""An options object of some backend, such as `ProcessGroupNCCL.Options`; read by reflection."""
TorchLayout: TypeAlias = Any
"""torch's own layout of a mesh: `_MeshLayout`, whose form depends on the version."""

_OLDEST = "2.11"


# 2.15 added `preserve_rank_order` to DeviceMesh. Before, torch sorts the ranks of every group.
HAS_PRESERVE_RANK_ORDER = "preserve_rank_order" in inspect.signature(StockDeviceMesh).parameters

# From 2.12 on, meshes are opaque types to torch.compile. Before, DeviceMesh has no metaclass.
MESHES_ARE_OPAQUE = type(StockDeviceMesh) is not type

# Names that every supported torch must have, checked at import. docs/torch_versions.md describes
# them, and those that are used only if the installed torch has them.
_PRIVATE_NAMES: tuple[tuple[Any, str], ...] = (
    (c10d, "_abort_process_group"),
    (c10d, "_get_default_timeout"),
    (c10d, "_get_split_source"),
    (c10d, "_new_process_group_helper"),
    (c10d, "_register_process_group"),
    (c10d, "_resolve_process_group"),
    (c10d, "_world"),
    (stock_module, "_MeshLayout"),
    (c10d_core, "Backend"),
    (c_extension, "DisableTorchFunction"),
    (c_extension, "DispatchKey"),
    (c_extension, "_SetExcludeDispatchKeyGuard"),
    (c_extension, "_dispatch_keys"),
    (c_extension, "_functorch"),
    (c_extension, "_len_torch_dispatch_stack"),
    (c_extension, "_len_torch_function_stack"),
    (fake_tensor, "FakeTensor"),
    (functorch, "temporarily_clear_interpreter_stack"),
    (guards, "TracingContext"),
    (guards, "detect_fake_mode"),
    (python_dispatch, "_disable_current_modes"),
    (torch_ops, "_len_torch_dispatch_stack_pre_dispatch"),
    (dist.ProcessGroup, "_device_types"),
    (dist.ProcessGroup, "_get_backend"),
    (StockDeviceMesh, "_setup_world_group_and_device"),
    (StockDeviceMesh, "_concatenate"),
    (StockDeviceMesh, "_create_flatten_mesh"),
    (StockDeviceMesh, "_get_root_mesh"),
    (StockDeviceMesh, "__hash__"),
    (StockDeviceMesh, "__setstate__"),
)
_PRIVATE_NAMES_SINCE_2_12: tuple[tuple[Any, str], ...] = (
    (opaque_object, "_OPAQUE_TYPES"),
    (stock_module, "_register_distributed_opaque_types"),
)
# Names by module, read only once a program has imported it: to compile, or to use DTensors.
# Importing these modules takes seconds, so a test checks the names, and not the import of this
# package.
_PRIVATE_NAMES_WHILE_COMPILING: dict[str, tuple[str, ...]] = {
    "torch._dynamo.symbolic_convert": ("InstructionTranslator",),
    "torch._dynamo.utils": ("counters",),
    "torch._dynamo.variables.builder": ("SourcelessBuilder",),
    "torch._inductor.ir": ("FallbackKernel",),
    "torch._inductor.lowering": ("lowerings", "register_lowering"),
    "torch._ops": ("OpOverloadPacket",),
    "torch.distributed._local_tensor": ("LocalIntNode", "enabled_local_tensor_mode"),
    "torch.distributed.tensor._redistribute": ("_optimize_transform_infos",),
    "torch.fx.experimental.symbolic_shapes": ("_constrain_range_for_size",),
}


def require_supported_torch() -> None:
    """Raise ImportError if the installed torch lacks a name that Meshverse needs."""
    if not dist.is_available():
        raise ImportError("meshverse needs a torch built with torch.distributed; this one is not.")
    names = _PRIVATE_NAMES + (_PRIVATE_NAMES_SINCE_2_12 if MESHES_ARE_OPAQUE else ())
    missing = [
        f"{getattr(owner, '__name__', owner)}.{name}"
        for owner, name in names
        if not hasattr(owner, name)
    ]
    if missing:
        raise ImportError(
            f"meshverse supports torch {_OLDEST} and newer, but torch {torch.__version__} lacks "
            f"{', '.join(missing)}. Install a supported torch, or a newer meshverse."
        )


require_supported_torch()
