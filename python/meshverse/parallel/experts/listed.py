"""Experts that are a list of modules, handed out to the ranks of a mesh.

The module around such a list calls each expert by itself (transformers before version 5). Here all
rows go to their experts at once, so its forward must say first which rows these are. Where it has
a method `moe` that is told each token's experts and their weights, this method is replaced. Else
its forward runs twice: once to see the rows that each expert gets, once with what they gave.

A parameter keeps its name, and is split by rows over the ranks, so that each has as much as of the
experts it runs. For the forward, ranks exchange these parts for the whole of their own experts.

Example:
    >>> block = mixtral.model.layers[0].block_sparse_moe  # doctest: +SKIP
    >>> hand_out_list("experts", block, mesh["ep"], ExpertParallel())  # doctest: +SKIP
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.func import functional_call

from meshverse.parallel.styles.local_styles import split_parameters

from .exchange import exchange_rows, scale_gradient
from .expert_parallel import ExpertParallel
from .routing import Routing

__all__ = ["check_list", "hand_out_list", "is_list_of_experts"]

_LIBRARY = "transformers.models."


class ListedExperts(nn.Module):
    """The experts of a list, under the same names, that are all run at once.

    Args:
        experts: those with weights first, all alike; then those that hand tokens on as they are.
        mesh: 1-D, of the ranks that they are handed out to.
        style: how tokens reach them.
    """

    def __init__(
        self, experts: Sequence[nn.Module], mesh: DeviceMesh, style: ExpertParallel
    ) -> None:
        super().__init__()
        for number, expert in enumerate(experts):
            self.add_module(str(number), expert)
        self.mesh, self.style = mesh, style
        self.count = len(_with_weights(experts))
        self.hands_on = len(experts) > self.count

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[nn.Module]:
        return self.children()

    def __getitem__(self, number: Any) -> nn.Module:
        return self.get_submodule(str(int(number)))

    def forward(self, hidden: Tensor, expert_ids: Tensor, weights: Tensor | None) -> Tensor:
        """What the experts of all ranks make of this rank's tokens; see `Routing`."""
        run = partial(self._run, self._own_weights())
        routing = Routing(hidden, expert_ids, weights)
        return self.style.combine(routing, self, self.mesh, run)

    def _own_weights(self) -> list[dict[str, Tensor]]:
        """The whole parameters of this rank's experts, by name."""
        size, own = self.mesh.size(), self.count // self.mesh.size()
        parts = [dict(self[number].named_parameters()) for number in range(self.count)]
        local: list[dict[str, Tensor]] = [
            {name: each.to_local() for name, each in part.items()}  # type: ignore[attr-defined]
            for part in parts
        ]
        flat = torch.stack([torch.cat([*map(torch.flatten, part.values())]) for part in local])
        counts = [own] * size
        mine = exchange_rows(flat, counts, counts, self.mesh.get_group())
        by_expert = mine.view(size, own, -1).unbind(1)
        return [_joined(rows, local[0]) for rows in by_expert]

    def _run(self, weights: list[dict[str, Tensor]], rows: Tensor, ids: Tensor) -> Tensor:
        """What this rank's experts make of rows, with gradients scaled for parameters only."""
        scale = self.style.gradient_scale
        order = ids.argsort(stable=True)
        counts = torch.bincount(ids, minlength=len(weights)).tolist()
        parts = torch.split(scale_gradient(rows[order], 1 / scale), counts)
        first = self.mesh.get_local_rank() * len(weights)
        # Without rows, an expert still has a gradient, of zeros.
        outputs = [
            functional_call(self[first + number], own, (part,))
            for number, (own, part) in enumerate(zip(weights, parts, strict=True))
        ]
        return scale_gradient(torch.cat(outputs), scale)[order.argsort()]


def _joined(rows: Tensor, shapes: dict[str, Tensor]) -> dict[str, Tensor]:
    """Parameters of one expert, from the parts of all ranks, of shape (ranks, elements)."""
    pieces = torch.split(rows, [each.numel() for each in shapes.values()], dim=1)
    return {
        name: piece.reshape(-1, *shape.shape[1:])
        for (name, shape), piece in zip(shapes.items(), pieces, strict=True)
    }


def is_list_of_experts(module: nn.Module) -> bool:
    """Whether a module is a list whose items are experts with weights."""
    return isinstance(module, nn.ModuleList) and bool(_with_weights(module))


def _with_weights(experts: Any) -> list[nn.Module]:
    """The experts before the first that has no weights."""
    having = [any(True for _ in expert.parameters()) for expert in experts]
    return list(experts)[: having.index(False)] if False in having else list(experts)


