"""Finding the Python objects that refer to process groups, and giving them others."""

from __future__ import annotations

import collections
import dataclasses
import functools
import gc
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch.distributed as dist
from torch import nn

from meshverse.groups.references import find_references

pytestmark = pytest.mark.usefixtures("world")  # rank 5 of 8, backend "fake"


@dataclasses.dataclass(frozen=True)
class _Frozen:
    group: Any


@dataclasses.dataclass(slots=True)
class _Slots:
    group: Any


class _Pair(NamedTuple):
    number: int
    group: Any


class _Unchangeable(dict[str, Any]):
    def __setitem__(self, key: str, value: Any) -> None:
        raise TypeError("this cannot be changed")


class _UnchangeableList(list[Any]):
    def __setitem__(self, index: Any, value: Any) -> None:
        raise TypeError("this cannot be changed")


class _UnchangeableDeque(collections.deque[Any]):
    def __setitem__(self, index: Any, value: Any) -> None:
        raise TypeError("this cannot be changed")


class _Hidden(_Slots):
    @property
    def group(self) -> Any:
        return _Slots.group.__get__(self)

    @group.setter
    def group(self, value: Any) -> None:
        _Slots.group.__set__(self, value)


def _closure(group: Any) -> Any:
    return lambda: group


def _default(group: Any) -> Any:
    def function(one: Any = group, *, two: Any = group) -> tuple[Any, Any]:
        return one, two

    return function


class _Held:
    """Whatever holds a group, and how to read it there."""

    def __init__(self, group: Any) -> None:
        module = nn.Module()
        module.group = group
        self.places: dict[str, tuple[Any, Any]] = {
            "attribute": (module, lambda held: held.group),
            "frozen": (_Frozen(group), lambda held: held.group),
            "slots": (_Slots(group), lambda held: held.group),
            "list": ([0, group], lambda held: held[1]),
            "dict": ({"tp": group}, lambda held: held["tp"]),
            "dict of plain dicts": ({"a": {"b": {"c": group}}}, lambda held: held["a"]["b"]["c"]),
            "key": ({0: 1, group: "x", 2: 3}, lambda held: list(held)[1]),
            "set": ({group}, lambda held: next(iter(held))),
            "deque": (collections.deque([group]), lambda held: held[0]),
            "tuple in a list": ([(1, group)], lambda held: held[0][1]),
            "tuple in a tuple": ([((group, 1), group)], lambda held: held[0][0][0]),
            "named tuple": ([_Pair(1, group)], lambda held: held[0].group),
            "dict in a tuple": ([({"x": group},)], lambda held: held[0][0]["x"]),
            "closure": (_closure(group), lambda held: held()),
            "partial": (functools.partial(_Pair, group), lambda held: held.args[0]),
            "keyword of a partial": (
                functools.partial(_Pair, g=group),
                lambda held: held.keywords["g"],
            ),
            "method": ([group.rank], lambda held: held[0].__self__),
            "frozenset": ([frozenset([group])], lambda held: next(iter(held[0]))),
            "class": (type("Own", (), {"group": group}), lambda held: held.group),
            "counter": (collections.Counter({group: 5, "x": 2}), lambda held: next(iter(held))),
            "dict that cannot be changed": (_Unchangeable(tp=group), lambda held: held["tp"]),
            "list that cannot be changed": (_UnchangeableList([group]), lambda held: held[0]),
            "deque that cannot be changed": (_UnchangeableDeque([group]), lambda held: held[0]),
            "slot behind a property": (_Hidden(group), lambda held: held.group),
            "default argument": (_default(group), lambda held: held()[0]),
            "default keyword": (_default(group), lambda held: held()[1]),
        }


def _new_group() -> Any:
    return dist.new_group(list(range(8)), use_local_synchronization=True)


@pytest.mark.parametrize("is_collected", [False, True])
def test_each_place_gets_the_new_group(is_collected: bool) -> None:
    old = [_new_group()]
    held = _Held(old[0])
    if is_collected:  # then containers of plain data are no longer followed
        gc.collect()
    found = find_references(old)
    assert found.problems == []
    new = {id(old[0]): _new_group()}
    expected = new[id(old[0])]
    for referrer in found.referrers:
        referrer.replace(new)
    for place, (owner, read) in held.places.items():
        assert read(owner) is expected, place
    assert type(held.places["named tuple"][0][0]) is _Pair
    assert list(held.places["key"][0].values()) == [1, "x", 3]
    reference = weakref.ref(old.pop())
    del found, referrer
    gc.collect()
    assert reference() is None, "something was left"


