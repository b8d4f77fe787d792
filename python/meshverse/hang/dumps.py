"""Files with dumps of flight recorders: one per rank, whatever else lies beside them."""

from __future__ import annotations

import gc
import io
import json
import multiprocessing
import os
import pickle
import re
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from .records import HISTORY, KEPT, Call, RankRecord, group_in_words, record_of

_MANY = 64  # from this number of files on, several processes read them
_RANK_IN_NAME = re.compile(r"(\d+)(\.\w+)?$")
_MOST_RANKS = 2**24  # a larger number at the end of a name is a date or a process id, no rank
# Hangs end after minutes or hours. Dumps whose last calls are further apart are of two hangs.
_LONGEST_HANG_SECONDS = 12 * 3600.0
# Operations that end on no rank before all ranks have called them.
_JOINT = ("all_", "_all_", "barrier", "reduce_scatter", "_reduce_scatter", "allreduce")
_ERRORS = (  # of unpickling or parsing bytes that are no dump
    ValueError,
    pickle.UnpicklingError,
    EOFError,
    AttributeError,
    ImportError,
    IndexError,
    KeyError,
    TypeError,
    OverflowError,
    MemoryError,
    RecursionError,
)


class LeftOut(NamedTuple):
    """A file that is not among the dumps.

    Attributes:
        file: path.
        rank: rank that its name ends with; None if it ends with none.
        reason: why it was left out, for messages: "it is empty".
        is_dump: whether it is a dump, of another moment.
    """

    file: Path
    rank: int | None
    reason: str
    is_dump: bool = False


@dataclass
class Dumps:
    """The dumps of one hang.

    Attributes:
        records: what was recorded, by global rank.
        left_out: files that are no dumps, or of another moment.
    """

    records: dict[int, RankRecord] = field(default_factory=dict)
    left_out: list[LeftOut] = field(default_factory=list)
    _files: dict[int, Path] = field(default_factory=dict)

    def history(self, rank: int) -> RankRecord | None:
        """Return all that the dump of a rank has recorded; None if there is no dump of it.

        The dump is read again: `records` have few completed calls, as there may be many ranks.
        """
        if rank not in self._files:
            return None
        record = _record_or_reason(rank, self._files[rank], HISTORY)
        return None if isinstance(record, str) else record

    def largest_rank(self) -> int:
        """Return the largest rank of the dumps, and of damaged files that are named like them."""
        names = {_without_rank(file) for file in self._files.values()}
        damaged = (
            one.rank
            for one in self.left_out
            if one.rank is not None and not one.is_dump and _without_rank(one.file) in names
        )
        return max(*self.records, *damaged, -1)

    def why_missing(self, rank: int) -> str:
        """Return why there is no dump of a rank, if a file of it was left out; else ""."""
        found = (one for one in self.left_out if one.rank == rank)
        return next((f"{one.file.name}: {one.reason}" for one in found), "")


