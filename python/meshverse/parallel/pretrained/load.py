"""Load a Hugging Face checkpoint into a model that is distributed already, or initialize it.

Example:
    >>> with torch.device("meta"):  # doctest: +SKIP
    ...     model = AutoModelForCausalLM.from_config(config)
    >>> fsdp2_strategy_parallelize(model, mesh)  # doctest: +SKIP
    >>> load_pretrained(model, "checkpoints/llama")  # doctest: +SKIP
    IncompatibleKeys(missing_keys=[], unexpected_keys=[])

    To train from scratch:

    >>> initialize_weights(model)  # doctest: +SKIP
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshverse.parallel.collectives.steps import check_is_same, gathered, together
from meshverse.parallel.models.modules import child_name, stage_of
from meshverse.parallel.models.parameters import keeping_attributes

from .adapters import adapter_of, adapter_places, first_values
from .deferred import Deferred, Known, Source, source_of
from .files import ADAPTER_WEIGHTS, CheckpointFiles, FilePart, read_folder
from .new_values import new_values
from .places import (
    Place,
    filled_skeleton,
    in_words,
    local_box,
    places_of,
    pretrained_model,
    skeleton_of,
)


class IncompatibleKeys(NamedTuple):
    """Names that a checkpoint and a model do not have in common.

    Attributes:
        missing_keys: parameters and buffers of the model of which the checkpoint has nothing. They
            keep their values; on the meta device, they get those of a new model.
        unexpected_keys: tensors of the checkpoint for which the model has no place.
    """

    missing_keys: list[str]
    unexpected_keys: list[str]


_Reads = list[tuple[Place, Source]]  # parameters and buffers to fill, with their values


class _Plan(NamedTuple):
    """Reads of a load.

    Attributes:
        reads: of the checkpoint, and of a new model's values.
        keys: what has no counterpart.
        digest: of the checkpoint.
    """

    reads: _Reads
    keys: IncompatibleKeys
    digest: str


def load_pretrained(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    strict: bool = True,
    device: torch.device | str | None = None,
    group: dist.ProcessGroup | None = None,
) -> IncompatibleKeys:
    """Load a checkpoint of transformers into a model, in place.

    Each rank reads from the safetensors files the bytes of its own shards, and casts them to the
    dtype of its parameters. Names and conversions are transformers' own: `from_pretrained` runs on
    tensors that are read later. A conversion that moves elements, such as the one that stacks
    experts, is run on the parts that a rank needs; another one on whole tensors.

    Of a folder with an adapter of PEFT, the adapter is loaded; of another one, the model, and an
    adapter on the meta device gets its first values.

    Parameters and buffers on the meta device get memory. Buffers that checkpoints lack, such as
    rotary frequencies, get the values that `from_pretrained` computes; tied parameters stay tied.
    Construct the optimizer afterwards.

    All ranks that have a part of the model make the call. If one raises, all raise the same error;
    before the first byte is read, the model is unchanged then.

    Args:
        model: model of transformers, or a wrapper of one, or a pipeline stage; parallelized or not.
        folder: the checkpoint's folder on this host: of `from_pretrained`'s safetensors files.
        strict: whether missing and unexpected keys are an error. Those that the model's class lists
            to be ignored never are.
        device: device for what is on the meta device. By default that of the parameters' mesh;
            without a mesh, torch's default device. With FSDP2's CPU offload, give "cpu".
        group: process group of all ranks that have a part of the model; by default all ranks.

    Returns:
        Missing and unexpected keys; both empty if `strict`.

    Raises:
        FileNotFoundError: the folder, or safetensors files in it, do not exist.
        ImportError: transformers, safetensors or accelerate is not installed or too old.
        OSError: a file cannot be read.
        RuntimeError: transformers cannot convert a tensor.
        TypeError: the model is not of transformers.
        ValueError: keys or shapes do not fit, ranks have different checkpoints, a file is damaged,
            a single file lies beside an index of others, an adapter lies beside the weights for
            a model that has one, the weights are quantized, or the value of a buffer on the meta
            device is not known.
    """
    seed = gathered(torch.initial_seed(), group)[0]
    plan = together(lambda: _plan(model, Path(folder), strict, seed), group)
    check_is_same(
        f"The checkpoint in {folder}", plan.digest, group, "Copy one checkpoint to all hosts."
    )

    _fill_together(model, plan.reads, device, group)
    return plan.keys


def initialize_weights(
    model: nn.Module,
    *,
    device: torch.device | str | None = None,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Initialize a model of transformers on the meta device without a checkpoint, in place.

    Parameters and buffers on the meta device get memory, and the values of a new model by
    transformers' own `initialize_weights`; others are unchanged. Adapters of PEFT get their first
    values, and tied parameters stay tied. Construct the optimizer afterwards.

    Each rank computes one whole tensor after another on the CPU, and keeps its shard. Random values
    depend on the name of the parameter and on the first rank's `torch.initial_seed()` alone: they
    are equal bit by bit on all replicas, and for any strategy and number of ranks. They have the
    distribution of `from_config`, but are not the same numbers for the same seed.

    All ranks that have a part of the model make the call. If one raises, all raise the same error,
    and the model is unchanged.

    Args:
        model: model of transformers, or a wrapper of one, or a pipeline stage; parallelized or not.
        device: as in `load_pretrained`.
        group: process group of all ranks that have a part of the model; by default all ranks.

    Raises:
        ImportError: transformers is not installed or too old.
        TypeError: the model is not of transformers.
        ValueError: transformers gives no value to a tensor on the meta device, the model is
            quantized, or it lacks ties that its config asks for.
    """
    seed = gathered(torch.initial_seed(), group)[0]
    reads = together(lambda: _reads_of_new(model, seed), group)
    _fill_together(model, reads, device, group)


