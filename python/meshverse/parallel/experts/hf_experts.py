"""What the tensor-parallel plans of transformers say of experts, as styles.

Such a plan names the module of the experts, each of its weights, and what goes with them. Here one
style for the module does all of it.

Example:
    >>> names = {"mlp.experts": "moe_tp_experts", "mlp.experts.down_proj": "rowwise"}
    >>> take_experts(model, names)  # doctest: +SKIP
    ({'mlp.experts': ExpertFeaturesParallel()}, {})
"""

from __future__ import annotations

from inspect import signature

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle, RowwiseParallel

from meshverse.parallel.models.module_names import matching_modules, parent_name

from .expert_parallel import SameTokensExpertParallel
from .features import ExpertFeaturesParallel
from .stacked import describe

__all__ = ["take_experts"]

# transformers' words for partial sums: a layer computes one, a module passes it on, and an outer
# module adds them up over the ranks.
_TERM, _LEFT_ALONE, _SUM = "local_rowwise", "local", "gather"
_ROUTER = "ep_router"


def take_experts(
    model: nn.Module, names: dict[str, str]
) -> tuple[dict[str, ParallelStyle], dict[str, str]]:
    """The styles of a model's experts, and the entries of its plan that are left for others.

    Args:
        model: with whole parameters.
        names: the plan, by module or parameter; entries that the model has.
    """
    styles: dict[str, ParallelStyle] = {}
    names = _sum_at_once(model, names)
    for key in _stacked(model, names):
        whole = any(_is_of(own, key) and names[own] == "grouped_gemm" for own in names)
        styles[key] = SameTokensExpertParallel() if whole else ExpertFeaturesParallel()
        names = {own: style for own, style in names.items() if not _is_of(own, key)}
        if _takes_rows(model, key):
            beside = [own for own in names if _is_of(own, parent_name(key))]
            styles |= {own: _OwnOutput() for own in beside if names[own] == "rowwise"}
    routers = _ROUTER if styles else ""  # which chose among a rank's experts, before
    left = {own: style for own, style in names.items() if own not in styles and style != routers}
    return styles, left


def _stacked(model: nn.Module, names: dict[str, str]) -> list[str]:
    """The keys that mean modules with stacked experts, whether named or by their parameters."""
    keys = dict.fromkeys(owner for key in names for owner in (key, parent_name(key)))
    return [key for key in keys if _has_stacked_experts(model, key)]


def _has_stacked_experts(model: nn.Module, key: str) -> bool:
    found = matching_modules(model, key) if key else []
    return any(describe(model.get_submodule(name)) is not None for name in found)


def _takes_rows(model: nn.Module, key: str) -> bool:
    """Whether experts get rows that are routed already, as in Llama 4."""
    name = matching_modules(model, key)[0]
    return len(signature(type(model.get_submodule(name)).forward).parameters) == 2  # with self


class _OwnOutput(RowwiseParallel):
    """Row-wise, with an output to which the module around it may add in place."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module = super()._apply(module, device_mesh)
        module.register_forward_hook(lambda module, arguments, output: output.clone())
        return module


def _is_of(key: str, owner: str) -> bool:
    return key == owner or key.startswith(f"{owner}.")


def _sum_at_once(model: nn.Module, names: dict[str, str]) -> dict[str, str]:
    """The plan, with sums made by each layer instead of the module around several.

    Of a term of a sum, the weights of a router would get the gradient of this term only.
    """
    sums = [
        key
        for key, style in names.items()
        if style == _SUM
        and any(_is_of(own, key) and other == _TERM for own, other in names.items())
    ]
    kept = {key: style for key, style in names.items() if key not in sums and style != _LEFT_ALONE}
    for key, style in kept.items():
        if style == _TERM and any(_is_of(key, owner) for owner in sums):
            kept[key] = "rowwise"
    return kept
