"""The default process group and its store; finding and ending process groups."""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from .backends import options_of, timeout_of
from .private_names import ProcessGroup, StockDeviceMesh, c10d

# --- the default process group -------------------------------------------------------------------


def current_default_group() -> ProcessGroup | None:
    """Return the default process group of this thread, or None before `init_process_group`."""
    return dist.GroupMember.WORLD


def thread_id() -> int | None:
    """Return this thread's id if ranks are threads (torch's threaded test backend), else None."""
    threaded = dist.is_initialized() and dist.get_backend() == "threaded"
    return threading.get_ident() if threaded else None


def set_up_world_and_device(mesh: StockDeviceMesh) -> None:
    """Start the default group if there is none, and choose this rank's device, as torch does.

    Raises:
        RuntimeError: the mesh is larger than the world.
        RuntimeError: this torch was built without the mesh's device, and `LOCAL_RANK` names one.
        ValueError: there is no default group, and the environment lacks the variables to start one.
    """
    try:
        mesh._setup_world_group_and_device()  # type: ignore[no-untyped-call]
    except (AssertionError, AttributeError) as error:
        device_type = mesh._device_type
        module = getattr(torch, device_type, None)
        if module is None or not hasattr(module, "is_available") or module.is_available():
            raise
        raise RuntimeError(
            f"Device type {device_type!r} is not available: this torch, {torch.__version__}, was "
            f"built without it, and cannot choose device {os.environ.get('LOCAL_RANK')} (the "
            f"LOCAL_RANK of the launcher). Install a build of torch with {device_type!r}, or "
            "create the mesh of 'cpu'."
        ) from error
    except ValueError as error:
        if "environment variable" not in str(error):
            raise
        program = os.path.basename(sys.argv[0]) or "program.py"
        raise ValueError(
            f"{error}. There is no process group, and the environment does not set this rank. "
            f"Start the program with a launcher, such as `torchrun --nproc-per-node 4 {program}`, "
            "or call torch.distributed.init_process_group() with rank=, world_size= and a store "
            "before the first mesh."
        ) from error


def store_of(default_group: ProcessGroup) -> Any:
    """Return the store of a default group; None for MPI, which has none."""
    return c10d._world.pg_map[default_group][1]


def clone_store(store: Any) -> Any:
    """Return another client of a store, or the store itself if it is not a `TCPStore`."""
    base = store
    while isinstance(base, dist.PrefixStore):
        base = base.underlying_store
    return store.clone() if isinstance(base, dist.TCPStore) else store


def store_allows_rendezvous(default_group: ProcessGroup) -> bool:
    """Whether ranks can have a rendezvous in the default group's store, which needs `compare_set`.

    They cannot with MPI, which has no store; with the fake backend, whose store does nothing; and
    with stores written in Python without `compare_set`, such as torchelastic's for etcd.
    """
    base = store_of(default_group)
    while isinstance(base, dist.PrefixStore):
        base = base.underlying_store
    kind: Any = type(base)  # mypy believes that a class cannot be hashed
    return _has_compare_set(kind)


def _has_compare_set(kind: type) -> bool:
    if issubclass(kind, (dist.TCPStore, dist.FileStore, dist.HashStore)):
        return True
    # A class written in Python has an operation only if it defines it: c10d's base class raises.
    own = (base for base in kind.__mro__ if base not in dist.Store.__mro__)
    return any("compare_set" in vars(base) for base in own)


class _NoGroups(list[ProcessGroup]):
    """An empty list that can be referenced weakly."""


def world_lifetime() -> object:
    """Return an object that c10d drops when the default group is destroyed or aborted.

    Other code may keep references to the default group and its store, so these cannot serve. This
    object is a list in c10d's registry of groups by tag, under a tag that nothing else uses. c10d
    clears that registry when it ends the default group. 2.11-2.15.
    """
    return c10d._world.tags_to_pg.setdefault("meshverse: no groups", _NoGroups())


def destroys_passed_default_group() -> FrameType | None:
    """Return the caller of `destroy_process_group(group)` that is ending the default group now.

    None if nothing calls it, or if it was called without a group. For the callback of the object
    that `world_lifetime` returns, which c10d drops inside that call. 2.11-2.15.
    """
    code = inspect.unwrap(c10d.destroy_process_group).__code__
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return None if frame is None or frame.f_locals.get("group") is None else frame.f_back


class Ranks(dict[int, int]):
    """Map from global rank to rank in a group, for weak references, which a dict does not allow."""


class _Watch(weakref.ref[Ranks]):
    """A weak reference to a group's `Ranks` that calls a function when the group ends."""

    __slots__ = ("arguments", "callback", "key")
    key: int
    callback: Callable[..., object]
    arguments: tuple[Any, ...]


_watches: dict[int, _Watch] = {}  # by the id of the `Ranks`