def _fill_together(
    model: nn.Module,
    reads: _Reads,
    device: torch.device | str | None,
    group: dist.ProcessGroup | None,
) -> None:
    """Fill the model on all ranks; if one fails, all put back what was on the meta device.

    A next load would keep the buffers that have memory by then, with whatever is in it.
    """
    lost = [(place, place.tensor) for place, _ in reads if place.tensor.is_meta]
    try:
        together(lambda: _fill(model, reads, device), group)
    except BaseException:
        state = {}
        for place, old in lost:
            if isinstance(old, nn.Parameter):
                state[place.name] = old
            else:
                setattr(place.module, place.own_name, old)
        if state:
            model.load_state_dict(state, strict=False, assign=True)
        raise


def _fill(model: nn.Module, reads: _Reads, device: torch.device | str | None) -> None:
    """Give memory to what is on the meta device, and each tensor its values."""
    _materialize(model, reads, device)
    with torch.no_grad():
        for place, source in {id(each[0].tensor): each for each in reads}.values():
            box, local = local_box(place)
            if local.numel():
                source.read_into(box, local)


def _reads_of_new(model: nn.Module, seed: int) -> _Reads:
    inner = pretrained_model(model, "initialize_weights")
    _refuse_quantized(inner)
    places = places_of(model, inner)
    skeleton = skeleton_of(inner)
    made = {place.name: place.tensor for place in places_of(skeleton, skeleton)}
    _check_ties(places, made)
    return _reads(model, places, skeleton, made, seed)


def _plan(model: nn.Module, folder: Path, strict: bool, seed: int) -> _Plan:
    inner = pretrained_model(model, "load_pretrained")
    files = read_folder(folder)
    places = places_of(model, inner)
    adapter = adapter_of(model)
    if files.is_adapter:
        return _plan_of_adapter(model, adapter, places, files, folder, strict)
    if adapter is not None and (folder / ADAPTER_WEIGHTS).exists():
        raise ValueError(
            f"{folder} has weights of a whole model beside {ADAPTER_WEIGHTS}, and {adapter!r} of "
            f"{type(model).__name__} would not get the latter. Move the adapter's files to a "
            "folder of their own, and load both folders."
        )
    _refuse_quantized(inner)
    own = {place.original for place in places}
    skeleton, report = filled_skeleton(
        inner, {name: Deferred(part) for name, part in files.parts.items()}
    )
    _check_shapes(report["mismatched_keys"], inner, folder)
    made = {place.name: place.tensor for place in places_of(skeleton, skeleton)}
    _check_ties(places, made)
    _check_tied_values(model, skeleton, places, made, folder)
    of_adapter = {} if adapter is None else adapter_places(model, adapter, places)
    new = {place.name for place in of_adapter.values() if place.original is None}
    absent = {
        place.name
        for place in places
        if place.persistent and place.original not in made and place.name not in new
    }
    keys = IncompatibleKeys(
        sorted(absent.union(name for name in report["missing_keys"] if name in own)),
        sorted(report["unexpected_keys"]),
    )
    _check_keys(keys, inner, folder, strict)
    for place in places:
        tensor = made.get(place.original or "")
        if isinstance(tensor, Deferred):
            _check_fits(place, tensor, folder)
    return _Plan(_reads(model, places, skeleton, made, seed), keys, files.digest)


