"""References to process groups in the Python objects of this process, and their replacement.

FSDP2's parameter groups, the stages of a pipeline and users' objects hold the process group itself,
and not its name. Once it has ended and another one was created in its place, they need that one.
`gc.get_referrers` finds these objects, except untracked dictionaries and tuples (those with only
plain data and groups) and local variables of running functions. These are searched only if a group
has more references than the collector explains.
"""

from __future__ import annotations

import collections
import contextlib
import gc
import inspect
import itertools
import sys
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

_FRAMES_OWN = 3  # references to a frame's dictionary of variables, if nobody else has one
_AT_ONCE = 1_000  # objects whose contents are listed in one step
_WRAPPED = (
    "an object of torch.nn.parallel.DistributedDataParallel, which uses it in C++ code: wrap the "
    "model again"
)
# Containers that the collector does not follow, if all in them is plain data.
_PLAIN = frozenset((dict, tuple))


class Referrer:
    """An object that refers to process groups, or to tuples that contain some.

    Args:
        owner: the object.
    """

    __slots__ = ("owner",)

    def __init__(self, owner: Any) -> None:
        self.owner = owner

    def can_replace(self, ids: Collection[int]) -> bool:
        """Return whether references to the objects of these ids can be replaced."""
        owner = self.owner
        # A subclass with a `__dict__`, or a struct sequence: a copy would lose its attributes.
        if isinstance(owner, tuple):
            return not (hasattr(owner, "__dict__") or hasattr(owner, "n_sequence_fields"))
        if isinstance(owner, (*_CONTAINERS, *_REBUILT)):
            return True
        return any(id(value) in ids for value, _ in _attributes(owner))

    def replace(self, new: dict[int, Any]) -> None:
        """Have the object refer to other objects.

        Args:
            new: a new object for the id of each old one. An immutable referrer (tuple, frozenset,
                bound method) is rebuilt, and its copy is added to `new`.
        """
        # The methods of the base classes: those of a subclass may refuse, or do something else.
        owner = self.owner
        if isinstance(owner, _REBUILT):
            new[id(owner)] = _rebuilt(owner, new)
        elif isinstance(owner, dict):
            _in_dict(owner, new)
        elif isinstance(owner, list):
            for index, value in enumerate(owner):
                list.__setitem__(owner, index, new.get(id(value), value))
        elif isinstance(owner, collections.deque):
            for index, value in enumerate(owner):
                collections.deque.__setitem__(owner, index, new.get(id(value), value))
        elif isinstance(owner, set):
            for value in [value for value in owner if id(value) in new]:
                set.discard(owner, value)
                set.add(owner, new[id(value)])
        elif isinstance(owner, types.CellType):
            owner.cell_contents = new.get(id(owner.cell_contents), owner.cell_contents)
        elif isinstance(owner, partial):
            arguments = tuple(new.get(id(value), value) for value in owner.args)
            _in_dict(owner.keywords, new)
            state: Any = (owner.func, arguments, owner.keywords, vars(owner))
            owner.__setstate__(state)  # type: ignore[attr-defined]
        else:
            for value, write in _attributes(owner):
                if id(value) in new:
                    write(new[id(value)])


_CONTAINERS = (dict, list, set, collections.deque, types.CellType, partial)
# Objects that cannot be changed: what refers to them gets new ones.
_BOUND = (types.BuiltinMethodType, types.MethodWrapperType)
_REBUILT = (tuple, frozenset, types.MethodType, *_BOUND)


def _rebuilt(owner: Any, new: Mapping[int, Any]) -> Any:
    if isinstance(owner, types.MethodType):
        return types.MethodType(owner.__func__, new.get(id(owner.__self__), owner.__self__))
    if isinstance(owner, _BOUND):
        return getattr(new.get(id(owner.__self__), owner.__self__), owner.__name__)
    kind = tuple if isinstance(owner, tuple) else frozenset
    return kind.__new__(type(owner), [new.get(id(one), one) for one in owner])


class References(NamedTuple):
    """All references to some process groups.

    Attributes:
        referrers: the objects that refer to them, in the order in which to replace what they have.
        problems: references that cannot be replaced: the index of the group, and a description.
    """

    referrers: list[Referrer]
    problems: list[tuple[int, str]]


