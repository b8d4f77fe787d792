"""Copies of options: data is copied, handles are handed on, and the options key tells the same."""

from __future__ import annotations

import collections
import dataclasses
import socket
import threading
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from helpers import via_store
from meshverse._core import OptionsKey
from meshverse._torch_compat.backends import IGNORED_OPTION_FIELDS, explicit_timeout_of
from meshverse.options.group_options import _copy as copy_of

_C10dOptions: Any = torch._C._distributed_c10d.Backend.Options


class RingOptions(_C10dOptions):  # type: ignore[misc]
    """As an out-of-tree backend has them."""

    def __init__(self) -> None:
        super().__init__("ring", timedelta(minutes=30))
        self.value: Any = None


class ArgumentOptions(_C10dOptions):  # type: ignore[misc]
    """Cannot be made without arguments, and counts how often it is made."""

    made = 0

    def __init__(self, rings: int, value: Any = None) -> None:
        super().__init__("ring", timedelta(seconds=70))
        if rings < 1:
            raise ValueError("a ring or more")
        type(self).made += 1
        self.rings = rings
        self.value = value


class PickyOptions(RingOptions):
    """Refuses to be made without arguments, in words of its own."""

    def __init__(self, rings: int = 0) -> None:
        super().__init__()
        if rings < 1:
            raise ValueError("a ring or more")
        self.rings = rings


class SlotOptions(_C10dOptions):  # type: ignore[misc]
    __slots__ = ("never_set", "value")

    def __init__(self) -> None:
        super().__init__("ring", timedelta(minutes=30))


class Config:
    def __init__(self) -> None:
        self.depth = 1
        self.hints = {"a": [1]}


@dataclasses.dataclass
class Cable:
    plug: Any = None
    lengths: list[int] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True, slots=True)
class FrozenCable:
    plug: Any = None
    lengths: list[int] = dataclasses.field(default_factory=list)


class Pair(tuple):
    pass


class Hints(dict):  # type: ignore[type-arg]
    pass


def _with_attribute(value: Any) -> Any:
    value.lengths = [2]
    return value


class NamedPair(NamedTuple):
    plug: Any
    lengths: list[int]


class Locked:
    """A handle as Python libraries have them: fields, and a lock among them."""

    def __init__(self) -> None:
        self.name = "eth0"
        self.lock = threading.Lock()


class Above:
    def __init__(self) -> None:
        self.inner = {"below": [Locked()]}


class ByHandle:
    def __init__(self) -> None:
        self.names = {threading.Lock(): "eth0"}


class Cyclic:
    def __init__(self) -> None:
        self.name = "eth0"
        self.me = self


class Closing:
    def __init__(self) -> None:
        self.descriptor = 3

    def __del__(self) -> None:
        pass


class OnlyOne:
    """A handle by its own word: whoever copies it gets it."""

    def __init__(self) -> None:
        self.descriptor = 3

    def __copy__(self) -> OnlyOne:
        return self


class Uncopyable(Locked):
    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("there is but one")


_HANDLES: dict[str, Callable[[], Any]] = {
    "object": object,
    "lock": threading.Lock,
    "what holds a lock": Locked,
    "what holds one far below": Above,
    "what goes by one": ByHandle,
    "what refers to itself": Cyclic,
    "what closes at its end": Closing,
    "what must not be copied": Uncopyable,
    "socket": socket.socket,
    "store": dist.HashStore,
    "tensor": lambda: torch.ones(2),
    "function": lambda: lambda: None,
    "thread": threading.Thread,
    "pool": lambda: ThreadPoolExecutor(1),
    "gloo device": lambda: dist.ProcessGroupGloo.create_device(hostname="127.0.0.1"),
}

_PLACES: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "field": (lambda handle: handle, lambda value: value),
    "list": (lambda handle: [0, handle], lambda value: value[1]),
    "tuple": (lambda handle: (handle, []), lambda value: value[0]),
    "named tuple": (lambda handle: NamedPair(handle, []), lambda value: value.plug),
    "dict": (lambda handle: {"a": {"b": handle}}, lambda value: value["a"]["b"]),
    "dict key": (lambda handle: {handle: []}, lambda value: next(iter(value))),
    "set": (lambda handle: {handle, "eth0"}, lambda value: next(iter(value - {"eth0"}))),
    "dataclass": (lambda handle: Cable(handle), lambda value: value.plug),
    "frozen dataclass": (lambda handle: FrozenCable(handle), lambda value: value.plug),
    "namespace": (lambda handle: types.SimpleNamespace(x=handle), lambda value: value.x),
    "options": (lambda handle: _ring(handle), lambda value: value.value),
}


