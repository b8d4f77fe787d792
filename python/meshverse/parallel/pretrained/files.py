"""Safetensors files: parts of their tensors read, and tensors written one after another.

A file is the length of its header in 8 bytes, the header (JSON), and the tensors' bytes. The
library's own slices either map the file into memory, a page at a time, or read whole tensors, and
its writer takes all tensors of a file at once: with a model's shards, both need more memory.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .deferred import Box, Source

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
_LENGTH = struct.Struct("<Q")
_LONGEST_HEADER = 100_000_000  # the library's limit
_BUFFER_BYTES = 1 << 26  # read at a time
_SAMPLE_BYTES = 4096  # read at four places of a file, to compare it with copies on other hosts
_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def can_be_written(dtype: torch.dtype) -> bool:
    """Return whether `FileWriter` has a name for a dtype. It has none for complex numbers."""
    return dtype in _NAMES


class FilePart(Source):
    """Tensor in a file, of which exactly the bytes that are asked for are read.

    Args:
        path: the file.
        name: of the tensor in the file.
        dtype: of the tensor.
        shape: of the tensor.
        start: of its bytes in the file.
    """

    def __init__(
        self, path: Path, name: str, dtype: torch.dtype, shape: Sequence[int], start: int
    ) -> None:
        self._path, self.name, self._start = path, name, start
        self.shape, self.dtype = torch.Size(shape), dtype

    def read_into(self, box: Box, out: Tensor) -> None:
        """Copy the elements of a box, in parts of at most `_BUFFER_BYTES` or a row."""
        if not box:  # a scalar
            box, out = [(0, 1)], out.unsqueeze(0)
        row = math.prod(high - low for low, high in box[1:]) * self.dtype.itemsize
        step = max(1, _BUFFER_BYTES // max(1, row))
        first, last = box[0]
        with open(self._path, "rb", buffering=0) as file:
            for low in range(first, last, step):
                high = min(last, low + step)
                part = [(low, high), *box[1:]]
                out.narrow(0, low - first, high - low).copy_(self._read(file, part))

    def _read(self, file: Any, box: Box) -> Tensor:
        shape, n_bytes = self.shape or (1,), self.dtype.itemsize
        sizes = [high - low for low, high in box]
        # Dimensions of which all is read are read in one run with the one before them.
        last = max((dim for dim, size in enumerate(sizes) if size != shape[dim]), default=0)
        run = math.prod(sizes[last:]) * n_bytes
        strides = [math.prod(shape[dim + 1 :]) * n_bytes for dim in range(len(shape))]
        buffer = torch.empty(math.prod(sizes) * n_bytes, dtype=torch.uint8, device="cpu")
        view, filled = _bytes_of(buffer), 0
        begin = self._start + box[last][0] * strides[last]
        for outer in product(*(range(*each) for each in box[:last])):
            file.seek(begin + sum(map(int.__mul__, outer, strides)))
            end = filled + run
            while filled < end:
                count = file.readinto(view[filled:end])
                if not count:
                    raise OSError(f"{self._path} ends within {self.name!r}: it is damaged")
                filled += count
        return buffer.view(self.dtype).view(sizes)


class CheckpointFiles(NamedTuple):
    """Tensors of a checkpoint's safetensors files.

    Attributes:
        parts: tensors by name.
        digest: of all names, shapes, dtypes and places, and of some bytes of each file: the same
            for copies of a folder, and another one for another step of the same training.
        is_adapter: whether they are an adapter of PEFT.
    """

    parts: dict[str, FilePart]
    digest: str
    is_adapter: bool = False


def read_folder(folder: Path) -> CheckpointFiles:
    """Return what is in the safetensors files of a checkpoint's folder.

    Raises:
        FileNotFoundError: there is no such folder, or no such file in it.
        ValueError: a file is damaged, or does not have the tensors that the index says; or the
            folder has an index, and a single file that is not in it.
    """
    if not folder.is_dir():
        cure = "Give that of a checkpoint on this host."
        if killed := sorted(folder.parent.glob(f".{folder.name}.????????.old")):
            cure = f"A save that was killed left {killed[-1]}: rename that to load it."
        raise FileNotFoundError(f"{folder} is no folder. {cure}")
    index = folder / INDEX
    if not index.exists():
        found = [name for name in (WEIGHTS, ADAPTER_WEIGHTS) if (folder / name).exists()]
        if not found:
            there = sorted(each.name for each in folder.iterdir())
            raise FileNotFoundError(
                f"{folder} has no {WEIGHTS}, {INDEX} or {ADAPTER_WEIGHTS}; it has {there[:8]}. "
                "Other formats are not read: load them with transformers and save them with "
                "save_pretrained()."
            )
        headers = {found[0]: read_header(folder / found[0])}
        is_adapter = found[0] == ADAPTER_WEIGHTS
        return CheckpointFiles(dict(headers[found[0]]), _digest(folder, headers), is_adapter)
    try:
        weight_map: dict[str, str] = json.loads(index.read_text())["weight_map"]
        if not all(isinstance(text, str) for text in (*weight_map.keys(), *weight_map.values())):
            raise TypeError("a name is no string")
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise ValueError(
            f"{index} is damaged ({error!r:.200}): it must be JSON with a weight_map of tensors' "
            "names to files' names."
        ) from error
    if (folder / WEIGHTS).exists() and WEIGHTS not in weight_map.values():
        raise ValueError(
            f"{folder} has {WEIGHTS}, and {INDEX} of other files: two checkpoints, of which "
            "transformers reads the first. Remove the one that you do not mean."
        )
    headers = {name: read_header(folder / name) for name in sorted({*weight_map.values()})}
    lacking = {key: name for key, name in weight_map.items() if key not in headers[name]}
    if lacking:
        raise ValueError(
            f"{index} says that {_some(lacking)} are in {_some({*lacking.values()})}, which do not "
            "have them: files and index are not of one checkpoint."
        )
    parts = {key: headers[name][key] for key, name in weight_map.items()}
    return CheckpointFiles(parts, _digest(folder, headers))


def read_header(path: Path) -> dict[str, FilePart]:
    """Return the tensors of a file.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is no safetensors file, is cut off, or has a dtype that torch lacks.
    """
    size = path.stat().st_size
    with open(path, "rb") as file:
        start = file.read(_LENGTH.size)
        length = _LENGTH.unpack(start)[0] if len(start) == _LENGTH.size else size
        begin = _LENGTH.size + length
        if length > _LONGEST_HEADER or begin > size:
            raise ValueError(f"{path} is no safetensors file, or is cut off after {size} bytes.")
        text = file.read(length)
    try:
        header = json.loads(text)
    except (RecursionError, ValueError):
        header = None
    if not isinstance(header, dict):
        raise ValueError(f"{path} is no safetensors file: its header is no JSON object.")
    header.pop("__metadata__", None)
    parts, places = {}, []
    for name, entry in header.items():
        dtype_name, shape, offsets = _fields(entry, name, path)
        dtype = _DTYPES.get(dtype_name)
        if dtype is None:
            raise ValueError(
                f"{name!r} in {path} has the dtype {dtype_name}, which cannot be read. Known are "
                f"{[*_DTYPES]}."
            )
        first, last = offsets
        if last - first != math.prod(shape) * dtype.itemsize or begin + last > size:
            raise ValueError(
                f"{path} is damaged or cut off: {name!r} of shape {tuple(shape)} and dtype {dtype} "
                f"has the bytes {begin + first} to {begin + last} of {size}."
            )
        places.append((first, last, name))
        parts[name] = FilePart(path, name, dtype, shape, begin + first)
    expected = 0  # as the format's own library, this refuses gaps and overlaps
    for first, last, name in sorted(places):
        if first != expected:
            raise ValueError(
                f"{path} is damaged: {name!r} begins at byte {begin + first}, and the tensor "
                f"before it ends at byte {begin + expected}."
            )
        expected = last
    return parts


def _fields(entry: Any, name: str, path: Path) -> tuple[str, list[int], list[int]]:
    """Return the dtype, shape and offsets of a tensor; ValueError if they are of other types."""
    fields: dict[str, Any] = entry if isinstance(entry, dict) else {}
    shape, offsets = fields.get("shape", 0), fields.get("data_offsets", 0)
    are_lists = isinstance(shape, list) and isinstance(offsets, list) and len(offsets) == 2
    if not are_lists or any(type(one) is not int or one < 0 for one in (*shape, *offsets)):
        raise ValueError(f"{path} is damaged: the header's entry of {name!r} is {entry!r:.200}.")
    return str(fields.get("dtype")), shape, offsets


def _digest(folder: Path, headers: Mapping[str, Mapping[str, FilePart]]) -> str:
    contents = [
        (file, name, str(part.dtype), tuple(part.shape), part._start)
        for file, parts in sorted(headers.items())
        for name, part in sorted(parts.items())
    ]
    digest = hashlib.sha256(repr(contents).encode())
    for name in sorted(headers):
        size = (folder / name).stat().st_size
        # Python 3.14 would read 128 KB at each place.
        with open(folder / name, "rb", buffering=_SAMPLE_BYTES) as file:
            for start in (size // 4, size // 2, 3 * size // 4, size - _SAMPLE_BYTES):
                file.seek(max(0, start))
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def _some(names: Any) -> list[str]:
    return sorted(names)[:4]


def _bytes_of(tensor: Tensor) -> memoryview:
    array: Any = tensor.numpy()
    return memoryview(array)


class FileWriter:
    """Safetensors file that is written one tensor after another, in any order.

    Args:
        path: of the new file.
        tensors: what it will have, by name.
    """

    def __init__(self, path: Path, tensors: Mapping[str, Source]) -> None:
        self.path = path
        self._starts: dict[str, int] = {}
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        # By falling size of elements, as the library does, which aligns all of them.
        for name in sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name)):
            source = tensors[name]
            offsets = [end, end + source.nbytes]
            header[name] = {
                "dtype": _NAMES[source.dtype],
                "shape": list(source.shape),
                "data_offsets": offsets,
            }
            self._starts[name], end = offsets
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._begin = _LENGTH.size + len(text)
        with open(path, "wb") as file:
            file.write(_LENGTH.pack(len(text)) + text)
            file.truncate(self._begin + end)

    def write(self, name: str, tensor: Tensor) -> None:
        """Write a tensor on the CPU."""
        values = tensor.detach().contiguous().view(-1).view(torch.uint8)
        with open(self.path, "r+b", buffering=0) as file:
            file.seek(self._begin + self._starts[name])
            left = _bytes_of(values)
            while left:
                left = left[file.write(left) :]

    def sync(self) -> None:
        """Wait until the file is on the disk."""
        with open(self.path, "r+b") as file:
            os.fsync(file.fileno())


def parts_of_files(names: Sequence[str], sizes: Sequence[int], limit: int) -> Iterator[list[str]]:
    """Yield the names of the tensors of each file, in order, of at most `limit` bytes or one."""
    own: list[str] = []
    filled = 0
    for name, size in zip(names, sizes, strict=True):
        if own and filled + size > limit:
            yield own
            own, filled = [], 0
        own.append(name)
        filled += size
    if own:
        yield own
