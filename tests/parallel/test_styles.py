"""Parallel styles by their names, and on small models in two real processes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from rounding import relative_errors, rounding
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from tp_models import BOUND, MLP, Attention, HeadNorm, Latent, PackedMLP, Tied, example, make

import meshverse
from helpers.crew import Crew
from helpers.interrupts import is_interrupted_at
from meshverse.parallel import apply_activation_checkpointing
from meshverse.parallel.styles.local_styles import (
    LocalParameters,
    PackedColwiseParallel,
    PackedRowwiseParallel,
    ReplicatedWithGradAllreduce,
    SharedKeyGradAllreduce,
    replaced_attributes,
)
from meshverse.parallel.tensor_parallel.apply import apply_tp_plan
from meshverse.parallel.tensor_parallel.hf_plan import (
    EXPERT_STYLES,
    translate_to_torch_parallel_style,
)

LOCAL, WHOLE = (Shard(-1),), (Replicate(),)


def layouts(style: ParallelStyle) -> tuple[object, object]:
    assert isinstance(style, ColwiseParallel | RowwiseParallel)
    return style.input_layouts, style.output_layouts


@pytest.mark.parametrize(
    ("name", "kind", "expected"),
    [
        ("colwise", ColwiseParallel, (WHOLE, LOCAL)),
        ("local_colwise", ColwiseParallel, (WHOLE, LOCAL)),
        ("colwise_rep", ColwiseParallel, (WHOLE, WHOLE)),
        ("colwise_gather_output", ColwiseParallel, (WHOLE, WHOLE)),
        ("embedding_colwise", ColwiseParallel, (WHOLE, WHOLE)),
        ("rowwise", RowwiseParallel, (LOCAL, WHOLE)),
        ("local_rowwise", RowwiseParallel, (LOCAL, (Partial(),))),
        ("rowwise_rep", RowwiseParallel, (WHOLE, WHOLE)),
        ("rowwise_split_input", RowwiseParallel, (WHOLE, WHOLE)),
        ("embedding_rowwise", RowwiseParallel, (WHOLE, WHOLE)),
    ],
)
def test_name_of_layouts(name: str, kind: type, expected: tuple[object, object]) -> None:
    style = translate_to_torch_parallel_style(name)
    assert type(style) is kind
    assert layouts(style) == expected


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("sequence_parallel", SequenceParallel),
        ("all_reduce", PrepareModuleOutput),
        ("gather", PrepareModuleOutput),
        ("packed_colwise", PackedColwiseParallel),
        ("local_packed_rowwise", PackedRowwiseParallel),
        ("replicated_with_grad_allreduce", ReplicatedWithGradAllreduce),
        ("mla_kv_a_proj", SharedKeyGradAllreduce),
        ("local_params", LocalParameters),
    ],
)
def test_name_of_kind(name: str, kind: type) -> None:
    style = translate_to_torch_parallel_style(name)
    assert type(style) is kind
    assert translate_to_torch_parallel_style(name) is not style


def test_what_is_no_name_is_refused() -> None:
    with pytest.raises(TypeError, match=r"style Shard.* must be a str.*'rowwise'"):
        translate_to_torch_parallel_style(Shard(0))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"'diagonal' is unknown.*'colwise', 'colwise_gather"):
        translate_to_torch_parallel_style("diagonal")


@pytest.mark.parametrize("name", sorted(EXPERT_STYLES))
def test_styles_of_experts_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"'{name}' splits experts"):
        translate_to_torch_parallel_style(name)


PLANS: dict[str, tuple[type[nn.Module], dict[str, ParallelStyle]]] = {
    "norm and sinks": (
        Attention,
        {
            "": LocalParameters({"sinks": Shard(0)}),
            "q_proj": ColwiseParallel(),
            "q_norm": ReplicatedWithGradAllreduce(),
            "o_proj": RowwiseParallel(),
        },
    ),
    "packed": (
        PackedMLP,
        {"gate_up": PackedColwiseParallel(), "down": PackedRowwiseParallel()},
    ),
    "summed outside": (
        MLP,
        {
            "up": translate_to_torch_parallel_style("local_colwise"),
            "down": translate_to_torch_parallel_style("local_rowwise"),
            "": translate_to_torch_parallel_style("gather"),
        },
    ),
    "shared key": (
        Latent,
        {
            "down": SharedKeyGradAllreduce(3),
            "up": ColwiseParallel(),
            "out": RowwiseParallel(),
        },
    ),
    "tied, and padding": (
        Tied,
        {
            "embedding": translate_to_torch_parallel_style("embedding_rowwise"),
            "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
        },
    ),
}


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def mesh_of_two() -> meshverse.DeviceMesh:
    return meshverse.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))


def run(model: nn.Module, kind: type[nn.Module]) -> dict[str, Tensor]:
    """The output, its input's gradient where there is one, and those of all parameters."""
    given = example(kind)
    if given.is_floating_point():
        given.requires_grad_()
    output = full(model(given))
    weights = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view_as(output)
    (output * weights).sum().backward()
    seen = {"output": output.detach()}
    if given.grad is not None:
        seen["input"] = given.grad
    gradients = {name: each.grad for name, each in model.named_parameters()}
    return seen | {name: full(each) for name, each in gradients.items() if each is not None}


