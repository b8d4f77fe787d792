"""Functions that find modules of a model: by name, in lists of layers, in pipeline stages.

Example:
    >>> model = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])})
    >>> matching_modules(model, "layers.*")
    ['layers.0', 'layers.1']
    >>> stage_of(model) is None
    True
    >>> import_class_from_path("torch.nn.Linear")
    <class 'torch.nn.modules.linear.Linear'>
"""

from __future__ import annotations

import copy
import logging
import pkgutil
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from itertools import chain
from typing import Any, TypeVar

from torch import Tensor, nn

# PEFT's names, by which it also saves them.
BASE_LAYER = "base_layer"
LORA_PAIR = ("lora_A", "lora_B")  # the first matrix, and the second
_LISTS = (nn.ModuleList, nn.ModuleDict)
_MARK = "_meshverse_pipeline_stage"
_Module = TypeVar("_Module", bound=nn.Module)
_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StageOf:
    """Description of a pipeline stage."""

    index: int
    count: int  # number of stages
    layers: range  # numbers of its decoder layers
    inner: str = ""  # name of the module that runs the layers; "" for the model itself
    # Name of the tied parameter: the embedding's on the first stage, the head's on the last. None
    # on other stages, and if embedding and head are not tied.
    tied: str | None = None
    # Whether the whole model has experts, on this stage or on others.
    model_has_experts: bool = False

    @property
    def is_first(self) -> bool:
        """Whether the stage has the embedding."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether the stage has the head."""
        return self.index == self.count - 1


class AbsentModule(nn.Module):
    """Stand-in, without parameters, for a module of another stage."""


def mark_as_stage(model: nn.Module, stage: StageOf) -> None:
    """Mark a model as a stage."""
    setattr(model, _MARK, stage)


def stage_of(model: nn.Module) -> StageOf | None:
    """Return the description of a stage; None for a whole model."""
    stage: Any = getattr(model, _MARK, None)
    return stage if isinstance(stage, StageOf) else None


def layer_lists(module: nn.Module, prefix: str = "") -> Iterator[list[tuple[str, nn.Module]]]:
    """Yield the items of each of the outermost ModuleLists and ModuleDicts, with their names.

    The module may be such a list itself. If a list contains lists, which have no forward, the inner
    lists are used. Layers of other pipeline stages are left out.
    """
    children = [
        (name, child)
        for name, child in module.named_children()
        if not isinstance(child, AbsentModule)
    ]
    if isinstance(module, _LISTS) and not any(isinstance(child, _LISTS) for _, child in children):
        yield [(prefix + name, child) for name, child in children]
        return
    for name, child in children:
        yield from layer_lists(child, f"{prefix}{name}.")


def has_forward(module: nn.Module) -> bool:
    """Return whether a module has a forward, of its class or its own; a ModuleList has none."""
    return "forward" in vars(module) or type(module).forward is not nn.Module.forward


def compile_layers(model: nn.Module, *, are_split: bool) -> None:
    """Compile the layers of a model in place, each by itself.

    Args:
        model: model to compile.
        are_split: whether tensor parallelism split the layers. They are then compiled anew for
            each shape: torch 2.13 raises RecursionError when it compiles DTensors for any shape.
    """
    layers = [layer for _, layer in chain.from_iterable(layer_lists(model))]
    inside = {id(module) for layer in layers for module in layer.modules()}
    for module in model.modules():
        if isinstance(module, nn.Embedding) and id(module) not in inside:
            module.register_forward_hook(_wait)
    for layer in layers:
        layer.compile(dynamic=False if are_split else None)


def _wait(module: nn.Module, arguments: Any, output: Tensor) -> Tensor:
    """Return an embedding's output after waiting for it: that of a row-wise split is asynchronous.

    A compiled layer that gets an asynchronous tensor returns the right output but loses the
    gradient, so that the embedding is not trained (seen with torch 2.13).
    """
    # An asynchronous tensor has its own class. A copy waits for it; a view does not.
    return output if type(output) is Tensor else output.clone()


