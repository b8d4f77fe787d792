"""Options keys: snapshots of options objects of classes nobody has seen."""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import datetime
import enum
import functools
import gc
import math
import os
import pathlib
import pickle
import socket
import struct
import subprocess
import sys
import threading
import types
import weakref

import pytest
import torch.distributed as dist

from helpers.tiers import in_tiers
from meshverse._core import AxisLayout, Layout, OptionsKey


class Color(enum.Enum):
    RED = 1
    BLUE = 2


class Level(enum.IntFlag):
    LOW = 1
    HIGH = 2


class Config:
    def __init__(self):
        self.min_ctas = 0
        self.algorithm = "ring"


class Options:
    """Has one of everything; each test changes what it is about."""

    def __init__(self):
        self.value = None
        self.config = Config()
        self.devices = []
        self.hints = {}

    @property
    def doubled(self):
        return [self.value, self.value]


@dataclasses.dataclass
class DataclassOptions:
    rings: int = 2
    devices: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(slots=True)
class SlotOptions:
    rings: int = 2


class OptionsWithArguments:
    def __init__(self, rings):
        self.rings = rings


class RaisingOptions:
    @property
    def world(self):
        raise RuntimeError("not connected")


def changed(options=Options, **fields):
    options = options()
    for name, value in fields.items():
        setattr(options, name, value)
    return options


def key(options=None, **kwargs):
    return OptionsKey.of("custom", options, **kwargs)


def test_defaults_written_out_are_no_options():
    for default in (Options(), DataclassOptions(), DataclassOptions(rings=2), SlotOptions()):
        assert key(default) == key()
        assert hash(key(default)) == hash(key())
        assert key(default).digest == key().digest
        assert repr(key(default)) == "OptionsKey('custom')"


def test_the_parts_of_a_key():
    timeout = datetime.timedelta(seconds=90, microseconds=5)
    full = key(DataclassOptions(rings=4), timeout=timeout, tag="x")
    assert repr(full) == "OptionsKey('custom', timeout=90.000005s, rings=4, tag='x')"
    assert (full.tag, key().tag) == ("x", "")
    parts = [key(), full, OptionsKey.of("other"), key(timeout=timeout), key(tag="x")]
    assert len(set(parts)) == len({part.digest for part in parts}) == len(parts)
    assert full != "custom"


def test_with_tag_changes_the_tag_only():
    original = key(DataclassOptions(rings=4))
    tagged = original.with_tag("reduce_scatter")
    assert tagged == key(DataclassOptions(rings=4), tag="reduce_scatter") != original
    assert original.tag == ""


def test_without_timeout_leaves_the_rest():
    full = key(DataclassOptions(rings=4), timeout=datetime.timedelta(seconds=69), tag="x")
    assert full.without_timeout() == key(DataclassOptions(rings=4), tag="x") != full
    assert full.without_timeout() == full.without_timeout().without_timeout()


def test_text_names_what_differs():
    options = changed(value=1.5, devices=["a"], config=Config())
    options.config.min_ctas = 4
    assert repr(key(options, timeout=datetime.timedelta(minutes=10), tag="it's")) == (
        "OptionsKey('custom', timeout=600s, config.min_ctas=4, devices[0]='a', doubled[0]=1.5, "
        r"doubled[1]=1.5, value=1.5, tag='it\'s')"
    )
    assert repr(OptionsKey.of("gloo")) == "OptionsKey('gloo')"


NAN, OTHER_NAN = (struct.unpack("d", struct.pack("Q", 0x7FF8 << 48 | n))[0] for n in (0, 1))

VALUES = [
    False, True, 0, 1, -1, 2**63, 2**64, -(2**64), 0.0, -0.0, 1.0, math.inf, NAN, OTHER_NAN,
    "", "1", "None", "list", b"", b"1", datetime.timedelta(0), datetime.timedelta(seconds=61),
    Color.RED, Color.BLUE, Level.LOW, Level.HIGH, Level.LOW | Level.HIGH,
    dist.DebugLevel.OFF, dist.DebugLevel.INFO,
    [], [None], [[]], (), {}, {"a": 1}, {"a": "1"}, {1: 1}, {"1": 1}, {"a": {"b": 1}}, {"a.b": 1},
    set(), {1}, {1, 2}, Config(), OptionsWithArguments(1), OptionsWithArguments(2),
    math.sin, math.cos, Config, sys, object(), object(),
]  # fmt: skip