def when_destroyed(group: ProcessGroup, callback: Callable[..., object], *arguments: Any) -> None:
    """Call a function once when the group is destroyed or aborted.

    If this is called several times for a group, only the first function is called. c10d reports no
    such event, but it has the only reference to a dictionary of the members' ranks, which it drops
    when the group ends. So a weak reference to that dictionary has a callback at the end of the
    group. 2.11-2.15. O(group size) for groups of `dist.new_group`, whose dictionary is copied.
    """
    kept = c10d._world.pg_group_ranks
    ranks = kept.get(group)
    if type(ranks) is not Ranks:
        if ranks is None or group is current_default_group():  # see `world_lifetime`
            return
        kept[group] = ranks = Ranks(ranks)
    key = id(ranks)
    if key not in _watches:
        watch = _Watch(ranks, _end_watch)
        watch.key, watch.callback, watch.arguments = key, callback, arguments
        _watches[key] = watch  # last, as an interrupt can come at any line


# These are default arguments, as the module's globals may be gone when a process ends.
def _end_watch(
    watch: _Watch,
    watches: dict[int, _Watch] = _watches,
    is_exiting: Callable[[], bool] = sys.is_finalizing,
) -> None:
    watches.pop(watch.key, None)
    if not is_exiting():
        watch.callback(*watch.arguments)


def shrunk_from(name: str) -> ProcessGroup | None:
    """Return the group with which `shrink_group` replaced the group of this name, or None.

    The new group's description contains the old name. 2.11-2.15.
    """
    groups = list(c10d._world.pg_names)  # a copy, as other threads may add groups
    return next((group for group in groups if group.group_desc == f"{name}:shrunk"), None)


def is_shrunk_default(group: ProcessGroup) -> bool:
    """Whether `shrink_group` created this default group, in which ranks have new numbers."""
    return bool(group.group_desc == "default:shrunken")


def can_be_reconfigured(group: ProcessGroup) -> bool:
    """Whether a group's members, and this process's rank in it, can change. 2.14-2.15.

    The group's own `supports_reconfigure` does not say so: it is true for every gloo group.
    """
    options = (options_of(group._get_backend(device)) for device in group._device_types)
    return any(getattr(one, "enable_reconfigure", False) for one in options)


def end_group(name: str, *, abort: bool) -> None:
    """Free the group of this name, if c10d still has it.

    Args:
        name: c10d's name of the group.
        abort: whether to abort its running collectives, if the backend can, instead of waiting for
            them.
    """
    held = [group for group in (find_c10d_group(name),) if group is not None]
    if not held:
        return
    tag = c10d._world.pg_to_tag.get(held[0])
    c10d._world.pg_group_ranks.setdefault(held[0], {})  # missing if its creation was interrupted
    if abort:
        with _left_behind(held):
            c10d._abort_process_group(held[0])
    else:
        dist.destroy_process_group(held[0])
    # c10d never removes the group's tag, under which it keeps an empty list. 2.11-2.15.
    tags = c10d._world.tags_to_pg
    if tag is not None and tags.get(tag) == []:
        tags.pop(tag, None)


def abort_all() -> None:
    """Abort the default group, and with it all other groups."""
    with _left_behind(list(c10d._world.pg_names)):
        c10d._abort_process_group()


@contextlib.contextmanager
def _left_behind(groups: list[ProcessGroup]) -> Iterator[None]:
    """Keep gloo groups that the block aborts until their operations have timed out.

    gloo cannot abort an operation: the destructor of a group waits for those that are running, and
    so for other ranks. It must not run in the caller, which would wait; nor, for long, in another
    thread: Python ends the process with an error if that comes back while the process exits.
    """
    held = [group for group in groups if not _is_nccl(group)]
    seconds = max((one.total_seconds() for one in map(timeout_of, held) if one), default=1800.0)
    try:
        yield
    finally:
        if held:
            # A process that ends before neither waits for this thread nor destroys the groups.
            timer = threading.Timer(min(seconds, threading.TIMEOUT_MAX), held.clear)
            timer.name, timer.daemon = "meshverse aborted groups", True
            timer.start()


def _is_nccl(group: ProcessGroup) -> bool:
    nccl = getattr(c10d, "ProcessGroupNCCL", None)  # None in a build without it
    backends = [group._get_backend(device) for device in group._device_types]
    return nccl is not None and all(isinstance(backend, nccl) for backend in backends)


# Returns the live process group that is registered under a name; RuntimeError if there is none.
resolve_group: Callable[[str], ProcessGroup] = c10d._resolve_process_group  # type: ignore[assignment]


def find_c10d_group(name: str) -> ProcessGroup | None:
    """Return the live process group registered under a name, or None."""
    try:
        return resolve_group(name)
    except RuntimeError:
        return None


def group_ranks_of(mesh: Any) -> list[list[int]]:
    """Return the global ranks of this rank's groups along the axes of a mesh, in group-rank order.

    Lazy groups that are not created yet are left out. For a mesh without groups, the list is empty.
    """
    names = list.__iter__(getattr(mesh, "_dim_group_names", None) or [])
    found = [find_c10d_group(name) for name in names if name is not None]
    return [dist.get_process_group_ranks(group) for group in found if group is not None]


def lacks_a_group(stock: Any, ranks: list[list[int]]) -> bool:
    """Return whether a stock mesh was created with process groups, and one of them has ended.

    A later world may have another group of the same name.

    Args:
        stock: mesh of torch's class.
        ranks: ascending global ranks of this rank's group along each axis.
    """
    names = getattr(stock, "_dim_group_names", None) or []
    if len(names) != len(ranks) or None in names:
        return False
    return [sorted(found) for found in group_ranks_of(stock)] != ranks