def check_list(name: str, block: nn.Module, size: int) -> None:
    """Check that a list of experts can be handed out.

    Args:
        name: of the list, for messages.
        block: the module around it, which calls the experts.
        size: number of ranks.

    Raises:
        ValueError: the module around it is not known to call each by itself, or changes its input
            at random; the experts differ; or their number, or their rows, do not divide.
    """
    experts: Any = block.get_submodule(name.rpartition(".")[2])
    having = _with_weights(experts)
    if not type(block).__module__.startswith(_LIBRARY):
        raise ValueError(
            f"{name} is a list of modules, which {type(block).__name__} may call in any way: that "
            "they can be run at once is known of models of transformers only. Stack their weights "
            "in 3-D parameters, or use tensor parallelism (tp_size)."
        )
    if getattr(block, "jitter_noise", 0):
        raise ValueError(
            f"{name}: {type(block).__name__} changes its input at random, by "
            f"jitter_noise={block.jitter_noise}, and must run twice. Set it to 0 for this."
        )
    if len(having) % size:
        raise ValueError(
            f"{name}: its {len(having)} experts do not divide by the {size} ranks of expert "
            "parallelism. Choose a number of ranks that divides them."
        )
    shapes = [{own: each.shape for own, each in e.named_parameters()} for e in having]
    uneven = [own for own, shape in shapes[0].items() if not shape or shape[0] % size]
    if any(each != shapes[0] for each in shapes) or uneven:
        raise ValueError(
            f"{name}: its experts have parameters of different shapes, or such whose rows do not "
            f"divide by the {size} ranks of expert parallelism: {uneven}. Use tp_size instead."
        )


def hand_out_list(name: str, block: nn.Module, mesh: DeviceMesh, style: ExpertParallel) -> None:
    """Hand out the list of experts of a module, in place.

    Args:
        name: of the list in the module.
        block: the module around it, checked.
        mesh: 1-D.
        style: how tokens reach the experts.
    """
    experts: Any = block.get_submodule(name)
    for expert in experts:
        placements = dict.fromkeys([own for own, _ in expert.named_parameters()], Shard(0))
        split_parameters(expert, placements, mesh, style.src_data_rank)
    block.add_module(name, ListedExperts(experts, mesh, style))
    # Not closures: a copy of the module must run on its own experts.
    told: Any = block
    if _is_told(block):
        told.moe = partial(_untraced_told, block, name)
    else:
        told.forward = partial(_untraced_twice, block, name)


def _is_told(block: nn.Module) -> bool:
    """Whether a module has a method that is told hidden states, their experts, and weights."""
    method = getattr(type(block), "moe", None)
    return method is not None and len(signature(method).parameters) == 4  # with self


def _told(block: nn.Module, name: str, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    output: Tensor = block.get_submodule(name)(hidden, ids, weights)
    return output


class _Experts:
    """In place of the experts: calls are written down, and answered by zeros or as known.

    Attributes:
        rows: that each call gave, in their order.
        numbers: of the experts called.
    """

    def __init__(self, count: int, answers: Sequence[Tensor] | None = None) -> None:
        self._count = count
        self._answers = answers
        self.rows: list[Tensor] = []
        self.numbers: list[int] = []

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: Any) -> Any:
        return partial(self._call, range(self._count)[int(number)])

    def __iter__(self) -> Iterator[Any]:
        return (self[number] for number in range(self._count))

    def _call(self, number: int, rows: Tensor) -> Tensor:
        self.rows.append(rows)
        self.numbers.append(number)
        if self._answers is None:
            return torch.zeros_like(rows)
        return self._answers[len(self.rows) - 1].view_as(rows)


def _twice(block: Any, name: str, *arguments: Any, **keywords: Any) -> Any:
    listed: Any = block.get_submodule(name)
    asked = _Experts(len(listed))
    hidden = arguments[0] if arguments else next(iter(keywords.values()))
    _run_with(block, name, asked, arguments, keywords)
    width = hidden.size(-1)
    flat = [rows.reshape(-1, width) for rows in asked.rows]
    # Without rows too, the gradient takes part in the exchange.
    rows = torch.cat(flat) if flat else hidden.reshape(-1, width)[:0]
    counts = [each.size(0) for each in flat]
    numbers = torch.tensor(asked.numbers, device=rows.device, dtype=torch.long)
    ids = numbers.repeat_interleave(torch.tensor(counts, device=rows.device, dtype=torch.long))
    answers = torch.split(listed(rows, ids[:, None], None), counts)
    return _run_with(block, name, _Experts(len(listed), answers), arguments, keywords)


def _run_with(block: Any, name: str, experts: _Experts, arguments: Any, keywords: Any) -> Any:
    # An attribute of the instance hides the module, which stays registered all the while.
    block.__dict__[name] = experts
    try:
        return type(block).forward(block, *arguments, **keywords)
    finally:
        del block.__dict__[name]


# Traced, each new number of rows that change ranks would compile anew. Dense layers stay traced.
_untraced: Any = torch.compiler.disable
_untraced_told = _untraced(_told)
_untraced_twice = _untraced(_twice)
