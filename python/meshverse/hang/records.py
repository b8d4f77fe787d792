"""Records of the calls of each rank in its process groups, from torch's flight recorder.

The format of a dump is documented in torch's tutorial "Flight Recorder for Debugging Stuck Jobs"
and in torch/csrc/distributed/c10d/FlightRecorder.hpp. Versions 1.0 to 2.10 of the format are read,
as pickle or JSON, from NCCL and gloo.
"""

from __future__ import annotations

import gc
import io
import json
import multiprocessing
import os
import pickle
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from meshverse import _torch_compat as compat

DEFAULT_GROUP = "the default group"
_KEPT = 4  # completed calls kept per group; pending calls are all kept
_MANY = 64  # from this number of files on, several processes read them
_P2P = re.compile(r"(send|recv) (\d+)(?:->|<-)(\d+)")
_RANK_IN_NAME = re.compile(r"(\d+)(\.\w+)?$")
# Parts of paths of files that are not the program's. The dump may be from another machine.
_PACKAGES, _OURS = ("/site-packages/", "/dist-packages/"), ("torch", "meshverse")
_PYTHONS = ("/lib/python3.", "/python/meshverse/", "/torch/distributed/", "/torch/_", "<")


class Call(NamedTuple):
    """A collective, a send or a receive, as one rank called it.

    Attributes:
        group: c10d's name of the process group.
        number: number of the collective in its group, from 1. Sends and receives are numbered
            separately; 0 means that the number is not known.
        operation: name of the operation, such as "all_reduce".
        is_done: whether the call is over on this rank.
        since: time of the call, in seconds since the epoch.
        shapes: shapes of the inputs.
        dtype: dtype of the first input; "" if there is none.
        line: file, line and function of the program; "" if that was not recorded.
        peer: rank within the group that a send goes to or a receive comes from; else None.
        detail: another argument that must be equal on all ranks, such as "root 1"; "" if unknown.
    """

    group: str
    number: int
    operation: str
    is_done: bool
    since: float
    shapes: tuple[tuple[int, ...], ...] = ()
    dtype: str = ""
    line: str = ""
    peer: int | None = None
    detail: str = ""

    @property
    def is_p2p(self) -> bool:
        """Whether it is a send or a receive."""
        return self.peer is not None


class GroupSeen(NamedTuple):
    """A process group, as a rank or its dump describes it.

    Attributes:
        label: name for messages, such as "axis tp".
        ranks: global ranks, in group-rank order; None if they are not known.
    """

    label: str
    ranks: Sequence[int] | None


@dataclass
class RankRecord:
    """The last calls of one rank.

    Attributes:
        rank: global rank.
        time: time of the record, in seconds since the epoch.
        calls: last calls in each group, and all pending calls, in the order of the calls.
        groups: the rank's process groups, by c10d's name.
        doing: line of the program that the rank's main thread is in; "" if it is not known.
        was_read: whether the rank's record was read: of many missing ranks, only some are.
    """

    rank: int
    time: float
    calls: list[Call] = field(default_factory=list)
    groups: dict[str, GroupSeen] = field(default_factory=dict)
    doing: str = ""
    was_read: bool = True

    def pending(self) -> list[Call]:
        """Return the calls that are not over, oldest first."""
        return [call for call in self.calls if not call.is_done]

    def last(self, group: str) -> Call | None:
        """Return the last collective that this rank called in a group, or None."""
        return next((c for c in reversed(self.calls) if c.group == group and not c.is_p2p), None)

    def renamed(self, names: Mapping[str, str]) -> RankRecord:
        """Return this record with other names for some groups."""
        groups = {names.get(name, name): seen for name, seen in self.groups.items()}
        calls = [call._replace(group=names.get(call.group, call.group)) for call in self.calls]
        return replace(self, groups=groups, calls=calls)


