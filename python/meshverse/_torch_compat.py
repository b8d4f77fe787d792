"""Every torch-private name Meshverse relies on, with the versions it is for.

No other file of the package touches a private name of torch. What is public is imported from torch
where it is used. Each name below was checked on torch 2.11 to 2.15; `require_supported_torch` runs
at import, so a torch that moved one of them fails there, with one sentence.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeAlias, cast

import torch
import torch.distributed as dist
from torch.distributed import device_mesh as stock_module
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh as StockDeviceMesh

from . import _core

__all__ = [
    "FLATTENED_ARE_APART",
    "HAS_PRESERVE_RANK_ORDER",
    "IGNORED_OPTION_FIELDS",
    "BackendOptions",
    "ProcessGroup",
    "StockDeviceMesh",
    "TorchLayout",
    "bound_to_device",
    "can_split",
    "canonical_backend",
    "check_backend",
    "create_by_all",
    "create_by_members",
    "create_by_split",
    "current_default_group",
    "default_backend",
    "default_timeout",
    "equals_stock",
    "from_torch_layout",
    "hook_concatenate",
    "is_backend_options",
    "let_compile_know",
    "live_options",
    "members_only_hazard",
    "needs_own_world_group",
    "options_timeout",
    "real_mesh",
    "require_supported_torch",
    "resolve_group",
    "set_up_device",
    "stock_concatenate",
    "thread_id",
    "to_torch_layout",
    "untraced",
]

ProcessGroup: TypeAlias = dist.ProcessGroup
BackendOptions: TypeAlias = Any
"""An options object of some backend, such as `ProcessGroupNCCL.Options`; read by reflection."""
TorchLayout: TypeAlias = Any
"""torch's own layout of a mesh: `_MeshLayout`, whose form depends on the version."""

_OLDEST = "2.11"

# Fields of c10d's options objects that c10d itself fills in for each group, or that repeat what an
# options key states beside them (`_timeout`, `backend`). `split_*` is written on NCCL's. 2.11-2.15.
IGNORED_OPTION_FIELDS = frozenset(
    {
        "_timeout",
        "backend",
        "global_ranks_in_group",
        "group_name",
        "split_color",
        "split_from",
    }
)

# 2.15 gave DeviceMesh `preserve_rank_order`; before, stock sorts the ranks of every group.
HAS_PRESERVE_RANK_ORDER = "preserve_rank_order" in inspect.signature(StockDeviceMesh).parameters

# From 2.12 on, meshes are opaque types to torch.compile; before, DeviceMesh has no metaclass.
MESHES_ARE_OPAQUE = type(StockDeviceMesh) is not type

# What is used below, checked at import; names behind a version are in _PRIVATE_NAMES_SINCE_2_12.
_PRIVATE_NAMES: tuple[tuple[Any, str], ...] = (
    (c10d, "_get_default_timeout"),
    (c10d, "_new_process_group_helper"),
    (c10d, "_resolve_process_group"),
    (c10d, "_world"),
    (stock_module, "_MeshLayout"),
    (StockDeviceMesh, "_setup_world_group_and_device"),
    (StockDeviceMesh, "_concatenate"),
    (StockDeviceMesh, "_create_flatten_mesh"),
    (StockDeviceMesh, "_get_root_mesh"),
)
_PRIVATE_NAMES_SINCE_2_12 = ((stock_module, "_register_distributed_opaque_types"),)


def require_supported_torch() -> None:
    """Raise ImportError with one clear sentence if this torch lacks a name we rely on."""
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


# --- the default process group -------------------------------------------------------------------


def current_default_group() -> ProcessGroup | None:
    """The default process group of this thread, or None before `init_process_group`."""
    return dist.GroupMember.WORLD


def default_backend(group: ProcessGroup) -> str:
    """The backend string a group was made with, such as "gloo" or "cpu:gloo,cuda:nccl"."""
    return str(c10d._world.pg_map[group][0])


def canonical_backend(backend: str) -> str:
    """The backend as c10d spells it, in lower case."""
    return str(dist.Backend(backend))


def default_timeout(backend: str, default_group: ProcessGroup) -> timedelta:
    """What a group of this backend gets when no timeout is asked for.

    The timeout the user gave `init_process_group`, if it is not c10d's default there; stock forgets
    it. Otherwise c10d's default for the backend.
    """
    usual = c10d._get_default_timeout
    default_name = default_backend(default_group)
    given = _timeout_of(default_group)
    if given is not None and given != usual(dist.Backend(default_name)):
        return given
    return usual(dist.Backend(backend))


