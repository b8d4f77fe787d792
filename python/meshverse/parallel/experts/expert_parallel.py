"""Parallel styles that distribute whole experts over a mesh, and functions that find experts."""

from __future__ import annotations

import re
from abc import abstractmethod
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module

from meshverse.parallel.models.modules import (
    BASE_LAYER,
    child_name,
    matching_modules,
    parent_name,
    stage_of,
)
from meshverse.parallel.models.second_order import differentiable_once
from meshverse.parallel.styles.local_styles import replaced_attributes, sum_gradients

from .adapters import (
    add_adapters,
    check_adapters,
    placements_of_adapters,
    wrappers_of,
)
from .dispatch import (
    Choices,
    Routing,
    Run,
    arguments_of,
    dispatch,
    exchange,
    read_routing,
    sum_choices,
)
from .stacked import DOWN, StackedStyle, describe, experts_inside
from .trial import PartOfExperts, ask_for_experts, with_second

ONLY_STACKED = (
    "Expert parallelism must have experts with stacked weights, whose forward takes each token's "
    "experts. Use transformers 5.0 or newer, or ep_size=1 and a plan that splits each expert."
)

# Names of experts' modules in models without an `_ep_plan`.
_EXPERTS = re.compile(r"(.*\.)?experts")


class _WholeExperts(StackedStyle[PartOfExperts]):
    """Base of the styles that distribute whole experts: rank r has the r-th part of the experts."""

    # Not traced: each new number of exchanged rows would recompile. Dense layers stay compiled.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def run(
        self, module: Any, answer: PartOfExperts, mesh: DeviceMesh, *inputs: Any, **more: Any
    ) -> Any:
        """Run the experts' own forward with this rank's experts, on the tokens that chose them."""
        experts = experts_inside(module)
        routing = read_routing(answer, arguments_of(experts, answer, inputs, more))
        local = {name: _own_experts(experts, name, answer, mesh) for name in answer.experts.names}
        local = add_adapters(module, local)
        with replaced_attributes(experts, {**local, **answer.numbers}):
            own = partial(_run_rows if answer.form == "rows" else _run, experts, answer)
            if not answer.ignores_zeros:
                return differentiable_once(self.combine(routing, answer, mesh, own))
            routed = routing.hidden.detach().any(-1).nonzero().squeeze(-1)
            some = routing.map(lambda each: each[routed])
            output = differentiable_once(self.combine(some, answer, mesh, own))
            return output.new_zeros(routing.hidden.shape).index_copy(0, routed, output)

    def ask(self, name: str, module: nn.Module, size: int) -> PartOfExperts:
        """Return how the experts in a module are run on a part of them."""
        experts = experts_inside(module)
        described = self.described(name, experts)
        check_adapters(name, module, described, size)
        answer = ask_for_experts(name, experts, described, size)
        if answer.draws and self.shares_tokens(size):
            raise ValueError(
                f"{name}: the forward of {type(experts).__name__} draws random numbers in "
                "training, such as for dropout. Ranks with the same tokens run it on different "
                "rows: their random states, and all later dropout, would no longer be the same. "
                "Set the dropout in experts to 0, move it behind them, or use tp=1."
            )
        return answer

    def placements(self, module: nn.Module, answer: PartOfExperts) -> dict[str, Placement]:
        """Return placements that split all parameters by experts, and those of adapters."""
        inside = f"{BASE_LAYER}." * len(wrappers_of(module))
        of_experts = dict.fromkeys((f"{inside}{each}" for each in answer.experts.names), Shard(0))
        return {**of_experts, **placements_of_adapters(module)}

    @abstractmethod
    def shares_tokens(self, size: int) -> bool:
        """Whether several ranks have the same tokens, if there are `size` ranks of experts."""

    @abstractmethod
    def combine(self, routing: Routing, part: PartOfExperts, mesh: DeviceMesh, run: Run) -> Tensor:
        """Return the outputs of all ranks' experts.

        Args:
            routing: routing of this rank's tokens.
            part: how the experts are run.
            mesh: 1-D mesh of the experts.
            run: function that runs this rank's experts.
        """


