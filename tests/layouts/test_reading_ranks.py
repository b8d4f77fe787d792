"""Ranks in lists and arrays, under torch's modes and transforms, and whatever Hypothesis finds."""

from __future__ import annotations

import array
import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from helpers.observation import OURS, STOCK, Family, assert_same
from helpers.worlds import fake_world, groups_created
from meshverse import DeviceMesh, Universe, init_device_mesh, init_mesh_partition
from meshverse._core import AxisLayout, Layout, RankMap

_RANKS = [4, 5, 6, 7]

# --- lists and arrays ----------------------------------------------------------------------------


class _Lying(list):
    """A list whose length is not what it says."""

    def __len__(self) -> int:
        return 10


_ARRAYS: dict[str, Callable[[], Any]] = {
    "list": lambda: [[4, 5], [6, 7]],
    "tuple": lambda: ((4, 5), (6, 7)),
    "range": lambda: range(4, 8),
    "whole floats": lambda: [4.0, 5.0],
    "numpy": lambda: np.array([[4, 5], [6, 7]]),
    "numpy uint64": lambda: np.array(_RANKS, dtype=np.uint64),
    "numpy that is read-only": lambda: np.broadcast_to(np.array(_RANKS), (1, 4)),
    "numpy with strides": lambda: np.arange(8)[::2],
    "list of numpy": lambda: [np.array([4, 5]), np.array([6, 7])],
    "list of tensors": lambda: [torch.tensor(4), torch.tensor(5)],
    "array": lambda: array.array("h", _RANKS),
    "one number": lambda: 5,
}


@pytest.mark.filterwarnings("ignore:.*(not writable|list of numpy.ndarrays is extremely slow)")
@pytest.mark.parametrize("kind", _ARRAYS)
def test_arrays_as_stock(kind: str, world) -> None:
    stock, ours = (mesh("cpu", _ARRAYS[kind]()) for mesh in (STOCK.DeviceMesh, DeviceMesh))
    assert_same(stock, ours)


# Refused by stock too, with the same type.
_NO_ARRAYS: dict[str, tuple[Callable[[], Any], type[Exception]]] = {
    "ragged": (lambda: [[4, 5], [6]], ValueError),
    "shorter than it says": (lambda: _Lying(_RANKS), ValueError),
    "text": (lambda: "45", TypeError),
    "list of text": (lambda: ["4", "5"], ValueError),
    "dictionary": (lambda: {4: 5}, TypeError),
    "set": (lambda: {4, 5}, TypeError),
    "generator": (lambda: (rank for rank in _RANKS), TypeError),
    "numpy of objects": (lambda: np.array(_RANKS, dtype=object), TypeError),
    "numpy, big end first": (lambda: np.array(_RANKS, dtype=">i4"), ValueError),
    "numpy backwards": (lambda: np.arange(8)[::-1], ValueError),
    "beyond any integer type": (lambda: [2**70, 5], ValueError),
    "list of tensors without values": (lambda: [torch.tensor(4, device="meta")], RuntimeError),
}


@pytest.mark.parametrize("family", [STOCK, OURS], ids=["stock", "ours"])
@pytest.mark.parametrize("kind", _NO_ARRAYS)
def test_what_is_no_array_of_ranks(kind: str, family: Family, world) -> None:
    make, error = _NO_ARRAYS[kind]
    with groups_created(0), pytest.raises(error) as raised:
        family.DeviceMesh("cpu", make())
    assert raised.type is error


@pytest.mark.parametrize("kind", _NO_ARRAYS)
def test_what_is_no_array_of_a_groups_ranks(kind: str, world) -> None:
    with pytest.raises(ValueError, match=r"Invalid mesh .* for ProcessGroup with ranks"):
        DeviceMesh.from_group(dist.new_group(_RANKS), "cpu", _NO_ARRAYS[kind][0]())


def test_a_number_of_ranks(world) -> None:
    assert Universe(np.int64(8)).rank_map is RankMap.identity(8)
    for number, error, message in (
        (True, TypeError, "but got True"),
        (2**31 + 1, ValueError, "2147483649 ranks"),
        (0, ValueError, "A mesh of 0 ranks"),
    ):
        with pytest.raises(error, match=message):
            Universe(number)


def test_parts_whose_ranks_are_none_follow_one_another(world) -> None:
    parts: Any = {"a": {"mesh_shape": (2,), "ranks": None}, "b": {"mesh_shape": (2,)}}
    meshes = init_mesh_partition("cpu", parts)
    assert [mesh.mesh.tolist() for mesh in meshes.values()] == [[0, 1], [2, 3]]


# --- the core's own reading ----------------------------------------------------------------------


class _Clears:
    """An integer that empties the list it is in when it is read."""

    def __init__(self, values: list[Any]) -> None:
        self._values = values

    def __index__(self) -> int:
        self._values.clear()
        self._values.extend([object()] * 3)
        return 0


