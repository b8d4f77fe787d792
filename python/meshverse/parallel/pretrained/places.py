"""Parameters and buffers of a model, with their names in the model as transformers makes it."""

from __future__ import annotations

import copy
import importlib
import math
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard

from meshverse._torch_compat.dtensors import is_strided_shard
from meshverse._torch_compat.modules import changes_names, is_persistent
from meshverse.parallel.models.modules import BASE_LAYER, child_name

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
        tensor: Tensor = getattr(self.module, self.own_name)
        return tensor


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
    check_names_of_modules(found[0])
    return found[0]


def check_names_of_modules(model: nn.Module) -> None:
    """Check that the names of a model's parameters are those of checkpoints.

    Raises:
        ValueError: a module is in a wrapper of torch's, which puts a name of its own before them.
    """
    for name, module in model.named_modules():
        if changes_names(module):
            raise ValueError(
                f"{name or type(model).__name__} is in torch's {type(module).__name__}, so its "
                "parameters have other names than in checkpoints. Compile the module in place, by "
                "its compile(), instead of torch.compile(module); checkpoint activations by "
                "apply_activation_checkpointing() of meshverse.parallel."
            )


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
    parameters = module.named_parameters(recurse=False, remove_duplicate=False)
    buffers = module.named_buffers(recurse=False, remove_duplicate=False)
    for own, _ in chain(parameters, buffers):
        as_made = None if original is None else child_name(original, own)
        yield Place(child_name(name, own), module, own, as_made, is_persistent(module, own))
    children = dict(module.named_children())
    for own, child in children.items():
        as_made = None if original is None else child_name(original, own)
        if BASE_LAYER in children:  # PEFT's wrapper of a layer, with adapters beside it
            as_made = original if own == BASE_LAYER else None
        elif {COPIES, ORIGINAL} <= children.keys():
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


def skeleton_of(inner: Any) -> Any:
    """Return a model of the same class and config on the meta device."""
    config = copy.deepcopy(inner.config)
    config.dtype = floating_dtype(inner)
    with torch.device("meta"), torch.random.fork_rng(devices=[]):
        skeleton = class_of(inner)(config)
    skeleton.tie_weights()  # transformers 5.0 does not, on the meta device
    return skeleton


def local_box(place: Place) -> tuple[list[tuple[int, int]], Tensor]:
    """Return what elements of a whole tensor this rank has, and the memory that they are in.

    Raises:
        ValueError: they are not one box, or not where `full_tensor` takes them to be.
    """
    tensor = place.tensor
    box = [(0, size) for size in tensor.shape]
    if not isinstance(tensor, DTensor):
        return box, tensor.detach()
    local, mesh, placements = tensor.to_local().detach(), tensor.device_mesh, tensor.placements
    said = f"{place.name} of shape {tuple(tensor.shape)} has the placements {placements} on {mesh}"
    strided = [axis for axis, each in enumerate(placements) if is_strided_shard(each)]
    plain = [axis for axis, each in enumerate(placements) if type(each) is Shard]
    others = [axis for axis, each in enumerate(placements) if type(each) is Replicate]
    if len(strided) + len(plain) + len(others) < mesh.ndim:
        raise ValueError(f"{said}: redistribute it to Replicate() or Shard() first.")
    # FSDP2, whose splits are the strided ones, splits what others have split before.
    for axis in (*plain, *reversed(strided)):
        placement: Any = placements[axis]
        after = [each for each in (*plain, *strided) if each > axis]
        same = [each for each in after if getattr(placements[each], "dim", None) == placement.dim]
        if axis in strided and placement.split_factor != math.prod(map(mesh.size, same)):
            raise ValueError(
                f"{said}, and a rank's elements are not one block. Redistribute it to Shard()."
            )
        start, end = box[placement.dim]
        length = -(-(end - start) // mesh.size(axis))
        # Not the coordinate: torch sorts the ranks of groups, and gathers shards in their order.
        start = min(start + length * mesh.get_local_rank(axis), end)
        box[placement.dim] = (start, min(start + length, end))
    sizes = tuple(end - start for start, end in box)
    # The shape of an empty local tensor is not compared: FSDP2 may use another one.
    if tuple(local.shape) != sizes and (local.numel() or math.prod(sizes)):
        raise ValueError(
            f"{said}, so this rank has a part of shape {sizes}; its local tensor has shape "
            f"{tuple(local.shape)}. Make it with distribute_tensor() or FSDP2, on a mesh whose "
            "ranks ascend."
        )
    return box, local


def in_words(names: list[str]) -> str:
    """Return the first names of a list, and how many more there are."""
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")