def test_every_kind_of_value_counts():
    keys = [key(changed(value=value)) for value in VALUES]
    again = [key(changed(value=value)) for value in VALUES]
    assert keys == again
    assert list(map(hash, keys)) == list(map(hash, again))
    assert len(set(keys)) == len(VALUES)


def test_digests_differ_where_values_do():
    plain = [value for value in VALUES if not isinstance(value, (type(math.sin), type(object())))]
    digests = {key(changed(value=value)).digest for value in plain}
    assert len(digests) >= len(plain) - 2


@pytest.mark.parametrize(
    ("one", "same"),
    [
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ({3, 1, 2}, {2, 3, 1}),
        (Config(), Config()),
        (types.SimpleNamespace(x=1), types.SimpleNamespace(x=1)),
    ],
)
def test_equal_content_gives_equal_keys(one, same):
    assert key(changed(value=one)) == key(changed(value=same))
    assert key(changed(value=one)).digest == key(changed(value=same)).digest


def test_nested_fields_have_dotted_names():
    options = changed(devices=[Config(), ("x",)], hints={"a": {"b": Color.RED}})
    options.config.algorithm = "tree"
    text = repr(key(options))
    assert "config.algorithm='tree', " in text
    assert "devices[0].min_ctas=0, " in text
    assert "devices[1][0]='x', " in text
    assert f"hints['a']['b']={__name__}.Color(RED)" in text
    assert "config.min_ctas" not in text


def test_what_only_the_defaults_have_counts():
    options = Options()
    del options.hints
    assert repr(key(options)) == "OptionsKey('custom', hints=absent)"
    assert key(options) != key()


def test_ignored_fields_are_not_even_read():
    assert key(RaisingOptions(), ignored=["world"]) == key()
    options = changed(value=3)
    options.config.min_ctas = 7
    ignored = {"value", "doubled", "config.min_ctas"}
    assert key(options, ignored=ignored) == key()
    result = repr(key(options, ignored=ignored - {"config.min_ctas"}))
    assert result == "OptionsKey('custom', config.min_ctas=7)"
    assert key(options, ignored=["config", "value", "doubled"]) == key()


def test_a_key_is_a_snapshot():
    options = changed(devices=["a"], hints={"x": [1]})
    before, text = key(options), repr(key(options))
    options.devices.append("b")
    options.hints["x"][0] = 2
    options.config.min_ctas = 9
    assert repr(before) == text
    assert before == key(changed(devices=["a"], hints={"x": [1]})) != key(options)


def test_objects_without_fields_count_by_identity_and_stay_alive():
    class Device:
        __slots__ = ("__weakref__",)

    device = Device()
    alive = weakref.ref(device)
    kept = key(changed(devices=[device]))
    assert kept == key(changed(devices=[device]))
    assert kept != key(changed(devices=[Device()]))
    assert kept.digest == key(changed(devices=[Device()])).digest
    handle = f"<{__name__}.{Device.__qualname__} handle>"
    assert repr(kept) == f"OptionsKey('custom', devices[0]={handle})"
    del device
    gc.collect()
    assert alive() is not None
    del kept
    assert alive() is None


class Locked:
    def __init__(self):
        self.name = "eth0"
        self.lock = threading.Lock()


class Cyclic:
    def __init__(self):
        self.me = self


@pytest.mark.parametrize(
    "make",
    [Locked, Cyclic, dist.HashStore, socket.socket, functools.partial(open, os.devnull)],
    ids=["lock", "cycle", "store", "socket", "file"],
)
def test_what_is_more_than_its_fields_counts_by_identity(make):
    with contextlib.ExitStack() as stack:
        one, other = (make() for _ in range(2))
        for handle in (one, other):
            stack.callback(getattr(handle, "close", int))
        assert key(changed(value=one)) == key(changed(value=one)) != key(changed(value=other))
        assert key(changed(value=one)).digest == key(changed(value=other)).digest
        assert repr(key(changed(value=one))).endswith("handle>)")


class Ring(collections.deque):
    def __init__(self, items):
        super().__init__(items)
        self.name = "eth0"


def test_items_of_containers_that_are_not_pythons_own_are_no_fields():
    one, other = Ring([1]), Ring([2])
    assert key(changed(value=one)) == key(changed(value=one)) != key(changed(value=other))


@dataclasses.dataclass
class Cable:
    plug: object = None


class Unreadable(Locked):
    @property
    def address(self):
        raise RuntimeError("not connected")


def cyclic():
    items = []
    items.append(items)
    return items