def write_dump(folder: str | os.PathLike[str]) -> Path:
    """Write a dump of this rank's flight recorder, in torch's format.

    With NCCL, torch itself writes one when its watchdog finds a timeout; with gloo, it never does.

    Args:
        folder: folder for the dumps of all ranks; it is created if it does not exist.

    Returns:
        Path of the file, whose name ends with the rank.

    Raises:
        RuntimeError: the recorder is off, or there is no default process group.
        OSError: the file cannot be written. An earlier dump stays as it is.
    """
    # Here, as reading dumps needs no torch.
    import torch.distributed as dist

    from meshverse._torch_compat.c10d_groups import current_default_group
    from meshverse._torch_compat.flight_recorder import not_recording_reason, recorded_pickle

    if why := not_recording_reason():
        raise RuntimeError(f"There is nothing to dump: {why}.")
    if current_default_group() is None:
        raise RuntimeError("There is no default process group, whose rank the dump is named after.")
    file = Path(folder) / f"trace_rank_{dist.get_rank()}"
    file.parent.mkdir(parents=True, exist_ok=True)
    taken = time.time()
    # Hidden, so no dump to those who read the folder; another thread may write one, too.
    new = file.with_name(f".{file.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        new.write_bytes(recorded_pickle())
        os.utime(new, (taken, taken))  # when a dump was taken is read from its file
        new.replace(file)
    except OSError:
        new.unlink(missing_ok=True)
        raise
    return file


def read_dumps(paths: Sequence[str | os.PathLike[str]]) -> Dumps:
    """Read dumps of flight recorders, one per rank. A file that is none costs only itself.

    Args:
        paths: files whose names end with the rank, as torch names them, such as
            "nccl_trace_rank_12"; a suffix such as ".json" or ".pickle" may follow. A folder stands
            for the files in it.

    Raises:
        OSError: a path does not exist, or a folder cannot be listed.
        ValueError: no file is a dump.
    """
    given = [file for path in map(Path, paths) for file in _files(path)]
    files = [*{file.resolve(): file for file in given}.values()]  # each once
    dumps = Dumps()
    ranked: list[tuple[int, Path]] = []
    for file in files:
        found = _RANK_IN_NAME.search(file.name)
        if found is None:
            reason = "its name does not end with a rank, as that of nccl_trace_rank_12 does"
            dumps.left_out.append(LeftOut(file, None, reason))
        elif int(found[1]) >= _MOST_RANKS:
            reason = f"its name ends with {found[1]}, which is too large for a rank: rename it"
            dumps.left_out.append(LeftOut(file, None, reason))
        else:
            ranked.append((int(found[1]), file))
    read: list[tuple[Path, RankRecord]] = []
    for (rank, file), record in zip(ranked, _all_records(ranked), strict=True):
        if isinstance(record, str):
            dumps.left_out.append(LeftOut(file, rank, record))
        else:
            read.append((file, record))
    for file, record in _of_one_moment(read, dumps):
        other = dumps.records.setdefault(record.rank, record)
        dumps._files.setdefault(record.rank, file)
        if other is not record:
            reason = "there is a newer dump of this rank"
            dumps.left_out.append(LeftOut(file, record.rank, reason, is_dump=True))
    dumps.records = dict(sorted(dumps.records.items()))
    if not dumps.records:
        reasons = [f"\n  {one.file}: {one.reason}" for one in dumps.left_out[:8]]
        raise ValueError(f"There are no dumps in {', '.join(map(str, paths))}.{''.join(reasons)}")
    return dumps


def _without_rank(file: Path) -> Path:
    return file.with_name(_RANK_IN_NAME.sub(r"_\2", file.name))


def _files(path: Path) -> list[Path]:
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist. Pass dumps, or a folder that has them.")
    if not path.is_dir():
        return [path]
    return [file for file in sorted(path.iterdir()) if file.is_file() and file.name[0] != "."]


# --- one file -----------------------------------------------------------------------------------


def _all_records(files: Sequence[tuple[int, Path]]) -> list[RankRecord | str]:
    if len(files) < _MANY or "fork" not in multiprocessing.get_all_start_methods():
        return [_record_or_reason(*one) for one in files]
    # Without the collector, which would scan the objects of a dump again and again. These processes
    # are ours; in the caller's, it is left alone.
    with multiprocessing.get_context("fork").Pool(initializer=gc.disable) as pool:
        return pool.starmap(_record_or_reason, files, chunksize=32)


def _record_or_reason(rank: int, file: Path, n_kept: int = KEPT) -> RankRecord | str:
    """Return the record in a file, or the reason why there is none."""
    try:
        return record_of(_read(file), rank, file.stat().st_mtime, n_kept=n_kept)
    except OSError as error:
        return f"it cannot be read ({error.strerror or error})"
    except _ERRORS as error:
        what = str(error) or type(error).__name__
        return what if what.startswith(("it ", "an entry ")) else f"it cannot be read ({what})"


def _read(file: Path) -> Mapping[str, Any]:
    content = file.read_bytes()
    if not content:
        raise ValueError("it is empty")
    is_json = content.lstrip()[:1] == b"{"
    dump = json.loads(content) if is_json else _PlainUnpickler(io.BytesIO(content)).load()
    if not isinstance(dump, Mapping):
        raise ValueError("it is not a dump of torch's flight recorder")
    return dump


class _PlainUnpickler(pickle.Unpickler):
    """Unpickler of numbers, strings, lists and dictionaries only: a file may be malicious."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it contains {module}.{name}, which no dump does")


# --- one moment ---------------------------------------------------------------------------------


def _of_one_moment(
    read: Iterable[tuple[Path, RankRecord]], dumps: Dumps
) -> Iterator[tuple[Path, RankRecord]]:
    """Yield the newest dumps, newest first; leave out those that are of an earlier hang or moment.

    A dump is of an earlier moment if it was written before a call that, by a newer dump, all ranks
    of a group have completed, and lacks this call.
    """
    by_age = sorted(read, key=lambda one: _last_call(one[1]), reverse=True)
    newest = _last_call(by_age[0][1]) if by_age else 0.0
    completed: dict[object, Call] = {}  # by group, the last one
    for file, record in by_age:
        age = newest - _last_call(record)
        lacks = next(_lacking(record, completed), None)
        if record.calls and age > _LONGEST_HANG_SECONDS:
            reason = f"its last call is {age / 3600:,.0f} hours older than that of the newest dump"
            dumps.left_out.append(LeftOut(file, record.rank, reason, is_dump=True))
        elif lacks is not None:
            group = group_in_words(record.groups[lacks.group])
            reason = (
                f"it is of another moment, {lacks.since - record.time:,.0f} s before number "
                f"{lacks.number:,} on {group}, which is completed"
            )
            dumps.left_out.append(LeftOut(file, record.rank, reason, is_dump=True))
        else:
            for call in record.calls:
                if call.is_done and call.operation.startswith(_JOINT):
                    key = _identity(call.group, record)
                    if call.number >= completed.setdefault(key, call).number:
                        completed[key] = call
            yield file, record


def _lacking(record: RankRecord, completed: Mapping[object, Call]) -> Iterator[Call]:
    for name in record.groups:
        call, last = completed.get(_identity(name, record)), record.last(name)
        if call is None or last is None:
            continue
        if last.number < call.number and record.time < call.since:
            yield call


def _identity(group: str, record: RankRecord) -> object:
    """Return a key of a group: ranks may give different groups the same name."""
    ranks = record.groups[group].ranks
    return (group, ranks[0], len(ranks)) if ranks else (group, record.rank)


def _last_call(record: RankRecord) -> float:
    return max((call.since for call in record.calls), default=float("-inf"))