def _ring(value: Any, kind: Any = RingOptions) -> Any:
    options = kind()
    options.value = value
    return options


def _key(options: Any) -> OptionsKey:
    return OptionsKey.of("ring", options, ignored=IGNORED_OPTION_FIELDS)


@pytest.fixture
def close_after() -> Iterator[Callable[[Any], Any]]:
    opened: list[Any] = []

    def note(handle: Any) -> Any:
        opened.append(handle)
        return handle

    yield note
    for handle in opened:
        getattr(handle, "close", lambda: None)()


@pytest.mark.parametrize("place", _PLACES)
@pytest.mark.parametrize("handle", _HANDLES)
def test_a_handle_reaches_the_copy_wherever_it_is(handle, place, close_after) -> None:
    inside, taken_out = _PLACES[place]
    one, other = (close_after(_HANDLES[handle]()) for _ in range(2))
    options = _ring(inside(one))
    mine = copy_of(options)
    assert mine is not options
    assert type(mine) is RingOptions
    assert taken_out(mine.value) is one
    assert _key(mine) == _key(options) == _key(_ring(inside(one)))
    assert _key(mine) != _key(_ring(inside(other)))


_DATA: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "list": (lambda: [1, [2]], lambda value: value[1].append(3)),
    "tuple": (lambda: (1, [2]), lambda value: value[1].append(3)),
    "own tuple": (lambda: Pair([[2]]), lambda value: value[0].append(3)),
    "named tuple": (lambda: NamedPair(None, [2]), lambda value: value.lengths.append(3)),
    "dict": (lambda: {"a": {"b": 1}}, lambda value: value["a"].update(b=2)),
    "ordered dict": (
        lambda: collections.OrderedDict(b=[1], a=[2]),
        lambda value: value["a"].append(3),
    ),
    "default dict": (
        lambda: collections.defaultdict(list, a=[2]),
        lambda value: value["b"].append(3),
    ),
    "attribute of a dict": (
        lambda: _with_attribute(Hints(a=1)),
        lambda value: value.lengths.append(3),
    ),
    "attribute of a tuple": (
        lambda: _with_attribute(Pair([1])),
        lambda value: value.lengths.append(3),
    ),
    "set": (lambda: {1, 2}, lambda value: value.add(3)),
    "object": (Config, lambda value: value.hints["a"].append(2)),
    "new attribute": (Config, lambda value: setattr(value, "width", 2)),
    "dataclass": (Cable, lambda value: value.lengths.append(2)),
    "frozen dataclass": (FrozenCable, lambda value: value.lengths.append(2)),
    "namespace": (
        lambda: types.SimpleNamespace(x=[1]),
        lambda value: value.x.append(2),
    ),
    "options": (lambda: _ring([1]), lambda value: value.value.append(2)),
    "gloo options": (
        dist.ProcessGroupGloo._Options,
        lambda value: setattr(value, "_threads", value._threads + 5),
    ),
    "in a list": (lambda: [Config()], lambda value: setattr(value[0], "depth", 2)),
}


@pytest.mark.parametrize("whose", ["the original", "the copy"])
@pytest.mark.parametrize("kind", [RingOptions, SlotOptions])
@pytest.mark.parametrize("data", _DATA)
def test_data_is_a_snapshot(data: str, kind: Any, whose: str) -> None:
    make, change = _DATA[data]
    options = _ring(make(), kind)
    mine = copy_of(options)
    before = _key(options)
    assert _key(mine) == before
    assert type(mine.value) is type(options.value)
    changed, other = (options, mine) if whose == "the original" else (mine, options)
    change(changed.value)
    assert _key(other) == before != _key(changed)


def test_what_is_there_twice_is_there_twice() -> None:
    config = Config()
    mine = copy_of(_ring({"one": config, "other": config, "more": [config]})).value
    assert mine["one"] is mine["other"] is mine["more"][0] is not config