def _timeout_of(group: ProcessGroup) -> timedelta | None:
    return options_timeout(live_options(group))  # the fake backend has no options


def check_backend(backend: str) -> None:
    """Raise ValueError if c10d knows no such backend, before anything is created.

    Args:
        backend: a name ("gloo") or a list for devices ("cpu:gloo,cuda:nccl").
    """
    known = [name for name in dist.Backend.backend_list if name != dist.Backend.UNDEFINED]
    for part in backend.split(","):
        name = part.rpartition(":")[2].lower()
        if name not in known:
            raise ValueError(
                f"Unknown backend {name!r} in {backend!r}: torch.distributed knows {known}. "
                "Use one of these, or register yours with torch.distributed.Backend."
                "register_backend first."
            )


def thread_id() -> int | None:
    """This thread's id under torch's threaded test backend, whose ranks are threads; else None."""
    threaded = dist.is_initialized() and dist.get_backend() == "threaded"
    return threading.get_ident() if threaded else None


def set_up_device(mesh: StockDeviceMesh) -> None:
    """Start the default group if there is none, and choose this rank's device, as stock does.

    Raises:
        RuntimeError: the mesh is larger than the world.
    """
    mesh._setup_world_group_and_device()  # type: ignore[no-untyped-call]


def resolve_group(name: str) -> ProcessGroup:
    """The live process group registered under this name; RuntimeError if there is none."""
    return c10d._resolve_process_group(name)  # type: ignore[arg-type]


# --- options -------------------------------------------------------------------------------------


def is_backend_options(value: object) -> bool:
    """Whether the value is an options object of c10d, such as `ProcessGroupNCCL.Options`."""
    return isinstance(value, torch._C._distributed_c10d.Backend.Options)


def options_timeout(options: BackendOptions | None) -> timedelta | None:
    """The timeout an options object carries, or None if it carries none."""
    return getattr(options, "_timeout", None)


# --- how a group comes to be ---------------------------------------------------------------------


def bound_to_device(group: ProcessGroup) -> bool:
    """Whether the group was initialised eagerly, with its device bound (`device_id=`)."""
    return getattr(group, "bound_device_id", None) is not None


def _uses_torchcomms() -> bool:
    return bool(getattr(torch.distributed.config, "use_torchcomms", False))


def live_options(group: ProcessGroup) -> BackendOptions | None:
    """The options the group's first backend was made with, if it has any."""
    devices = group._device_types
    return group._get_backend(devices[0]).options if devices else None


def can_split(group: ProcessGroup, backend: str | None) -> bool:
    """Whether stock would split this default group for a new group of this backend."""
    device = torch.accelerator.current_accelerator()
    if device is None or not bound_to_device(group) or not torch.accelerator.is_available():
        return False
    return backend is None or bool(group._get_backend(device).name() == backend)


def members_only_hazard(group: ProcessGroup, backend: str) -> str | None:
    """Why a group of this backend must be made by all ranks, or None if its members suffice."""
    if _uses_torchcomms():
        return "torchcomms"
    if "mpi" in (part.rpartition(":")[2] for part in backend.split(",")):
        return "MPI"
    if callable(getattr(group, "new_group", None)):
        return "the default group makes its own subgroups"
    if os.environ.get("TORCH_DIST_INIT_BARRIER", "0") == "1":
        return "TORCH_DIST_INIT_BARRIER=1"
    if bound_to_device(group):
        return "the default group is bound to a device and the backend differs"
    return None


def needs_own_world_group(group: ProcessGroup) -> bool:
    """Whether stock makes a new group for an axis over the whole world, rather than reuse it."""
    return torch.cuda.is_available() and dist.get_backend(group) == "gloo"