def errors_of(name: str, without: str | None) -> dict[str, float]:
    """Return the relative errors of a split model by tensor.

    Args:
        name: of the plan.
        without: an entry of it to leave out.
    """
    kind, plan = PLANS[name]
    split = make(kind)
    if without is None:
        apply_tp_plan(split, mesh_of_two(), plan)
    else:  # by torch: apply_tp_plan refuses the plan
        for key in plan.keys() - {without}:
            parallelize_module(split.get_submodule(key), mesh_of_two(), plan[key])
        if hasattr(split, "num_heads"):
            split.num_heads //= 2
    expected, seen = run(make(kind), kind), run(split, kind)
    return relative_errors(seen, expected, floor=1e-2)


@pytest.mark.parametrize("name", PLANS)
def test_split_model_equals_one_process(crew: Crew, name: str) -> None:
    for rank in crew.run(errors_of, 2, name, None):
        assert max(rank.values()) < BOUND, rank


def check_second_order_raises(model: nn.Module, given: Tensor, wanted: list[Tensor]) -> None:
    for each in wanted:
        # With a path beside the model, on which a second pass meets no split layer.
        loss = full(model(given)).sin().square().sum() + full(each).square().sum()
        with pytest.raises(RuntimeError, match="second-order gradients would lack the terms"):
            torch.autograd.grad(loss, each, create_graph=True)
    assert len(torch.autograd.grad(full(model(given)).sum(), wanted)) == len(wanted)


def second_order(name: str) -> None:
    kind, plan = PLANS[name]
    model, given = make(kind), example(kind)
    apply_tp_plan(model, mesh_of_two(), plan)
    inputs = [given.requires_grad_()] if given.is_floating_point() else []
    check_second_order_raises(model, given, [*inputs, *model.parameters()])


@pytest.mark.parametrize("name", PLANS)
def test_second_order_gradients_raise(crew: Crew, name: str) -> None:
    crew.run(second_order, 2, name)


def errors_under_ddp() -> dict[str, float]:
    """Relative errors of outputs, and of the input's gradients, before and after a step.

    Each replica has the whole batch, so that the mean of their gradients is that of one.
    """
    kind, plan = PLANS["norm and sinks"]
    mesh = meshverse.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    split = make(kind)
    apply_tp_plan(split, mesh["tp"], plan)
    seen = []
    for model in (make(kind), DistributedDataParallel(split, device_mesh=mesh["dp"])):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        results = {}
        for step in range(2):
            found = run(model, kind)
            results |= {f"{name} {step}": found[name] for name in ("output", "input")}
            optimizer.step()
        seen.append(results)
    return relative_errors(seen[1], seen[0], floor=1e-2)


def test_replicas_of_a_split_model_equal_one_process(crew: Crew) -> None:
    for rank in crew.run(errors_under_ddp, 4):
        assert max(rank.values()) < BOUND, rank


