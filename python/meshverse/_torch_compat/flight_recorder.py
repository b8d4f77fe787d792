"""torch's flight recorder in this process, c10d's groups, and the call that a thread waits in."""

from __future__ import annotations

import os
import pickle
from collections.abc import Collection, Iterator
from types import FrameType
from typing import Any, NamedTuple

import torch.distributed as dist

from .private_names import c10d, c10d_core

_SIZE_VARIABLES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
_USUAL_SIZE = 2000
# NCCL's groups are in a recorder of their own, which only a torch with NCCL has.
_NAMES = ("_dump_nccl_trace", "_dump_fr_trace")
_dumps = [getattr(c10d_core, name) for name in _NAMES if hasattr(c10d_core, name)]


class FrameWait(NamedTuple):
    """A call of torch.distributed that a thread is in, read from its frame.

    Attributes:
        frame: frame of the call. Keep it no longer than needed: it keeps the call's tensors.
        since: when the call was first seen, in seconds since the epoch.
        operation: name of the function.
        group: c10d's name of the process group.
        peer: for a send or receive, the other rank, within the group, or -1 for any; else None.
        root: for a collective with a root, that rank, within the group; else None.
    """

    frame: FrameType
    since: float
    operation: str
    group: str
    peer: int | None
    root: int | None


class RecordedCall(NamedTuple):
    """A collective, a send or a receive in the flight recorder.

    Attributes:
        group: c10d's name of the process group.
        thread_id: identifier of the calling thread, as Python's `threading.get_ident()`.
        thread_name: the operating system's name of that thread.
        time_ns: time of the call, in nanoseconds since the epoch.
    """

    group: str
    thread_id: int
    thread_name: str
    time_ns: int


def recorder_size() -> int:
    """Return the number of calls that the flight recorder keeps; 0 if it is off."""
    sizes = (os.environ.get(name) for name in _SIZE_VARIABLES)
    size = next((each for each in sizes if each is not None), str(_USUAL_SIZE)).strip()
    is_number = bool(_dumps) and size.lstrip("-").isdecimal()
    return max(int(size), 0) if is_number else 0


def not_recording_reason() -> str | None:
    """Return why the flight recorder is off, and how to turn it on; None if it is on."""
    if not _dumps:
        return "this torch has no flight recorder for its backends"
    if recorder_size():
        return None
    return (
        f"torch's flight recorder is off: set {_SIZE_VARIABLES[0]}={_USUAL_SIZE} before the "
        "processes start"
    )


def read_flight_recorders(*, with_lines: bool) -> list[dict[str, Any]]:
    """Return the completed and pending calls of each recorder, NCCL's first. O(their size).

    Args:
        with_lines: whether to include each call's line in the program; the first time, this takes a
            second.
    """
    return [pickle.loads(dump(True, with_lines, False)) for dump in _dumps]  # written by torch


def recorded_calls() -> Iterator[RecordedCall]:
    """Yield the recorder's calls, oldest first, if it records threads. O(size of its buffer). 2.13.

    Nothing is recorded of backends without a flight recorder.
    """
    if not recorder_size():
        return
    for dump in read_flight_recorders(with_lines=False):
        for entry in dump["entries"]:
            if "thread_id" in entry:
                group, _ = entry["process_group"]
                thread_name = str(entry.get("thread_name", ""))
                time_ns = entry["time_created_ns"]
                yield RecordedCall(group, int(entry["thread_id"]), thread_name, time_ns)


def flight_recorder_status() -> dict[tuple[int, str], Any]:
    """Return the sequence numbers of each group's last calls. O(number of groups)."""
    return {
        (recorder, group): numbers
        for recorder, dump in enumerate(_dumps)
        for group, numbers in pickle.loads(dump(False, False, False))["pg_status"].items()
    }


def recorded_pickle() -> bytes:
    """Return a recorder's content as torch writes it to a file: NCCL's, if it has calls."""
    *nccls, last = _dumps
    used = (dump for dump in nccls if pickle.loads(dump(True, False, False))["entries"])
    content: bytes = next(used, last)(True, True, False)
    return content


def groups_of_process() -> Iterator[tuple[str, str, list[int]]]:
    """Yield the name, the description and the ordered ranks of each c10d group of this rank."""
    for group, ranks in list(c10d._world.pg_group_ranks.items()):
        name = c10d._world.pg_names.get(group)
        if name is not None and ranks:
            yield name, group.group_desc, sorted(ranks, key=lambda rank: ranks[rank])


def wait_of_frame(innermost: FrameType | None, now: float) -> FrameWait | None:
    """Return the send, receive or collective that a thread is in, or None.

    The flight recorder records no sends and receives of gloo, no roots of collectives, and with
    NCCL no call before the group has a communicator: a group's first call creates it, and waits
    for the other ranks there. This finds them in the frames of a waiting thread: it is in a
    function of torch.distributed, or in one of its pipelines that has a list of sends and receives.

    When a call was first seen is noted among the locals of its frame, as an `id` may soon be that
    of another frame. The note ends with the frame; torch's function does not see it.

    Args:
        innermost: innermost frame of the thread.
        now: time, in seconds since the epoch.
    """
    frame, is_in_distributed = innermost, True
    while frame is not None and _is_torchs(frame):
        is_in_distributed = is_in_distributed and _is_in_package(frame, "torch.distributed.")
        call = None
        if _is_call(frame):
            call = _call_of(
                frame.f_code.co_name, frame.f_locals, is_functional=not _is_c10ds(frame)
            )
        elif is_in_distributed and _is_in_package(frame, "torch.distributed.pipelining."):
            call = _first_p2p(list(frame.f_locals.values()))
        if call is not None:
            return FrameWait(frame, frame.f_locals.setdefault(_SEEN, now), *call)
        if _is_call(frame):
            return None  # of a group that has ended
        frame = frame.f_back
    return None