def test_two_groups_are_not_confused() -> None:
    old = [_new_group(), _new_group()]
    held = {"one": (old[0], old[1]), "two": [old[1]]}
    new = {id(each): _new_group() for each in old}
    first, second = new.values()
    for referrer in find_references(old).referrers:
        referrer.replace(new)
    assert held["one"][0] is first
    assert held["one"][1] is held["two"][0] is second


def _generator(group: Any) -> Iterator[Any]:
    yield group


def test_a_function_that_has_read_the_attribute_of_a_class_reads_the_new_one() -> None:
    """CPython keeps what it found in a class, without a reference."""
    old = [_new_group()]
    kind = type("Own", (), {"group": old[0]})

    def read() -> Any:
        return kind.group

    for _ in range(1000):
        read()
    new = {id(old[0]): _new_group()}
    expected = new[id(old[0])]
    for referrer in find_references(old).referrers:
        referrer.replace(new)
    old.clear()
    gc.collect()
    assert read() is expected


def test_counts_stay() -> None:
    old = [_new_group()]
    counter = collections.Counter({old[0]: 5, "x": 2})
    new = {id(old[0]): _new_group()}
    for referrer in find_references(old).referrers:
        referrer.replace(new)
    assert list(counter.values()) == [5, 2]


def _generator(group: Any) -> Iterator[Any]:
    yield group


def _cached(group: Any) -> Any:
    cached = functools.lru_cache(maxsize=4)(_closure)
    cached(group)
    return cached


@pytest.mark.parametrize(
    ("hold", "what"),
    [
        (_cached, "an object '_closure' of functools._lru_cache_wrapper"),
        (slice, "an object of builtins.slice"),
        (lambda group: iter((group,)), None),
    ],
    ids=["cache", "slice", "iterator of a tuple"],
)
def test_what_cannot_be_replaced_is_named(hold: Any, what: str | None) -> None:
    old = [_new_group()]
    held = [hold(old[0])]
    problems = find_references(old).problems
    assert problems, "nothing was found"
    assert {index for index, _ in problems} == {0}
    assert what is None or what in [text for _, text in problems]
    del held


def _variable(old: list[Any]) -> list[str]:
    mine = old[0]
    problems = find_references(old).problems
    del mine
    return [what for _, what in problems]


def _tuple(old: list[Any]) -> list[str]:
    mine = (1, (old[0], "x"))
    problems = find_references(old).problems
    del mine
    return [what for _, what in problems]


def _arguments(old: list[Any]) -> list[str]:
    def program(*mine: Any) -> list[str]:
        return [what for _, what in find_references(old).problems]

    return program(old[0], 1)


@pytest.mark.parametrize("program", [_variable, _tuple, _arguments])
def test_a_local_variable_is_named_with_its_function(program: Any) -> None:
    problems = program([_new_group()])
    assert any(
        f"variable 'mine' of {name}() at {__file__}:" in what
        for what in problems
        for name in (program.__name__, "program")
    ), problems


def test_local_dictionaries_are_found_and_nothing_is_kept() -> None:
    old = [_new_group()]
    held = {"tp": old[0]}
    gc.collect()
    new = {id(old[0]): _new_group()}
    expected = new[id(old[0])]
    for referrer in find_references(old).referrers:
        referrer.replace(new)
    assert held["tp"] is expected
    reference = weakref.ref(old.pop())
    assert reference() is None


def test_a_search_keeps_no_local_variable() -> None:
    class Large:
        pass

    large = Large()
    reference = weakref.ref(large)
    old = [_new_group()]
    mine = old[0]
    assert find_references(old).problems
    del large, mine
    assert reference() is None


def test_a_running_generator_is_named() -> None:
    old = [_new_group()]
    running = _generator(old[0])
    next(running)
    problems = [what for _, what in find_references(old).problems]
    assert "an object '_generator' of builtins.generator" in problems
    running.close()


def test_what_refers_weakly_holds_nothing() -> None:
    old = [_new_group()]
    weakly = weakref.WeakKeyDictionary({old[0]: 1})
    found = find_references(old)
    assert found.problems == []
    assert len(weakly) == 1
