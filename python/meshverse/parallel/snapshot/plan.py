"""Reads of a rank from a snapshot: what it needs, who has it, and what nobody has.

`torch.distributed.checkpoint`'s planners compute which parts of which saved chunks a rank needs, on
whatever mesh it saved and on whatever mesh it loads.
"""

from __future__ import annotations

import io
import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from ctypes import string_at
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem, WriteItem

from .file import FileName, Header, Record, SnapshotFile
from .values import Values

__all__ = ["Place", "Plan", "part_of"]


class Place(NamedTuple):
    """A file that a rank can read.

    Attributes:
        holder: the rank.
        owner: rank that saved the file.
    """

    holder: int
    owner: int


class Plan:
    """A rank's reads of a snapshot.

    Args:
        state: the state to load into, without Stateful objects.
        headers: of all files that ranks can read.
        rank: this rank.
        world_size: number of ranks.
        distance: how far away a holder's files are.

    Attributes:
        names: names of all values of the state.
        reads: planned reads, each with the place to read from.
        missing: what nobody has, in words.
    """

    def __init__(
        self,
        state: dict[str, Any],
        headers: Mapping[Place, Header],
        rank: int,
        world_size: int,
        distance: Callable[[int], int],
    ) -> None:
        self._values = values = Values(state)
        needs = {item.index: _size(item) for item in values.items}
        keys = {index.fqn for index in needs}
        self._places: dict[MetadataIndex, list[tuple[Place, Record]]] = defaultdict(list)
        for place, header in headers.items():
            for record in header.records:
                if record.item.index.fqn in keys and _size(record.item) != 0:
                    self._places[record.item.index].append((place, record))

        def preference(found: tuple[Place, Record]) -> tuple[bool, int, int]:
            place, _ = found
            return place.owner != rank, distance(place.holder), (place.owner - rank) % world_size

        saved_by = max((header.world_size for header in headers.values()), default=0)
        self.names = frozenset(values.by_name)
        several = set()
        for index, found in self._places.items():
            found.sort(key=preference)
            has_own = found[0][0].owner == rank and saved_by == world_size
            if not has_own and len({record.checksum for _, record in found}) > 1:
                several.add(index.fqn)
        self.missing = [
            f"this rank's value of {name!r} (other ranks saved different values: give each rank's "
            "a key of its own)"
            for name in sorted(several | self._with_overlapping_parts())
        ]
        self.missing += self._of_other_dtypes()
        self._planner = DefaultLoadPlanner(
            flatten_state_dict=False, flatten_sharded_tensors=False, allow_partial_load=True
        )
        self._planner.set_up_planner(dict(values.by_name), self._metadata())
        try:
            planned = self._planner.finish_plan(self._planner.create_local_plan())
        except ValueError as error:  # saved with another shape or type
            planned = LoadPlan([])
            self.missing.append(str(error))
        self.reads = [(item, self._places[item.storage_index][0]) for item in planned.items]
        read: dict[MetadataIndex, int] = defaultdict(int)
        for item in planned.items:
            read[item.dest_index] += math.prod(item.lengths) if _is_tensor(item) else 1
        lacking = {index.fqn for index, size in needs.items() if read[index] < size}
        self.missing += [repr(name) for name in sorted(lacking)]

    def _with_overlapping_parts(self) -> set[str]:
        """Return the names under which ranks saved parts that cannot be of one tensor."""
        sizes: dict[str, int] = defaultdict(int)
        wholes: dict[str, int] = {}
        for index, places in self._places.items():
            data = places[0][1].item.tensor_data
            if data is not None:
                sizes[index.fqn] += math.prod(data.chunk.sizes)
                wholes[index.fqn] = math.prod(data.size)
        return {name for name, size in sizes.items() if size > wholes[name]}

    def _of_other_dtypes(self) -> list[str]:
        now = {
            item.index.fqn: item.tensor_data.properties.dtype
            for item in self._values.items
            if item.tensor_data is not None
        }
        found = {
            (name, record.item.tensor_data.properties.dtype)
            for index, places in self._places.items()
            for _, record in places
            if (name := index.fqn) in now and record.item.tensor_data is not None
        }
        return [
            f"{name!r} as {now[name]} (it was saved as {dtype})"
            for name, dtype in sorted(found, key=str)
            if dtype != now[name]
        ]

    def _metadata(self) -> Metadata:
        """Return the snapshot as a checkpoint of `torch.distributed.checkpoint`."""
        found: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        for index, places in self._places.items():
            data = places[0][1].item.tensor_data
            if data is None:
                found[index.fqn] = BytesStorageMetadata()
                continue
            tensor = found.setdefault(
                index.fqn, TensorStorageMetadata(data.properties, data.size, [])
            )
            assert isinstance(tensor, TensorStorageMetadata)
            tensor.chunks.append(data.chunk)
        return Metadata(dict(found))

    def values(
        self, sources: list[torch.Tensor], attempt: str, step: int
    ) -> list[tuple[torch.Tensor | str, Any]]:
        """Return what is read, and where it goes: a tensor's part, or the name of another value.

        Args:
            sources: for each read, its tensor, or the bytes of its pickle.
            attempt: of the files, which errors name.
            step: of the files.

        Raises:
            RuntimeError: a value cannot be unpickled.
        """
        found: list[tuple[torch.Tensor | str, Any]] = []
        for (item, (place, _)), source in zip(self.reads, sources, strict=True):
            if _is_tensor(item):
                found.append((self._planner.resolve_tensor(item).detach(), source))
                continue
            name = item.dest_index.fqn
            pickled = io.BytesIO(string_at(source.data_ptr(), source.numel()))
            try:
                found.append((name, torch.load(pickled, weights_only=False)))
            except Exception as error:
                file = FileName(attempt, step, place.owner)
                raise RuntimeError(
                    f"{name!r} cannot be unpickled from {file} of rank "
                    f"{place.holder}: {type(error).__name__}: {error}. Nothing was loaded. Load "
                    "with the classes and devices that the program had when it saved, or empty the "
                    "folder and load a checkpoint"
                ) from error
        return found

    def write(self, values: list[tuple[torch.Tensor | str, Any]]) -> None:
        """Put what `values` returned into the state."""
        for target, value in values:
            if isinstance(target, torch.Tensor):
                target.copy_(value)
            else:
                self._values.replace(target, value)


def part_of(file: SnapshotFile, record: Record, item: ReadItem) -> torch.Tensor:
    """Return what a read needs of a record."""
    if not _is_tensor(item):
        return file.pickled(record)
    part = file.tensor(record)
    for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
        part = part.narrow(dim, start, length)
    return part


def _is_tensor(item: ReadItem) -> bool:
    return item.type == LoadItemType.TENSOR


def _size(item: WriteItem) -> int:
    """Return an item's number of elements: 1 for a pickled value."""
    return 1 if item.tensor_data is None else math.prod(item.tensor_data.chunk.sizes)
