"""Records of what each rank called in its process groups, as torch's flight recorder dumps them.

The form of a dump is documented in torch's tutorial "Flight Recorder for Debugging Stuck Jobs" and
in torch/csrc/distributed/c10d/FlightRecorder.hpp; versions 1.0 to 2.10 of it are read, as a pickle
or as JSON, of NCCL and of gloo.
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
_KEPT = 4  # calls of each group that are over; all that are pending are kept
_MANY = 64  # files from which on processes share the reading
_P2P = re.compile(r"(send|recv) (\d+)(?:->|<-)(\d+)")
_RANK_IN_NAME = re.compile(r"(\d+)(\.\w+)?$")
# Parts of paths of files that are not the program's, on whatever machine they were recorded.
_PACKAGES, _OURS = ("/site-packages/", "/dist-packages/"), ("torch", "meshverse")
_PYTHONS = ("/lib/python3.", "/python/meshverse/", "/torch/distributed/", "/torch/_", "<")


class Call(NamedTuple):
    """A collective, a send or a receive, as one rank called it.

    Attributes:
        group: c10d's name of the process group.
        number: of the collective in its group, from 1; of a send or receive, among these.
        operation: such as "all_reduce".
        is_done: whether it is over on this rank.
        since: when it was called, in seconds since the epoch.
        shapes: of its inputs.
        dtype: of the first input; "" if it has none.
        line: file and line of the program, and its function; "" where that was not recorded.
        peer: of a send or receive, the other rank, within the group; else None.
        detail: more that must be equal on all ranks, such as "root 1"; "" where it is not known.
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
    """A process group, as a rank knows it.

    Attributes:
        label: what it is for, such as "axis tp".
        ranks: global ranks, in group-rank order; None where they are not known.
    """

    label: str
    ranks: Sequence[int] | None


@dataclass
class RankRecord:
    """The last calls of one rank.

    Attributes:
        rank: global rank.
        time: when it was recorded, in seconds since the epoch.
        calls: the last of each group, and all that are pending, in the order they were called.
        groups: its process groups, by c10d's name.
        doing: the line of the program that its main thread is in; "" where that is not known.
        was_asked: whether its calls were looked at; of many missing ranks, some are not.
    """

    rank: int
    time: float
    calls: list[Call] = field(default_factory=list)
    groups: dict[str, GroupSeen] = field(default_factory=dict)
    doing: str = ""
    was_asked: bool = True

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
    """Return the record of a dump, as torch's flight recorder gives it.

    Args:
        dump: the unpickled or parsed content.
        rank: global rank of the process.
        time: when it was dumped, in seconds since the epoch.

    Raises:
        ValueError: it is no dump of a flight recorder.
    """
    entries, config = dump.get("entries", []), dump.get("pg_config", {})
    if "version" not in dump or not isinstance(entries, list) or not isinstance(config, Mapping):
        raise ValueError("it is no dump of torch's flight recorder: it has no version and entries")
    try:
        groups = dict(_configured(config))
        # A process that has had several worlds has had several groups of one name: the last counts.
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
    """Return what a group is for, from c10d's description of it."""
    if description.startswith("mesh_"):
        return f"axis {description.removeprefix('mesh_')}"
    return DEFAULT_GROUP if description == "default_pg" else f"group {description!r}"


def complete_default_group(records: Mapping[int, RankRecord], largest_rank: int) -> None:
    """Give the default group its ranks, from 0 to the largest one, where a dump has none."""
    for record in records.values():
        for name, seen in record.groups.items():
            if seen.label == DEFAULT_GROUP and len(seen.ranks or ()) <= largest_rank:
                record.groups[name] = seen._replace(ranks=range(largest_rank + 1))


def _configured(config: Mapping[str, Any]) -> Iterator[tuple[str, GroupSeen]]:
    for value in config.values():
        ranks = value["ranks"]
        ranks = json.loads(ranks) if isinstance(ranks, str) else ranks
        if value["name"] and ranks:  # gloo's have neither
            yield str(value["name"]), GroupSeen(label_of(str(value["desc"])), _as_range(ranks))


