"""Parameters and head counts between split layers: right where the plan names them, or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from rounding import relative_errors
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel
from torch.nn import functional as F
from tp_models import BOUND, FEATURES, HEADS, TOKENS, WIDTH, mesh_of_two, run

from helpers.crew import Crew
from helpers.tiers import in_tiers
from helpers.worlds import fake_world
from meshverse.parallel import (
    LocalParameters,
    Replicated,
    ReplicatedWithGradAllreduce,
    apply_tp_plan,
)
from meshverse.parallel.styles.local_styles import PackedColwiseParallel, PackedRowwiseParallel

SUMMED = ReplicatedWithGradAllreduce
Inner = Callable[["Attention", Tensor], Tensor]


class Attention(nn.Module):
    """Attention without a known name for anything: heads of shape (batch, heads, tokens, features).

    Args:
        inner: what is done with the heads of queries and keys.
        parts: the modules and parameters that it uses.
    """

    def __init__(self, inner: Inner, parts: dict[str, Any]) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, HEADS * FEATURES) for _ in range(3))
        for name, each in parts.items():
            setattr(self, name, each)
        self.out = nn.Linear(HEADS * FEATURES, WIDTH)
        self.inner = inner

    def forward(self, hidden: Tensor) -> Tensor:
        projections = (self.query, self.key, self.value)
        q, k, v = (each(hidden).unflatten(-1, (-1, FEATURES)) for each in projections)
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        scores = (self.inner(self, q) @ self.inner(self, k).mT).softmax(-1)
        return self.out((scores @ v).transpose(1, 2).flatten(-2))


class Relative(nn.Module):
    """Adds an embedding of positions to the features of each head."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(TOKENS, FEATURES)

    def forward(self, heads: Tensor) -> Tensor:
        return heads + self.table(torch.arange(heads.size(-2)))


