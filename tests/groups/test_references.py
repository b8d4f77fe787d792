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


class _OnClass:
    group: Any = None


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
            "default argument": (_default(group), lambda held: held()[0]),
            "default keyword": (_default(group), lambda held: held()[1]),
        }


_PLACES = list(_Held(None).places)


def _new_group() -> Any:
    return dist.new_group(list(range(8)), use_local_synchronization=True)


@pytest.mark.parametrize("is_collected", [False, True])
@pytest.mark.parametrize("place", _PLACES)
def test_each_place_gets_the_new_group(place: str, is_collected: bool) -> None:
    old = [_new_group()]
    held, read = _Held(old[0]).places[place]
    if is_collected:  # then containers of plain data are no longer followed
        gc.collect()
    found = find_references(old)
    assert found.problems == []
    new = {id(old[0]): _new_group()}
    expected = new[id(old[0])]
    for holder in found.holders:
        holder.replace(new)
    assert read(held) is expected
    if place == "named tuple":
        assert type(held[0]) is _Pair
    if place == "key":
        assert list(held.values()) == [1, "x", 3]


def test_two_groups_are_not_confused() -> None:
    old = [_new_group(), _new_group()]
    held = {"one": (old[0], old[1]), "two": [old[1]]}
    new = {id(each): _new_group() for each in old}
    first, second = new.values()
    for holder in find_references(old).holders:
        holder.replace(new)
    assert held["one"][0] is first
    assert held["one"][1] is held["two"][0] is second


def _generator(group: Any) -> Iterator[Any]:
    yield group


@pytest.mark.parametrize(
    ("hold", "what"),
    [
        (lambda group: group.rank, "an object of builtins."),
        (lambda group: frozenset([group]), "an object of builtins.frozenset"),
        (lambda group: iter([group]), None),
        (lambda group: type("Own", (), {"group": group}), None),
    ],
    ids=["method", "frozenset", "iterator of a list", "class"],
)
def test_what_cannot_be_replaced_is_named(hold: Any, what: str | None) -> None:
    old = [_new_group()]
    held = [hold(old[0])]
    problems = find_references(old).problems
    if what is None:
        assert problems == []
    else:
        assert [index for index, _ in problems] == [0]
        assert what in problems[0][1]
    del held


def test_a_local_variable_is_named_with_its_function() -> None:
    old = [_new_group()]

    def program() -> list[tuple[int, str]]:
        mine = old[0]
        problems = find_references(old).problems
        del mine
        return problems

    ((index, what),) = program()
    assert index == 0
    assert what.startswith(f"variable 'mine' of program() at {__file__}:")


def test_a_running_generator_is_named() -> None:
    old = [_new_group()]
    running = _generator(old[0])
    next(running)
    assert [what for _, what in find_references(old).problems] == [
        "an object of builtins.generator"
    ]
    running.close()


def test_what_refers_weakly_holds_nothing() -> None:
    old = [_new_group()]
    weakly = weakref.WeakKeyDictionary({old[0]: 1})
    found = find_references(old)
    assert found.problems == []
    assert len(weakly) == 1
