"""Tensors that are read later: each result is that of torch, and a box of it reads a box."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from helpers.tiers import in_tiers
from meshverse.parallel.pretrained.deferred import Box, Deferred, Known, Source, read, source_of
from meshverse.parallel.pretrained.files import FileWriter, read_header


class Counted(Known):
    """Elements of a tensor that counts those that are read."""

    read = 0

    def read_into(self, box: Box, out: Tensor) -> None:
        """Copy the elements of a box."""
        self.read += out.numel()
        super().read_into(box, out)


Change = Callable[[random.Random, Tensor], Callable[[Tensor], Tensor]]


def _permute(draw: random.Random, tensor: Tensor) -> Callable[[Tensor], Tensor]:
    dims = draw.sample(range(tensor.ndim), tensor.ndim)
    return lambda each: each.permute(dims)


def _narrow(draw: random.Random, tensor: Tensor) -> Callable[[Tensor], Tensor]:
    dim = draw.randrange(tensor.ndim)
    start = draw.randrange(tensor.shape[dim])
    size = draw.randrange(start, tensor.shape[dim]) + 1 - start
    return lambda each: each.narrow(dim, start, size)


def _unsqueeze(draw: random.Random, tensor: Tensor) -> Callable[[Tensor], Tensor]:
    dim = draw.randrange(tensor.ndim + 1)
    return lambda each: each.unsqueeze(dim)


def _squeeze(draw: random.Random, tensor: Tensor) -> Callable[[Tensor], Tensor]:
    return Tensor.squeeze


def _select(draw: random.Random, tensor: Tensor) -> Callable[[Tensor], Tensor]:
    dim = draw.randrange(tensor.ndim)
    index = draw.randrange(-tensor.shape[dim], tensor.shape[dim])
    return lambda each: each.select(dim, index)


def _cat(draw: random.Random, tensor: Tensor) -> Callable[[Tensor], Tensor]:
    dim = draw.randrange(tensor.ndim)
    return lambda each: torch.cat([each, each], dim)


def _stack(draw: random.Random, tensor: Tensor) -> Callable[[Tensor], Tensor]:
    dim = draw.randrange(tensor.ndim + 1)
    return lambda each: torch.stack([each, each, each], dim)


def _chunk(draw: random.Random, tensor: Tensor) -> Callable[[Tensor], Tensor]:
    dim, number = draw.randrange(tensor.ndim), draw.randrange(2)
    return lambda each: each.chunk(2, dim)[-number]


def _flatten(draw: random.Random, tensor: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda each: each.reshape(-1)


def _unflatten(draw: random.Random, tensor: Tensor) -> Callable[[Tensor], Tensor]:
    dim = draw.randrange(tensor.ndim)
    return lambda each: each.unflatten(dim, (-1, 2 - each.shape[dim] % 2))


def _transpose(draw: random.Random, tensor: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda each: each.transpose(0, -1).contiguous()


_CHANGES: list[Change] = [
    *(_permute, _narrow, _unsqueeze, _squeeze, _select, _cat),
    *(_stack, _chunk, _flatten, _unflatten, _transpose),
]


def _box(draw: random.Random, tensor: Tensor) -> list[tuple[int, int]]:
    pairs = [(draw.randrange(size), size) for size in tensor.shape]
    return [(low, draw.randrange(low, size) + 1) for low, size in pairs]


@pytest.mark.parametrize(
    "seeds",
    in_tiers(
        [range(500), range(500, 5_000), range(5_000, 20_000)], [range(500)], [range(500, 5_000)]
    ),
)
def test_any_movement_of_elements_is_that_of_torch(seeds: range) -> None:
    for seed in seeds:
        draw = random.Random(seed)
        given = torch.randn([draw.choice([1, 2, 3, 4, 6]) for _ in range(draw.randrange(1, 4))])
        seen: Tensor = Deferred(Known(given))
        for _ in range(5):
            change = draw.choice(_CHANGES)
            if not given.ndim:
                break
            apply = change(draw, given)
            given, seen = apply(given), apply(seen)
            assert isinstance(seen, Deferred), seed
            assert seen.shape == given.shape, seed
        source = source_of(seen)
        assert not _computes(source), f"seed {seed}: an operation is run on whole tensors"
        assert torch.equal(read(source), given), seed
        box = _box(draw, given)
        part = given[tuple(slice(*each) for each in box)]
        assert torch.equal(read(source, box), part), seed


def _computes(source: Source) -> bool:
    return source.computes or any(map(_computes, source.inputs()))


def test_a_part_of_stacked_experts_reads_the_experts_in_it() -> None:
    gates, ups = ([Counted(torch.randn(6, 4)) for _ in range(8)] for _ in range(2))
    stacked = [torch.stack([Deferred(each) for each in part]) for part in (gates, ups)]
    both = torch.cat(stacked, dim=1)
    part = read(source_of(both), [(2, 4), (3, 9), (0, 4)])
    expected = torch.cat([torch.stack([each.tensor for each in part]) for part in (gates, ups)], 1)
    assert torch.equal(part, expected[2:4, 3:9])
    assert [each.read for each in gates] == [0, 0, 12, 12, 0, 0, 0, 0]
    assert [each.read for each in ups] == [0, 0, 12, 12, 0, 0, 0, 0]


def test_an_operation_that_computes_gets_whole_tensors() -> None:
    given = torch.randn(4, 6)
    counted = Counted(given)
    doubled = Deferred(counted) * 2
    assert _computes(source_of(doubled))
    assert torch.equal(read(source_of(doubled[1:2])), given[1:2] * 2)
    assert counted.read == given.numel()


def test_values_are_cast_once_to_the_dtype_in_which_they_are_read() -> None:
    given = torch.tensor([1.0, 1 + 2**-20])
    narrow = Deferred(Known(given)).to(torch.bfloat16)
    assert narrow.dtype == torch.bfloat16
    out = torch.empty(2)
    source_of(narrow).read_into([(0, 2)], out)
    assert torch.equal(out, given)
    assert torch.equal(read(source_of(narrow)), given.to(torch.bfloat16))


def test_a_tensor_that_is_not_read_yet_cannot_be_changed() -> None:
    with pytest.raises(NotImplementedError, match="would change a tensor that is not read yet"):
        Deferred(Known(torch.ones(2))).zero_()


@pytest.mark.parametrize("other", [torch.arange(6.0).view(2, 3), torch.zeros(2, 3)])
def test_two_of_them_are_compared_by_their_elements(other: Tensor) -> None:
    given = torch.arange(6.0).view(2, 3)
    equal = torch.equal(Deferred(Known(given)), Deferred(Known(other)))
    assert equal == torch.equal(given, other)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn]
)
def test_files_are_those_that_the_library_reads_and_writes(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    safetensors = pytest.importorskip("safetensors.torch", reason="it is not installed")
    tensors = {
        "b": torch.randn(3, 4, 5).to(dtype),
        "a": torch.randn(7).to(torch.float16),
        "none": torch.empty(0, 3),
        "scalar": torch.tensor(2.0),
    }
    safetensors.save_file(tensors, tmp_path / "theirs", metadata={"format": "pt"})
    writer = FileWriter(tmp_path / "ours", {name: Known(each) for name, each in tensors.items()})
    for name in reversed(tensors):
        writer.write(name, tensors[name])
    again = safetensors.load_file(tmp_path / "ours")
    assert again.keys() == tensors.keys()
    assert all(torch.equal(_bytes(again[name]), _bytes(tensors[name])) for name in tensors)
    assert all(again[name].shape == tensors[name].shape for name in tensors)
    parts = read_header(tmp_path / "theirs")
    assert parts.keys() == tensors.keys()
    for name, part in parts.items():
        whole = tensors[name]
        assert torch.equal(_bytes(read(part)), _bytes(whole))
        for seed in range(20 if whole.numel() else 0):
            box = _box(random.Random(seed), whole)
            expected = whole[tuple(slice(*each) for each in box)]
            assert torch.equal(_bytes(read(part, box)), _bytes(expected)), (name, box)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


@pytest.mark.parametrize("contents", [b"", b"short", b"\xff" * 64, b"\x02" + bytes(7) + b"[]{}"])
def test_a_file_of_another_format_is_refused(tmp_path: Path, contents: bytes) -> None:
    (tmp_path / "file").write_bytes(contents)
    with pytest.raises(ValueError, match=r"file (is no safetensors file|is damaged)"):
        read_header(tmp_path / "file")