@pytest.mark.parametrize(
    ("name", "entry", "wrong"),
    [("norm and sinks", "q_norm", "q_norm.weight"), ("shared key", "down", "down.weight")],
)
def test_without_the_style_gradients_are_wrong(
    crew: Crew, name: str, entry: str, wrong: str
) -> None:
    for rank in crew.run(errors_of, 2, name, entry):
        assert rank["output"] < BOUND
        assert rank[wrong] > 0.1


class Noting(HeadNorm):
    """Notes which kind of weight its forward sees."""

    def forward(self, heads: Tensor) -> Tensor:
        self.seen = type(self.weight)
        return super().forward(heads)


def parameters_in_and_after_forward() -> tuple[set[str], bool, list[bool]]:
    model = make(Attention)
    model.q_norm = Noting().double()
    names = set(model.state_dict())
    apply_tp_plan(model, mesh_of_two(), PLANS["norm and sinks"][1])
    norms = [model.q_norm, copy.deepcopy(model).q_norm]
    model(example(Attention))
    with pytest.raises(ArithmeticError):
        model(example(Attention) * torch.nan)
    whole = [
        isinstance(norm.weight, DTensor) and norm.weight is dict(norm.named_parameters())["weight"]
        for norm in norms
    ]
    return set(model.state_dict()) ^ names, norms[0].seen is Tensor, whole


def test_parameters_are_local_in_forward_only(crew: Crew) -> None:
    for changed_names, local, whole_again in crew.run(parameters_in_and_after_forward, 2):
        assert not changed_names
        assert local
        assert all(whole_again)


def errors_of_copies_and_recomputation() -> list[dict[str, float]]:
    """Of a copy of a split model, and of a split layer that is computed again in backward."""
    kind, plan = PLANS["norm and sinks"]
    whole, split = make(kind), make(kind)
    apply_tp_plan(split, mesh_of_two(), plan)
    models = [copy.deepcopy(split)]
    for mode in ("full", "selective"):
        models.append(copy.deepcopy(split))
        apply_activation_checkpointing(nn.Sequential(nn.ModuleList([models[-1]])), mode)
    with torch.no_grad():  # which no copy uses
        for each in split.parameters():
            each.zero_()
    expected = run(whole, kind)
    return [relative_errors(run(each, kind), expected, floor=1e-2) for each in models]


def test_copies_and_recomputed_layers_have_local_parameters(crew: Crew) -> None:
    for rank in crew.run(errors_of_copies_and_recomputation, 2):
        for errors in rank:
            assert max(errors.values()) < BOUND, errors


def attributes_and_ties() -> tuple[int, bool, bool]:
    attention, tied = make(Attention), make(Tied)
    mesh = mesh_of_two()
    apply_tp_plan(attention, mesh, PLANS["norm and sinks"][1])
    apply_tp_plan(tied, mesh, PLANS["tied, and padding"][1])
    same = tied.head.weight is tied.embedding.weight
    return attention.num_heads, same, isinstance(tied.head.weight, DTensor)


def test_head_counts_are_local_and_ties_stay(crew: Crew) -> None:
    assert crew.run(attributes_and_ties, 2) == [(2, True, True)] * 2


def used_twice() -> tuple[float, bool, bool]:
    """A block that the model goes through twice, as ALBERT's: the largest relative error."""
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 6))
    model = nn.Sequential(block, nn.ReLU(), block)
    given = torch.ones(2, 6)
    expected = model(given)
    plan = {"0.0": ColwiseParallel(), "*.1": RowwiseParallel()}
    apply_tp_plan(model, mesh_of_two(), plan)
    is_split = isinstance(model.get_parameter("2.0.weight"), DTensor)
    error = (model(given) - expected).norm() / expected.norm()
    return error.item(), is_split, model[0] is model[2]


def test_a_block_that_is_used_twice_is_split_once(crew: Crew) -> None:
    for error, is_split, is_one in crew.run(used_twice, 2):
        assert error < rounding(torch.float32, terms=8, steps=4)  # of four layers of 8 and 6
        assert is_split
        assert is_one


def odd_heads() -> nn.Module:
    model = make(Attention)
    model.num_heads = 3
    return model


def split_before() -> nn.Module:
    model = make(MLP)
    apply_tp_plan(model, mesh_of_two(), {"up": ColwiseParallel(output_layouts=Replicate())})
    return model