def find_references(groups: Sequence[Any]) -> References:
    """Find all Python objects that refer to some process groups.

    It goes through all objects of the process, which takes some tenths of a second for 300,000.

    Args:
        groups: groups that may be referred to, in a list that is the caller's only reference.
    """
    if not groups:
        return References([], [])
    rebuilt: list[Referrer] = []
    others: list[Referrer] = []
    problems: list[tuple[int, str]] = []
    number = {id(group): index for index, group in enumerate(groups)}
    targets = list(groups)
    untracked: list[Any] = []
    variables: list[_Variables] = []
    if _has_other_references(groups):
        variables = _running()
        untracked = _untracked(variables, number.keys())
    classes = _classes()
    while targets:
        outer: list[Any] = []
        ids = {id(target) for target in targets}
        for owner in [*gc.get_referrers(*targets), *untracked]:
            inside = next((id(one) for one in gc.get_referents(owner) if id(one) in ids), None)
            if inside is None or owner is groups or owner is targets:
                continue
            if isinstance(owner, (Referrer, types.FrameType)):
                continue
            index, referrer = number[inside], Referrer(classes.get(id(owner), owner))
            if _uses_in_cpp(owner):
                problems.append((index, _WRAPPED))
            if isinstance(owner, _REBUILT) and referrer.can_replace(ids):
                number[id(owner)] = index
                outer.append(owner)
                rebuilt.append(referrer)  # after those that it contains
            elif referrer.can_replace(ids):
                others.append(referrer)
            else:
                problems.append((index, _name(owner)))
        targets = outer
    # A local variable may hold a rebuilt tuple rather than the group.
    if not variables and _has_other_references([referrer.owner for referrer in rebuilt]):
        variables = _running()
    problems += _in_variables(variables, number)
    return References([*rebuilt, *others], list(dict.fromkeys(problems)))


def _classes() -> dict[int, type]:
    """Return all classes by the ids of their dictionaries, which nobody may write to directly."""
    found: dict[int, type] = {}
    seen: set[type] = set()
    classes: list[type] = [object]
    while classes:
        kind = classes.pop()
        if kind not in seen:
            seen.add(kind)
            found |= {id(one): kind for one in gc.get_referents(vars(kind))}
            classes += type.__subclasses__(kind)
    return found


def _has_other_references(groups: Sequence[Any]) -> bool:
    """Return whether objects have references that the collector does not find."""
    ids = {id(group) for group in groups}
    inside = (gc.get_referents(owner) for owner in gc.get_referrers(*groups))
    found = collections.Counter(id(one) for all_ in inside for one in all_ if id(one) in ids)
    alone = [object()]
    (uncounted,) = (sys.getrefcount(one) - 1 for one in alone)  # those that counting itself makes
    return any(sys.getrefcount(group) - uncounted > found[id(group)] for group in groups)


def _untracked(variables: Sequence[_Variables], ids: AbstractSet[int]) -> list[Any]:
    """Return the containers of groups, and containers of these, that the collector does not find.

    Args:
        variables: local variables that may refer to such containers, as all objects may.
        ids: ids of the groups.
    """
    known: dict[int, bool] = {}  # by the id of a container: whether it contains groups
    found: list[Any] = []

    def contains_groups(container: Any) -> bool:
        if id(container) not in known:
            inside = gc.get_referents(container)
            nested = [one for one in inside if type(one) in _PLAIN and not gc.is_tracked(one)]
            of_nested = [contains_groups(one) for one in nested]  # all of them: each is to be found
            known[id(container)] = any(of_nested) or any(id(one) in ids for one in inside)
            if known[id(container)]:
                found.append(container)
        return known[id(container)]

    owners = gc.get_objects()
    owners += [list(each.values.values()) for each in variables]
    for start in range(0, len(owners), _AT_ONCE):
        containers = _untracked_in(owners[start : start + _AT_ONCE])
        # Few of them contain groups, so first all of these together, without a loop in Python.
        if _lead_to(containers, ids):
            for container in containers:
                contains_groups(container)
    return found


def _untracked_in(owners: Sequence[Any]) -> list[Any]:
    """Return the containers in some objects that the collector does not find, each once."""
    inside = gc.get_referents(*owners)
    plain = itertools.compress(inside, map(_PLAIN.__contains__, map(type, inside)))
    untracked = list(itertools.filterfalse(gc.is_tracked, plain))
    return list(dict(zip(map(id, untracked), untracked, strict=True)).values())