@pytest.mark.parametrize(
    "parts",
    [
        lambda: [threading.Lock()],
        lambda: [[threading.Lock()]],
        lambda: [Cable(threading.Lock())],
        lambda: [{threading.Lock(): 1}],
        lambda: [{"eth0", threading.Lock()}],
        lambda: [cyclic(), threading.Lock()],
        lambda: [Unreadable()],
        lambda: [{"a": Unreadable()}],
    ],
)
def test_an_object_that_holds_a_handle_is_one_whatever_else_it_holds(parts):
    def holding(parts):
        config = Config()
        config.parts, config.cable = parts, Cable(parts)
        return config

    parts = parts()
    one, other = holding(parts), holding(parts)
    assert repr(key(changed(value=one))).endswith("value=<test_options_keys.Config handle>)")
    assert key(changed(value=one)) == key(changed(value=one)) != key(changed(value=other))
    # Other than an object, a namespace is data whatever it holds.
    keys = [key(changed(value=types.SimpleNamespace(x=x))) for x in (one, one, other)]
    assert keys[0] == keys[1] != keys[2]


def test_objects_that_refer_to_what_holds_them_are_handles():
    outer, inner = Cable(), Config()
    outer.plug, inner.algorithm = inner, [outer]
    assert key(types.SimpleNamespace(x=outer)) == key(types.SimpleNamespace(x=Cable(inner)))
    assert repr(key(types.SimpleNamespace(x=outer))).endswith("Config handle>)")


def test_no_two_fields_have_one_name():
    def options(dotted, nested):
        return types.SimpleNamespace(**{"a.b": dotted}, a=types.SimpleNamespace(b=nested))

    keys = {key(options(dotted, nested)) for dotted in (1, 2) for nested in (1, 2)}
    assert len(keys) == 4


def test_handles_as_keys_of_dicts_and_in_sets_count_by_identity():
    one, other = Locked(), Locked()
    for put in (lambda h: {h: [1]}, lambda h: {h, "eth0"}):
        assert key(changed(value=put(one))) == key(changed(value=put(one)))
        assert key(changed(value=put(one))) != key(changed(value=put(other)))
        assert key(changed(value=put(one))).digest == key(changed(value=put(other))).digest
    assert key(changed(value={one, other})) == key(changed(value={other, one}))


def test_paths_count_by_what_they_say():
    one, same, other = (pathlib.PurePosixPath(text) for text in ("/a/b", "/a/b", "/a/c"))
    str(one)  # which it keeps
    assert key(changed(value=one)) == key(changed(value=same)) != key(changed(value=other))
    assert key(changed(value=one)) != key(changed(value="/a/b"))


def test_layouts_and_keys_count_by_what_they_are():
    def key_with(value: object) -> OptionsKey:
        return OptionsKey.of("gloo", types.SimpleNamespace(of=value))

    def values() -> list[object]:
        layouts = AxisLayout(4, 2), AxisLayout(4), Layout([AxisLayout(4)])
        return [*layouts, OptionsKey.of("gloo"), OptionsKey.of("gloo", tag="x")]

    keys = [key_with(value) for value in values()]
    assert keys == [key_with(value) for value in values()]
    assert len(set(keys)) == len({key.digest for key in keys}) == len(keys)
    assert pickle.loads(pickle.dumps(keys)) == keys
    assert key_with({AxisLayout(4): 1}) == key_with({AxisLayout(4): 1})


def test_a_tag_is_a_string():
    key = OptionsKey.of("gloo")
    for wrong in (5, None, b"x"):
        with pytest.raises(TypeError, match="not a string"):
            key.with_tag(wrong)
        with pytest.raises(TypeError, match="not a string"):
            OptionsKey.of("gloo", tag=wrong)
    with pytest.raises(UnicodeEncodeError):
        key.with_tag("\ud800")


def test_options_without_fields_count_by_identity():
    class Opaque:
        __slots__ = ()

    one, other = Opaque(), Opaque()
    assert key(one) == key(one) != key(other)
    assert key(one) != key()


def test_types_that_need_arguments_count_by_all_their_fields():
    one = key(OptionsWithArguments(1))
    assert one == key(OptionsWithArguments(1)) != key(OptionsWithArguments(2))
    assert repr(one) == f"OptionsKey('custom', {__name__}.OptionsWithArguments, rings=1)"

    class Other(OptionsWithArguments):
        pass

    assert key(Other(1)) != one


