"""Adapters that PEFT has added to a model: their names in PEFT's files, and their first values."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from meshverse.parallel.models.modules import LORA_PAIR, shallow_copy

from .files import ADAPTER_WEIGHTS
from .places import Place, check_names_of_modules, in_words

_PREFIX = "base_model.model."  # of names in PEFT's files
_PAIRS = (*LORA_PAIR, "lora_embedding_A", "lora_embedding_B")
# Values of `init_lora_weights` for which PEFT draws values without the layer's weight.
_DRAWN = (True, "gaussian")


def adapter_of(model: nn.Module) -> str | None:
    """Return the name of the adapter that PEFT has added to a model, or None.

    Raises:
        ValueError: it has several.
    """
    configs = getattr(model, "peft_config", None)
    if not isinstance(configs, dict) or not configs:
        return None
    if len(configs) > 1:
        raise ValueError(
            f"{type(model).__name__} has the adapters {sorted(configs)}: only one can be loaded "
            "and saved. Remove the others with delete_adapter()."
        )
    return str(next(iter(configs)))


def adapter_places(model: nn.Module, adapter: str, places: Sequence[Place]) -> dict[str, Place]:
    """Return what PEFT saves of an adapter, by the name in its file.

    Raises:
        ValueError: a module is in a wrapper that changes names, or PEFT saves what is no parameter
            or buffer of the model, as for prompts.
    """
    check_names_of_modules(model)
    from peft import get_peft_model_state_dict

    marks = {place.name: torch.empty(place.tensor.shape, device="meta") for place in places}
    by_mark = {id(marks[place.name]): place for place in places}
    named = get_peft_model_state_dict(model, state_dict=marks, adapter_name=adapter)
    computed = [name for name, mark in named.items() if id(mark) not in by_mark]
    if computed:
        kind = model.peft_config[adapter].peft_type  # type: ignore[index, union-attr]
        raise ValueError(
            f"PEFT computes {in_words(computed)} of the adapter {adapter!r} ({kind}) as it saves: "
            "these are no parameters, and cannot be saved or loaded here. Save the whole model "
            "with torch.distributed.checkpoint."
        )
    prefix = "" if hasattr(model, "get_base_model") else _PREFIX  # PEFT's wrapper has it in names
    return {f"{prefix}{name}": by_mark[id(mark)] for name, mark in named.items()}


def first_values(
    model: nn.Module, adapter: str, places: Sequence[Place], seed: int
) -> dict[str, Tensor]:
    """Return the values that PEFT gives to LoRA's new matrices, the same on all ranks, by name.

    Raises:
        ValueError: they depend on the layers' weights.
    """
    on_meta = {place.name for place in places if place.original is None and place.tensor.is_meta}
    layers = [
        (name, module)
        for name, module in model.named_modules()
        if any(each.startswith(f"{name}.") for each in on_meta)
        and hasattr(module, "reset_lora_parameters")
    ]
    if not layers:
        return {}
    how = model.peft_config[adapter].init_lora_weights  # type: ignore[index, union-attr]
    if how not in _DRAWN:
        why = (
            "leaves them as their layers' constructors do, which draw nothing on the meta device"
            if how is False
            else "computes them from the layers' weights"
        )
        raise ValueError(
            f"{in_words(sorted(on_meta))} are on the meta device, and init_lora_weights={how!r} "
            f"{why}. Add the adapter to the loaded model, or load an adapter's folder."
        )
    values: dict[str, Tensor] = {}
    with torch.random.fork_rng(devices=[]):
        for name, layer in layers:
            # By layer, so that those of all pipeline stages differ. Only of this generator: those
            # of GPUs stay as they are.
            digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
            torch.default_generator.manual_seed(int.from_bytes(digest[:7], "little"))
            values |= dict(_drawn(name, layer, adapter, how))
    return {name: value for name, value in values.items() if name in on_meta}


def _drawn(name: str, layer: nn.Module, adapter: str, how: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the new matrices of a layer, whole and on the CPU."""
    copied: Any = shallow_copy(layer)
    held: Any
    for pair in _PAIRS:
        held = getattr(layer, pair, None)
        if held is not None and adapter in held:
            setattr(copied, pair, type(held)({adapter: _whole_on_cpu(held[adapter])}))
    copied.reset_lora_parameters(adapter, how)
    for pair in _PAIRS:
        held = getattr(copied, pair, None)
        for own, value in () if held is None else held.named_parameters():
            yield f"{name}.{pair}.{own}", value.detach()


def _whole_on_cpu(held: Any) -> Any:
    """Return a matrix, or the layer that has it, with whole tensors on the CPU."""

    def empty(tensor: Tensor) -> nn.Parameter:
        return nn.Parameter(torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu"))

    if isinstance(held, Tensor):
        return empty(held)
    copied = shallow_copy(held)
    for name, each in held.named_parameters(recurse=False, remove_duplicate=False):
        setattr(copied, name, empty(each))
    return copied


def save_adapter(model: Any, adapter: str, tensors: dict[str, Tensor], folder: Path) -> None:
    """Save an adapter as PEFT does.

    Args:
        model: the model, with PEFT's wrapper or without.
        adapter: its name.
        tensors: whole, on the CPU, by the name in PEFT's file.
        folder: for its files.
    """
    from safetensors.torch import save_file

    values: dict[str, Tensor] = {}
    seen = set[int]()
    for name, each in tensors.items():
        address = each.untyped_storage().data_ptr()
        # Layers may share one, of which the file has one for each.
        values[name] = each.clone() if address in seen else each.contiguous()
        seen.add(address)
    save_file(values, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    config = copy.deepcopy(model.peft_config[adapter])
    config.inference_mode = True  # as PEFT sets it in files
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if config.base_model_name_or_path is None:
        config.base_model_name_or_path = vars(base).get("name_or_path")
    mapping = None
    if config.task_type is None:
        mapping = {
            "base_model_class": type(base).__name__,
            "parent_library": type(base).__module__,
        }
    config.save_pretrained(folder, auto_mapping_dict=mapping)
