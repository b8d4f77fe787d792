"""Parallel styles that distribute whole experts over a mesh, and functions that find experts."""

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

# Names of experts' modules in models without an `_ep_plan`.
_EXPERTS = re.compile(r"(.*\.)?experts")


class _WholeExperts(StackedStyle):
    """Base of the styles that distribute whole experts: rank r has the r-th part of the experts."""

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
            if len(values) == 1:  # rows of Llama 4: those of zeros are not routed
                routed = routing.hidden.detach().any(-1).nonzero().squeeze(-1)
                some = routing.map(lambda each: each[routed])
                output = self.combine(some, experts, mesh, own)
                return torch.zeros_like(routing.hidden).index_copy(0, routed, output)
            output = self.combine(routing, experts, mesh, own)
        # Return a view only if needed: FSDP2's hooks are lost if a view is changed in place.
        return output if output.shape == values[0].shape else output.view_as(values[0])

    def check(self, name: str, module: nn.Module, size: int) -> None:
        """Check that the module has stacked experts, whose number is divisible by `size`."""
        experts = self.described(name, module)
        takes_all = "routing_weights" in signature(type(module).forward).parameters
        if takes_all and not experts.is_routed:
            raise ValueError(
                f"{name}: {type(module).__name__} takes a weight for every expert, as in "
                f"transformers 4. {ONLY_STACKED}"
            )
        if experts.count % size:
            raise ValueError(
                f"{name}: its {experts.count} experts are not divisible by the {size} ranks of "
                "expert parallelism. Use a number of ranks that divides the number of experts."
            )

    def placements(self, experts: StackedExperts) -> dict[str, Placement]:
        """Return placements that split all parameters by experts."""
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
        """Return the outputs of all ranks' experts.

        Args:
            routing: routing of this rank's tokens.
            experts: description of the experts.
            mesh: 1-D mesh of the experts.
            run: function `run(rows, local expert ids)` that runs this rank's experts.
        """


@dataclass(eq=False, repr=False)
class ExpertParallel(_WholeExperts):
    """Style that distributes stacked experts over ranks, and sends tokens to the experts' ranks.

    The module's forward must take hidden states, each token's experts, and the weights of these
    experts. No token is dropped. The gradients of experts are sums over the tokens of all ranks.

    Args:
        same_tokens: 1-D mesh of the ranks that have the same tokens as this rank, such as the mesh
            of tensor parallelism. Each of them then sends a part of the tokens. None if all ranks
            have different tokens.
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
        outputs = dispatch(routing.map(partial(_slice, same)), experts, mesh, run)
        shape = routing.hidden.shape
        sliced = DTensor.from_local(
            outputs.contiguous(), same, [Shard(0)], shape=shape, stride=(shape[1], 1)
        )
        return sliced.redistribute(placements=[Replicate()]).to_local().clone()


def _slice(mesh: DeviceMesh, tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor that all ranks have; backward gathers the gradients."""
    whole = DTensor.from_local(tensor, mesh, [Replicate()], run_check=False)
    return whole.redistribute(placements=[Shard(0)]).to_local()


class SameTokensExpertParallel(_WholeExperts):
    """Style that distributes stacked experts over ranks that all have the same tokens.

    Each rank runs its experts on the tokens that chose them, and the outputs are summed over the
    ranks. Tokens are not sent.
    """

    def combine(
        self, routing: Routing, experts: StackedExperts, mesh: DeviceMesh, run: _Run
    ) -> Tensor:
        """Return the sum over the ranks of their experts' outputs."""
        shared = routing.map(
            lambda each: sum_gradients(each, mesh) if each.is_floating_point() else each
        )
        local = experts.count // mesh.size()
        first = mesh.get_local_rank() * local
        is_own = (routing.expert_ids >= first) & (routing.expert_ids < first + local)
        flat = is_own.reshape(-1).nonzero().squeeze(-1)
        rows = shared.hidden[flat // is_own.size(-1)]
        given = run(rows, routing.expert_ids.reshape(-1)[flat] - first)
        outputs = given.new_zeros((is_own.numel(), given.size(-1))).index_copy(0, flat, given)
        term = DTensor.from_local(weigh(shared, outputs), mesh, [Partial()], run_check=False)
        total = term.redistribute(placements=[Replicate()]).to_local()
        if not experts.has_identity:
            return total
        beyond = (routing.expert_ids >= experts.count).reshape(-1, 1)
        unchanged = routing.hidden.repeat_interleave(is_own.size(-1), 0) * beyond
        return total + weigh(routing, unchanged)


def _own_experts(module: nn.Module, name: str, experts: StackedExperts, mesh: DeviceMesh) -> Tensor:
    """Return the rows of a parameter that belong to this rank's experts.

    LongCat's weights also have rows for its identity experts, so an even split gives a rank some
    rows of other ranks' experts. The ranks then exchange rows.
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
    """Return the outputs of this rank's experts for rows.

    `gradient_scale` applies to the gradients of parameters, not to those of rows.
    """
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

    If the model has an expert-parallel plan (`_ep_plan`), they are the modules whose weights the
    plan splits by experts; else the modules called `experts`.
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
        model: model whose experts' parameters are not distributed yet.
        ep_mesh: 1-D mesh to distribute the experts over.
        same_tokens: as in `ExpertParallel`.
        gradient_scale: as in `ExpertParallel`.

    Returns:
        Names of the modules whose experts were distributed.

    Raises:
        ValueError: the model has no experts, or experts that cannot be distributed over these
            ranks. The model is unchanged then.

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
    """Return the names of a model's modules with experts, after checking them.

    A pipeline stage may have no experts, if other stages of its model have some.

    Raises:
        ValueError: the model has no experts, or experts that cannot be distributed over `size`
            ranks.
    """
    names, stage = expert_modules(model), stage_of(model)
    if not names and (stage is None or not stage.model_has_experts):
        raise ValueError(
            f"ep={size}: {type(model).__name__} has no experts to distribute: it must have an "
            "_ep_plan, or modules called 'experts' with 3-D weights. Use ep_size=1, or apply "
            "ExpertParallel() to its experts' modules with parallelize_module."
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
            raise ValueError(
                f"{name} is distributed already. Distribute experts once, before FSDP."
            )
    return names