def test_one_shared_default_is_not_a_default():
    class Singleton:
        instance = None
        rings = 1

        def __new__(cls):
            cls.instance = cls.instance or super().__new__(cls)
            return cls.instance

    options = Singleton()
    options.rings = 2
    assert repr(key(options)).endswith(", rings=2)")


def test_attributes_added_to_no_fields_count():
    assert repr(key(types.SimpleNamespace(rings=2))) == "OptionsKey('custom', rings=2)"
    assert key(types.SimpleNamespace(rings=2)) == key(types.SimpleNamespace(rings=2))


def test_slots_that_were_never_set_are_absent():
    class Slots:
        __slots__ = ("rings", "trees")

        def __init__(self):
            self.rings = 2

    options = Slots()
    assert key(options) == key()
    options.trees = 1
    assert repr(key(options)) == "OptionsKey('custom', trees=1)"


def test_an_attribute_that_hides_a_property_wins():
    class Hiding(Options):
        doubled = "no longer computed"

    assert repr(key(changed(Hiding, value=1))) == "OptionsKey('custom', value=1)"


class Hints(dict):
    pass


class Spots(list):
    pass


class Pair(tuple):
    pass


@pytest.mark.parametrize("kind", [Hints, Spots, Pair, collections.OrderedDict])
def test_attributes_of_containers_count(kind):
    def hints(mode):
        own = kind()
        own.mode = [mode]
        return changed(hints=own)

    assert key(hints("ring")) == key(hints("ring")) != key(hints("tree"))
    assert repr(key(hints("ring"))).count("'ring'") == 1
    assert key(hints("ring"), ignored=["hints.mode"]) == key(changed(hints=kind()))


@pytest.mark.parametrize("depth", [9, 20_000])
def test_a_deep_tuple_as_a_key_of_a_dict_is_a_handle(depth):
    deep = ()
    for _ in range(depth):
        deep = (deep,)
    assert key(changed(hints={deep: 1})) == key(changed(hints={deep: 1}))
    assert "<builtins.tuple 0>" in repr(key(changed(hints={deep: 1})))


def test_what_cannot_be_read_says_so():
    with pytest.raises(
        TypeError,
        match=r"'world' of type .*RaisingOptions cannot be read \(RuntimeError: not connected\)",
    ) as raised:
        key(RaisingOptions())
    assert isinstance(raised.value.__cause__, RuntimeError)
    with pytest.raises(TypeError, match=r"'doubled\[0\]\.world'.*add it to `ignored`"):
        key(changed(value=RaisingOptions()))


def test_what_has_no_end_says_so():
    cyclic = {}
    cyclic["self"] = cyclic
    with pytest.raises(TypeError, match=r"'doubled\[0\]\['self'\]' of .*dict contains itself"):
        key(changed(value=cyclic))
    deep = 1
    for _ in range(20):
        deep = [deep]
    with pytest.raises(TypeError, match=r"of type builtins\.list is nested too deeply: .* 8 deep"):
        key(changed(value=deep))
    shared = [1]
    assert "value[1][0]=1" in repr(key(changed(value=[shared, shared])))


@pytest.mark.parametrize("options", ["high", 5, 1.5, {"timeout": 3}, [], datetime.timedelta(1)])
def test_plain_values_are_not_options(options):
    with pytest.raises(TypeError, match="options must be an object with fields, such as"):
        key(options)


def test_misused_arguments_say_so():
    with pytest.raises(TypeError, match="call the class to make one"):
        key(Options)
    with pytest.raises(TypeError, match=r"timeout 600: it must be a datetime\.timedelta or None"):
        key(timeout=600)
    with pytest.raises(TypeError, match="collection of field names, not one name"):
        key(Options(), ignored="value")
    with pytest.raises(TypeError, match=r"made by OptionsKey\.of\(backend, options\)"):
        OptionsKey("nccl")
    with pytest.raises(OverflowError, match="computing a timeout"):
        key(timeout=datetime.timedelta.max)


def test_digests_are_the_same_in_every_process():
    made = "OptionsKey.of('nccl', SimpleNamespace(a=1, b=[2.5, 'x'], c={'k': None}), tag='t')"
    program = (
        "from types import SimpleNamespace; from meshverse._core import OptionsKey;"
        f"print({made}.digest)"
    )
    elsewhere = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONHASHSEED": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    here = eval(made, {"OptionsKey": OptionsKey, "SimpleNamespace": types.SimpleNamespace})
    assert elsewhere.stdout.strip() == here.digest


