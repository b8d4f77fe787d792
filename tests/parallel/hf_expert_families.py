"""Families with experts, handed out to ranks: programs of ranks.

They are apart from their tests, because a rank needs no list of all families, which takes seconds.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from functools import partial

import hf_families
import torch.distributed as dist
from hf_families import Outcome, full, tiny_model
from rounding import largest_error
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from meshverse.parallel import (
    ParallelismSizes,
    create_fsdp2_device_mesh,
    fsdp2_strategy_parallelize,
)


def compare_both(family: str, sizes: dict[str, int]) -> tuple[Outcome, Outcome]:
    """Compare a family untied, and tied."""
    compare = partial(
        hf_families.compare,
        family,
        shard=partial(shard, sizes=sizes),
        is_split=is_handed_out,
        error_of=partial(error_of_shares, sizes=sizes),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers' own, of tiny sizes
        return compare(tied=False), compare(tied=True)


def shard(model: nn.Module, sizes: Mapping[str, int]) -> None:
    mesh, moe_mesh = create_fsdp2_device_mesh(ParallelismSizes(**sizes))
    exact = MixedPrecisionPolicy()
    fsdp2_strategy_parallelize(model, mesh, moe_mesh=moe_mesh, mp_policy=exact)


def is_handed_out(parameter: Tensor) -> bool:
    mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
    return mesh is not None and "ep" in (mesh.mesh_dim_names or ())


def error_of_shares(
    split: nn.Module, whole: nn.Module, floor: float, sizes: Mapping[str, int]
) -> tuple[float, str]:
    """Return the largest error of this rank's share of the logits, and of all gradients."""
    parts = dist.get_world_size() // sizes.get("tp_size", 1)
    mine = dist.get_rank() // sizes.get("tp_size", 1)
    every = hf_families.tokens().reshape(4, -1)
    expected = hf_families.run(whole, every)
    # Gradients are averages over the ranks, and `run` sums.
    seen = hf_families.run(split, every.chunk(parts)[mine], scale=parts, row=mine * 4 // parts)
    logits = expected["logits"]
    assert logits is not None
    expected["logits"] = logits.chunk(parts)[mine]
    return largest_error(seen, expected, floor)


def auxiliary_loss(family: str, sizes: Mapping[str, int]) -> tuple[float, float, str]:
    """Compare the loss of routers that a family adds to its own, and all gradients.

    It is no sum over tokens: all ranks have the whole batch.
    """
    losses, seen = [], []
    for sharded in (False, True):
        model = tiny_model(family, tied=False, output_router_logits=True, router_aux_loss_coef=5.0)
        if sharded:
            shard(model, sizes)
        tokens = hf_families.tokens()
        output = model(input_ids=tokens, labels=tokens, use_cache=False)
        output.loss.backward()
        losses.append(full(output.aux_loss).item())
        seen.append({name: full(each.grad) for name, each in model.named_parameters()})
    error, worst = largest_error(seen[1] | {"logits": None}, seen[0] | {"logits": None}, 1e-2)
    return abs(losses[1] - losses[0]) / losses[0], error, worst
