"""Modules of a model that compute the same in a call, with other weights.

Modules have one form if their trees have the same classes, shapes of parameters and buffers, values
of buffers, and styles. Modules of one form differ only by attributes, such as the number of a
layer. What a forward does not read cannot change it: so a module is equal to one whose forward was
run, if those attributes are the same that the run read. Of an attribute that is no plain value, the
same means the same object. A forward that reads `vars(self)` is not seen to do so.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Placement
from torch.distributed.tensor.parallel import ParallelStyle

from meshverse.parallel.models.modules import child_name
from meshverse.parallel.models.trials import OF_EVERY_MODULE

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, Placement)

Attribute = tuple[str, str]  # name of the module that has it, and its own


class SameForm:
    """Modules of one form that are called alike, of which some were run.

    Args:
        name: of the first module.
        module: the first module.
    """

    def __init__(self, name: str, module: nn.Module) -> None:
        self.first = module
        self._attributes = {name: attributes_in(module)}
        self._read: dict[str, Collection[Attribute]] = {}  # of the modules that were run

    def add(self, name: str, module: nn.Module) -> None:
        """Add a module of this form."""
        self._attributes[name] = attributes_in(module)

    def is_alone(self) -> bool:
        """Whether no other module has this form."""
        return len(self._attributes) == 1

    def to_run(self) -> list[str]:
        """Return the names of modules to run next: each may differ from all others."""
        read = {each for some in self._read.values() for each in some}
        chosen = {self._values(name, read): name for name in reversed(self._left())}
        return [*chosen.values()][::-1]

    def has_run(self, name: str, read: Collection[Attribute]) -> None:
        """Note that a module was run, and what it read."""
        self._read[name] = read

    def equal_to(self, name: str) -> Iterator[str]:
        """Yield the modules that are equal to one that was run, with this one."""
        read = self._read[name]
        expected = self._values(name, read)
        return (each for each in self._attributes if self._values(each, read) == expected)

    def _left(self) -> list[str]:
        known = {each for name in self._read for each in self.equal_to(name)}
        return [name for name in self._attributes if name not in known]

    def _values(self, name: str, read: Iterable[Attribute]) -> Hashable:
        attributes = self._attributes[name]
        return tuple((each, attributes.get(each)) for each in sorted(read))


def add_to_forms(
    forms: dict[tuple[Hashable, Hashable], list[SameForm]],
    call: Hashable,
    name: str,
    module: nn.Module,
    styles: Mapping[str, ParallelStyle],
    counts: Mapping[int, Mapping[str, int]],
) -> None:
    """Add a module to those of the same form that are called alike.

    Args:
        forms: of all modules so far, by what is equal in their calls, and in their trees.
        call: what equal calls have in common.
        name: of the module in its model.
        module: to add.
        styles: of the modules in it, by name.
        counts: attributes that a rank has with other values, by the id of their module.
    """
    known = forms.setdefault((call, _key(module, styles, counts)), [])
    for form in known:
        if _have_equal_buffers(module, form.first):
            form.add(name, module)
            return
    known.append(SameForm(name, module))


def attributes_in(module: nn.Module) -> dict[Attribute, Hashable]:
    """Return all attributes in a module's tree that not every module has."""
    return {
        (own, name): _plain(each)
        for own, inside in module.named_modules()
        for name, each in vars(inside).items()
        if name not in OF_EVERY_MODULE
    }


def note_reads(module: nn.Module) -> set[Attribute]:
    """Return a set, to which reading an attribute in a module's tree adds it from now on.

    The module must be a copy: the classes in its tree are replaced by subclasses.
    """
    read: set[Attribute] = set()
    for own, inside in module.named_modules():
        if names := vars(inside).keys() - OF_EVERY_MODULE:
            inside.__class__ = _noting(type(inside), names, partial(_add, read, own))
    return read


