"""Every kind of tensor that may hold ranks: stock's mesh, or an error that says what is wrong.

Some of these end the process if their memory is read by its address; so would a mistake here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.distributed.tensor import DTensor, Replicate
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._pytree import tree_map
from typing_extensions import Self

from helpers.observation import STOCK, assert_same
from helpers.worlds import groups_created
from meshverse import DeviceMesh, Universe, init_device_mesh

pytestmark = pytest.mark.usefixtures("world")  # rank 5 of 8

_RANKS = [4, 5, 6, 7]


def _ranks(**kind: Any) -> torch.Tensor:
    return torch.tensor(_RANKS, **kind)


class _Plain(torch.Tensor):
    """A subclass that adds nothing."""


class _Wrapping(torch.Tensor):
    """A tensor whose values are in another one. Results of operations are plain."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Self:
        wrapper = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        wrapper.inner = inner
        return wrapper

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        args, kwargs = tree_map(lambda x: x.inner if isinstance(x, cls) else x, (args, kwargs))
        return function(*args, **(kwargs or {}))


class _StaysWrapped(_Wrapping):
    """The same, but results of operations are wrapped again."""

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        result = super().__torch_dispatch__(function, types, args, kwargs)
        return tree_map(lambda x: cls(x) if isinstance(x, torch.Tensor) else x, result)


def _asynchronous(dtype: torch.dtype) -> torch.Tensor:
    result = functional.broadcast(_ranks(dtype=dtype), 0, dist.group.WORLD)
    assert type(result) is functional.AsyncCollectiveTensor
    return result


def _local() -> torch.Tensor:
    reason = "LocalTensor is in later torch"
    module = pytest.importorskip("torch.distributed._local_tensor", reason=reason)
    return module.LocalTensor({rank: _ranks() for rank in range(8)})


_INTEGERS = ["uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"]
_FLOATS = ["float16", "bfloat16", "float32", "float64", "float8_e4m3fn"]

_AS_STOCK: dict[str, Callable[[], torch.Tensor]] = {
    **{name: lambda name=name: _ranks(dtype=getattr(torch, name)) for name in _INTEGERS},
    **{name: lambda name=name: _ranks().float().to(getattr(torch, name)) for name in _FLOATS},
    "parameter": lambda: torch.nn.Parameter(_ranks(), requires_grad=False),
    "float parameter": lambda: torch.nn.Parameter(_ranks(dtype=torch.float32)),
    "result with a gradient": lambda: torch.nn.Parameter(_ranks(dtype=torch.float32)) * 1,
    "every other": lambda: torch.tensor([4, 0, 5, 0, 6, 0, 7, 0])[::2],
    "with an offset": lambda: torch.arange(100)[4:8],
    "negative view": lambda: torch._neg_view(torch.tensor([-4, -5, -6, -7])),
    "imaginary part of a conjugate": lambda: torch.tensor([-4j, -5j, -6j, -7j]).conj().imag,
    "inference": lambda: torch.inference_mode()(_ranks)(),
    "subclass": lambda: _ranks().as_subclass(_Plain),
    "wrapper": lambda: _Wrapping(_ranks()),
    "asynchronous": lambda: _asynchronous(torch.int64),
    "asynchronous int32": lambda: _asynchronous(torch.int32),
    "local": _local,
}


@pytest.mark.parametrize("kind", _AS_STOCK)
def test_stocks_mesh(kind: str) -> None:
    stock, ours = (mesh("cpu", _AS_STOCK[kind]()) for mesh in (STOCK.DeviceMesh, DeviceMesh))
    assert ours.mesh.tolist() == _RANKS
    assert_same(stock, ours)


@pytest.mark.parametrize("kind", _AS_STOCK)
def test_wherever_ranks_are_given(kind: str) -> None:
    make = _AS_STOCK[kind]
    group = dist.new_group(_RANKS)
    assert DeviceMesh.from_group(group, "cpu", make()).mesh.tolist() == _RANKS
    groups = [dist.new_group([5]), group]
    two = DeviceMesh.from_group(groups, "cpu", make().reshape(1, 4), mesh_dim_names=("dp", "tp"))
    assert two.mesh.tolist() == [_RANKS]
    assert init_device_mesh("cpu", (2, 2), ranks=make()).mesh.tolist() == [[4, 5], [6, 7]]
    assert Universe(make()).rank_map.ranks().tolist() == _RANKS


def test_two_dimensions_of_any_strides() -> None:
    whole = torch.arange(8).reshape(2, 4)
    for ranks in (whole, whole.T, whole.T.contiguous(), whole[:, 1:3], torch._neg_view(-whole)):
        stock, ours = (mesh("cpu", ranks) for mesh in (STOCK.DeviceMesh, DeviceMesh))
        assert ours.mesh.equal(ranks)
        assert_same(stock, ours)


def test_a_single_rank_of_no_dimension() -> None:
    for mesh in (DeviceMesh("cpu", torch.tensor(5)), DeviceMesh("cpu", torch.tensor([5])[0])):
        assert (mesh.mesh.tolist(), mesh.shape) == (5, ())


# --- refused -------------------------------------------------------------------------------------


def _fake() -> torch.Tensor:
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode().from_tensor(_ranks())


def _distributed() -> torch.Tensor:
    mesh = STOCK.init_device_mesh("cpu", (8,))
    return DTensor.from_local(_ranks(), mesh, [Replicate()])