@pytest.mark.parametrize(
    "read",
    [RankMap.from_ranks, lambda values: Layout.from_shape([n + 1 for n in [0]], values[:1])],
    ids=["ranks", "strides"],
)
def test_a_list_that_changes_while_it_is_read(read: Callable[[list[Any]], Any]) -> None:
    values: list[Any] = []
    values += [_Clears(values), *range(10**6, 10**6 + 100_000)]
    read(values)


def test_all_values_of_a_list_that_changes_are_read() -> None:
    values: list[Any] = []
    values += [_Clears(values), *range(10**6, 10**6 + 100_000)]
    assert RankMap.from_ranks(values).ranks().tolist() == [0, *range(10**6, 10**6 + 100_000)]


@pytest.mark.parametrize(
    "buffer",
    [
        array.array("d", [0.0, 1.0]),
        array.array("I", [0, 1]),
        b"\0\1",
        np.array([0, 1], dtype=">i8"),
        np.array([0, 1], dtype=">i4"),
        np.arange(4)[::2],
        np.arange(4)[::-1],
        np.arange(4).reshape(2, 2),
        np.array(3),
        np.zeros(2, dtype="datetime64[s]"),
    ],
    ids=lambda buffer: str(memoryview(buffer).format) if not isinstance(buffer, np.ndarray) else "",
)
def test_buffers_of_another_form(buffer: Any) -> None:
    with pytest.raises((ValueError, BufferError), match=r"one-dimensional, contiguous|cannot"):
        RankMap.from_ranks(buffer)


def test_buffers_of_the_right_form() -> None:
    for buffer in (array.array("q", [3, 1]), np.array([3, 1], dtype=np.int32), memoryview(b"")):
        if len(buffer):
            assert RankMap.from_ranks(buffer).ranks().tolist() == [3, 1]
    with pytest.raises(ValueError, match="at least one rank"):
        RankMap.from_ranks(array.array("q"))


@settings(max_examples=300)
@given(
    st.lists(st.one_of(st.integers(), st.integers(-2, 9), st.floats(), st.booleans(), st.none())),
    st.lists(st.integers() | st.integers(-2, 9)),
)
def test_the_core_takes_any_values(first: list[Any], second: list[Any]) -> None:
    for make in (
        lambda: RankMap.from_ranks(first),
        lambda: AxisLayout(first, second),
        lambda: Layout.from_shape(first, second),
    ):
        with contextlib.suppress(ValueError, TypeError, OverflowError):
            make()


# --- under modes and transforms ------------------------------------------------------------------


