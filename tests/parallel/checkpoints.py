"""Checkpoints of tiny models, loaded into models that are distributed and saved again: programs."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import hf_families
import torch
import torch.distributed as dist
import transformers
from hf_families import full, tiny_model
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import meshverse
from meshverse.parallel import (
    ParallelismSizes,
    apply_tp_plan,
    create_fsdp2_device_mesh,
    fsdp2_strategy_parallelize,
    get_hf_tp_shard_plan,
    load_pretrained,
    pipeline_stages,
    save_pretrained,
)

# Arrangements of four ranks: sizes for FSDP2's mesh; none for tensor parallelism alone.
ARRANGEMENTS: dict[str, dict[str, int]] = {
    "tp 4": {},
    "fsdp 4": {"tp_size": 1},
    "tp 2 x fsdp 2": {"tp_size": 2},
    "2 replicas x fsdp 2": {"dp_replicate_size": 2},
    "ep 4": {"ep_size": 4},
    "ep 2 x tp 2": {"ep_size": 2, "tp_size": 2},
    "pp 2 x tp 2": {"pp_size": 2, "tp_size": 2},
    "pp 2 x fsdp 2": {"pp_size": 2},
}


def saved(family: str, folder: str, *, tied: bool = False, **changes: Any) -> nn.Module:
    """A tiny model; transformers on the first rank saves it."""
    if family.startswith("inkling"):  # its files have rows for tokens that the model lacks
        changes = {"unpadded_vocab_size": hf_families.VOCABULARY - 4, **changes}
    if family in ("llama", "mixtral"):  # as many heads as "tp 4" has ranks
        changes = {"num_key_value_heads": 4, **changes}
    model = tiny_model(family, tied=tied, **changes)
    if not dist.is_initialized() or dist.get_rank() == 0:
        model.save_pretrained(folder)
    if dist.is_initialized():
        dist.barrier()
    return model


def on_meta(folder: str, dtype: torch.dtype = torch.float32) -> Any:
    """The model of a checkpoint's config, without memory."""
    config = transformers.AutoConfig.from_pretrained(folder)
    config._attn_implementation = "eager"
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config).to(dtype)


def arranged(model: Any, arrangement: str) -> Any:
    """A model, distributed over the world's four ranks."""
    sizes = ARRANGEMENTS[arrangement]
    if not sizes:
        mesh = meshverse.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
        apply_tp_plan(model, mesh, get_hf_tp_shard_plan(model))
        return model
    device_mesh, moe_mesh = create_fsdp2_device_mesh(ParallelismSizes(**sizes))
    if "pp_size" in sizes:
        (model,) = pipeline_stages(model, device_mesh["pp"])
    exact = MixedPrecisionPolicy()
    return fsdp2_strategy_parallelize(model, device_mesh, moe_mesh=moe_mesh, mp_policy=exact)


def values_of(model: nn.Module) -> dict[str, Tensor]:
    """All parameters and buffers, as one process has them."""
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    return {name: full(each.detach()) for name, each in tensors}


def round_trip(family: str, arrangement: str, tied: bool, folder: str) -> str:
    """Load a checkpoint and save it; return the first difference, or the refusal, in words."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers' own, of tiny sizes
        alone = saved(family, f"{folder}/given", tied=tied)
        model = on_meta(f"{folder}/given")
        try:
            model = arranged(model, arrangement)
        except ValueError as error:
            return f"refused: {error}"
        assert load_pretrained(model, f"{folder}/given") == ([], [])
        expected = transformers.AutoModelForCausalLM.from_pretrained(
            f"{folder}/given", dtype=torch.float32
        )
        # Of the parameters, transformers initializes a part of some again, such as Youtu's padding.
        whole = values_of(expected) | {
            name: each.detach() for name, each in alone.named_parameters(remove_duplicate=False)
        }
        seen = values_of(model)
        assert "pp" in arrangement or seen.keys() == whole.keys()
        for name, value in seen.items():
            if value.dtype != whole[name].dtype or not torch.equal(value, whole[name]):
                return f"{name} is not what from_pretrained loads"
        if "pp" not in arrangement and hf_families.is_tied(model) != hf_families.is_tied(expected):
            return "embedding and head"
        save_pretrained(model, f"{folder}/saved", max_shard_size=50_000)
    given, again = tensors_in(f"{folder}/given"), tensors_in(f"{folder}/saved")
    if given.keys() != again.keys():
        return f"keys {sorted(given.keys() ^ again.keys())}"
    for name, value in given.items():
        if value.dtype != again[name].dtype or not torch.equal(value, again[name]):
            return f"{name} is not what was loaded"
    if dist.get_rank() == 0:
        expected.save_pretrained(f"{folder}/theirs")
    dist.barrier()
    configs = [
        json.loads(Path(folder, each, "config.json").read_text()) for each in ("theirs", "saved")
    ]
    return "" if configs[0] == configs[1] else "config.json"


def tensors_in(folder: str) -> dict[str, Tensor]:
    """The tensors of all safetensors files of a folder, as the library reads them."""
    found: dict[str, Tensor] = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        assert not tensors.keys() & found.keys(), path
        found |= tensors
    return found


def bytes_read() -> int:
    """Bytes that this process has read by system calls, from the kernel."""
    fields: Mapping[str, str] = dict(
        line.split(": ") for line in Path("/proc/self/io").read_text().splitlines()
    )
    return int(fields["rchar"])
