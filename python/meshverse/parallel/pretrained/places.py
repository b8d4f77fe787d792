"""Parameters and buffers of a model, with their names in the model as transformers makes it."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from meshverse._torch_compat.dispatch import version_of
from meshverse.parallel.models.modules import BASE_LAYER, child_name

from .deferred import Deferred

# PEFT's names of a trained copy of a module, and of the module itself, in its wrapper.
COPIES, ORIGINAL = "modules_to_save", "original_module"
_NAMED = 6  # names in an error
_SINCE = (5, 0)  # version of transformers from which it has conversions of checkpoints


class Place(NamedTuple):
    """Parameter or buffer of a model.

    Attributes:
        name: in the model.
        module: that has it.
        own_name: in the module.
        original: name in the model as transformers makes it; None if a wrapper has added it.
        persistent: whether checkpoints have it: it is a parameter or a persistent buffer.
    """

    name: str
    module: nn.Module
    own_name: str
    original: str | None
    persistent: bool

    @property
    def tensor(self) -> Tensor:
        """The parameter or buffer that is there now."""
        tensor = self.module._parameters.get(self.own_name)
        found = self.module._buffers[self.own_name] if tensor is None else tensor
        assert found is not None
        return found


def transformers_for(function: str) -> Any:
    """Import transformers for a function of this package.

    Raises:
        ImportError: it is not installed, or too old.
    """
    try:
        transformers = importlib.import_module("transformers")
    except ImportError as error:
        raise ImportError(
            f'{function}() needs transformers: pip install "meshverse[hf]".', name="transformers"
        ) from error
    version = tuple(map(int, transformers.__version__.split(".")[:2]))
    if version < _SINCE:
        raise ImportError(
            f"{function}() needs transformers {'.'.join(map(str, _SINCE))} or newer, which has "
            f"conversions of checkpoints; {transformers.__version__} is installed.",
            name="transformers",
        )
    return transformers


def pretrained_model(model: nn.Module, function: str) -> Any:
    """Return the model of transformers that is the model, or is within its wrapper.

    Raises:
        TypeError: there is none, or several.
    """
    base = transformers_for(function).PreTrainedModel

    def outermost(module: nn.Module) -> Iterator[nn.Module]:
        if isinstance(module, base):
            yield module
            return
        for child in module.children():
            yield from outermost(child)

    given: object = model
    found = list(outermost(given)) if isinstance(given, nn.Module) else []
    if len(found) != 1:
        raise TypeError(
            f"{function}() takes a model of transformers, alone or in a wrapper; "
            f"{type(model).__name__} has {[type(each).__name__ for each in found]}. Load others "
            "with torch.distributed.checkpoint."
        )
    return found[0]


def class_of(inner: Any) -> Any:
    """Return the class of a model of transformers: FSDP2 puts its own before it."""
    return next(each for each in type(inner).__mro__ if not issubclass(each, FSDPModule))


def places_of(model: nn.Module, inner: nn.Module) -> list[Place]:
    """Return the parameters and buffers of a model; those that are shared, under each name."""
    return list(_walk(model, "", None, inner))


def _walk(
    module: nn.Module, name: str, original: str | None, inner: nn.Module | None
) -> Iterator[Place]:
    if module is inner:
        original, inner = "", None
    lost = module._non_persistent_buffers_set
    for own in [*module._parameters, *module._buffers]:
        if module._parameters.get(own) is None and module._buffers.get(own) is None:
            continue
        as_made = None if original is None else child_name(original, own)
        yield Place(child_name(name, own), module, own, as_made, own not in lost)
    for own, child in module._modules.items():
        if child is None:
            continue
        as_made = None if original is None else child_name(original, own)
        if BASE_LAYER in module._modules:  # PEFT's wrapper of a layer, with adapters beside it
            as_made = original if own == BASE_LAYER else None
        elif {COPIES, ORIGINAL} <= module._modules.keys():
            as_made = original
            if own == COPIES:
                for adapter, copied in child.named_children():
                    where = child_name(child_name(name, own), adapter)
                    yield from _walk(copied, where, original, inner)
                continue
        yield from _walk(child, child_name(name, own), as_made, inner)


def floating_dtype(inner: nn.Module) -> torch.dtype:
    """Return the dtype of a model's first floating-point parameter."""
    dtypes = (each.dtype for each in inner.parameters() if each.is_floating_point())
    return next(dtypes, torch.float32)


def filled_skeleton(inner: Any, tensors: Mapping[str, Tensor]) -> tuple[Any, dict[str, Any]]:
    """Return a model that `from_pretrained` has made of deferred tensors, and its report.

    Nothing is read, and nothing but buffers gets memory: parameters are the deferred tensors, after
    all of transformers' renames, conversions and ties; those that are missing are on the meta
    device.

    Args:
        inner: model of the same class and config.
        tensors: the checkpoint's, by name.
    """
    if find_spec("accelerate") is None:
        raise ImportError(
            'load_pretrained() needs accelerate: pip install "meshverse[hf]".', name="accelerate"
        )
    return class_of(inner).from_pretrained(  # type: ignore[no-any-return]
        None,
        config=copy.deepcopy(inner.config),
        state_dict=dict(tensors),
        dtype=floating_dtype(inner),
        device_map={"": "meta"},
        ignore_mismatched_sizes=True,
        output_loading_info=True,
    )


def compute_missing(skeleton: Any, seed: int) -> dict[str, Tensor]:
    """Return what a checkpoint lacks, as transformers makes it for a new model, by name.

    What transformers gives no value after a model was on the meta device is left out.

    Args:
        skeleton: what `filled_skeleton` has returned; it is changed.
        seed: of random values.
    """
    lost = {}
    for place in places_of(skeleton, skeleton):
        tensor: Any = place.tensor
        if isinstance(tensor, Deferred) or not tensor.is_meta:
            tensor._is_hf_initialized = True
            continue
        empty = torch.empty_like(tensor, device="cpu")
        if isinstance(tensor, nn.Parameter):
            empty = nn.Parameter(empty, tensor.requires_grad)
            place.module._parameters[place.own_name] = empty
        else:
            place.module._buffers[place.own_name] = empty
        lost[place.name] = place, empty
    for module in skeleton.modules():
        vars(module).pop("_is_hf_initialized", None)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # and not those of GPUs, which stay as they are
        skeleton.initialize_weights()
    return {
        name: place.tensor.detach()
        for name, (place, empty) in lost.items()
        if place.tensor is not empty or version_of(empty)
    }


def local_box(tensor: Tensor) -> tuple[list[tuple[int, int]], Tensor]:
    """Return what elements of a whole tensor this rank has, and the memory that they are in."""
    if not isinstance(tensor, DTensor):
        return [(0, size) for size in tensor.shape], tensor.detach()
    (chunk,) = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]
    box = [(at, at + size) for at, size in zip(chunk.offsets, chunk.sizes, strict=True)]
    return box, tensor.to_local().detach()


def reshard(model: nn.Module) -> None:
    """Let FSDP2 shard what it has gathered for a forward, so that parameters are this rank's."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def in_words(names: list[str]) -> str:
    """Return the first names of a list, and how many more there are."""
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")