def test_what_has_no_end_is_neither_compared_nor_copied() -> None:
    cycle: list[Any] = []
    cycle.append(cycle)
    for take in (copy_of, _key):
        with pytest.raises(TypeError, match="contains itself"):
            take(_ring(cycle))


def test_what_says_that_there_is_but_one_is_believed() -> None:
    one = OnlyOne()
    assert copy_of(_ring([one])).value[0] is one


def test_a_type_that_takes_arguments_is_copied_without_making_it_anew() -> None:
    lock = threading.Lock()
    options = ArgumentOptions(3, [lock])
    made = ArgumentOptions.made
    mine = copy_of(options)
    assert type(mine) is ArgumentOptions
    assert mine is not options
    assert (mine.rings, mine.backend, mine._timeout) == (3, "ring", timedelta(seconds=70))
    mine._timeout, mine.rings = timedelta(seconds=90), 5
    mine.value.append(1)
    assert (options._timeout, options.rings, options.value) == (timedelta(seconds=70), 3, [lock])
    assert ArgumentOptions.made == made


def test_slots_that_were_never_set_stay_so() -> None:
    mine = copy_of(_ring(1, SlotOptions))
    assert mine.value == 1
    assert not hasattr(mine, "never_set")


def test_options_that_do_something_at_their_end_are_not_doubled() -> None:
    class ClosingOptions(RingOptions):
        def __del__(self) -> None:
            pass

    options = ClosingOptions()
    assert copy_of(options) is options


def test_options_without_fields_are_handed_on() -> None:
    class Opaque:
        __slots__ = ()

    options = Opaque()
    assert copy_of(options) is options
    assert copy_of(None) is None


def test_options_of_any_class_are_copied() -> None:
    handle = Locked()
    options = types.SimpleNamespace(handle=handle, rings=[1])
    mine = copy_of(options)
    assert mine is not options
    assert mine.handle is handle
    assert mine.rings == [1]
    assert mine.rings is not options.rings


def test_a_type_with_its_own_way_to_copy_is_asked() -> None:
    class Counting(RingOptions):
        copies = 0

        def __copy__(self) -> Counting:
            Counting.copies += 1
            return Counting()

        def __deepcopy__(self, memo: Any) -> Any:
            raise AssertionError("that would copy the handles")

    options = Counting()
    options.value = [threading.Lock()]
    mine = copy_of(options)
    assert Counting.copies == 1
    assert mine.value[0] is options.value[0]
    assert mine.value is not options.value


def test_options_of_a_cpp_backend(via_store_library: Path) -> None:
    module = via_store.load(via_store_library)
    device = module.Device()
    options = module.Options()
    options.devices, options.hints = [device], {"device": device, "rings": [1], "more": Locked()}
    options.wiring.chunk_bytes = 7
    mine = copy_of(options)
    assert type(mine) is module.Options
    assert _key(mine) == _key(options) != _key(module.Options())
    assert mine.devices[0] is device is mine.hints["device"]
    assert mine.hints["more"] is options.hints["more"]
    mine.wiring.chunk_bytes = 8
    mine.hints["rings"].append(2)
    mine.devices = []
    assert options.wiring.chunk_bytes == 7
    assert options.hints["rings"] == [1]
    assert options.devices == [device]


def test_cpp_options_extended_in_python(via_store_library: Path) -> None:
    module = via_store.load(via_store_library)

    class Extended(module.Options):
        def __init__(self, lock: Any) -> None:
            super().__init__()
            self.lock = lock
            self.nested = module.Wiring()
            self.more = [module.Options()]

    options = Extended(threading.Lock())
    options.wiring.network = "eth0"
    options.nested.network = "eth1"
    options.more[0].hints = [options.lock]
    mine = copy_of(options)
    assert type(mine) is Extended
    assert mine.lock is options.lock is mine.more[0].hints[0]
    assert mine.wiring.network == "eth0"
    assert mine.nested is options.nested  # it may be anything
    assert _key(mine) == _key(options)
    mine.more[0].hints.append(1)
    assert options.more[0].hints == [options.lock]


def test_constructors_that_refuse_say_no_default() -> None:
    options = PickyOptions(2)
    assert explicit_timeout_of(options) == timedelta(minutes=30)
    assert _key(options) == _key(copy_of(options))