def _local_that_differs() -> torch.Tensor:
    return type(_local())({rank: _ranks() + (rank == 3) for rank in range(8)})


def _without_memory() -> torch.Tensor:
    tensor = _ranks()
    tensor.untyped_storage().resize_(0)
    return tensor


def _beyond_its_memory() -> torch.Tensor:
    tensor = torch.arange(8)[4:]
    tensor.untyped_storage().resize_(56)
    return tensor


_UNREADABLE = r"cannot be read \(.*Give the ranks as a list"
_NOT_A_RANK = r"which are integers from 0 to 2147483647, but got "

_REFUSED: dict[str, tuple[Callable[[], torch.Tensor], type[Exception], str]] = {
    "meta": (lambda: _ranks(device="meta"), NotImplementedError, r"meta tensor of shape \(4,\)"),
    "fake": (_fake, RuntimeError, r"fake tensor of shape \(4,\) has no values"),
    "distributed": (_distributed, RuntimeError, "DTensor.*" + _UNREADABLE),
    "two": (lambda: TwoTensor(_ranks(), _ranks()), RuntimeError, "TwoTensor.*" + _UNREADABLE),
    "wrapped for good": (lambda: _StaysWrapped(_ranks()), RuntimeError, _UNREADABLE),
    "local that differs": (_local_that_differs, RuntimeError, "LocalTensor.*" + _UNREADABLE),
    "functional": (lambda: torch._to_functional_tensor(_ranks()), RuntimeError, _UNREADABLE),
    "sparse": (lambda: _ranks().to_sparse(), RuntimeError, "sparse_coo.*" + _UNREADABLE),
    "quantized": (
        lambda: torch.quantize_per_tensor(_ranks().float(), 1.0, 0, torch.quint8),
        RuntimeError,
        "quint8.*" + _UNREADABLE,
    ),
    "nested": (
        lambda: torch.nested.nested_tensor([torch.tensor([4, 5]), torch.tensor([6])]),
        RuntimeError,
        _UNREADABLE,
    ),
    "jagged": (
        lambda: torch.nested.nested_tensor([_ranks()], layout=torch.jagged),
        RuntimeError,
        "NestedTensor.*" + _UNREADABLE,
    ),
    "memory taken away": (_without_memory, RuntimeError, _UNREADABLE),
    "some memory taken away": (_beyond_its_memory, RuntimeError, _UNREADABLE),
    "expanded": (lambda: torch.tensor([5]).expand(3), ValueError, "rank 5 stands at positions 0"),
    "fraction": (lambda: torch.tensor([4.0, 4.5]), ValueError, _NOT_A_RANK + "4.5 at position 1"),
    "no number": (lambda: torch.tensor([float("nan")]), ValueError, _NOT_A_RANK + "nan"),
    "infinite": (lambda: torch.tensor([float("inf")]), ValueError, _NOT_A_RANK + "inf"),
    "negative": (lambda: torch.tensor([[5, -1]]), ValueError, _NOT_A_RANK + "-1 at position 1"),
    "complex": (lambda: torch.tensor([5 + 1j]), ValueError, _NOT_A_RANK + r"\(5\+1j\)"),
    "beyond int32": (lambda: torch.tensor([5, 2**31]), ValueError, _NOT_A_RANK + "2147483648"),
    "a rank, if cut to int32": (lambda: torch.tensor([2**32 + 4]), ValueError, _NOT_A_RANK + "42"),
    "beyond int64": (
        lambda: torch.tensor([5, 2**63 + 5], dtype=torch.uint64),
        ValueError,
        _NOT_A_RANK + "9223372036854775813 at position 1",
    ),
    "outside the world": (lambda: torch.tensor([5, 8]), ValueError, "includes rank 8"),
    "empty": (lambda: torch.tensor([]), ValueError, r"at least one rank.*\(0,\)"),
    "none in a dimension": (lambda: torch.empty(2, 0), ValueError, r"at least one rank.*\(2, 0\)"),
}

_ONLY_REAL_PARTS = pytest.mark.filterwarnings("ignore:Casting complex values to real")
_PROTOTYPES = pytest.mark.filterwarnings(
    "ignore:.*(is deprecated|is in prototype stage|will be removed)"
)


@_ONLY_REAL_PARTS
@_PROTOTYPES
@pytest.mark.parametrize("kind", _REFUSED)
def test_refused(kind: str) -> None:
    make, error, message = _REFUSED[kind]
    given = make()
    with groups_created(0), pytest.raises(error, match=message) as raised:
        DeviceMesh("cpu", given)
    assert raised.type is error


@_ONLY_REAL_PARTS
@_PROTOTYPES
@pytest.mark.parametrize("kind", _REFUSED)
def test_refused_wherever_ranks_are_given(kind: str) -> None:
    make, error, message = _REFUSED[kind]
    given, groups = make(), [dist.new_group([5]), dist.new_group(_RANKS)]
    with groups_created(0):
        with pytest.raises(error, match=message):
            init_device_mesh("cpu", (max(1, given.numel()),), ranks=given)
        with pytest.raises(error):
            DeviceMesh.from_group(groups[1], "cpu", given)
        with pytest.raises(error):
            DeviceMesh.from_group(groups, "cpu", given, mesh_dim_names=("dp", "tp"))
        if kind != "outside the world":  # a universe may be of a larger world yet to come
            with pytest.raises(error, match=message):
                Universe(given)