def _lead_to(containers: Sequence[Any], ids: AbstractSet[int]) -> bool:
    """Return whether objects of these ids are in some containers, or in containers in these."""
    while containers:
        if not ids.isdisjoint(map(id, gc.get_referents(*containers))):
            return True
        containers = _untracked_in(containers)
    return False


def _in_dict(owner: dict[Any, Any], new: Mapping[int, Any]) -> None:
    kind = collections.OrderedDict if isinstance(owner, collections.OrderedDict) else dict
    if any(id(key) in new for key in owner):
        items = [(new.get(id(key), key), value) for key, value in kind.items(owner)]
        kind.clear(owner)
        kind.update(owner, items)  # in the same order
    for key, value in list(kind.items(owner)):
        if id(value) in new:
            kind.__setitem__(owner, key, new[id(value)])


def _attributes(owner: Any) -> list[tuple[Any, Callable[[Any], object]]]:
    """Return the values of attributes of an object itself, each with a function that sets it."""
    if isinstance(owner, type):
        names = vars(owner).items()
        return [(value, partial(type.__setattr__, owner, name)) for name, value in names]
    found: list[tuple[Any, Callable[[Any], object]]] = []
    if isinstance(owner, types.FunctionType):
        found.append((owner.__defaults__, partial(setattr, owner, "__defaults__")))
    if hasattr(owner, "__dict__"):
        own = vars(owner)
        found += [(value, partial(own.__setitem__, name)) for name, value in own.items()]
    for base in type(owner).__mro__:
        for member in vars(base).values() if "__slots__" in vars(base) else ():
            if isinstance(member, types.MemberDescriptorType):
                with contextlib.suppress(AttributeError):  # not set
                    found.append((member.__get__(owner), partial(member.__set__, owner)))
    return found


def _uses_in_cpp(owner: Any) -> bool:
    """Return whether this is a DistributedDataParallel, or the `__dict__` of one."""
    if issubclass(type(owner), DistributedDataParallel):
        return True
    return type(owner) is dict and isinstance(owner.get("reducer"), dist.Reducer)


class _Variables(NamedTuple):
    """The local variables of a running function, by name, and where it is."""

    values: dict[str, Any]
    where: str


def _running() -> list[_Variables]:
    """Return the local variables of the functions that run in any thread, but for Meshverse's."""
    found = []
    frames = list(sys._current_frames().values())
    while frames:
        frame = frames.pop()
        code = frame.f_code
        is_own = str(frame.f_globals.get("__name__")).startswith("meshverse.")
        # Module and class bodies keep their variables in a dictionary, which the collector finds.
        if code.co_flags & inspect.CO_OPTIMIZED and not is_own:
            where = f"{code.co_name}() at {code.co_filename}:{frame.f_lineno}"
            found.append(_Variables(_local_variables(frame), where))
        if frame.f_back is not None:
            frames.append(frame.f_back)
        del frame  # the frame of this function is among them: a cycle would keep all of them
    return found


def _local_variables(frame: types.FrameType) -> dict[str, Any]:
    snapshot = frame.f_locals
    # A variable of a closure is a cell, which is found as an object.
    cells = {*frame.f_code.co_cellvars, *frame.f_code.co_freevars}
    variables = {name: value for name, value in snapshot.items() if name not in cells}
    # Before Python 3.13, the frame would keep what the variables refer to now, until it ends.
    if sys.version_info < (3, 13) and sys.getrefcount(snapshot) <= _FRAMES_OWN:
        snapshot.clear()
    return variables


def _in_variables(
    variables: Sequence[_Variables], number: Mapping[int, int]
) -> Iterator[tuple[int, str]]:
    """Yield the local variables that refer to groups: they cannot be set."""
    for values, where in variables:
        for name, value in values.items():
            if id(value) in number:
                yield number[id(value)], f"variable {name!r} of {where}"


def _name(owner: Any) -> str:
    kind, name = type(owner), getattr(owner, "__qualname__", None)
    of = f" {name!r}" if isinstance(name, str) else ""
    return f"an object{of} of {kind.__module__}.{kind.__qualname__}"