class Kernel(nn.Module):
    """A convolution over the tokens of each head."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(FEATURES, FEATURES, 3, padding=1)

    def forward(self, heads: Tensor) -> Tensor:
        return self.conv(heads.flatten(0, 1).mT).mT.view_as(heads)


class MLP(nn.Module):
    def __init__(self, between: nn.Module, packed: bool = False) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)
        self.between, self.packed = between, packed

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down(self.between(self.up(hidden)))


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(0.7))

    def forward(self, given: Tensor) -> Tensor:
        return given * self.factor


class Nested(nn.Module):
    """Projections in a module of their own, beside what uses their output."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.ModuleDict({"up": nn.Linear(WIDTH, 16)})
        self.scale, self.down = Scale(), nn.Linear(16, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down(self.scale(self.project["up"](hidden)))


def attention(inner: Inner, **parts: Any) -> nn.Module:
    return Attention(inner, parts)


def lambdas(self: Any, heads: Tensor) -> Tensor:
    return heads * (self.lambdas[0] * self.lambdas[1]).exp()


QKV: dict[str, ParallelStyle] = {
    **{name: ColwiseParallel() for name in ("query", "key", "value")},
    "out": RowwiseParallel(),
}
UP_DOWN: dict[str, ParallelStyle] = {"up": ColwiseParallel(), "down": RowwiseParallel()}
PACKED = {"up": PackedColwiseParallel(), "down": PackedRowwiseParallel()}

# What builds a model; its plan; the entries that it needs, too; and the parameter that is refused.
Case = tuple[Callable[[], nn.Module], dict[str, ParallelStyle], dict[str, ParallelStyle], str]
CASES: dict[str, Case] = {
    "temperature": (
        lambda: attention(
            lambda self, heads: heads * self.temperature,
            temperature=nn.Parameter(torch.tensor(1.5)),
        ),
        QKV,
        {"": LocalParameters(summed=["temperature"])},
        "temperature",
    ),
    "lambdas": (
        lambda: attention(lambdas, lambdas=nn.Parameter(torch.rand(2, FEATURES))),
        QKV,
        {"": LocalParameters(summed=["lambdas"])},
        "lambdas",
    ),
    "linear": (
        lambda: attention(lambda self, heads: self.mix(heads), mix=nn.Linear(FEATURES, FEATURES)),
        QKV,
        {"mix": SUMMED()},
        "mix.weight",
    ),
    "positions": (
        lambda: attention(lambda self, heads: self.relative(heads), relative=Relative()),
        QKV,
        {"relative.table": SUMMED()},
        "relative.table.weight",
    ),
    "convolution": (
        lambda: attention(lambda self, heads: self.kernel(heads), kernel=Kernel()),
        QKV,
        {"kernel.conv": SUMMED()},
        "kernel.conv.weight",
    ),
    "prelu": (
        lambda: attention(lambda self, heads: self.slope(heads), slope=nn.PReLU()),
        QKV,
        {"slope": SUMMED()},
        "slope.weight",
    ),
    "norm": (
        lambda: attention(lambda self, heads: self.ln(heads), ln=nn.LayerNorm(FEATURES)),
        QKV,
        {"ln": SUMMED()},
        "ln.weight",
    ),
    "norm in a sequence": (
        lambda: attention(
            lambda self, heads: self.q_norm(heads), q_norm=nn.Sequential(nn.RMSNorm(FEATURES))
        ),
        QKV,
        {"q_norm.0": SUMMED()},
        "q_norm.0.weight",
    ),
    "mlp": (lambda: MLP(Scale()), UP_DOWN, {"between": SUMMED()}, "between.factor"),
    "mlp's prelu": (lambda: MLP(nn.PReLU()), UP_DOWN, {"between": SUMMED()}, "between.weight"),
    "packed mlp": (lambda: MLP(Scale()), PACKED, {"between": SUMMED()}, "between.factor"),
    "nested": (
        Nested,
        {"project.up": ColwiseParallel(), "down": RowwiseParallel()},
        {"scale": SUMMED()},
        "scale.factor",
    ),
}
SHORT = ("temperature", "norm in a sequence", "nested")


def make(case: str) -> nn.Module:
    torch.manual_seed(3)
    return CASES[case][0]().double()


def errors_of(case: str) -> dict[str, float]:
    split, (_, plan, entries, _) = make(case), CASES[case]
    apply_tp_plan(split, mesh_of_two(), plan | entries)
    return relative_errors(run(split), run(make(case)), floor=1e-2)


@pytest.mark.parametrize("case", in_tiers(CASES, SHORT))
def test_gradients_with_an_entry_equal_one_process(crew: Crew, case: str) -> None:
    for errors in crew.run(errors_of, 2, case):
        assert max(errors.values()) < BOUND, errors


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("frozen", [False, True])
def test_parameters_without_an_entry_are_refused_by_name(case: str, frozen: bool) -> None:
    model, (_, plan, _, parameter) = make(case), CASES[case]
    model.get_parameter(parameter).requires_grad_(not frozen)  # it may be unfrozen later
    with fake_world(2), pytest.raises(ValueError, match=rf"no entry for .*'{parameter}'"):
        apply_tp_plan(model, mesh_of_two(), plan)
    assert not any(isinstance(each, DTensor) for each in model.parameters())


@pytest.mark.parametrize("missing", ["query", "key", "value", "out"])
def test_plans_that_split_only_some_projections_are_refused(missing: str) -> None:
    model = attention(lambda self, heads: heads)
    plan = {name: style for name, style in QKV.items() if name != missing}
    with fake_world(2), pytest.raises(ValueError, match=rf"no entry for .*'{missing}.weight'"):
        apply_tp_plan(model, mesh_of_two(), plan)
    assert not any(isinstance(each, DTensor) for each in model.parameters())


def test_a_style_of_a_module_around_says_nothing_of_its_parameters() -> None:
    model = make("norm in a sequence")
    with fake_world(2):
        for entries in ({"q_norm": SUMMED()}, {"": Replicated()}, {"": SUMMED()}):
            with pytest.raises(ValueError, match=r"no entry for .*'q_norm.0.weight'"):
                apply_tp_plan(model, mesh_of_two(), QKV | entries)


class Residual(nn.Module):
    """A norm before an MLP, and a gain after it: all ranks have the same there."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(WIDTH), MLP(nn.Identity())
        self.gain = nn.Parameter(torch.rand(WIDTH))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.mlp(self.norm(hidden)) * self.gain


@pytest.mark.parametrize(
    ("entries", "names"),
    [
        ({"norm": SUMMED()}, r"\['norm.weight', 'norm.bias'\]"),
        ({"": LocalParameters(summed=["gain"])}, r"\['gain'\]"),
    ],
)
def test_sums_of_whole_gradients_are_refused(entries: dict[str, ParallelStyle], names: str) -> None:
    model = Residual()
    plan = {f"mlp.{name}": style for name, style in UP_DOWN.items()}
    with fake_world(2), pytest.raises(ValueError, match=f"sums the gradients of {names}"):
        apply_tp_plan(model, mesh_of_two(), plan | entries)
    assert not any(isinstance(each, DTensor) for each in model.parameters())


def test_gradients_of_split_tokens_may_be_summed() -> None:
    model = Residual()
    plan = {
        "norm": SUMMED(),
        "mlp.up": ColwiseParallel(input_layouts=Shard(1)),
        "mlp.down": RowwiseParallel(output_layouts=Shard(1)),
    }
    with fake_world(2):
        apply_tp_plan(model, mesh_of_two(), plan)
    assert isinstance(model.norm.weight, DTensor)


class Latent(nn.Module):
    """Layers before the column-wise one, whose input is the same on all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH))
        self.gain = nn.Parameter(torch.rand(WIDTH))
        self.up, self.down = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down(self.up(self.before(hidden * self.gain)).relu())


def errors_of_latent() -> dict[str, float]:
    models = []
    for _ in range(2):
        torch.manual_seed(3)
        models.append(Latent().double())
    entries = {"before": Replicated(), "": LocalParameters({"gain": Replicate()})}
    apply_tp_plan(models[0], mesh_of_two(), UP_DOWN | entries)
    return relative_errors(run(models[0]), run(models[1]), floor=1e-2)