def create_by_members(
    ranks: list[int],
    default_group: ProcessGroup,
    *,
    backend: str,
    options: BackendOptions | None,
    timeout: timedelta | None,
    name: str,
    description: str,
) -> ProcessGroup:
    """Create one process group; only its members call this, and only they take part.

    Args:
        ranks: global ranks of the group, in group-rank order; mine among them.
        default_group: the default process group, whose store the group uses.
        backend: backend string of the group.
        options: options object that c10d may keep and write to, or None.
        timeout: of the group's operations; None for c10d's default.
        name: unique in the life of the default group, the same on all members.
        description: shown in c10d's logs.
    """
    _, store = c10d._world.pg_map[default_group]
    group, _ = c10d._new_process_group_helper(
        len(ranks),
        ranks.index(default_group.rank()),
        ranks,
        backend,
        store,
        name,  # type: ignore[arg-type]
        backend_options=options,
        timeout=timeout,
        device_id=default_group.bound_device_id,
        group_desc=description,
    )
    c10d._world.pg_group_ranks[group] = dict(zip(ranks, range(len(ranks)), strict=True))
    return cast("ProcessGroup", group)


def create_by_split(
    ranks: Sequence[int],
    *,
    options: BackendOptions | None,
    timeout: timedelta | None,
    description: str,
) -> ProcessGroup | None:
    """Split the ranks off the default group; every rank of the default group calls this once.

    Returns:
        The new group, or None on a rank that is not in `ranks`.
    """
    group = dist.split_group(
        split_ranks=[list(ranks)], timeout=timeout, pg_options=options, group_desc=description
    )
    return group if isinstance(group, ProcessGroup) else None


def create_by_all(
    all_ranks: list[list[int]],
    *,
    backend: str,
    options: BackendOptions | None,
    timeout: timedelta | None,
    keeps_order: bool,
    description: str,
) -> ProcessGroup | None:
    """Create all groups of an axis as stock does, in a loop that every rank of the world runs.

    Args:
        all_ranks: global ranks of every group.
        backend: backend string of the groups.
        options: options object, or None.
        timeout: of the groups' operations.
        keeps_order: whether group ranks follow the order given, not ascending ranks.
        description: shown in c10d's logs.

    Returns:
        My group, or None if this rank is in none of them.

    Raises:
        ValueError: the order is to be kept, and this torch sorts the ranks of a group.
    """
    order: dict[str, Any] = {"sort_ranks": False} if keeps_order else {}
    if order and "sort_ranks" not in inspect.signature(dist.new_group).parameters:
        raise ValueError(
            f"preserve_rank_order needs a newer torch than {torch.__version__} where all ranks "
            "take part in making a group: this one sorts the ranks. Leave it out, or update torch."
        )
    mine = None
    for ranks in all_ranks:
        group = dist.new_group(
            ranks,
            timeout=timeout,
            backend=backend,
            pg_options=options,
            group_desc=description,
            **order,
        )
        if isinstance(group, ProcessGroup):
            mine = group
    return mine


# --- torch's layout classes ----------------------------------------------------------------------

_MeshLayout: Any = stock_module._MeshLayout
# 2.13 split the one layout class: `_FlatLayout` is an axis, `_MeshLayout` a tuple of axes.
_FlatLayout: Any = getattr(stock_module, "_FlatLayout", None)
# Before, a mesh made by flattening has another form, and is unequal to one made otherwise.
FLATTENED_ARE_APART = _FlatLayout is None


def _flat(sizes: tuple[int, ...], strides: tuple[int, ...]) -> Any:
    # Ours are canonical already, so the constructor's own coalescing (10 us an axis) is skipped.
    axis = object.__new__(_FlatLayout)
    object.__setattr__(axis, "shape", sizes)
    object.__setattr__(axis, "stride", strides)
    return axis


def _unnested(values: tuple[int, ...], one_point: int) -> int | tuple[int, ...]:
    return one_point if not values else values[0] if len(values) == 1 else values


def _to_torch_axis(axis: _core.AxisLayout) -> Any:
    if _FlatLayout is not None:
        return _flat(axis.sizes, axis.strides)
    return _MeshLayout(_unnested(axis.sizes, 1), _unnested(axis.strides, 1))


