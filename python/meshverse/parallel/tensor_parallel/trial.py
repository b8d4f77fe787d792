"""Trials: a module's own forward, run whole and as ranks would run it, on random weights.

A plan does not show what a forward does between a column-wise and a row-wise layer. It may need all
features or heads at once (a softmax over features, halves of packed gate and up), or compute with
a number of heads. So the forward is run: whole, and once for each rank, where a column-wise layer
gives the rank's features and a row-wise layer gets those of all ranks. The outputs must be the
same. The layers themselves are torch's to split, and are run whole.

No process communicates, nothing of the module is changed, and no random state of torch's is used.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import ceil, prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from meshverse.parallel.models.modules import child_name
from meshverse.parallel.styles.local_styles import LocalParameters, Replicated

from .regions import closed_regions, has_local_output

_logger = logging.getLogger(__name__)
_SEQUENCES, _TOKENS = 2, 6
_LARGEST_ERROR = 1e-3  # relative; a wrong forward is off by far more, rounding by less
_PERIOD = 1_000_003  # random numbers, of which larger weights are repetitions


@dataclass
class _Stopped(Exception):  # noqa: N818  (no error: it ends the run of one rank)
    """A rank reached a row-wise layer, and the features of the other ranks are not known yet."""

    features: Tensor


def try_plan(
    model: nn.Module,
    styles: Mapping[str, ParallelStyle],
    counts: Mapping[int, Mapping[str, int]],
    size: int,
) -> list[str]:
    """Compare each module that contains split activations with itself, split over ranks.

    Modules are tried whose forward takes hidden states alone, (sequences, tokens, features), and
    whose layers inside have plain styles.

    Args:
        model: model that is not split yet.
        styles: the plan, by the names of modules.
        counts: attributes that a rank has with other values, by the id of their module.
        size: number of ranks.

    Returns:
        Names of the modules that could not be tried.

    Raises:
        ValueError: a module gives other outputs with its parts.
    """
    untried = []
    for region in closed_regions(styles):
        module = model.get_submodule(region)
        inside = {
            name: styles[own]
            for name, _ in module.named_modules()
            if (own := child_name(region, name) if name else region) in styles
        }
        trial = _Trial(module, inside, counts, size)
        error = trial.error() if trial.is_possible() else None
        if error is None:
            untried.append(region)
        elif not error < _LARGEST_ERROR:  # NaN, too
            raise ValueError(
                f"{region or type(model).__name__!r} ({type(module).__name__}) computes something "
                f"else with {size} ranks' parts of its features than with all of them (tried with "
                f"random weights; relative error {error:.2g}). Its forward may need all features "
                "or heads at once, or compute with a number of heads, which is that of one rank. "
                "Let its layers give and take all features (output_layouts=Replicate() for the "
                "column-wise ones, input_layouts=Replicate() for the row-wise ones), keep what it "
                "computes from a number of heads in an attribute, name such numbers in "
                "LocalParameters, or remove its layers from the plan."
            )
    return untried


class _Trial:
    """A module between whose layers activations are split, and its styles by name inside it."""

    def __init__(
        self,
        module: nn.Module,
        styles: Mapping[str, ParallelStyle],
        counts: Mapping[int, Mapping[str, int]],
        size: int,
    ) -> None:
        self.module, self.styles, self.counts, self.size = module, styles, counts, size
        self._generator = torch.Generator().manual_seed(0)
        parameter = next(module.parameters())
        self._device = torch.device("cpu") if parameter.is_meta else parameter.device

    def is_possible(self) -> bool:
        """Return whether each style is one whose parts of the weights are known here."""
        return not any(each.is_meta for each in self.module.buffers()) and all(
            _is_known(self.module.get_submodule(name), style) for name, style in self.styles.items()
        )

    @torch.no_grad()
    def error(self) -> float | None:
        """Return the relative error of the output; None if the forward needs other inputs."""
        try:
            whole = self._copy()
        except Exception:  # noqa: BLE001  (attributes that cannot be copied raise anything)
            return None
        for width in self._widths():
            hidden = self._random(_SEQUENCES, _TOKENS, width)
            try:
                expected = _first_tensor(whole(hidden.clone()))
            except Exception:  # noqa: BLE001  (a forward raises anything)
                continue
            if expected is None or not expected.isfinite().all():
                continue
            try:
                outputs = self._run_ranks(whole, hidden)
            except Exception as error:  # noqa: BLE001
                _logger.info("%s with a rank's parts: %s", type(self.module).__name__, error)
                return float("inf")
            return max(_relative_error(each, expected) for each in outputs)
        return None

    def _widths(self) -> list[int]:
        layers = [each for each in self.module.modules() if isinstance(each, nn.Linear)]
        return list(dict.fromkeys(each.in_features for each in layers))

    def _random(self, *shape: int) -> Tensor:
        count = prod(shape)
        some = min(count, _PERIOD)
        given = torch.randn(some, generator=self._generator, dtype=torch.float32, device="cpu")
        given = given.to(self._device)
        return given.repeat(ceil(count / max(some, 1)))[:count].reshape(shape)

    def _copy(self) -> nn.Module:
        """Return the module with random weights in float32, without dropout."""
        memo: dict[int, Any] = {}
        for each in self.module.parameters():
            scale = each.shape[-1] ** -0.5 if each.ndim > 1 else 1.0
            memo[id(each)] = nn.Parameter(self._random(*each.shape) * scale, requires_grad=False)
        module = copy.deepcopy(self.module, memo)
        for buffer in module.buffers():
            if buffer.is_floating_point():
                buffer.data = buffer.data.float()
        for inside in module.modules():  # hooks of the user's are none of a trial's business
            inside._forward_hooks.clear()
            inside._forward_pre_hooks.clear()
        return module.eval()

    def _run_ranks(self, whole: nn.Module, hidden: Tensor) -> list[Tensor | None]:
        """Return each rank's output. All ranks are run up to the next row-wise layer in turn."""
        gathered: list[Tensor] = []
        while True:
            outputs, features = [], []
            for rank in range(self.size):
                module = self._part(whole, rank, gathered)
                try:
                    outputs.append(_first_tensor(module(hidden.clone())))
                except _Stopped as stopped:
                    features.append(stopped.features)
            if not features:
                return outputs
            gathered.append(torch.cat(features, dim=-1))

    def _part(self, whole: nn.Module, rank: int, gathered: list[Tensor]) -> nn.Module:
        """Return the module that a rank has.

        Args:
            whole: module with all parameters.
            rank: which rank.
            gathered: inputs of row-wise layers that are known, in the order of calls.
        """
        shared: dict[int, Any] = {id(each): each for each in whole.parameters()}
        module = copy.deepcopy(whole, shared)
        rest = iter(gathered)

        def own_features(layer: nn.Module, arguments: Any, output: Tensor) -> Tensor:
            return output.chunk(self.size, dim=-1)[rank]

        def all_features(layer: nn.Module, arguments: tuple[Tensor]) -> tuple[Tensor]:
            known = next(rest, None)
            if known is None:
                raise _Stopped(arguments[0])
            return (known,)

        for (name, inside), original in zip(
            module.named_modules(), self.module.modules(), strict=True
        ):
            for attribute, value in self.counts.get(id(original), {}).items():
                setattr(inside, attribute, value)
            style = self.styles.get(name)
            if isinstance(style, ColwiseParallel):
                inside.register_forward_hook(own_features)
            elif isinstance(style, RowwiseParallel):
                inside.register_forward_pre_hook(all_features)
            elif isinstance(style, LocalParameters):
                for own_name, placement in style.placements_of(inside).items():
                    if isinstance(placement, Shard):
                        own = inside.get_parameter(own_name).chunk(self.size, placement.dim)[rank]
                        inside._parameters[own_name] = nn.Parameter(own, requires_grad=False)
        return module


def _is_known(module: nn.Module, style: ParallelStyle) -> bool:
    if type(style) is ColwiseParallel:
        is_plain = style.input_layouts == (Replicate(),) and has_local_output(style)
        return is_plain and isinstance(module, nn.Linear | nn.Embedding)
    if type(style) is RowwiseParallel:
        layouts = style.input_layouts, style.output_layouts
        return layouts == ((Shard(-1),), (Replicate(),)) and isinstance(module, nn.Linear)
    return isinstance(style, LocalParameters | Replicated)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for each in value:
            yield from _tensors(each)


def _first_tensor(output: Any) -> Tensor | None:
    return next(_tensors(output), None)


def _relative_error(seen: Tensor | None, expected: Tensor) -> float:
    if seen is None or seen.shape != expected.shape:
        return float("inf")
    return float((seen - expected).norm() / expected.norm())
