"""One rank's part of the state at one step, in a memory-mapped file.

A file is written under a name that begins with a dot, and renamed when it is whole. A process that
is killed at any moment leaves the files that were there before.

Layout: magic, header's offset, length and checksum; items, each at a multiple of `_ALIGNED` bytes;
the header, a pickled `Header`.
"""

from __future__ import annotations

import mmap
import os
import pickle
import re
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

from .values import Values

__all__ = ["Contents", "FileName", "Header", "Record", "SnapshotFile", "names_in"]

_START = struct.Struct("<8sQQI")
_MAGIC = b"mvsnap02"
_ALIGNED = 64
_COLUMNS = 2039  # of 8 bytes, in a block of a checksum
_BLOCK = 64 * 8 * _COLUMNS  # about 1 MB
_NAME = re.compile(r"(\d{6}-[0-9a-f]{8})\.(\d{12,})\.(\d{6})\.snapshot")
_SIMPLE = (bool, int, float, str, type(None))  # their pickles are kept: optimizers have thousands


class FileName(NamedTuple):
    """Name of a file; names sort by age.

    Attributes:
        attempt: run of the job that wrote it: its number, and random digits that the ranks of this
            run have in common.
        step: step of the state.
        owner: rank that saved it.
    """

    attempt: str
    step: int
    owner: int

    def __str__(self) -> str:
        return f"{self.attempt}.{self.step:012d}.{self.owner:06d}.snapshot"


def names_in(folder: Path) -> list[FileName]:
    """Return the names of the whole files of a folder, oldest first."""
    matches = filter(None, map(_NAME.fullmatch, os.listdir(folder)))
    return sorted(FileName(found[1], int(found[2]), int(found[3])) for found in matches)


class Record(NamedTuple):
    """An item's place in a file, and its checksum."""

    item: WriteItem
    start: int
    n_bytes: int
    checksum: int


@dataclass(frozen=True)
class Header:
    """Contents of a file, but for the data.

    Attributes:
        world_size: number of ranks of the job that saved it.
        hosts: names of its hosts and their ranks.
        records: its items.
    """

    world_size: int
    hosts: list[tuple[str, list[int]]]
    records: list[Record]

    @property
    def names(self) -> set[str]:
        """Names of the saved values."""
        return {record.item.index.fqn for record in self.records}


class SnapshotFile:
    """A file that is mapped into memory.

    Args:
        path: the file.
        n_bytes: least size of a file to write; None to read one that is there.

    Raises:
        OSError: the file system has too little memory left.
    """

    def __init__(self, path: Path, n_bytes: int | None = None) -> None:
        self.path = path
        writes = n_bytes is not None
        opened = os.open(path, os.O_RDWR | os.O_CREAT if writes else os.O_RDONLY, 0o600)
        try:
            if n_bytes is not None and os.fstat(opened).st_size < n_bytes:
                _allocate(opened, n_bytes, path)
            self.n_bytes = os.fstat(opened).st_size
            access = mmap.ACCESS_WRITE if writes else mmap.ACCESS_COPY
            self._map = mmap.mmap(opened, self.n_bytes, access=access)
        finally:
            os.close(opened)
        self.bytes = torch.frombuffer(self._map, dtype=torch.uint8)

    # --- Write -----------------------------------------------------------------------------------

    def rename(self, path: Path) -> None:
        """Give the file another name, which takes effect at once or not at all."""
        os.rename(self.path, path)
        self.path = path

    def remove_if_begun(self) -> None:
        """Remove the file, unless it is whole: it has the name of whole ones."""
        if self.path.name.startswith("."):
            self.path.unlink(missing_ok=True)

    def write(self, contents: Contents) -> None:
        """Copy items into the file, and their header."""
        records = []
        for (item, value), (start, size) in zip(contents.items, contents.places, strict=True):
            padded = self.bytes[start : start + _padded(size, 8)]
            padded[size:].zero_()
            if isinstance(value, torch.Tensor):
                if size:
                    padded[:size].view(value.dtype).view(value.shape).copy_(value.detach())
            else:
                self._map[start : start + size] = value
            records.append(Record(item, start, size, self._checksum(start, size)))
        header = pickle.dumps(Header(contents.world_size, contents.hosts, records))
        end = contents.end + len(header)
        self._map[contents.end : end] = header
        self._map[: _START.size] = _START.pack(
            _MAGIC, contents.end, len(header), zlib.crc32(header)
        )

    # --- Read ------------------------------------------------------------------------------------

    def used(self) -> torch.Tensor:
        """Return the bytes of the file that have contents."""
        _, start, size, _ = _START.unpack(self._map[: _START.size])
        return self.bytes[: start + size]

    def header(self) -> Header | None:
        """Return the header, or None if it is damaged."""
        if self.n_bytes < _START.size:
            return None
        magic, start, size, checksum = _START.unpack(self._map[: _START.size])
        header = self._map[start : start + size]
        if magic != _MAGIC or zlib.crc32(header) != checksum:
            return None
        read: Header = pickle.loads(header)
        return read

    def is_sound(self, header: Header) -> bool:
        """Whether all items have their checksums."""
        return all(
            self._checksum(start, size) == checksum for _, start, size, checksum in header.records
        )

    def _checksum(self, start: int, size: int) -> int:
        """Return a checksum that depends on the values and their order.

        CRC-32 of a large item would take longer than its copy. Instead, blocks of it are seen as
        matrices: the CRC-32 is of the sums of their columns, which take one pass at the speed of
        memory. The number of columns is a prime, so permuted rows, pages or experts differ.
        """
        end = start + _padded(size, 8)
        with memoryview(self._map) as view:
            if size < _BLOCK:
                return zlib.crc32(view[start:end])
            checksum, whole = 0, start + (end - start) // _BLOCK * _BLOCK
            sums = bytearray(8 * _COLUMNS)
            words = torch.frombuffer(sums, dtype=torch.int64)
            for block in range(start, whole, _BLOCK):
                rows = self.bytes[block : block + _BLOCK].view(torch.int64).view(-1, _COLUMNS)
                torch.sum(rows, 0, out=words)
                checksum = zlib.crc32(sums, checksum)
            return zlib.crc32(view[whole:end], checksum)

    def tensor(self, record: Record) -> torch.Tensor:
        """Return the tensor of a record, in the file's memory."""
        data = record.item.tensor_data
        assert data is not None
        flat = self.bytes[record.start : record.start + record.n_bytes]
        return flat.view(data.properties.dtype).view(data.chunk.sizes)

    def pickled(self, record: Record) -> torch.Tensor:
        """Return the bytes of a record."""
        return self.bytes[record.start : record.start + record.n_bytes]