def sequence_number(name: str) -> int:
    """Return the number of the last collective that a group of this process has begun, from 1.

    Also of one that is not recorded. 0 if there is none, or the backend does not count.

    Args:
        name: c10d's name of the group.
    """
    group = _group_called(name)
    try:
        return 0 if group is None else int(group._get_sequence_number_for_group())
    except RuntimeError:  # of a backend that does not count
        return 0


def highest_number(name: str) -> int | None:
    """Return the number of the last collective that any backend of a group has begun.

    None if it is not known.

    Args:
        name: c10d's name of the group.
    """
    group, numbers = _group_called(name), []
    for device in () if group is None else group._device_types:
        try:
            backend = group._get_backend(device)
        except RuntimeError:  # there is none
            continue
        try:
            numbers.append(int(backend._get_sequence_number_for_group()))
        except RuntimeError:  # it does not count
            return None
    return max(numbers, default=None)


def creation_of_frame(frame: FrameType | None) -> str:
    """Return the function of torch.distributed in which a thread creates a process group; or "".

    There it waits for other ranks in the store, which nothing records.
    """
    while frame is not None and _is_torchs(frame):
        if _is_in(frame, _CREATIONS):
            return frame.f_code.co_name
        frame = frame.f_back
    return ""


def runs_backward(frame: FrameType) -> bool:
    """Return whether torch runs a backward in a frame, perhaps in threads of its own."""
    is_graphs = frame.f_globals.get("__name__") == "torch.autograd.graph"
    return is_graphs and frame.f_code.co_name == "_engine_run_backward"


def _is_torchs(frame: FrameType) -> bool:
    """Return whether a frame is torch's, or one of contextlib between two of torch's."""
    return _is_in_package(frame, "torch.") or _is_in_package(frame, "contextlib")


def _is_in_package(frame: FrameType, prefix: str) -> bool:
    return str(frame.f_globals.get("__name__")).startswith(prefix)


def _is_c10ds(frame: FrameType) -> bool:
    return frame.f_globals.get("__name__") == "torch.distributed.distributed_c10d"


def _is_in(frame: FrameType, functions: Collection[str]) -> bool:
    return _is_c10ds(frame) and frame.f_code.co_name in functions


def _is_call(frame: FrameType) -> bool:
    return _is_in(frame, _CALLS) or (
        frame.f_globals.get("__name__") == "torch.distributed._functional_collectives"
        and frame.f_code.co_name in _COLLECTIVES
    )


MONITORED_BARRIER = "monitored_barrier"  # which is not recorded
_SEEN = "seen by meshverse.watch()"  # no name that a program can have
_BATCH = "batch_isend_irecv"
_CREATIONS = ("new_group", "split_group", "init_process_group")
_PEERS = {
    "send": ("group_dst", "dst"),
    "recv": ("group_src", "src"),
    "isend": ("group_dst", "dst"),
    "irecv": ("group_src", "src"),
    "send_object_list": ("group_dst", "dst"),
    "recv_object_list": ("group_src", "src"),
}
_ROOTS = {
    "broadcast": ("group_src", "src"),
    "scatter": ("group_src", "src"),
    "reduce": ("group_dst", "dst"),
    "gather": ("group_dst", "dst"),
}
_COLLECTIVES = (
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_single",
    "all_gather_tensor",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    MONITORED_BARRIER,
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    *_ROOTS,
)
_CALLS = {*_PEERS, *_COLLECTIVES, _BATCH}

_FoundCall = tuple[str, str, int | None, int | None]  # as `FrameWait`, without its frame


def _call_of(operation: str, values: dict[str, Any], *, is_functional: bool) -> _FoundCall | None:
    if operation == _BATCH:
        return _first_p2p([values.get("p2p_op_list")])
    group = values.get("group_name") or values.get("group") or dist.GroupMember.WORLD
    if isinstance(group, str):  # of a functional collective
        group = _group_called(group)
    if not isinstance(group, dist.ProcessGroup):  # perhaps a mesh that is not resolved yet
        return None
    name = c10d._world.pg_names.get(group)
    if name is None:
        return None
    if is_functional or operation not in _PEERS | _ROOTS:
        return operation, name, None, None
    in_group, in_world = (_PEERS | _ROOTS)[operation]
    other = values.get(in_group)
    is_peer = operation in _PEERS
    if other is None and values.get(in_world) is not None:
        other = c10d._world.pg_group_ranks[group].get(values[in_world])
    elif other is None and is_peer:  # only receives may leave it out
        other = -1
    if is_peer:
        return operation.partition("_")[0].removeprefix("i"), name, other, None
    return operation, name, None, other


def _first_p2p(values: list[Any]) -> _FoundCall | None:
    """Return the first send or receive of the first list of these among some values."""
    for value in values:
        if isinstance(value, list) and value and isinstance(value[0], dist.P2POp):
            operation = value[0]
            name = c10d._world.pg_names.get(operation.group)
            if name is None:
                return None
            peer = c10d._world.pg_group_ranks[operation.group].get(operation.peer)
            return operation.op.__name__.removeprefix("i"), name, peer, None
    return None


def _group_called(name: str) -> Any:
    return next((group for group, own in list(c10d._world.pg_names.items()) if own == name), None)
