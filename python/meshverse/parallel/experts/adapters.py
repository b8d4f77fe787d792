"""PEFT's LoRA of stacked experts, of which each rank has the part of its own experts.

For n experts and the rank r, lora_A is (n * r, in): the rows of one expert are neighbors. lora_B
is (out, r * n), and an expert has every n-th column. So lora_A is sharded by experts, and lora_B by
its rows: when the experts run, ranks exchange them for the columns of their experts.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Placement, Shard

from meshverse.parallel.models.modules import LORA_PAIR, adapted
from meshverse.parallel.styles.local_styles import replaced_attributes

from .stacked import DOWN, StackedExperts, experts_inside


def wrappers_of(module: nn.Module) -> list[Any]:
    """Return the wrappers of a module's stacked experts, from the outermost."""
    found: list[Any] = []
    experts = experts_inside(module)
    while module is not experts:
        found.append(module)
        module = adapted(module)
    return found


def check_adapters(name: str, module: nn.Module, experts: StackedExperts, size: int) -> None:
    """Check that the adapters of a module's experts can be distributed with them.

    Raises:
        ValueError: they are not LoRA of an expert's weight, have another number of experts, or
            the rows of lora_B cannot be shared evenly.
    """
    library: Any = sys.modules.get("peft.tuners.lora")
    kind: Any = getattr(library, "ParamWrapper", ())
    for wrapper in wrappers_of(module):
        if not isinstance(wrapper, kind):
            raise ValueError(
                f"{name}: its experts are wrapped by {type(wrapper).__name__}, which cannot be "
                "distributed with them: only PEFT's LoRA of their parameters can be "
                "(target_parameters). Merge the others, or use ep_size=1."
            )
        weights = [*experts.columns, DOWN]
        if wrapper.parameter_name not in weights:
            raise ValueError(
                f"{name}: PEFT adapts {wrapper.parameter_name!r} of its experts, and only the "
                f"adapters of {weights} can be distributed with them. Leave it out of "
                "target_parameters, or use ep_size=1."
            )
        if wrapper.num_experts != experts.count:
            raise ValueError(
                f"{name}: the adapter of {wrapper.parameter_name} has {wrapper.num_experts} "
                f"experts, and its module has {experts.count}. Leave it out of target_parameters, "
                "or use ep_size=1."
            )
        for adapter, second in wrapper.lora_B.named_children():
            if second.weight.size(0) % size:
                raise ValueError(
                    f"{name}: lora_B of the adapter {adapter!r} of {wrapper.parameter_name} has "
                    f"{second.weight.size(0)} rows, which {size} ranks of expert parallelism "
                    "cannot share evenly. Choose another ep_size."
                )


def placements_of_adapters(module: nn.Module) -> dict[str, Placement]:
    """Return placements of the matrices of a module's adapters, by name in the module."""
    matrices = {
        id(each)
        for wrapper in wrappers_of(module)
        for side in LORA_PAIR
        for each in getattr(wrapper, side).parameters()
    }
    return {
        name: Shard(0) for name, parameter in module.named_parameters() if id(parameter) in matrices
    }


def add_adapters(module: nn.Module, local: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the parameters of this rank's experts with what their adapters add.

    Args:
        module: experts, or the outermost wrapper of them.
        local: parameters of this rank's experts, by name.
    """
    sums = dict(local)
    for wrapper in wrappers_of(module):
        if wrapper.disable_adapters or wrapper.merged:
            continue
        for adapter in wrapper.active_adapters:
            if adapter in wrapper.lora_A:
                name = wrapper.parameter_name
                sums[name] = sums[name] + _added(wrapper, adapter, local[name].size(0))
    return sums


def _added(wrapper: Any, adapter: str, own: int) -> Tensor:
    """Return what an adapter adds to the parameter of this rank's `own` experts."""
    first, second = (getattr(wrapper, pair)[adapter] for pair in LORA_PAIR)
    rows: Tensor = first.weight.to_local()
    by_expert = second.weight.view(second.weight.size(0), -1, wrapper.num_experts)
    columns: Tensor = by_expert.redistribute(placements=[Shard(2)]).to_local()
    # PEFT takes the matrices of one expert for those of a layer, and returns two dimensions.
    copies = 2 if own == 1 else 1
    with (
        replaced_attributes(wrapper, {"num_experts": own * copies}),
        replaced_attributes(first, {"weight": torch.cat([rows] * copies)}),
        replaced_attributes(second, {"weight": torch.cat([columns] * copies, -1).flatten(1)}),
    ):
        added: Tensor = wrapper.get_delta_weight(adapter)
    return added[:own]