class Contents:
    """Items that one rank saves at one step, and their places in a file.

    Args:
        state: what `torch.distributed.checkpoint.save` takes, without Stateful objects.
        pickles: those of the last step, which are reused.
        world_size: see `Header`.
        hosts: see `Header`.

    Attributes:
        items: each with its tensor or its pickle.
        places: start and size of each item in the file, in bytes.
        pickles: those of this step's simple values, by type and `repr`.
    """

    def __init__(
        self,
        state: dict[str, Any],
        pickles: dict[tuple[type, str], bytes],
        world_size: int,
        hosts: list[tuple[str, list[int]]],
    ) -> None:
        self.world_size, self.hosts = world_size, hosts
        values = Values(state)
        self.pickles: dict[tuple[type, str], bytes] = {}
        self.items = [(item, self._value(values, item, pickles)) for item in values.items]
        self.places = list(self._placed())
        self.end = _padded(sum(self.places[-1])) if self.places else _ALIGNED
        # The header has at most 64 bytes an item more than this.
        header = len(pickle.dumps((values.items, hosts))) + 64 * len(values.items)
        self.n_bytes = self.end + header + 4096

    def _value(
        self, values: Values, item: WriteItem, pickles: dict[tuple[type, str], bytes]
    ) -> torch.Tensor | bytes:
        if item.type != WriteItemType.BYTE_IO:
            return values.tensor(item)
        value = values.by_name[item.index.fqn]
        key = (type(value), repr(value)) if type(value) in _SIMPLE else None
        pickled = pickles.get(key) or self.pickles.get(key) if key else None
        pickled = pickled or values.pickled(item)
        if key:
            self.pickles[key] = pickled
        return pickled

    def _placed(self) -> Iterator[tuple[int, int]]:
        start = _ALIGNED
        for _, value in self.items:
            size = value.nbytes if isinstance(value, torch.Tensor) else len(value)
            yield start, size
            start = _padded(start + size)


def _allocate(opened: int, n_bytes: int, path: Path) -> None:
    try:
        if hasattr(os, "posix_fallocate"):  # a full tmpfs is an error here, not a SIGBUS later
            os.posix_fallocate(opened, 0, n_bytes)
        else:
            os.ftruncate(opened, n_bytes)
    except OSError as error:
        raise OSError(
            error.errno,
            f"a snapshot of {n_bytes} bytes does not fit into {path.parent}: "
            f"{os.strerror(error.errno or 0)}. Choose a folder on a file system with room for "
            "`keep` snapshots of each of the host's ranks, and of the copies it receives",
        ) from error


def _padded(n_bytes: int, multiple: int = _ALIGNED) -> int:
    return -(-n_bytes // multiple) * multiple