def test_modules_with_the_same_input_equal_one_process(crew: Crew) -> None:
    for errors in crew.run(errors_of_latent, 2):
        assert max(errors.values()) < BOUND, errors


class Counted(nn.Module):
    """Attention that reshapes by a number of heads, under a name of the user's own."""

    def __init__(self, name: str, groups: str | None = None, **others: int) -> None:
        super().__init__()
        keys = 2 if groups else HEADS
        self.query = nn.Linear(WIDTH, HEADS * FEATURES)
        self.key, self.value = (nn.Linear(WIDTH, keys * FEATURES) for _ in range(2))
        self.out = nn.Linear(HEADS * FEATURES, WIDTH)
        self.names = name, groups or name
        for key, each in {name: HEADS, **({groups: keys} if groups else {}), **others}.items():
            setattr(self, key, each)

    def forward(self, hidden: Tensor) -> Tensor:
        heads, keys = (getattr(self, name) for name in self.names)
        # Features are what is left: a wrong number of heads raises no error.
        q = self.query(hidden).unflatten(-1, (heads, -1)).transpose(1, 2)
        k, v = (
            each(hidden).unflatten(-1, (keys, -1)).transpose(1, 2)
            for each in (self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return self.out(mixed.transpose(1, 2).flatten(-2))


NAMES = ("heads", "num_query_heads", "nhead", "n_local_heads")


def errors_of_counted(
    name: str, entries: dict[str, ParallelStyle], others: dict[str, Any]
) -> float:
    models = []
    for _ in range(2):
        torch.manual_seed(3)
        models.append(Counted(name, **others).double())
    apply_tp_plan(models[0], mesh_of_two(), QKV | entries)
    return max(relative_errors(run(models[0]), run(models[1]), floor=1e-2).values())


def test_named_head_counts_equal_one_process(crew: Crew) -> None:
    entry = {"": LocalParameters({"heads": Shard(0), "window": Replicate()})}
    assert max(crew.run(errors_of_counted, 2, "heads", entry, {"window": 4})) < BOUND
    both = {"": LocalParameters({"num_query_groups": Shard(0)})}
    groups = {"groups": "num_query_groups", "num_kv_heads": 2}
    assert max(crew.run(errors_of_counted, 2, "num_heads", both, groups)) < BOUND


@pytest.mark.parametrize("name", NAMES)
def test_head_counts_under_other_names_are_refused(name: str) -> None:
    model = Counted(name)
    with fake_world(2), pytest.raises(ValueError, match=rf"'{name}': 4.* may count heads"):
        apply_tp_plan(model, mesh_of_two(), QKV)
    assert not any(isinstance(each, DTensor) for each in model.parameters())


def test_numbers_beside_known_head_counts_are_refused_if_equal() -> None:
    groups = {"groups": "num_query_groups", "num_kv_heads": 2, "other": 3}
    with fake_world(2), pytest.raises(ValueError, match=r"\{'num_query_groups': 2\} of 'Counted'"):
        apply_tp_plan(Counted("num_heads", **groups), mesh_of_two(), QKV)


def test_a_head_count_that_is_also_the_number_of_its_layer_is_refused() -> None:
    model = nn.Sequential(*(nn.Identity() for _ in range(HEADS)), Counted("heads"))
    plan = {f"{HEADS}.{name}": style for name, style in QKV.items()}
    with fake_world(2), pytest.raises(ValueError, match=r"'4'.*computes something else"):
        apply_tp_plan(model, mesh_of_two(), plan)
    assert not any(isinstance(each, DTensor) for each in model.parameters())


def test_head_counts_of_the_class_are_refused() -> None:
    model = type("OfClass", (Counted,), {"copies": HEADS})("num_heads")
    with fake_world(2), pytest.raises(ValueError, match=r"\{'copies': 4\} of 'OfClass'"):
        apply_tp_plan(model, mesh_of_two(), QKV)


def test_head_counts_that_cannot_be_set_are_refused() -> None:
    class ByProperty(Counted):
        @property
        def n_heads(self) -> int:
            return HEADS

    model = ByProperty("num_heads")
    with fake_world(2), pytest.raises(ValueError, match=r"n_heads is a property of ByProperty"):
        apply_tp_plan(model, mesh_of_two(), QKV)
    assert not any(isinstance(each, DTensor) for each in model.parameters())


def test_numbers_that_cannot_count_heads_are_no_matter() -> None:
    model = Counted("num_heads", width=WIDTH, layer=3, dim=HEADS * FEATURES)
    with fake_world(2):
        apply_tp_plan(model, mesh_of_two(), QKV)
    assert (model.num_heads, model.width, model.layer) == (2, WIDTH, 3)


def test_one_parameter_in_two_ways_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\['a'\] have a placement and are in summed="):
        LocalParameters({"a": Shard(0)}, summed=["a"])
    with pytest.raises(TypeError, match="summed='gain' is a str"):
        LocalParameters(summed="gain")