def _reads(
    model: nn.Module,
    places: list[Place],
    skeleton: nn.Module,
    made: Mapping[str, Tensor],
    seed: int,
) -> _Reads:
    """Return the reads of what the skeleton has, and of new values of the rest on the meta device.

    Args:
        model: to be filled.
        places: of the model.
        skeleton: model as transformers makes it; it is changed.
        made: the skeleton's tensors by name; those of a checkpoint are deferred.
        seed: of random values.
    """
    new: dict[str, Source] = {}
    lost = [place for place in places if place.tensor.is_meta]
    if any(not isinstance(made.get(place.original or ""), Deferred) for place in lost):
        new = new_values(skeleton, seed)
    adapter = adapter_of(model)
    drawn = {} if adapter is None else first_values(model, adapter, places, seed)
    reads: _Reads = []
    for place in places:
        tensor = made.get(place.original or "")
        if isinstance(tensor, Deferred):
            reads.append((place, source_of(tensor)))
        elif place.tensor.is_meta and place.original in new:
            reads.append((place, new[place.original]))
        elif place.tensor.is_meta and place.name in drawn:
            reads.append((place, Known(drawn[place.name])))
    _check_all_known(model, lost, reads)
    _check_boxes(reads)
    return reads


def _plan_of_adapter(
    model: nn.Module,
    adapter: str | None,
    places: list[Place],
    files: CheckpointFiles,
    folder: Path,
    strict: bool,
) -> _Plan:
    if adapter is None:
        raise ValueError(
            f"{folder} has an adapter of PEFT, and {type(model).__name__} has none. Add one with "
            "peft.get_peft_model() and the config in the folder, before you parallelize the model."
        )
    found = adapter_places(model, adapter, [place for place in places if place.persistent])
    keys = IncompatibleKeys(
        sorted(found.keys() - files.parts.keys()),
        [] if stage_of(model) else sorted(files.parts.keys() - found.keys()),
    )
    _check_keys(keys, model, folder, strict)
    reads: _Reads = []
    for name, place in found.items():
        if name in files.parts:
            part = files.parts[name]
            _check_fits(place, Deferred(part), folder)
            reads.append((place, part))
    lost = [place for place in found.values() if place.tensor.is_meta]
    _check_all_known(model, lost, reads)
    _check_boxes(reads)
    return _Plan(reads, keys, files.digest)


def _check_all_known(model: nn.Module, lost: list[Place], reads: _Reads) -> None:
    known = {place.name for place, _ in reads}
    unknown = [place.name for place in lost if place.name not in known]
    unknown += [
        child_name(name, own)
        for name, module in model.named_modules()
        for own, value in vars(module).items()
        if isinstance(value, Tensor) and value.is_meta
    ]
    if unknown:
        raise ValueError(
            f"{in_words(unknown)} of {type(model).__name__} are on the meta device, and neither "
            "the checkpoint, if there is one, nor transformers has their values. Make them on a "
            "real device first, or build the model with accelerate's init_empty_weights(), which "
            "keeps buffers."
        )


def _check_boxes(reads: _Reads) -> None:
    """Raise ValueError, before anything changes, if a rank's part of a tensor is not known."""
    for place, _ in reads:
        local_box(place)


def _check_shapes(mismatched: Any, inner: nn.Module, folder: Path) -> None:
    if mismatched:
        name, given, own = sorted(mismatched)[0]
        more = f", and {len(mismatched) - 1} more do not fit" if len(mismatched) > 1 else ""
        raise ValueError(
            f"{name} is {tuple(given)} in {folder}, but {tuple(own)} in {type(inner).__name__}"
            f"{more}. Make the model from the checkpoint's config.json."
        )


def _check_ties(places: list[Place], made: dict[str, Tensor]) -> None:
    """Raise ValueError if transformers ties parameters that are not tied in the model."""
    own = defaultdict[str, set[int]](set)
    for place in places:
        own[place.original or ""].add(id(place.tensor))
    names = defaultdict[int, list[str]](list)
    for name, tensor in made.items():
        if name in own:
            names[id(tensor)].append(name)
    for first, *others in names.values():
        untied = [name for name in others if not own[name] & own[first]]
        if untied:
            raise ValueError(
                f"transformers ties {in_words(untied)} to {first}, as the model's config and the "
                "checkpoint say, and the model does not. Call model.tie_weights() before you "
                "parallelize it, or build it with config.tie_word_embeddings=False."
            )


def _check_tied_values(
    model: nn.Module, skeleton: Any, places: list[Place], made: dict[str, Tensor], folder: Path
) -> None:
    """Raise ValueError if the checkpoint has several values for what the model has tied."""
    names = defaultdict[int, list[str]](list)
    for place in places:
        if place.original is not None and isinstance(made.get(place.original), Deferred):
            names[id(place.tensor)].append(place.original)
    pairs = [(first, name) for first, *others in names.values() for name in others]
    stage = stage_of(model)
    if stage is not None and stage.tied is not None:  # to a parameter of another stage
        pairs += [
            (first, name)
            for name, first in skeleton.get_expanded_tied_weights_keys(all_submodels=True).items()
            if stage.tied in (first, name)
            and all(isinstance(made.get(each), Deferred) for each in (first, name))
        ]
    for first, name in pairs:
        if made[first] is not made[name] and not torch.equal(made[first], made[name]):
            raise ValueError(
                f"{type(model).__name__} ties {name} to {first}, and their values in {folder} "
                "differ. Build the model with config.tie_word_embeddings=False."
            )