REFUSED: dict[str, tuple[Callable[[], nn.Module], dict[str, ParallelStyle], str]] = {
    "no style": (
        lambda: make(MLP),
        {"up": ColwiseParallel(), "down": "rowwise"},  # type: ignore[dict-item]
        r"\{'down': 'rowwise'\}: all values must be .*translate_to_torch_parallel_style",
    ),
    "output": (
        lambda: nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3)),
        {"0": ColwiseParallel(), "1": ColwiseParallel()},
        r"1: its 3 output features are not divisible by the 2 ranks",
    ),
    "input": (
        lambda: nn.Sequential(nn.Linear(4, 6), nn.Linear(3, 6)),
        {"*": RowwiseParallel()},
        r"1: its 3 input features are not divisible by the 2 ranks",
    ),
    "heads": (
        odd_heads,
        PLANS["norm and sinks"][1],
        r"num_heads=3 is not divisible by the 2 ranks",
    ),
    "module": (
        lambda: nn.ModuleDict({"up": nn.Linear(4, 6), "norm": HeadNorm()}),
        {"up": ColwiseParallel(), "norm": ColwiseParallel()},
        r"norm is a HeadNorm, but .*Colwise.* can only split linear layers and embeddings",
    ),
    "parameter": (
        lambda: make(Attention),
        {"q_proj": ColwiseParallel(), "": LocalParameters({"sink": Shard(0)})},
        r"has no parameter 'sink' of its own, only \['sinks'\]",
    ),
    "dim": (
        lambda: make(Attention),
        {"q_proj": ColwiseParallel(), "": LocalParameters({"sinks": Shard(1)})},
        r"sinks: S.*1.* names no dim of its shape \(4,\)",
    ),
    "single parameter": (
        lambda: nn.ModuleDict({"up": nn.Linear(4, 6), "odd": nn.Linear(4, 3)}),
        {"up": ColwiseParallel(), "odd": LocalParameters({"bias": Shard(0)})},
        r"odd.bias: size 3 of dim 0 is not divisible",
    ),
    "tie": (
        lambda: make(Tied),
        {"head": ColwiseParallel()},
        r"\['embedding.weight', 'head.weight'\] are one parameter",
    ),
    "shared size": (
        lambda: make(Latent),
        {"up": ColwiseParallel(), "down": SharedKeyGradAllreduce()},
        r"as shared_size",
    ),
    "packed": (
        lambda: nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 6)),
        {"0": ColwiseParallel(), "1": PackedColwiseParallel()},
        r"1: PackedColwiseParallel\(parts=2\) needs a linear layer",
    ),
    "twice": (
        split_before,
        {"down": RowwiseParallel(), "up": ColwiseParallel()},
        r"up.weight is distributed already",
    ),
}


def refusal(name: str) -> None:
    """Check that a plan is refused, and that the model is as it was then."""
    build, plan, _ = REFUSED[name]
    model = build()
    before = {key: (each, type(each)) for key, each in model.named_parameters()}
    hooks = [len(each._forward_hooks) for each in model.modules()]
    with pytest.raises((ValueError, TypeError), match=REFUSED[name][2]):
        apply_tp_plan(model, mesh_of_two(), plan)
    after = dict(model.named_parameters())
    assert all(after[key] is each and type(each) is kind for key, (each, kind) in before.items())
    assert hooks == [len(each._forward_hooks) for each in model.modules()]


@pytest.mark.parametrize("name", REFUSED)
def test_refusal_changes_nothing(crew: Crew, name: str) -> None:
    crew.run(refusal, 2, name)


@pytest.mark.parametrize("placement", [Partial(), "sum", None, Shard])
def test_local_parameters_take_placements_of_values_only(placement: Any) -> None:
    with pytest.raises(TypeError, match=r"placements \{'scale': .*summed= instead"):
        LocalParameters({"scale": placement})


def test_wherever_a_block_was_interrupted_its_replaced_attributes_are_back() -> None:
    module = nn.Linear(2, 2)
    weight = module.weight

    def block() -> None:
        with replaced_attributes(module, {"weight": torch.zeros(2, 2)}):
            pass

    place = 1
    while is_interrupted_at(place, block):
        assert module.weight is weight, place
        place += 1
    assert place > 3
