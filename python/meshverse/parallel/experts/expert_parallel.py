"""Parallel styles that distribute whole experts over a mesh, and a search for experts."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module

from meshverse.parallel.models.modules import child_name, matching_modules, parent_name, stage_of
from meshverse.parallel.styles.local_styles import hidden_parameters, sum_gradients

from .dispatch import Routing, arguments_of, dispatch, exchange_rows, read_routing, weigh
from .stacked import (
    DOWN,
    StackedExperts,
    StackedStyle,
    apply_experts,
    describe,
    implementation_of,
    own_gate,
)

_Run = Callable[[Tensor, Tensor], Tensor]

ONLY_STACKED = (
    "Expert parallelism must have experts with stacked weights, whose forward takes each token's "
    "experts. Use transformers 5.0 or newer, or ep_size=1 and a plan that splits each expert."
)

# Names of modules with experts in models that carry no plan of their own.
_EXPERTS = re.compile(r"(.*\.)?experts")


class _WholeExperts(StackedStyle):
    """Base of the styles that distribute whole experts: rank r has the r-th part of them."""

    gradient_scale = 1.0

    # Not traced: each new number of exchanged rows would recompile. Dense layers stay compiled.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def run(
        self, module: Any, experts: StackedExperts, mesh: DeviceMesh, *inputs: Any, **more: Any
    ) -> Any:
        """Run this rank's experts on the tokens that chose them."""
        values = arguments_of(module, inputs, more)
        local = {name: _own_experts(module, name, experts, mesh) for name in experts.names}
        routing = read_routing(experts, values)
        with hidden_parameters(module, local):
            own = partial(_run, module, experts, self.gradient_scale)
            if len(values) == 1:  # rows without a routing, as in Llama 4: zeros stay
                routed = routing.hidden.detach().any(-1).nonzero().squeeze(-1)
                some = routing.share(lambda each: each[routed])
                output = self.combine(some, experts, mesh, own)
                return torch.zeros_like(routing.hidden).index_copy(0, routed, output)
            output = self.combine(routing, experts, mesh, own)
        # No view if possible: FSDP2's hooks are lost on a view that is changed in place.
        return output if output.shape == values[0].shape else output.view_as(values[0])

    def check(self, name: str, module: nn.Module, size: int) -> None:
        """Check that the module has stacked experts, whose number divides by the ranks."""
        experts = self.described(name, module)
        takes_all = "routing_weights" in signature(type(module).forward).parameters
        if takes_all and not experts.is_routed:
            raise ValueError(
                f"{name}: {type(module).__name__} takes a weight for every expert, as in "
                f"transformers 4. {ONLY_STACKED}"
            )
        if experts.count % size:
            raise ValueError(
                f"{name}: its {experts.count} experts do not divide by the {size} ranks of expert "
                "parallelism. The number of ranks must divide the number of experts."
            )

    def placements(self, experts: StackedExperts) -> dict[str, Placement]:
        """Return the placements: all parameters are split by experts."""
        return dict.fromkeys(experts.names, Shard(0))

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        own: Any = super()._apply(module, device_mesh)
        if isinstance(getattr(own, "num_experts", None), int):
            own.num_experts = getattr(own, DOWN).size(0) // device_mesh.size()
        return module

    @abstractmethod
    def combine(
        self, routing: Routing, experts: StackedExperts, mesh: DeviceMesh, run: _Run
    ) -> Tensor:
        """Return all ranks' experts' outputs; `run(rows, local ids)` runs this rank's experts."""


