"""Trials: the own forward of an experts' module, run on parts of random weights, and compared.

Names and shapes do not show what a forward does with its weights: whether it counts experts by
them, which dim has the inner features, where the gates are, or what an expert adds to a token. So
the forward is run: on random weights as a whole, and on the parts of all ranks, whose outputs must
sum to the same, and so must the gradients of the inputs. Nothing else may get gradients, as each
rank would have a part of them. It runs in training mode without dropout, and in evaluation mode.
Nothing of the module is changed, and random states are as before. What a forward changes
elsewhere, such as a list in a global variable, stays changed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from inspect import Parameter, signature
from itertools import combinations, permutations
from math import ceil, isfinite
from typing import Any, Literal, TypeVar, get_args

import torch
from torch import Tensor, nn

from meshverse.parallel.models.dropout import WithoutDropout
from meshverse.parallel.models.leaves import in_words, other_leaves
from meshverse.parallel.models.random_states import host_random_states, same_random_state
from meshverse.parallel.models.trials import kept_by, trial_copy

from .stacked import DOWN, StackedExperts

# The weights of an expert begin some _STEPs later in the same random numbers than those of the one
# before, so that a probe of many experts needs the memory of two. The numbers grow, so that each
# expert has others, and larger ones. Kernels need weights aligned to 16 bytes.
_STEP = 16
_PERIOD = 1_000_003  # random numbers, of which larger weights are repetitions
_MANY = 64  # equal tokens
_CROWD = 24  # tokens that choose one expert, more than it takes if it takes so many only
_ROWS = 2  # for each expert, if a forward takes equally many rows for each
_Second = Literal["none", "behind", "again"]
_SECOND: tuple[_Second, ...] = get_args(_Second)
_NUMBERS = 4  # at most, of attributes of which each subset is tried
GATE = "_apply_gate"  # transformers' name of a method that gets the output of packed weights

_TRANSFORMERS = "For experts of transformers, use transformers 5.0 or newer."

_Gate = Callable[[Tensor], Tensor]
_Values = dict[str, int]
_Kept = dict[str, list[Tensor]]  # tensors and numbers, by attribute
_Case = TypeVar("_Case")
_Ask = Callable[[str, nn.Module, StackedExperts, int], _Case]

# Inputs of a forward: only rows, equally many for each expert; hidden states and each token's
# weights for all experts; or hidden states, each token's experts, and their weights.
Form = Literal["rows", "all", "choices"]


@dataclass(frozen=True)
class Part:
    """How a module's own forward is run on one rank's part of its parameters."""

    experts: StackedExperts
    form: Form
    # Whether ids from the number of experts on are those of identity experts, which return their
    # input times its weight.
    has_identity: bool
    # Attributes of the module that have other values in the forward: numbers of experts or features
    numbers: _Values = field(default_factory=dict)


@dataclass(frozen=True)
class PartOfExperts(Part):
    """How a module's own forward is run on some of its experts."""

    # What a row has besides its only choice, with weight 0, if the forward needs two (LongCat): the
    # id behind those of its experts, or its own again.
    second: _Second = "none"
    counts_from_end: bool = False  # whether id -1 is that of the last expert
    ignores_zeros: bool = False  # whether rows of zeros give zeros, and get no gradient
    # Whether the forward draws from random states in training, such as for dropout.
    draws: bool = False


@dataclass(frozen=True)
class PartOfFeatures(Part):
    """How a module's own forward is run on a part of the inner features of its experts."""

    columns_dim: int = 1  # dim of the inner features in the weights to them
    down_dim: int = 2  # dim of the inner features in the weight from them
    # Whether the weights to the inner features have two halves, of which each rank needs a part.
    has_halves: bool = False
    # Whether ranks may exchange halves of what the forward gives to its `_apply_gate`, instead.
    has_gate: bool = False


class _Problem(Exception):  # noqa: N818  (part of a sentence, and never seen by users)
    """End of a sentence about a forward, which says what is wrong with it."""