@dataclasses.dataclass
class _Picklable:
    count: int = 0
    ratio: float = 0.5
    name: str = ""
    on: bool = False
    raw: bytes = b""
    parts: list[int] = dataclasses.field(default_factory=list)
    wait: datetime.timedelta = datetime.timedelta(0)
    nothing: object = None


@pytest.mark.parametrize(
    "key",
    [
        OptionsKey.of("gloo"),
        OptionsKey.of("nccl", timeout=datetime.timedelta(seconds=67), tag="x"),
        OptionsKey.of(
            "nccl",
            _Picklable(3, -0.0, "é\0", True, b"\xff", [1, 2], datetime.timedelta(seconds=61), 4),
        ),
    ],
    ids=str,
)
def test_a_key_is_pickled(key: OptionsKey) -> None:
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        again = pickle.loads(pickle.dumps(key, protocol))
        assert (again, hash(again), again.digest, repr(again)) == (
            *(key, hash(key), key.digest, repr(key)),
        )
    assert copy.deepcopy(key) == key


def test_a_key_of_what_is_known_by_identity_is_not_pickled() -> None:
    key = OptionsKey.of("nccl", _Picklable(nothing=threading.Lock()))
    with pytest.raises(TypeError, match=r"cannot pickle this OptionsKey: its field nothing is a"):
        pickle.dumps(key)


@pytest.mark.parametrize(
    "state",
    [
        (),
        (1, None, "", "", {}),
        ("gloo", None, "", "", {"a": ("float", "x")}),
        ("gloo", None, "", "", {"a": ("strange", 1)}),
        ("gloo", None, "", "", {"a": ()}),
        ("gloo", None, "", "", {"a": 1}),
        ("gloo", "soon", "", "", []),
    ],
    ids=str,
)
def test_a_damaged_pickle_of_a_key_is_refused(state: tuple[object, ...]) -> None:
    with pytest.raises(ValueError, match="a pickled OptionsKey"):
        OptionsKey(state)


def locked_key():
    """A handle, and the key of options that have it."""
    handle = Locked()
    return handle, key(changed(devices=[handle]))


def test_a_key_in_a_cycle_is_collected():
    handle, kept = locked_key()
    handle.key = kept
    alive = weakref.ref(handle)
    del handle, kept
    gc.collect()
    assert alive() is None


def test_keys_with_the_same_handle_in_a_cycle_are_collected():
    handle, kept = locked_key()
    handle.keys = [kept, kept.with_tag("x"), kept.with_tag("y").with_tag("z")]
    handle.twice = key(changed(devices=[handle, handle]))
    alive = weakref.ref(handle)
    del handle, kept
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("first_dies", in_tiers([False, True], [True]))
def test_the_handle_of_a_live_key_outlives_another_key_in_a_cycle(first_dies):
    handle, first = locked_key()
    second = first.with_tag("x")
    cyclic, kept = (first, second) if first_dies else (second, first)
    handle.owner = [cyclic]
    handle.owner.append(handle.owner)
    alive = weakref.ref(handle)
    del handle, first, second, cyclic
    for _ in range(3):
        gc.collect()
    survivor = alive()
    assert survivor.name == "eth0"
    assert survivor.owner[1] is survivor.owner
    assert kept.with_tag("") == key(changed(devices=[survivor]))
    del survivor, kept
    gc.collect()
    assert alive() is None


def test_a_key_without_handles_is_nothing_to_the_garbage_collector():
    assert not gc.is_tracked(key(changed(level=2)))
    assert gc.is_tracked(locked_key()[1])


def test_a_long_chain_of_keys_and_handles_is_freed():
    handle = None
    for _ in range(20_000):  # deep enough to overflow a stack of 8 MiB
        outer = Locked()
        outer.key = handle and key(changed(devices=[handle]))
        handle = outer
    alive = weakref.ref(handle)
    del outer, handle
    assert alive() is None


@pytest.mark.parametrize("kind", [str, pathlib.PurePosixPath])
def test_texts_that_utf8_cannot_encode_count_by_what_they_say(kind: type):
    text = os.fsdecode(b"/scratch/\xff")  # a path that is not in the file system's encoding
    one = key(changed(value=kind(text)))
    assert one == key(changed(value=kind(text)))
    assert one.digest == key(changed(value=kind(text))).digest
    others = (text + "x", ascii(text), text.replace("\udcff", "\\udcff"))
    assert all(one != key(changed(value=kind(other))) for other in others)
    assert pickle.loads(pickle.dumps(one)) == one