def _check_keys(keys: IncompatibleKeys, inner: nn.Module, folder: Path, strict: bool) -> None:
    if not strict or not any(keys):
        return
    missing, unexpected = keys
    what = []
    if missing:
        what.append(f"lacks {in_words(missing)} of {type(inner).__name__}")
    if unexpected:
        what.append(f"has {in_words(unexpected)}, for which the model has no place")
    raise ValueError(
        f"The checkpoint in {folder} {' and '.join(what)}. Make the model from its config.json, or "
        "pass strict=False to keep the model's values and leave the checkpoint's out."
    )


def _check_fits(place: Place, tensor: Deferred, folder: Path) -> None:
    """Raise ValueError if a tensor's shape or kind of dtype is not that of the model's."""
    own = place.tensor
    if own.shape != tensor.shape:
        raise ValueError(
            f"{place.name} is {tuple(own.shape)}, but the model's config says "
            f"{tuple(tensor.shape)}. Load the checkpoint before you resize the model."
        )
    kept = {each.dtype for each in source_of(tensor).leaves() if isinstance(each, FilePart)}
    wrong = [dtype for dtype in kept if _kind(dtype) != _kind(own.dtype)]
    if wrong and not _is_computed(source_of(tensor)):
        raise ValueError(
            f"{place.name} is {own.dtype}, but {wrong[0]} in {folder}: weights that are quantized "
            "or packed cannot be cast. Save them dequantized."
        )


def _kind(dtype: torch.dtype) -> object:
    is_plain = dtype.is_floating_point and dtype.itemsize > 1
    return "floating point" if is_plain else dtype


def _is_computed(source: Source) -> bool:
    """Return whether an operation is run on whole tensors: it may dequantize them."""
    return source.computes or any(map(_is_computed, source.inputs()))


def _refuse_quantized(inner: Any) -> None:
    if getattr(inner.config, "quantization_config", None) is not None:
        raise ValueError(
            f"The config of {type(inner).__name__} says that it is quantized, and quantized models "
            "are not supported. Dequantize the checkpoint with transformers, and make the model "
            "without quantization_config."
        )


def _materialize(model: nn.Module, reads: _Reads, device: torch.device | str | None) -> None:
    """Give memory to parameters and buffers on the meta device; shared ones stay shared."""
    state: dict[str, Tensor] = {}
    made: dict[int, Tensor] = {}
    mesh_device = _device_of(place.tensor for place, _ in reads)
    for place, _ in reads:
        old = place.tensor
        if not old.is_meta:
            continue
        is_parameter = isinstance(old, nn.Parameter)
        if id(old) not in made:
            on = torch.device(device) if device is not None and is_parameter else mesh_device
            made[id(old)] = _with_memory(old, on)
        if is_parameter:
            state[place.name] = made[id(old)]
        else:
            setattr(place.module, place.own_name, made[id(old)])
    with keeping_attributes(model):
        # Unlike setting attributes, this tells FSDP2, which also shards what it has gathered.
        model.load_state_dict(state, strict=False, assign=True)
    if left := [place.name for place, _ in reads if place.tensor.is_meta]:
        raise RuntimeError(
            f"load_state_dict() of {type(model).__name__} has not taken {in_words(left)}, which "
            "are still on the meta device: a hook or a method of a module changes the names. "
            "Load the model before you add it."
        )


def _with_memory(old: Tensor, device: torch.device) -> Tensor:
    made: Tensor
    if isinstance(old, DTensor):
        local = torch.empty_like(old.to_local(), device=device)
        made = DTensor.from_local(
            local,
            old.device_mesh,
            old.placements,
            run_check=False,
            shape=old.shape,
            stride=old.stride(),
        )
    else:
        made = torch.empty_like(old, device=device)
    return nn.Parameter(made, old.requires_grad) if isinstance(old, nn.Parameter) else made


def _device_of(tensors: Iterable[Tensor]) -> torch.device:
    kind = next((each.device_mesh.device_type for each in tensors if isinstance(each, DTensor)), "")
    if not kind:
        return torch.get_default_device()
    if kind == "cpu":
        return torch.device(kind)
    return torch.device(kind, torch.get_device_module(kind).current_device())
