"""Which modules of a model have experts that can be handed out, and how it is done to all.

Example:
    >>> apply_expert_parallelism(model, moe_mesh["ep"], same_tokens=mesh["tp"])  # doctest: +SKIP
    ['model.layers.0.mlp.experts', 'model.layers.1.mlp.experts']
"""

from __future__ import annotations

import re

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from meshverse.parallel.models.module_names import matching_modules, parent_name
from meshverse.parallel.models.stages import stage_of

from .expert_parallel import ExpertParallel
from .listed import check_list, hand_out_list, is_list_of_experts
from .stacked import describe

__all__ = ["apply_expert_parallelism", "check_experts", "expert_modules"]

# What modules of experts are called that carry no plan of their own.
_EXPERTS = re.compile(r"(.*\.)?experts")


def expert_modules(model: nn.Module) -> list[str]:
    """The names of a model's modules of routed experts: with stacked weights, or lists of modules.

    They are those whose weights the model's own expert-parallel plan (`_ep_plan`) splits by
    experts; without such a plan, those called `experts`.
    """
    planned = [
        name
        for prefix, module in _with_plans(model)
        for key, style in module._ep_plan.items()  # type: ignore[union-attr, operator]
        if style == "grouped_gemm"
        for name in matching_modules(model, prefix + parent_name(key))
    ]
    named = [name for name, _ in model.named_modules() if _EXPERTS.fullmatch(name)]
    found = dict.fromkeys(planned or named)
    return [name for name in found if _is_known(model.get_submodule(name))]


def _is_known(module: nn.Module) -> bool:
    return describe(module) is not None or is_list_of_experts(module)


def _with_plans(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The modules that have an expert-parallel plan, with what goes before its keys."""
    return [
        (f"{name}." if name else "", module)
        for name, module in model.named_modules()
        if isinstance(getattr(module, "_ep_plan", None), dict)
    ]


def apply_expert_parallelism(
    model: nn.Module,
    ep_mesh: DeviceMesh,
    *,
    same_tokens: DeviceMesh | None = None,
    gradient_scale: float = 1.0,
) -> list[str]:
    """Hand out a model's experts to the ranks of a mesh, in place.

    Args:
        model: whose parameters are whole.
        ep_mesh: 1-D.
        same_tokens: as for `ExpertParallel`.
        gradient_scale: as for `ExpertParallel`.

    Returns:
        The names of the modules whose experts were handed out.

    Raises:
        ValueError: it has no experts that can be handed out, or their number does not divide. The
            model is as it was then.
    """
    names = check_experts(model, ep_mesh.size())
    for name in names:
        style, module = ExpertParallel(same_tokens, gradient_scale), model.get_submodule(name)
        if is_list_of_experts(module):
            around = model.get_submodule(parent_name(name))
            hand_out_list(name.rpartition(".")[2], around, ep_mesh, style)
        else:
            parallelize_module(module, ep_mesh, style)
    return names


def check_experts(model: nn.Module, size: int) -> list[str]:
    """The modules of a model whose experts can be handed out; nothing is changed.

    Args:
        model: whose parameters are whole.
        size: number of ranks to hand them out to.

    Returns:
        Their names. None for a pipeline stage without experts, if its model has some.

    Raises:
        ValueError: there are none, or some that cannot be handed out.
    """
    names = expert_modules(model)
    stage = stage_of(model)
    if not names and stage is not None and stage.model_has_experts:
        return []  # they are in other stages
    if not names:
        raise ValueError(f"ep={size}: {_why_none(model)}")
    style = ExpertParallel()
    for name in names:
        module = model.get_submodule(name)
        if is_list_of_experts(module):
            check_list(name, model.get_submodule(parent_name(name)), size)
        else:
            style.check(name, module, size)
        if any(isinstance(each, DTensor) for each in module.parameters()):
            raise ValueError(f"{name} is distributed already. Hand out experts once, before FSDP.")
    return names


def _why_none(model: nn.Module) -> str:
    return (
        f"{type(model).__name__} has no experts to hand out: no _ep_plan, and no module called "
        "'experts' with 3-D weights or a list of modules. Use ep_size=1, or apply ExpertParallel "
        "to its modules with parallelize_module."
    )