class _Refusing(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        raise AssertionError(f"{function} was seen by a mode")


class _OfFunctions(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


@contextlib.contextmanager
def _local_tensors() -> Iterator[None]:
    reason = "LocalTensorMode is in later torch"
    module = pytest.importorskip("torch.distributed._local_tensor", reason=reason)
    with module.LocalTensorMode(8):
        yield


@contextlib.contextmanager
def _deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


_MODES: dict[str, Callable[[], Any]] = {
    "fake": FakeTensorMode,
    "fake with real inputs": lambda: FakeTensorMode(allow_non_fake_inputs=True),
    "functional": FunctionalTensorMode,
    "the user's": _Refusing,
    "of functions": _OfFunctions,
    "meta by default": lambda: torch.device("meta"),
    "inference": torch.inference_mode,
    "deterministic": _deterministic,
    "local": _local_tensors,
}


@pytest.mark.parametrize("mode", _MODES)
@pytest.mark.parametrize("kind", ["list", "tensor", "int32", "strides"])
def test_ranks_under_a_mode(kind: str, mode: str, world) -> None:
    ranks: Any = torch.tensor(_RANKS, dtype=torch.int32 if kind == "int32" else torch.int64)
    ranks = {"list": _RANKS, "strides": torch.tensor([[4, 0], [5, 0], [6, 0], [7, 0]])[:, 0]}.get(
        kind, ranks
    )
    groups = [dist.new_group(_RANKS)]
    with _MODES[mode]():
        meshes = [
            DeviceMesh("cpu", ranks),
            init_device_mesh("cpu", (4,), ranks=ranks),
            DeviceMesh.from_group(groups[0], "cpu", ranks),
            DeviceMesh.from_group(groups, "cpu", ranks, mesh_dim_names=("tp",)),
            init_mesh_partition("cpu", {"a": {"mesh_shape": (4,), "ranks": ranks}})["a"],
        ]
    for mesh in meshes:
        assert mesh.mesh.tolist() == _RANKS
        assert dist.get_process_group_ranks(mesh.get_group()) == _RANKS


_TRANSFORMS: dict[str, Callable[[Callable[[torch.Tensor], torch.Tensor], torch.Tensor], Any]] = {
    "grad": lambda function, x: torch.func.grad(function)(x),
    "vmap": lambda function, x: torch.func.vmap(function)(x[None]),
    "jvp": lambda function, x: torch.func.jvp(function, (x,), (x,)),
    "functionalize": lambda function, x: torch.func.functionalize(function)(x),
    "make_fx": lambda function, x: make_fx(function)(x),
    "make_fx, fake": lambda function, x: make_fx(function, tracing_mode="fake")(x),
    "make_fx, symbolic": lambda function, x: make_fx(
        function, tracing_mode="symbolic", pre_dispatch=True
    )(x),
}


# torch's own, when jvp is first used.
_ONLY_TORCHS = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")


@_ONLY_TORCHS
@pytest.mark.parametrize("transform", _TRANSFORMS)
def test_ranks_inside_a_transform(transform: str, world) -> None:
    ranks, meshes = torch.tensor(_RANKS), []

    def function(x: torch.Tensor) -> torch.Tensor:
        meshes.extend([DeviceMesh("cpu", ranks), DeviceMesh("cpu", _RANKS)])
        return (x * x).sum()

    _TRANSFORMS[transform](function, torch.arange(3.0))
    assert [mesh.mesh.tolist() for mesh in meshes] == [_RANKS, _RANKS]


def test_values_of_a_transform() -> None:
    seen = []

    def function(x: torch.Tensor) -> torch.Tensor:
        with fake_world(8, 5):
            seen.append(DeviceMesh("cpu", x).mesh.tolist())
        return x.sum()

    torch.func.grad(function)(torch.tensor([4.0, 5.0]))
    assert seen == [[4, 5]]
    with pytest.raises(RuntimeError, match="cannot be read"):
        torch.func.vmap(function)(torch.tensor([[4.0, 5.0]]))


_FIRST_READ = [*_TRANSFORMS, *_MODES]


@_ONLY_TORCHS
@pytest.mark.parametrize("where", _FIRST_READ)
def test_what_torch_reads_is_plain_wherever_it_is_read_first(where: str, world) -> None:
    # Nobody else has these ranks in this order, so nobody has read their tensor.
    order = _FIRST_READ.index(where)
    ranks = [*torch.arange(8).roll(order % 8).tolist()]
    ranks = ranks if order < 8 else ranks[::-1]
    mesh = DeviceMesh("cpu", ranks)

    def look(x: torch.Tensor) -> torch.Tensor:
        _ = mesh.mesh, mesh._rank_map, mesh._flatten_rank_map
        return (x * x).sum()

    if where in _TRANSFORMS:
        _TRANSFORMS[where](look, torch.arange(3.0))
    else:
        with _MODES[where]():
            _ = mesh.mesh, mesh._rank_map, mesh._flatten_rank_map
    plain = torch._C._dispatch_keys(torch.empty(0))
    for tensor in (mesh.mesh, mesh._rank_map):
        assert type(tensor) is torch.Tensor
        assert torch._C._dispatch_keys(tensor) == plain
        assert tensor.tolist() == ranks


# --- whatever Hypothesis finds -------------------------------------------------------------------

_DTYPES = [
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float32, torch.float64,
]  # fmt: skip


def _two_dimensional(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(2, -1) if tensor.numel() % 2 == 0 else tensor.reshape(1, -1)


# Each keeps the values, or turns them about together with the oracle.
_STEPS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "as it is": lambda t: t,
    "transposed": lambda t: _two_dimensional(t.contiguous()).T,
    "flipped": lambda t: t.flip(0),
    "sliced": lambda t: t[::2],
    "from the second on": lambda t: t[1:] if t.shape[0] > 1 else t,
    "padded": lambda t: torch.stack([t, torch.zeros_like(t)], -1)[..., 0],
    "expanded by one": lambda t: t.expand(1, *t.shape)[0],
    "as a parameter": lambda t: torch.nn.Parameter(t, requires_grad=False),
    "with a gradient": lambda t: t.detach().clone().requires_grad_(t.is_floating_point()),
    "of a subclass": lambda t: t.as_subclass(type("Sub", (torch.Tensor,), {})),
    "negative view": lambda t: torch._neg_view(-t) if t.dtype is not torch.uint8 else t,
}


@given(
    ranks=st.permutations(range(8)),
    size=st.integers(1, 8),
    dtype=st.sampled_from(_DTYPES),
    steps=st.lists(st.sampled_from(sorted(_STEPS)), max_size=4),
)
def test_any_chain_of_views(ranks, size: int, dtype: torch.dtype, steps: list[str]) -> None:
    tensor = torch.tensor(ranks[:size], dtype=dtype)
    for step in steps:
        tensor = _STEPS[step](tensor)
    with fake_world(8, 5):
        stock, ours = STOCK.DeviceMesh("cpu", tensor), DeviceMesh("cpu", tensor)
        assert ours.mesh.tolist() == tensor.to(torch.int64).tolist()
        assert_same(stock, ours)


@given(
    st.lists(
        st.integers(-3, 10) | st.integers(-(2**63), 2**63 - 1) | st.floats() | st.booleans(),
        max_size=6,
    )
)
def test_any_values(values: list[Any]) -> None:
    with fake_world(8, 5):
        try:
            mesh = DeviceMesh("cpu", values)
        except ValueError:
            ranks = set(values) & set(range(8))
            assert len(ranks) < len(values) or not values
        else:
            assert mesh.mesh.tolist() == values