def record_of(dump: Mapping[str, Any], rank: int, time: float) -> RankRecord:
    """Return the record in a dump of torch's flight recorder.

    Args:
        dump: unpickled or parsed content of the dump.
        rank: global rank of the process.
        time: time of the dump, in seconds since the epoch.

    Raises:
        ValueError: `dump` is not a dump of a flight recorder.
    """
    entries, config = dump.get("entries", []), dump.get("pg_config", {})
    if "version" not in dump or not isinstance(entries, list) or not isinstance(config, Mapping):
        raise ValueError("it is not a dump of torch's flight recorder: no version or entries")
    try:
        groups = dict(_configured(config))
        # In a process that has had several worlds, a name can be that of several groups. Only the
        # calls of the last one count.
        ids = {entry["process_group"][0]: entry.get("pg_id") for entry in entries}
        for entry in entries:
            name, description = entry["process_group"]
            if name not in groups:
                groups[str(name)] = GroupSeen(label_of(description), None)
        last = [entry for entry in entries if entry.get("pg_id") == ids[entry["process_group"][0]]]
        calls = [call for call in (_call(*entry) for entry in _to_keep(last)) if call is not None]
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise ValueError(f"an entry is not as torch writes it: {error!r}") from None
    return RankRecord(rank, time, calls, groups)


def label_of(description: str) -> str:
    """Return a group's name for messages, from c10d's description of the group."""
    if description.startswith("mesh_"):
        return f"axis {description.removeprefix('mesh_')}"
    return DEFAULT_GROUP if description == "default_pg" else f"group {description!r}"


def complete_default_group(records: Mapping[int, RankRecord], largest_rank: int) -> None:
    """Set the ranks of the default group, from 0 to the largest one, if a dump lacks them."""
    for record in records.values():
        for name, seen in record.groups.items():
            if seen.label == DEFAULT_GROUP and len(seen.ranks or ()) <= largest_rank:
                record.groups[name] = seen._replace(ranks=range(largest_rank + 1))


def _configured(config: Mapping[str, Any]) -> Iterator[tuple[str, GroupSeen]]:
    for value in config.values():
        ranks = value["ranks"]
        ranks = json.loads(ranks) if isinstance(ranks, str) else ranks
        if value["name"] and ranks:  # gloo's groups have neither
            yield str(value["name"]), GroupSeen(label_of(str(value["desc"])), _as_range(ranks))


def _as_range(ranks: list[int]) -> Sequence[int]:
    """Return ranks as a range if possible, to save memory: each of 10,240 dumps lists all ranks."""
    first, *others = ranks
    step = others[0] - first if others else 1
    if step > 0:
        as_range = range(first, first + step * len(ranks), step)
        if list(as_range) == ranks:
            return as_range
    return tuple(map(int, ranks))


def _to_keep(
    entries: Sequence[Mapping[str, Any]],
) -> Iterator[tuple[Mapping[str, Any], int, bool]]:
    """Return the entries to keep, in order, each with its number and whether the call is over."""
    numbered = []
    last_done: dict[tuple[str, bool], int] = {}
    for entry in entries:
        is_p2p = bool(entry.get("is_p2p"))
        number = int(
            entry["p2p_seq_id"] if is_p2p else entry.get("collective_seq_id", entry.get("seq_id"))
        )
        is_gloos = str(entry["profiling_name"]).startswith("gloo:")
        # With gloo, a call is over once it is retired; there is no other sign. NCCL's watchdog also
        # retires calls that timed out.
        is_done = bool(entry["retired"]) if is_gloos else entry["state"] == "completed"
        key = entry["process_group"][0], is_p2p
        if is_done and not is_gloos:
            last_done[key] = max(last_done.get(key, 0), number)
        numbered.append((entry, key, number, is_done))
    left: dict[str, int] = {}
    kept: list[tuple[Mapping[str, Any], int, bool]] = []
    for entry, key, number, is_done in reversed(numbered):
        # NCCL runs the calls of a group in order, so all calls before one that is over are over
        # too. The recorder does not update each of several coalesced calls.
        is_over = is_done or number <= last_done.get(key, 0)
        n_left = left.setdefault(key[0], _KEPT)
        if not is_over or n_left:
            left[key[0]] = max(n_left - is_over, 0)
            kept.append((entry, number, is_over))
    kept.reverse()
    return iter(kept)


def _call(entry: Mapping[str, Any], number: int, is_done: bool) -> Call | None:
    """Return the call of an entry; None if the entry stands for several sends and receives."""
    operation = str(entry["profiling_name"]).rpartition(":")[2]
    p2p = _P2P.match(operation) if entry.get("is_p2p") else None
    if entry.get("is_p2p") and p2p is None:
        return None
    return Call(
        group=str(entry["process_group"][0]),
        number=number,
        operation=operation if p2p is None else p2p[1],
        is_done=is_done,
        since=int(entry["time_created_ns"]) / 1e9,
        shapes=tuple(tuple(shape) for shape in entry["input_sizes"]),
        dtype=next(iter(entry.get("input_dtypes") or ()), ""),
        line=line_of(entry.get("frames", ())),
        peer=None if p2p is None else int(p2p[3]),
    )