def note_reads_outside(
    module: nn.Module, attributes: Mapping[str, Collection[str]], forwards: Collection[str]
) -> set[Attribute]:
    """Return a set, to which reading an attribute adds it, but in forwards that are tried with it.

    Args:
        module: a copy, as for `note_reads`.
        attributes: those that count, by the names of the modules that have them.
        forwards: names of modules. A read does not count in the forward of one that contains the
            attribute's module or, if none does, of this module itself.
    """
    read: set[Attribute] = set()
    running: dict[str, int] = {}  # calls of a forward that have not ended

    def note(own: str, around: Collection[str], name: str) -> None:
        if not any(running[each] for each in around):
            read.add((own, name))

    for own, names in attributes.items():
        prefixes = {own, *accumulate(own.split("."), child_name), ""}
        around = prefixes.intersection(forwards) or {own}
        for each in around - running.keys():
            running[each] = 0
            inside = module.get_submodule(each)
            inside.forward = partial(_counted, running, each, inside.forward)
        owner = module.get_submodule(own)
        owner.__class__ = _noting(type(owner), names, partial(note, own, around))
    return read


def _add(read: set[Attribute], own: str, name: str) -> None:
    read.add((own, name))


def _counted(
    running: dict[str, int], name: str, forward: Callable[..., Any], /, *given: Any, **named: Any
) -> Any:
    running[name] += 1
    try:
        return forward(*given, **named)
    finally:
        running[name] -= 1


def _noting(
    kind: type[nn.Module], names: Collection[str], note: Callable[[str], None]
) -> type[nn.Module]:
    def get(self: nn.Module, name: str) -> Any:
        if name in names:
            note(name)
        return super(noting, self).__getattribute__(name)

    members = {"__getattribute__": get, "__module__": kind.__module__}
    metaclass: Any = type(kind)
    noting: type[nn.Module] = metaclass(kind.__name__, (kind,), members)
    return noting


def _key(
    module: nn.Module,
    styles: Mapping[str, ParallelStyle],
    counts: Mapping[int, Mapping[str, int]],
) -> Hashable:
    modules = [
        (
            own,
            type(each),
            _plain(dict(counts.get(id(each), {}))),
            style_key(style) if (style := styles.get(own)) else None,
        )
        for own, each in module.named_modules()
    ]
    first: dict[int, str] = {}  # of the names of a shared parameter
    parameters = [
        (own, first.setdefault(id(each), own), each.shape, each.dtype)
        for own, each in module.named_parameters(remove_duplicate=False)
    ]
    buffers = [(own, each.shape, each.dtype) for own, each in module.named_buffers()]
    return tuple(modules), tuple(parameters), tuple(buffers)


def style_key(style: ParallelStyle) -> Hashable:
    """Return what is equal for styles of one class and with the same settings."""
    return type(style), _plain(vars(style))


def style_text(style: object) -> str:
    """Return a style in words that are the same in all processes.

    These are its class and, of torch's styles and ours, its settings. Others may hold what differs.
    """
    if not type(style).__module__.startswith(("torch.", "meshverse.")):
        return type(style).__name__
    settings = {name: _in_words(each) for name, each in vars(style).items()}
    return f"{type(style).__name__}({', '.join(f'{k}={v}' for k, v in sorted(settings.items()))})"


def _in_words(value: Any) -> str:
    if isinstance(value, dict):
        pairs = sorted(f"{_in_words(key)}: {_in_words(each)}" for key, each in value.items())
        return f"{{{', '.join(pairs)}}}"
    if isinstance(value, set | frozenset):
        return f"{{{', '.join(sorted(map(_in_words, value)))}}}"
    if isinstance(value, tuple | list):
        return f"({', '.join(map(_in_words, value))})"
    is_same = isinstance(value, PLAIN) and not isinstance(value, torch.device)
    return repr(value) if is_same else type(value).__name__


def _plain(value: Any) -> Hashable:
    """Return a key that is equal for equal plain values, and for one object."""
    if isinstance(value, dict):
        return dict, tuple((_plain(key), _plain(each)) for key, each in value.items())
    if isinstance(value, tuple | list):
        return type(value), tuple(map(_plain, value))
    return type(value), value if isinstance(value, PLAIN) else id(value)


def _have_equal_buffers(one: nn.Module, other: nn.Module) -> bool:
    """Whether the buffers, which have the same shapes, have the same values, if they have any."""
    pairs: list[tuple[Tensor, Tensor]] = [*zip(one.buffers(), other.buffers(), strict=True)]
    return all(
        first.is_meta == second.is_meta
        and (first.is_meta or (first.device == second.device and torch.equal(first, second)))
        for first, second in pairs
    )
