"""Parameters that a strategy replaces by others: what may be lost when it does."""

from __future__ import annotations

import contextlib
from collections import defaultdict, deque
from collections.abc import Iterator
from functools import partial
from types import FunctionType, MappingProxyType, MemberDescriptorType, MethodType, ModuleType
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn

from meshverse._torch_compat.module_hooks import forward_hooks, has_gradient_hooks

from .trials import OF_EVERY_MODULE

_PLAIN = (type(None), str, bytes, bool, int, float, complex, type, ModuleType, torch.Size)
# Other classes may compute what they give out: they are searched as objects.
_DICTS = (dict, MappingProxyType)
_CONTAINERS = (*_DICTS, tuple, list, set, frozenset, deque)
_DEPTH = 2  # objects on the way from an attribute to a tensor
_WAS_REPLACED = "_meshverse_was_replaced"  # attribute of a parameter

__all__ = ["keeping_attributes", "second_holders", "why_not_replaced", "why_weight_is_not_split"]


@contextlib.contextmanager
def keeping_attributes(model: nn.Module) -> Iterator[None]:
    """Give parameters that replace others the Python attributes of those, within the context.

    Those that were replaced, and that something else still holds, are marked for
    `why_not_replaced`.

    Example: a program marks parameters by `parameter.no_weight_decay = True` for its optimizer.
    """
    named = [*model.named_parameters(remove_duplicate=False)]
    attributes = {name: dict(vars(parameter)) for name, parameter in named}
    before = [ref(parameter) for _, parameter in named]  # so that their memory can be freed
    del named
    yield
    kept = set()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        kept.add(id(parameter))
        for attribute, value in attributes.get(name, {}).items():
            vars(parameter).setdefault(attribute, value)
    for each in before:
        if (left := each()) is not None and id(left) not in kept:
            setattr(left, _WAS_REPLACED, True)


def why_not_replaced(parameter: nn.Parameter) -> str | None:
    """Return what would be lost if another parameter replaced this one, and the cure, or None."""
    if hasattr(parameter, _WAS_REPLACED):
        return (
            "is shared with another model that is already split or sharded: the two would no "
            "longer share it. Make them parts of one module, and parallelize that"
        )
    if has_gradient_hooks(parameter):
        return (
            "has hooks of its gradient, and would lose them: it becomes another parameter. "
            "Register them after the model is split and sharded"
        )
    if parameter.grad is not None:
        return (
            "has a gradient, and would lose it: it becomes another parameter. Use the gradient, or "
            "set it to None, before"
        )
    return None


class _Memory(NamedTuple):
    """The memory between the first and the last element of a tensor.

    Attributes:
        storage: address of its storage.
        start: first byte in the storage.
        stop: byte after the last one.
    """

    storage: int
    start: int
    stop: int


def _memory(tensor: Tensor) -> _Memory | None:
    """Return a tensor's memory; None if it has none of its own, as on the meta device."""
    if tensor.layout != torch.strided or not tensor.numel():
        return None
    address = tensor.untyped_storage().data_ptr()
    if not address:
        return None
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    length = sum((size - 1) * stride for size, stride in pairs) + 1
    first, width = int(tensor.storage_offset()), tensor.element_size()
    return _Memory(address, first * width, (first + length) * width)


def second_holders(model: nn.Module) -> dict[str, str]:
    """Return, by name, each parameter whose memory is also held elsewhere in its model, and where.

    That is another parameter or a buffer with the same memory, or a tensor in an attribute that is
    not registered or in a forward hook: in containers and functions there, in objects in these, or
    in objects in those, and no deeper. Whoever replaces the parameter leaves the other one as it
    was.
    """
    of_storage: dict[int, list[tuple[_Memory, str]]] = defaultdict(list)
    found: dict[str, str] = {}

    def others(tensor: Tensor) -> list[str]:
        if (mine := _memory(tensor)) is None:
            return []
        known = of_storage[mine.storage]
        return [name for its, name in known if its.start < mine.stop and mine.start < its.stop]

    for name, parameter in model.named_parameters():
        for other in others(parameter):
            found[name] = f"the parameter {other!r} has the same memory"
        if (memory := _memory(parameter)) is not None:
            of_storage[memory.storage].append((memory, name))
    for buffer_name, buffer in model.named_buffers():
        for name in others(buffer):
            found[name] = f"the buffer {buffer_name!r} has the same memory"
    registered = {*map(id, model.modules())}
    behind: dict[int, list[Tensor]] = {}  # by the id of a value, as all modules have one config
    for owner, module in model.named_modules():
        for tensor in _tensors_behind(forward_hooks(module), registered):
            for name in others(tensor):
                found[name] = f"a forward hook of {owner!r} holds it too"
        for attribute, value in vars(module).items():
            # Before each forward, a hook of torch computes "weight" from "weight_orig".
            if attribute in OF_EVERY_MODULE or f"{attribute}_orig" in module._parameters:
                continue
            if isinstance(module, nn.RNNBase) and attribute == "_flat_weights":
                continue  # torch sets it again if a weight is replaced
            if id(value) not in behind:
                behind[id(value)] = [*_tensors_behind(value, registered)]
            for tensor in behind[id(value)]:
                for name in others(tensor):
                    where = f"{owner}.{attribute}" if owner else attribute
                    found[name] = f"the attribute {where!r} holds it too, without registering it"
    return found


def _tensors_behind(value: Any, registered: set[int]) -> Iterator[Tensor]:
    """Yield the tensors that an attribute leads to: through containers, and `_DEPTH` objects.

    Args:
        value: of the attribute.
        registered: ids of the model's modules, which are not searched.
    """
    waiting, seen = [(value, 0)], {*registered}
    while waiting:
        each, depth = waiting.pop()
        if isinstance(each, Tensor):
            yield each
        elif id(each) not in seen and not isinstance(each, _PLAIN):
            is_container = isinstance(each, _CONTAINERS)
            if is_container or depth < _DEPTH:
                seen.add(id(each))
                inside = _inside(each)
                waiting += [(one, depth if is_container else depth + 1) for one in inside]


def _inside(value: Any) -> list[Any]:
    """Return what a container, a function, an object, or a module outside the model refers to."""
    if isinstance(value, _DICTS):
        return [*value.values()]
    if isinstance(value, _CONTAINERS):
        return [*value]
    if isinstance(value, nn.Module):
        return [*value.parameters(), *value.buffers()]
    if isinstance(value, partial):
        return [value.func, value.args, value.keywords]
    if isinstance(value, MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, FunctionType):
        closed_over = []
        for cell in value.__closure__ or ():
            with contextlib.suppress(ValueError):  # of an empty cell
                closed_over.append(cell.cell_contents)
        return [*closed_over, value.__defaults__, value.__kwdefaults__]
    return [*getattr(value, "__dict__", {}).values(), *_slots(value)]


def _slots(value: Any) -> Iterator[Any]:
    """Yield the values of an object's slots: with them, it may have no `__dict__`."""
    for base in type(value).__mro__:
        for member in vars(base).values() if "__slots__" in vars(base) else ():
            if isinstance(member, MemberDescriptorType):
                with contextlib.suppress(AttributeError):  # it was never set
                    yield member.__get__(value)


def why_weight_is_not_split(module: nn.Module) -> str | None:
    """Return why the weight of an embedding cannot be split, or None."""
    if not isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return None
    if module.max_norm is not None:
        return f"changes its weight in its forward (max_norm={module.max_norm}), on a copy"
    if module.sparse:
        return "gets a sparse gradient (sparse=True), which cannot be reduced"
    return None