@dataclass(eq=False, repr=False)
class ExpertParallel(_WholeExperts):
    """Style that distributes stacked experts over ranks, and sends tokens to the experts' ranks.

    The module's forward must take hidden states, each token's experts, and the weights of these
    experts; or only rows, equally many for each expert. It is run with a rank's experts, on one row
    for each token and expert, and the outputs of a token are summed: whether this gives the outputs
    of one process is tried with random weights before anything is changed. No token is dropped. The
    gradients of experts are sums over the tokens of all ranks.

    Args:
        same_tokens: 1-D mesh of the ranks that have the same tokens as this rank, such as the mesh
            of tensor parallelism. Each of them then sends a part of the tokens, and experts must
            draw no random numbers, such as for dropout. None if all ranks have different tokens.
    """

    same_tokens: DeviceMesh | None = None

    def shares_tokens(self, size: int) -> bool:
        """Whether `same_tokens` has several ranks."""
        return self.same_tokens is not None and self.same_tokens.size() > 1

    def combine(self, routing: Routing, part: PartOfExperts, mesh: DeviceMesh, run: Run) -> Tensor:
        """Return the outputs of all ranks' experts for this rank's tokens."""
        same = self.same_tokens
        if same is None or same.size() == 1:
            return dispatch(routing, part, mesh, run)
        outputs = dispatch(routing.map(partial(_slice, same)), part, mesh, run)
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
    ranks. Tokens are not sent. Experts must draw no random numbers, such as for dropout.
    """

    def shares_tokens(self, size: int) -> bool:
        """Whether there are several ranks."""
        return size > 1

    def combine(self, routing: Routing, part: PartOfExperts, mesh: DeviceMesh, run: Run) -> Tensor:
        """Return the sum over the ranks of their experts' outputs."""
        shared = routing.map(
            lambda each: sum_gradients(each, mesh) if each.is_floating_point() else each
        )
        local = part.experts.count // mesh.size()
        first = mesh.get_local_rank() * local
        is_own = (routing.expert_ids >= first) & (routing.expert_ids < first + local)
        flat = is_own.reshape(-1).nonzero().squeeze(-1)
        rows = shared.hidden[flat // is_own.size(-1)]
        weights = None if shared.weights is None else shared.weights.reshape(-1)[flat]
        given = run(Choices(rows, routing.expert_ids.reshape(-1)[flat] - first, weights))
        outputs = given.new_zeros((is_own.numel(), given.size(-1))).index_copy(0, flat, given)
        term = DTensor.from_local(sum_choices(outputs, routing), mesh, [Partial()], run_check=False)
        total = term.redistribute(placements=[Replicate()]).to_local()
        if not part.has_identity or routing.weights is None:
            return total
        of_identity = routing.weights * (routing.expert_ids >= part.experts.count)
        return total + routing.hidden * of_identity.sum(-1, keepdim=True)


def _own_experts(module: nn.Module, name: str, part: PartOfExperts, mesh: DeviceMesh) -> Tensor:
    """Return the rows of a parameter that belong to this rank's experts.

    LongCat's weights also have rows for its identity experts, so an even split gives a rank some
    rows of other ranks' experts. The ranks then exchange rows.
    """
    parameter: Any = module._parameters[name]  # a DTensor
    held: Tensor = parameter.to_local()
    held_by_all: int = parameter.size(0)
    count = part.experts.count
    if held_by_all == count:
        return held
    size, rank = mesh.size(), mesh.get_local_rank()
    chunk, own = -(-held_by_all // size), count // size

    def overlap(holder: int, owner: int) -> int:
        last = min((holder + 1) * chunk, (owner + 1) * own)
        return max(0, last - max(holder * chunk, owner * own))

    sent = [overlap(rank, owner) for owner in range(size)]
    received = [overlap(holder, rank) for holder in range(size)]
    return exchange([held[: sum(sent)]], sent, received, mesh.get_group())[0]


def _count_of(module: Any) -> int:
    """Return the number of this rank's experts."""
    count: int = module._parameters[DOWN].to_local().size(0)
    return count


def _run(module: Any, part: PartOfExperts, choices: Choices) -> Tensor:
    """Return the outputs of this rank's experts, by the module's own forward."""
    rows, ids, weights = choices
    assert weights is not None
    count = rows.size(0)
    if not count:  # run on a row whose output is dropped, for gradients of zeros on this rank, too
        rows = torch.cat([rows, rows.new_ones((1, rows.size(1)))])
        ids, weights = torch.cat([ids, ids.new_zeros(1)]), torch.cat([weights, weights.new_ones(1)])
    inputs = with_second(part, _count_of(module), ids, weights)
    output: Tensor = type(module).forward(module, rows, *inputs)
    return output if count else output[:0]


def _run_rows(module: Any, part: PartOfExperts, choices: Choices) -> Tensor:
    """Return the outputs of this rank's experts, by a forward that takes rows: as many for each."""
    rows, ids, _ = choices
    counts = torch.bincount(ids, minlength=_count_of(module))
    order = ids.argsort(stable=True)
    # Each row's number among those of its expert.
    numbers = torch.arange(len(ids), device=ids.device) - (counts.cumsum(0) - counts)[ids[order]]
    most = max(1, int(counts.max()))
    places = torch.empty_like(ids).index_copy(0, order, ids[order] * most + numbers)
    filled = rows.new_zeros((len(counts) * most, rows.size(1))).index_copy(0, places, rows)
    output: Tensor = type(module).forward(module, filled)
    return output[places]


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
        return is_list or describe(experts_inside(module)) is not None

    return [name for name in dict.fromkeys(names) if has_experts(model.get_submodule(name))]


def apply_expert_parallelism(
    model: nn.Module,
    ep_mesh: DeviceMesh,
    *,
    same_tokens: DeviceMesh | None = None,
) -> list[str]:
    """Distribute a model's experts over the ranks of a mesh, in place.

    Args:
        model: model whose experts' parameters are not distributed yet.
        ep_mesh: 1-D mesh to distribute the experts over.
        same_tokens: as in `ExpertParallel`.

    Returns:
        Names of the modules whose experts were distributed.

    Raises:
        ValueError: the model has no experts, or experts that cannot be distributed over these
            ranks. The model is unchanged then.

    Example:
        >>> apply_expert_parallelism(model, moe_mesh["ep"])  # doctest: +SKIP
        ['model.layers.0.mlp.experts', 'model.layers.1.mlp.experts']
    """
    names = check_experts(model, ep_mesh.size(), same_tokens)
    for name in names:
        style = ExpertParallel(same_tokens)
        parallelize_module(model.get_submodule(name), ep_mesh, style)
    return names


def check_experts(model: nn.Module, size: int, same_tokens: DeviceMesh | None = None) -> list[str]:
    """Return the names of a model's modules with experts, after checking them.

    A pipeline stage may have no experts, if other stages of its model have some.

    Raises:
        ValueError: the model has no experts, or experts that cannot be distributed over `size`
            ranks, of which those of `same_tokens` have the same tokens.
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
        if any(isinstance(each, DTensor) for each in module.parameters()):
            raise ValueError(
                f"{name} is distributed already. Distribute experts once, before FSDP."
            )
        ExpertParallel(same_tokens).check(name, module, size)
    owned: dict[int, str] = {}
    for name in names:
        for own, parameter in model.get_submodule(name).named_parameters():
            if first := owned.get(id(parameter)):
                raise ValueError(
                    f"{name}.{own} is the same parameter as {first}, and would become another one. "
                    "Let layers share the whole module of experts, or use ep_size=1."
                )
            owned[id(parameter)] = f"{name}.{own}"
    return names