def line_of(frames: Iterable[Mapping[str, Any]]) -> str:
    """Return the innermost line of the program among frames; "" if there is none.

    If no frame is outside Python and installed packages, the program itself is a package. Then this
    is the innermost line in a package other than torch and meshverse.

    Args:
        frames: frames, innermost first, each with filename, line and name of the function.
    """
    in_package = ""
    for frame in frames:
        file = str(frame["filename"])
        line = f"{file}:{frame['line']} in {frame['name']}"
        if any(part in file for part in _PACKAGES):
            is_torchs = any(f"{part}{name}/" in file for part in _PACKAGES for name in _OURS)
            in_package = in_package or ("" if is_torchs else line)
        elif not any(part in file for part in _PYTHONS):
            return line
    return in_package


# --- files --------------------------------------------------------------------------------------


def write_dump(folder: str | os.PathLike[str]) -> Path:
    """Write a dump of this rank's flight recorder, in torch's format.

    With NCCL, torch itself writes one when its watchdog finds a timeout; with gloo, it never does.

    Args:
        folder: folder for the dumps of all ranks; it is created if it does not exist.

    Returns:
        Path of the file, whose name ends with the rank.

    Raises:
        RuntimeError: the recorder is off, or there is no default process group.
    """
    if why := compat.why_not_recording():
        raise RuntimeError(f"There is nothing to dump: {why}.")
    if compat.current_default_group() is None:
        raise RuntimeError("There is no default process group, whose rank the dump is named after.")
    file = Path(folder) / f"trace_rank_{dist.get_rank()}"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(compat.recorded_pickle())
    return file


def read_dumps(paths: Sequence[str | os.PathLike[str]]) -> dict[int, RankRecord]:
    """Read dumps of flight recorders, one per rank.

    Args:
        paths: files whose names end with the rank, as torch names them, such as
            "nccl_trace_rank_12"; a suffix such as ".json" or ".pickle" may follow. A folder stands
            for the files in it.

    Raises:
        OSError: a file cannot be read.
        ValueError: a file is not a dump, its name has no rank, two files have the same rank, or
            there is no file.
    """
    files = [file for path in map(Path, paths) for file in _files(path)]
    named: dict[int, Path] = {}
    for file in files:
        found = _RANK_IN_NAME.search(file.name)
        if found is None:
            raise ValueError(
                f"{file} has no rank at the end of its name: torch names a dump after its rank, "
                "such as nccl_trace_rank_12. Rename it, or leave it out."
            )
        rank = int(found[1])
        if rank in named:
            raise ValueError(
                f"{named[rank]} and {file} are both of rank {rank}: pass one dump per rank, all "
                "of one job and one time."
            )
        named[rank] = file
    records = dict(zip(named, _all_records(named), strict=True))
    if not records:
        raise ValueError(f"There are no dumps in {', '.join(map(str, paths))}.")
    complete_default_group(records, max(records))
    return records


def _all_records(files: Mapping[int, Path]) -> list[RankRecord]:
    if len(files) < _MANY or "fork" not in multiprocessing.get_all_start_methods():
        return [_record_of_file(*one) for one in files.items()]
    # Without the collector, which would scan the objects of a dump again and again. These processes
    # are ours; in the caller's, it is left alone.
    with multiprocessing.get_context("fork").Pool(initializer=gc.disable) as pool:
        return pool.starmap(_record_of_file, files.items(), chunksize=32)


def _record_of_file(rank: int, file: Path) -> RankRecord:
    try:
        return record_of(_read(file), rank, file.stat().st_mtime)
    except (ValueError, pickle.UnpicklingError, EOFError, AttributeError) as error:
        raise ValueError(f"{file} cannot be read: {error}.") from None


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    return [file for file in sorted(path.iterdir()) if file.is_file() and file.name[0] != "."]


def _read(file: Path) -> Mapping[str, Any]:
    content = file.read_bytes()
    is_json = content.lstrip()[:1] == b"{"
    dump = json.loads(content) if is_json else _PlainUnpickler(io.BytesIO(content)).load()
    if not isinstance(dump, Mapping):
        raise ValueError("it is not a dump of torch's flight recorder")
    return dump


class _PlainUnpickler(pickle.Unpickler):
    """Unpickler of numbers, strings, lists and dictionaries only: a file may be malicious."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it contains {module}.{name}, which no dump does")