def _as_range(ranks: list[int]) -> Sequence[int]:
    """Return ranks as a range where they are one: each of 10,240 dumps lists all ranks."""
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
    """Return the entries to keep, in order, each with its number and whether it is over."""
    numbered = []
    last_done: dict[tuple[str, bool], int] = {}
    for entry in entries:
        is_p2p = bool(entry.get("is_p2p"))
        number = int(
            entry["p2p_seq_id"] if is_p2p else entry.get("collective_seq_id", entry.get("seq_id"))
        )
        is_gloos = str(entry["profiling_name"]).startswith("gloo:")
        # Gloo says only whether a call is over. NCCL's watchdog also retires one that timed out.
        is_done = bool(entry["retired"]) if is_gloos else entry["state"] == "completed"
        key = entry["process_group"][0], is_p2p
        if is_done and not is_gloos:
            last_done[key] = max(last_done.get(key, 0), number)
        numbered.append((entry, key, number, is_done))
    left: dict[str, int] = {}
    kept: list[tuple[Mapping[str, Any], int, bool]] = []
    for entry, key, number, is_done in reversed(numbered):
        # NCCL runs the calls of a group in order, and the recorder does not follow each of those
        # that are coalesced: what comes before one that is over is over too.
        is_over = is_done or number <= last_done.get(key, 0)
        n_left = left.setdefault(key[0], _KEPT)
        if not is_over or n_left:
            left[key[0]] = max(n_left - is_over, 0)
            kept.append((entry, number, is_over))
    kept.reverse()
    return iter(kept)


def _call(entry: Mapping[str, Any], number: int, is_done: bool) -> Call | None:
    """Return the call of an entry; None for one that stands for several sends and receives."""
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

    If the program itself is installed, it is the innermost line in a package that is not torch.

    Args:
        frames: innermost first, each with its filename, line, and name of the function.
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
    """Write what this rank's flight recorder has, as torch does when NCCL's watchdog ends a job.

    Nothing writes gloo's by itself.

    Args:
        folder: of all ranks' dumps; made if it is not there.

    Returns:
        The file, named after the rank.

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
    """Read dumps of flight recorders, one a rank; a folder stands for the files in it.

    Args:
        paths: of files whose names end with the rank, as torch writes them, such as
            "nccl_trace_rank_12"; an ending such as ".json" or ".pickle" may follow.

    Raises:
        OSError: a file cannot be read.
        ValueError: a file is no dump, its name has no rank, two are of one rank, or there is none.
    """
    files = [file for path in map(Path, paths) for file in _files(path)]
    named: dict[int, Path] = {}
    for file in files:
        found = _RANK_IN_NAME.search(file.name)
        if found is None:
            raise ValueError(
                f"{file} has no rank at the end of its name: torch names a dump after its rank, "
                "such as nccl_trace_rank_12. Rename it, or give the other files."
            )
        rank = int(found[1])
        if rank in named:
            raise ValueError(
                f"{named[rank]} and {file} are both of rank {rank}: give the dumps of one job and "
                "one time only."
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
    with multiprocessing.get_context("fork").Pool() as pool:
        return pool.starmap(_record_of_file, files.items(), chunksize=32)


def _record_of_file(rank: int, file: Path) -> RankRecord:
    was_enabled = gc.isenabled()
    gc.disable()  # it would go through all of a dump again and again
    try:
        return record_of(_read(file), rank, file.stat().st_mtime)
    except (ValueError, pickle.UnpicklingError, EOFError, AttributeError) as error:
        raise ValueError(f"{file} cannot be read: {error}.") from None
    finally:
        if was_enabled:
            gc.enable()


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    return [file for file in sorted(path.iterdir()) if file.is_file() and file.name[0] != "."]


def _read(file: Path) -> Mapping[str, Any]:
    content = file.read_bytes()
    is_json = content.lstrip()[:1] == b"{"
    dump = json.loads(content) if is_json else _PlainUnpickler(io.BytesIO(content)).load()
    if not isinstance(dump, Mapping):
        raise ValueError("it is no dump of torch's flight recorder")
    return dump


class _PlainUnpickler(pickle.Unpickler):
    """Unpickler of numbers, strings, lists and dictionaries: a file may come from anywhere."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it has an object, {module}.{name}, which no dump has")