def matching_modules(model: nn.Module, pattern: str) -> list[str]:
    """Return the names of the modules that match a plan's key, in the order of the model.

    Modules of other pipeline stages are left out.
    """
    found = _walk(model, pattern)[-1]
    return [name for name, module in found if not isinstance(module, AbsentModule)]


def is_in_other_stage(model: nn.Module, pattern: str) -> bool:
    """Return whether a plan's key may match a module of another pipeline stage."""
    steps = _walk(model, pattern)
    return any(isinstance(module, AbsentModule) for found in steps for _, module in found)


def _walk(model: nn.Module, pattern: str) -> list[list[tuple[str, nn.Module]]]:
    """Return, for each prefix of a plan's key, the matching modules with their names."""
    steps = [[("", model)]]
    for token in pattern.split(".") if pattern else ():
        children = [
            (child_name(name, own_name), child)
            for name, module in steps[-1]
            for own_name, child in module.named_children()
            if fnmatchcase(own_name, token)
        ]
        steps.append(children)
    return steps


def parameter_of(model: nn.Module, pattern: str) -> nn.Parameter | None:
    """Return the first parameter that matches a plan's key, or None."""
    owner, _, name = pattern.rpartition(".")
    modules = map(model.get_submodule, matching_modules(model, owner))
    found = (module._parameters.get(name) for module in modules)
    return next((parameter for parameter in found if parameter is not None), None)


def nearest_name(model: nn.Module, pattern: str) -> str | None:
    """Return the module name most similar to a plan's key, with `*` for numbers of layers."""
    names = dict.fromkeys(
        re.sub(r"(?<![^.])\d+(?![^.])", "*", name) for name, _ in model.named_modules()
    )
    return next(iter(get_close_matches(pattern, names, n=1, cutoff=0.0)), None)


def is_present(model: nn.Module, pattern: str) -> bool:
    """Return whether a plan's key matches a module or parameter of a model."""
    return bool(matching_modules(model, pattern)) or parameter_of(model, pattern) is not None


def adapted(module: nn.Module) -> nn.Module:
    """Return the layer that PEFT's adapters wrap; a layer without adapters is returned as it is."""
    base = module._modules.get(BASE_LAYER)
    return module if base is None else base


def shallow_copy(module: _Module) -> _Module:
    """Return a copy that has the same children, parameters, buffers and hooks, in its own dicts."""
    # Not copy.copy(), which calls the constructor of a module that FSDP2 shards.
    copied = object.__new__(type(module))
    copied.__dict__.update(module.__dict__)
    for table, empty in vars(nn.Module()).items():
        if isinstance(empty, dict | set):
            copied.__dict__[table] = copy.copy(module.__dict__[table])
    return copied


def child_name(parent: str, name: str) -> str:
    """Return the full name (or pattern) of a child; the model itself has the name ""."""
    return f"{parent}.{name}" if parent else name


def parent_name(name: str) -> str:
    """Return the name (or pattern) of the parent module."""
    return name.rpartition(".")[0]


def import_class_from_path(path: str) -> Any:
    """Import the class, function or value at a path such as "package.module.Class".

    Raises:
        ImportError: the module cannot be imported, or lacks this name.
        ValueError: it is not a dotted path of Python names.
    """
    try:
        return pkgutil.resolve_name(path)
    except AttributeError as error:
        raise ImportError(
            f"Import path {path!r} cannot be resolved: {error}.", name=path
        ) from error


def import_classes_from_paths(paths: Sequence[str]) -> list[Any]:
    """Import the objects at paths, in order; omit those that fail, with a warning in the log."""
    found = []
    for path in paths:
        try:
            found.append(import_class_from_path(path))
        except Exception as error:  # noqa: BLE001, PERF203  (a module that runs raises anything)
            _logger.warning("Import path %r is ignored: %s", path, error)
    return found