def to_torch_layout(layout: _core.Layout, *, flattened: bool) -> TorchLayout:
    """torch's form of a layout, equal to the one stock torch builds for the same mesh.

    Args:
        layout: ours.
        flattened: whether the mesh was made by flattening; 2.11 and 2.12 write those differently.
    """
    if _FlatLayout is not None:
        return _MeshLayout([_flat(axis.sizes, axis.strides) for axis in layout])
    if flattened and len(layout[0].sizes) < 2:
        return _to_torch_axis(layout[0])
    # 2.11 and 2.12 keep the stride of a size-1 axis, which ours do not: we give the stride it has
    # in a root mesh, row-major over what follows.
    strides: list[int | tuple[int, ...]] = []
    following = 1
    for axis in reversed(layout.axes):
        strides.append(_unnested(axis.strides, following))
        following = axis.sizes[0] * axis.strides[0] if axis.sizes else following
    sizes = tuple(_unnested(axis.sizes, 1) for axis in layout)
    return _MeshLayout(sizes, tuple(reversed(strides)))


# As it was before `hook_concatenate`.
stock_concatenate = StockDeviceMesh._concatenate


def from_torch_layout(layout: TorchLayout) -> _core.Layout:
    """Our form of a layout of torch's."""
    if _FlatLayout is not None:
        return _core.Layout([_core.AxisLayout(axis.shape, axis.stride) for axis in layout])
    axes = [layout[i] for i in range(len(layout))]
    flat = [list(axis.sizes_and_strides) for axis in axes]
    return _core.Layout(
        [_core.AxisLayout([m[0] for m in modes], [m[1] for m in modes]) for modes in flat]
    )


def equals_stock(mesh: StockDeviceMesh, stock: Any, layout: _core.Layout) -> bool:
    """Whether a mesh of ours, with this layout, is the same as a stock mesh. O(world)."""
    fields = ["_flatten_rank_map", "_device_type", "_mesh_dim_names", "_thread_id"]
    if HAS_PRESERVE_RANK_ORDER:
        fields.append("_preserve_rank_order")
    return from_torch_layout(stock._layout) == layout and all(
        getattr(mesh, field) == getattr(stock, field) for field in fields
    )


# --- tracing -------------------------------------------------------------------------------------


def let_compile_know(mesh_class: type[StockDeviceMesh], guard: Callable[[Any], list[Any]]) -> None:
    """Make torch.compile treat a subclass of the stock mesh as a mesh, with a guard of its own.

    From 2.12, meshes are opaque types, looked up along the MRO. The subclass gets an entry like
    stock's, under stock's name in op schemas, but with this guard. 2.11 asks whether a value is of
    the stock class itself, in one place; the import of Dynamo (0.8 s) is for 2.11 only.

    Args:
        mesh_class: our class.
        guard: gives the values of a mesh that must stay equal for a compiled graph to be used.
    """
    if not MESHES_ARE_OPAQUE:
        from torch._dynamo.variables.distributed import (  # type: ignore[attr-defined]
            DeviceMeshVariable,
        )

        DeviceMeshVariable.is_device_mesh = staticmethod(
            lambda value: isinstance(value, StockDeviceMesh)
        )
        return
    from torch._library import opaque_object

    stock_module._register_distributed_opaque_types()  # type: ignore[no-untyped-call]
    known = opaque_object._OPAQUE_TYPES
    known[mesh_class] = dataclasses.replace(known[StockDeviceMesh], guard_fn=guard)


def hook_concatenate(
    mesh_class: type[StockDeviceMesh], ours: Callable[[Sequence[Any]], StockDeviceMesh]
) -> None:
    """Have `DeviceMesh._concatenate`, which FSDP2 calls by the stock name, use ours for our meshes.

    Args:
        mesh_class: our class.
        ours: concatenates meshes of which the first is ours.
    """

    @functools.wraps(stock_concatenate)
    def concatenate(device_mesh_list: list[StockDeviceMesh]) -> StockDeviceMesh:
        is_ours = bool(device_mesh_list) and isinstance(device_mesh_list[0], mesh_class)
        return (ours if is_ours else stock_concatenate)(device_mesh_list)

    StockDeviceMesh._concatenate = staticmethod(concatenate)  # type: ignore[method-assign]


def real_mesh(value: object) -> Any:
    """The mesh inside one of torch.compile's stand-ins (`FakeScriptObject`), or the value."""
    return getattr(value, "real_obj", value)


@contextlib.contextmanager
def untraced() -> Iterator[None]:
    """Make real CPU tensors inside, whatever fake or proxy mode or default device is active."""
    from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

    with (
        torch._subclasses.fake_tensor.unset_fake_temporarily(),
        disable_proxy_modes_tracing(),
        torch.device("cpu"),
    ):
        yield