@dataclass(eq=False, repr=False)
class ExpertParallel(_WholeExperts):
    """Style that distributes stacked experts over ranks, and sends each rank's tokens to them.

    For a module whose forward takes hidden states, each token's experts and their weights. No token
    is dropped. The gradients of experts are sums over the tokens of all ranks of the mesh.

    Args:
        same_tokens: 1-D mesh of the ranks that have the same tokens as this one, such as that of
            tensor parallelism: each then sends a part of them. None if every rank has its own.
        gradient_scale: factor on the gradients of the experts' parameters.
    """

    same_tokens: DeviceMesh | None = None
    gradient_scale: float = 1.0

    def combine(
        self, routing: Routing, experts: StackedExperts, mesh: DeviceMesh, run: _Run
    ) -> Tensor:
        """Return the outputs of all ranks' experts for this rank's tokens."""
        same = self.same_tokens
        if same is None or same.size() == 1:
            return dispatch(routing, experts, mesh, run)
        outputs = dispatch(routing.share(partial(_slice, same)), experts, mesh, run)
        shape = routing.hidden.shape
        sliced = DTensor.from_local(
            outputs.contiguous(), same, [Shard(0)], shape=shape, stride=(shape[1], 1)
        )
        return sliced.redistribute(placements=[Replicate()]).to_local().clone()