class _Probe:
    """A module with random weights and inputs, on which its forward is run.

    Args:
        module: the experts' module.
        experts: its parameters.
        own: number of experts of a rank.
        step: unit of the distance of two experts' weights in the random numbers; 0 if all have the
            same.
        width: number of features of the hidden states.
        dtype: dtype of weights and inputs.
        device: their device.
    """

    def __init__(
        self,
        module: nn.Module,
        experts: StackedExperts,
        own: int,
        step: int,
        *,
        width: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.module, self.experts, self.own, self.step = module, experts, own, step
        self.width, self.dtype, self.device = width, dtype, device
        self._generator = torch.Generator().manual_seed(0)
        self.training = True
        self.form = _form_of(module)
        self.weights = {name: self._weight(name) for name in experts.names}
        self.ids, self.hidden, self.router = self._inputs()
        self._twins: list[nn.Module] = []  # that were run on parts
        self._expected: list[Tensor] = []  # gradients of the inputs, if they are known
        self.kept: _Kept = {}  # after a run as a whole

    def _random(self, *shape: int) -> Tensor:
        given = torch.rand(shape, generator=self._generator, dtype=torch.float32, device="cpu")
        return (given * 2 - 1).to(self.device, self.dtype)

    def _weight(self, name: str) -> Tensor:
        parameter = self.module.get_parameter(name)
        count, *inner = parameter.shape
        size = parameter[0].numel()
        step = self.step and ceil(size / count / self.step) * self.step
        total = size + (count - 1) * step
        scale: float = 2 / size ** (0.25 * (len(inner) - 1))
        numbers = self._random(min(total, _PERIOD)) * scale
        numbers = numbers.repeat(ceil(total / len(numbers)))[:total]
        if step:
            numbers *= torch.linspace(1, 2, total, device=self.device, dtype=self.dtype)
        strides = (inner[-1], 1) if len(inner) == 2 else (1,)
        return numbers.as_strided((count, *inner), (step, *strides))

    def _inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return ids, hidden states and weights of tokens of all ranks' first and last experts."""
        count, own = self.experts.count, self.own
        if self.form == "rows":
            ids = torch.arange(count, device="cpu").repeat_interleave(_ROWS)[:, None]
        else:
            some = dict.fromkeys((0, own - 1, count - own, count - 1))
            crowd = [(0, each) for each in some if each] * _CROWD
            firsts = range(0, count, own) if own < count else ()
            pairs = [(first, (first + 2 * own - 1) % count) for first in firsts]
            pairs += [*permutations(some, 2), *crowd[:_CROWD]]
            ids = torch.tensor(pairs or [(0,)], device="cpu")
        if self.form == "all":
            ids = torch.arange(count, device="cpu").expand(len(ids), count)
        weights = (self._random(*ids.shape) + 2) / 3  # 1/3 to 1
        hidden = self._random(len(ids), self.width)
        return ids.to(self.device), hidden.requires_grad_(), weights.requires_grad_()

    def run(
        self,
        hidden: Tensor,
        ids: Tensor,
        weights: Tensor,
        parameters: Mapping[str, Any] | None = None,
        numbers: Mapping[str, int] | None = None,
        *,
        with_dropout: bool = False,
    ) -> Tensor:
        """Return the forward's output, with some parameters and attributes replaced."""
        forward: Any = type(self.module).forward
        hidden, weights = hidden.clone(), weights.clone()  # which may be changed in place
        inputs = {
            "rows": (hidden,),
            "all": (hidden, weights),
            "choices": (hidden, ids, weights),
        }
        try:
            twin = self._twin({**self.weights, **(parameters or {}), **(numbers or {})})
            self._twins.append(twin)
            with nullcontext() if with_dropout else WithoutDropout():
                output = forward(twin, *inputs[self.form])
        except _Problem:
            raise
        except Exception as error:  # a forward of a user's own raises anything
            raise _Problem(f"raises {type(error).__name__}: {error}") from error
        if not isinstance(output, Tensor) or output.shape != hidden.shape:
            given = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
            raise _Problem(f"gives {given} for hidden states of shape {tuple(hidden.shape)}")
        return output

    def in_evaluation(self) -> _Probe:
        """Return a probe with the same weights and inputs, whose module is in evaluation mode."""
        again = copy.copy(self)
        again.training, again._twins = False, []
        return again

    def draws(self) -> bool:
        """Whether the forward, with its dropout, changes random states."""
        kind = self.device.type
        sources: list[Any] = [torch] if kind == "cpu" else [torch, torch.get_device_module(kind)]
        with same_random_state(self.device):
            before = [each.get_rng_state() for each in sources]
            host = host_random_states()
            self.run(self.hidden, self.ids, self.router, with_dropout=True)
            after = [each.get_rng_state() for each in sources]
            is_same = host == host_random_states()
        return not (is_same and all(map(torch.equal, before, after)))

    def gate(self, features: Tensor) -> Tensor:
        """Return the output of the module's `_apply_gate`."""
        return getattr(self._twin(self.weights), GATE)(features)  # type: ignore[no-any-return]

    def whole(self) -> Tensor:
        """Return the output for all tokens with all weights, after checking that it has values."""
        output = self.run(self.hidden, self.ids, self.router)
        self.kept = self.kept_last()
        if not output.any(-1).all() or not isfinite(output.float().norm().item()):
            raise _Problem("gives zeros, infinite values or nan for random tokens")
        try:
            self._expected = self._gradients(output)
        except Exception:  # noqa: BLE001  (kernels may have no backward for weights like these)
            self._expected = []
        if not all(each.isfinite().all() for each in self._expected):
            self._expected = []
        self._twins.clear()
        return output

    def kept_last(self) -> _Kept:
        """Return buffers, and tensors and numbers in other attributes, after the last run."""
        twin = self._twins[-1]
        buffers = {name: [each] for name, each in twin.named_buffers()}
        kept = {**kept_by(twin), **buffers}
        return {name: each for name, each in kept.items() if name not in self.experts.names}

    def equal(self, seen: Tensor, expected: Tensor) -> bool:
        """Whether two outputs differ by rounding only."""
        difference = (seen.float() - expected.float()).norm(dim=-1)
        return bool((difference <= self._bound * expected.float().norm(dim=-1)).all())

    @property
    def _bound(self) -> float:
        return 1e-4 if self.dtype in (torch.float32, torch.float64) else 0.05

    def is_whole(self, total: Tensor, whole: Tensor) -> bool:
        """Whether a sum of outputs is that of all experts, and so are the inputs' gradients."""
        if not self.equal(total, whole):
            return False
        if not self._expected:
            return True
        for twin in self._twins:  # as the parts of the weights are there in forward only
            for name in self.experts.names:
                vars(twin).pop(name, None)
        self._twins.clear()
        try:
            seen = self._gradients(total)
        except Exception as error:
            raise _Problem(
                f"runs again in backward, as in torch.utils.checkpoint ({type(error).__name__})"
            ) from error
        for own, its in zip(seen, self._expected, strict=True):
            if not (own - its).norm() <= self._bound * its.norm():
                raise _Problem("gives other gradients than in one process")
        return True

    def _gradients(self, output: Tensor) -> list[Tensor]:
        """Return the gradients of the hidden states and the router's weights."""
        given = torch.linspace(-1, 1, output.numel(), device=output.device, dtype=output.dtype)
        inputs = [self.hidden, self.router]
        found = torch.autograd.grad(
            output, inputs, given.view_as(output), retain_graph=True, materialize_grads=True
        )
        return [each.float() for each in found]

    def _twin(self, attributes: Mapping[str, Any]) -> nn.Module:
        """Return a copy of the module, with some attributes instead of its parameters."""
        twin = trial_copy(self.module).train(self.training)
        for name, each in [*twin._parameters.items()]:
            if each is not None:
                del twin._parameters[name]
        for name, buffer in twin._buffers.items():
            if buffer is not None:
                twin._buffers[name] = self._buffer(name, buffer)
        for child in twin.children():
            child.to(self.device)
        vars(twin).update(attributes)
        return twin

    def _buffer(self, name: str, buffer: Tensor) -> Tensor:
        """Return other values, so that it shows if they depend on the expert or the feature."""
        if buffer.is_floating_point():
            numbers = torch.linspace(0.5, 1.5, buffer.numel(), device="cpu").view(buffer.shape)
            return numbers.to(self.device, buffer.dtype)
        if buffer.is_meta:
            raise _Problem(f"has the buffer {name!r} without values, on the meta device")
        return buffer.clone().to(self.device)


def _check_same(probe: _Probe, part: Part) -> None:
    """Check that the last run, on a part, left what one as a whole leaves in attributes.

    Raises:
        _Problem: something is different.
    """
    seen, expected = probe.kept_last(), probe.kept
    names = sorted((expected.keys() | seen.keys()) - part.numbers.keys())
    if other := [each for each in names if not _are_equal(seen.get(each), expected.get(each))]:
        raise _Problem(
            f"changes its {other}, and would do so by the rows or features of one rank, so that "
            "the module around it must keep or count what is needed"
        )


def _wholes(probe: _Probe) -> list[tuple[_Probe, Tensor]]:
    """Return probes in training and in evaluation mode, with their outputs as a whole.

    Raises:
        _Problem: an output gives a gradient to something else than parameters and inputs.
    """
    wholes = [(each, each.whole()) for each in (probe, probe.in_evaluation())]
    for _, whole in wholes:
        _check_leaves(probe, whole)
    return wholes


@torch.no_grad()
def _check_rows_alone(probe: _Probe, whole: Tensor) -> None:
    """Check that what a token gets depends on no others: experts get tokens of several ranks.

    Raises:
        _Problem: it does.
    """
    rows = torch.arange(len(whole), device=probe.device)
    some = rows[::_ROWS] if probe.form == "rows" else rows.flip(0)[::2]
    seen = probe.run(probe.hidden[some], probe.ids[some], probe.router[some])
    if not probe.equal(seen, whole[some]):
        raise _Problem(
            "gives a token something else if there are fewer others, as where experts drop tokens "
            "or normalize over them"
        )
    if probe.form == "choices":
        same = rows[-1:].expand(_MANY)
        seen = probe.run(probe.hidden[same], probe.ids[same], probe.router[same])
        if not probe.equal(seen, whole[same]):
            raise _Problem(
                f"gives some of {_MANY} equal tokens something else, as if it drops some"
            )


def _check_leaves(probe: _Probe, whole: Tensor) -> None:
    """Check that nothing else gets a gradient than the experts' parameters and the inputs.

    Raises:
        _Problem: something does.
    """
    for leaf in other_leaves([whole], [probe.hidden, probe.router]):
        raise _Problem(
            f"uses {in_words('', leaf.shape, leaf.dtype)}, so that each rank would get a part of "
            "its gradient: apply it outside the module"
        )


def _are_equal(one: list[Tensor] | None, other: list[Tensor] | None) -> bool:
    if one is None or other is None or len(one) != len(other):
        return False
    return all(
        (mine.shape, mine.dtype) == (its.shape, its.dtype)
        and torch.equal(mine.nan_to_num(), its.nan_to_num())
        for mine, its in zip(one, other, strict=True)
    )


def _undisturbed(ask: _Ask[_Case]) -> _Ask[_Case]:
    """Let a function ask with gradients, and leave random states as they are."""

    @wraps(ask)
    def undisturbed(name: str, module: nn.Module, experts: StackedExperts, size: int) -> _Case:
        with torch.enable_grad(), same_random_state(_device_of(module)):
            return ask(name, module, experts, size)

    return undisturbed


@_undisturbed
def ask_for_experts(
    name: str, module: nn.Module, experts: StackedExperts, size: int
) -> PartOfExperts:
    """Return how a module's own forward is run on the experts of each of `size` ranks.

    Raises:
        ValueError: it cannot be, or the number of experts is not divisible by `size`.
    """
    kind, count = type(module).__name__, experts.count
    if count % size:
        raise ValueError(
            f"{name}: its {count} experts are not divisible by the {size} ranks of "
            "expert parallelism. Use a number of ranks that divides the number of experts."
        )
    own = count // size
    probe = _probe(name, module, experts, own, _STEP)
    try:
        wholes = _wholes(probe)
        if probe.form == "all":
            raise _Problem("takes weights for all experts")
        for each, whole in wholes:
            _check_rows_alone(each, whole)
        common = (experts, probe.form, _has_identity(probe))
        possible = [
            PartOfExperts(*common, numbers, second)
            for second in (_SECOND if probe.form == "choices" else _SECOND[:1])
            for numbers in _subsets(_numbers_equal_to(module, {count: own}))
        ]
        part = _first(possible, wholes, _is_sum_of_experts)
        part = replace(part, draws=probe.draws())
    except _Problem as problem:
        raise ValueError(
            f"{name}: the forward of {kind} cannot be run on {own} of its {count} experts: it "
            f"{problem}. With expert parallelism, each rank runs it with its own experts' weights, "
            "on one row for each token and expert, and the outputs of a token are summed: so it "
            "must count experts by its weights, such as len(self.down_proj), and add nothing else. "
            f"Change it, or use ep_size=1. {_TRANSFORMERS}"
        ) from problem
    return replace(
        part, counts_from_end=_counts_from_end(probe), ignores_zeros=_ignores_zeros(probe)
    )


def with_second(
    part: PartOfExperts, own: int, ids: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    """Return ids and weights of rows, of shape (rows, choices), for a forward with `own` experts.

    Args:
        part: how the forward is run.
        own: number of experts.
        ids: each row's expert, shape (rows,).
        weights: its weight, shape (rows,).
    """
    if part.second == "none":
        return ids[:, None], weights[:, None]
    second = ids if part.second == "again" else torch.full_like(ids, own)
    return torch.stack([ids, second], 1), torch.stack([weights, torch.zeros_like(weights)], 1)


@_undisturbed
def ask_for_features(
    name: str, module: nn.Module, experts: StackedExperts, size: int
) -> PartOfFeatures:
    """Return how a module's own forward is run on `size` parts of its experts' inner features.

    Raises:
        ValueError: it cannot be, or the number of features is not divisible by `size`.
    """
    probe = _probe(name, module, experts, experts.count, step=0)
    columns, down = (
        [module.get_parameter(each).shape for each in names] for names in (experts.columns, (DOWN,))
    )
    width = down[0][1:].numel() // probe.width
    if width % size:
        raise ValueError(
            f"{name}: the {width} inner features of its experts are not divisible by "
            f"the {size} ranks of tensor parallelism. Use a number of ranks that divides them."
        )
    common = (experts, probe.form, _has_identity(probe))
    features = {shape[1:].numel() // probe.width for shape in columns}
    numbers = _numbers_equal_to(module, {each: each // size for each in (*features, width)})
    possible = [
        PartOfFeatures(*common, chosen, columns_dim, down_dim, has_halves)
        for chosen in _subsets(numbers)
        for columns_dim in (1, 2)
        for down_dim in (2, 1)
        for has_halves in (False, True)
        if all(shape[3 - columns_dim] == probe.width for shape in columns)
        and down[0][3 - down_dim] == probe.width
        and all(shape[columns_dim] % (size * (1 + has_halves)) == 0 for shape in columns)
    ]
    try:
        wholes = _wholes(probe)
        part = _first(possible, wholes, partial(_is_sum_of_features, size=size))
    except _Problem as problem:
        raise ValueError(
            f"{name}: the forward of {type(module).__name__} cannot be run on a part of the "
            f"{width} inner features of its experts: it {problem}. The outputs of {size} such "
            "parts must sum to that of all features, so it must not normalize or select features. "
            "Distribute whole experts over an experts' mesh instead, with ExpertParallel(), or "
            "remove the module from the plan."
        ) from problem
    return replace(part, has_gate=_has_gate(probe, wholes[0][1], part, size))


def _form_of(module: nn.Module) -> Form:
    given = [*signature(type(module).forward).parameters.values()][1:]
    count = sum(each.kind is Parameter.POSITIONAL_OR_KEYWORD for each in given)
    forms: dict[int, Form] = {1: "rows", 2: "all"}
    return forms.get(count, "choices")


def _probe(name: str, module: nn.Module, experts: StackedExperts, own: int, step: int) -> _Probe:
    """Return a probe with the number of hidden features and the dtype that the forward takes."""
    first, device = module.get_parameter(DOWN), _device_of(module)
    _, outputs, inputs = module.get_parameter(experts.columns[-1]).shape
    widths = [each for each in (inputs, outputs) if each in first.shape[1:]]
    problem: Exception = _Problem(f"has weights of the shapes {outputs, inputs} and {first.shape}")
    # In float32, rounding hides least; but some kernels take only the parameters' own dtype.
    for dtype in dict.fromkeys((torch.float32, first.dtype)):
        for width in dict.fromkeys(widths):
            probe = _Probe(module, experts, own, step, width=width, dtype=dtype, device=device)
            try:
                probe.whole()
            except _Problem as error:
                problem = error
            else:
                return probe
    raise ValueError(
        f"{name}: the forward of {type(module).__name__} {problem}. It must take hidden states of "
        "shape (tokens, features), each token's experts and their weights, both of shape (tokens, "
        "choices); or only rows of hidden states, equally many for each expert. It must return "
        "their new values. Change it, or use ep_size=1 and a plan without this module. "
        f"{_TRANSFORMERS}"
    ) from problem


def _device_of(module: nn.Module) -> torch.device:
    """Return the device of a trial."""
    first = module.get_parameter(DOWN)
    if not first.is_meta:
        return first.device
    # A torch that was built for CUDA has no GPU everywhere.
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def _is_sum_of_experts(probe: _Probe, whole: Tensor, part: PartOfExperts) -> bool:
    """Whether the outputs of the ranks' experts sum to those of all experts."""
    own, total = probe.own, torch.zeros_like(whole)
    for start in range(0, probe.experts.count, own):
        tokens, choices = torch.where((probe.ids >= start) & (probe.ids < start + own))
        ids, weights = (each[tokens, choices] for each in (probe.ids - start, probe.router))
        # The weights of identity experts, if there are any, are behind those of experts.
        parameters = {name: each[start : start + own] for name, each in probe.weights.items()}
        ids, weights = with_second(part, own, ids, weights)
        rows = probe.run(probe.hidden[tokens], ids, weights, parameters, part.numbers)
        _check_same(probe, part)
        total = total.index_add(0, tokens, rows.to(total.dtype))
    return probe.is_whole(total, whole)


def _is_sum_of_features(
    probe: _Probe, whole: Tensor, part: PartOfFeatures, size: int, gates: Sequence[_Gate] = ()
) -> bool:
    """Whether the outputs of the ranks' features sum to those of all features.

    Args:
        probe: the module.
        whole: its output with all features.
        part: how it is run on a part of them.
        size: number of ranks.
        gates: for each rank, what is called as its `_apply_gate`; if not given, its own.
    """
    total = torch.zeros_like(whole)
    for rank in range(size):
        parameters: dict[str, Any] = {GATE: gates[rank]} if gates else {}
        for name, each in probe.weights.items():
            if name == f"{DOWN}_bias":
                own = each[0] / size
            elif name == DOWN:
                own = each[0].chunk(size, part.down_dim - 1)[rank]
            else:  # a weight or a bias, of which one has been taken
                dim = 0 if each.ndim == 2 else part.columns_dim - 1
                own = _chunk(each[0], 1 + part.has_halves, size, rank, dim)
            parameters[name] = own.contiguous().expand(each.size(0), *own.shape)
        rows = probe.run(probe.hidden, probe.ids, probe.router, parameters, part.numbers)
        _check_same(probe, part)
        total = total + rows
    return probe.is_whole(total, whole)


def _chunk(tensor: Tensor, count: int, size: int, rank: int, dim: int) -> Tensor:
    """Return a rank's part of each of `count` parts of a tensor."""
    return torch.cat([each.chunk(size, dim)[rank] for each in tensor.chunk(count, dim)], dim)


def _has_gate(probe: _Probe, whole: Tensor, part: PartOfFeatures, size: int) -> bool:
    """Whether the forward is right if ranks exchange what it gives to its `_apply_gate`.

    It must call it once, with all that depends on the packed weight, which is split contiguously.
    """
    own = getattr(probe.module, GATE, None)
    if not part.has_halves or not callable(own):
        return False
    given: list[list[Tensor]] = [[] for _ in range(size)]

    def record(rank: int, features: Tensor) -> Tensor:
        given[rank].append(features)
        return probe.gate(features)

    def exchange(rank: int, _: Tensor) -> Tensor:
        packed = torch.cat([each for (each,) in given], -1)
        return probe.gate(_chunk(packed, 2, size, rank, -1))

    contiguous = replace(part, has_halves=False)
    try:
        gates = [partial(record, rank) for rank in range(size)]
        _is_sum_of_features(probe, whole, contiguous, size, gates)
        if any(len(each) != 1 for each in given):
            return False
        gates = [partial(exchange, rank) for rank in range(size)]
        return _is_sum_of_features(probe, whole, contiguous, size, gates)
    except _Problem:
        return False


def _has_identity(probe: _Probe) -> bool:
    """Whether the first id above those of experts is that of an identity expert."""
    if probe.form != "choices":
        return False
    seen = _with_id(probe, probe.experts.count)
    expected = (probe.hidden * probe.router.sum(-1, keepdim=True)).cpu()
    return seen is not None and probe.equal(seen, expected)


def _counts_from_end(probe: _Probe) -> bool:
    """Whether the id -1 is that of the last expert."""
    if probe.form != "choices":
        return False
    seen, expected = _with_id(probe, -1), _with_id(probe, probe.experts.count - 1)
    return seen is not None and expected is not None and probe.equal(seen, expected)


def _with_id(probe: _Probe, expert_id: int) -> Tensor | None:
    """Return the output if all tokens choose an id, maybe of no expert; None if forward raises.

    On the CPU, because on other devices, an index out of bounds ends the process.
    """
    same = (probe.module, probe.experts, probe.own, probe.step)
    cpu = torch.device("cpu")
    try:
        again = _Probe(*same, width=probe.width, dtype=probe.dtype, device=cpu)
        return again.run(again.hidden, torch.full_like(again.ids, expert_id), again.router)
    except _Problem:
        return None


def _ignores_zeros(probe: _Probe) -> bool:
    """Whether rows of zeros give zeros and get no gradient, so that they need not be sent."""
    if probe.form != "rows":
        return False
    hidden = probe.hidden.detach().clone()
    hidden[1::_ROWS] = 0
    hidden.requires_grad_()
    output = probe.run(hidden, probe.ids, probe.router)
    if not output.requires_grad:
        return not output[1::_ROWS].any()
    (gradient,) = torch.autograd.grad(output, hidden, torch.ones_like(output))
    return not output[1::_ROWS].any() and not gradient[1::_ROWS].any()


def _numbers_equal_to(module: nn.Module, values: Mapping[int, int]) -> _Values:
    """Return new values of the module's own int attributes that have one of these values."""
    own = {name: each for name, each in vars(module).items() if type(each) is int}
    return {name: values[each] for name, each in own.items() if each in values}


def _subsets(numbers: _Values) -> Iterator[_Values]:
    """Yield the subsets of some attributes, larger ones first; of many, only all and none."""
    sizes = range(len(numbers), -1, -1) if len(numbers) <= _NUMBERS else (len(numbers), 0)
    for size in sizes:
        yield from map(dict, combinations(numbers.items(), size))


def _first(
    possible: Iterable[_Case],
    wholes: Sequence[tuple[_Probe, Tensor]],
    is_right: Callable[[_Probe, Tensor, _Case], bool],
) -> _Case:
    """Return the first possibility that is right in both modes, or raise the last one's problem."""
    problem = _Problem("gives other outputs than in one process")
    for each in possible:
        try:
            wrong = next((own for own, whole in wholes if not is_right(own, whole, each)), None)
        except _Problem as error:
            problem = error
            continue
        if wrong is None:
            return each
        mode = "" if wrong.training else " in evaluation mode"
        problem = _Problem(f"gives other outputs than in one process{mode}")
    raise problem