def _slice(mesh: DeviceMesh, tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor that all ranks have; gradients are gathered."""
    whole = DTensor.from_local(tensor, mesh, [Replicate()], run_check=False)
    return whole.redistribute(placements=[Shard(0)]).to_local()


class SameTokensExpertParallel(_WholeExperts):
    """Style that distributes stacked experts over ranks that all have the same tokens.

    Each rank runs its experts on the tokens that chose them, and the outputs are summed over the
    ranks: no token changes ranks.
    """

    def combine(
        self, routing: Routing, experts: StackedExperts, mesh: DeviceMesh, run: _Run
    ) -> Tensor:
        """Return the sum over the ranks of their experts' outputs."""
        shared = routing.share(
            lambda each: sum_gradients(each, mesh) if each.is_floating_point() else each
        )
        local = experts.count // mesh.size()
        first = mesh.get_local_rank() * local
        mine = (routing.expert_ids >= first) & (routing.expert_ids < first + local)
        flat = mine.reshape(-1).nonzero().squeeze(-1)
        rows = shared.hidden[flat // mine.size(-1)]
        given = run(rows, routing.expert_ids.reshape(-1)[flat] - first)
        outputs = given.new_zeros((mine.numel(), given.size(-1))).index_copy(0, flat, given)
        term = DTensor.from_local(weigh(shared, outputs), mesh, [Partial()], run_check=False)
        total = term.redistribute(placements=[Replicate()]).to_local()
        if not experts.hands_on:
            return total
        beyond = (routing.expert_ids >= experts.count).reshape(-1, 1)
        handed_on = routing.hidden.repeat_interleave(mine.size(-1), 0) * beyond
        return total + weigh(routing, handed_on)


def _own_experts(module: nn.Module, name: str, experts: StackedExperts, mesh: DeviceMesh) -> Tensor:
    """Return the rows of a parameter that belong to this rank's experts.

    LongCat's weights have rows for its identity experts too, so an even split gives a rank rows of
    other ranks' experts. The ranks exchange these first.
    """
    parameter: Any = module._parameters[name]  # a DTensor
    held: Tensor = parameter.to_local()
    held_by_all: int = parameter.size(0)
    if held_by_all == experts.count:
        return held
    size, rank = mesh.size(), mesh.get_local_rank()
    chunk, own = -(-held_by_all // size), experts.count // size

    def overlap(holder: int, owner: int) -> int:
        last = min((holder + 1) * chunk, (owner + 1) * own)
        return max(0, last - max(holder * chunk, owner * own))

    sent = [overlap(rank, owner) for owner in range(size)]
    received = [overlap(holder, rank) for holder in range(size)]
    return exchange_rows(held[: sum(sent)], sent, received, mesh.get_group())


def _run(
    module: Any, experts: StackedExperts, gradient_scale: float, rows: Tensor, ids: Tensor
) -> Tensor:
    """Return this rank's experts' outputs for rows; scales the gradients of parameters only."""
    rows = _scaled_gradient(rows, 1 / gradient_scale)
    if implementation_of(module) not in (None, "eager") and rows.size(0):
        unit = torch.ones_like(ids, dtype=rows.dtype)
        output = type(module).forward(module, rows, ids[:, None], unit[:, None])
    else:
        order = ids.argsort(stable=True)
        counts = torch.bincount(ids, minlength=getattr(module, DOWN).size(0)).tolist()
        output = apply_experts(module, experts, rows[order], counts, own_gate)[order.argsort()]
    return _scaled_gradient(output, gradient_scale)


def _scaled_gradient(tensor: Tensor, factor: float) -> Tensor:
    if factor == 1 or not tensor.requires_grad:
        return tensor
    scaled = tensor.view_as(tensor)
    scaled.register_hook(lambda gradient: gradient * factor)  # type: ignore[no-untyped-call]
    return scaled


def expert_modules(model: nn.Module) -> list[str]:
    """Return the names of a model's modules of routed experts: stacked weights, or ModuleLists.

    They are those whose weights the model's own expert-parallel plan (`_ep_plan`) splits by
    experts; without such a plan, those called `experts`.
    """
    planned = [
        found
        for prefix, module in model.named_modules()
        if isinstance(plan := getattr(module, "_ep_plan", None), dict)
        for key, style in plan.items()
        if style == "grouped_gemm"
        for found in matching_modules(model, child_name(prefix, parent_name(key)))
    ]
    names = planned or [name for name, _ in model.named_modules() if _EXPERTS.fullmatch(name)]

    def has_experts(module: nn.Module) -> bool:
        is_list = isinstance(module, nn.ModuleList) and any(True for _ in module.parameters())
        return is_list or describe(module) is not None

    return [name for name in dict.fromkeys(names) if has_experts(model.get_submodule(name))]


def apply_expert_parallelism(
    model: nn.Module,
    ep_mesh: DeviceMesh,
    *,
    same_tokens: DeviceMesh | None = None,
    gradient_scale: float = 1.0,
) -> list[str]:
    """Distribute a model's experts over the ranks of a mesh, in place.

    Args:
        model: a model with whole parameters.
        ep_mesh: a 1-D mesh.
        same_tokens: as in `ExpertParallel`.
        gradient_scale: as in `ExpertParallel`.

    Returns:
        The names of the modules whose experts were distributed.

    Raises:
        ValueError: the model has no experts, or some that cannot be distributed over these ranks.
            The model is unchanged then.

    Example:
        >>> apply_expert_parallelism(model, moe_mesh["ep"])  # doctest: +SKIP
        ['model.layers.0.mlp.experts', 'model.layers.1.mlp.experts']
    """
    names = check_experts(model, ep_mesh.size())
    for name in names:
        style = ExpertParallel(same_tokens, gradient_scale)
        parallelize_module(model.get_submodule(name), ep_mesh, style)
    return names


def check_experts(model: nn.Module, size: int) -> list[str]:
    """Return the names of modules whose experts can be distributed over `size` ranks.

    A pipeline stage may have none, if other stages of its model have some.

    Raises:
        ValueError: there are none, or some cannot be distributed or do not divide by the ranks.
    """
    names, stage = expert_modules(model), stage_of(model)
    if not names and (stage is None or not stage.model_has_experts):
        raise ValueError(
            f"ep={size}: {type(model).__name__} has no experts to distribute: it must have an "
            "_ep_plan, or modules called 'experts' with 3-D weights. Use ep_size=1, or apply "
            "ExpertParallel() to its modules with parallelize_module."
        )
    for name in names:
        module = model.get_submodule(name)
        if isinstance(module, nn.ModuleList):
            raise ValueError(
                f"ep={size}: {name} of {type(model).__name__} is a list of modules, as in "
                f"transformers 4. {ONLY_STACKED}"
            )
        ExpertParallel().check(name, module, size)
        if any(isinstance(each, DTensor) for each in module.parameters()):
            raise ValueError(f"{name} is distributed already: do it once, before FSDP.")
    return names
