"""Expert parallelism with tensor parallelism, FSDP2 and replicas, against one process."""

from __future__ import annotations

import math
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from expert_models import BOUND, WIDTH, Model, objective, tokens
from rounding import largest_error, training_error
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

import meshverse
from helpers.crew import Crew
from helpers.sleeping import sleep
from helpers.tiers import in_tiers
from helpers.worlds import fake_world
from meshverse.parallel import (
    FSDP2Config,
    FSDP2Manager,
    ParallelismSizes,
    Replicated,
    clip_grad_norm_,
    create_device_meshes,
    create_fsdp2_device_mesh,
    fsdp2_strategy_parallelize,
    get_flat_mesh,
    get_total_norm,
)

STEPS, SEQUENCES, LENGTH = 2, 8, 5
_ADAM_EPS = 1e-8
_EXACT = MixedPrecisionPolicy()
_PLAN = {
    "layers.*.up": ColwiseParallel(),
    "layers.*.down": RowwiseParallel(),
    **dict.fromkeys(("layers.*.norm", "layers.*.mlp"), Replicated()),
}


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def batch(step: int) -> Tensor:
    """Sequences of a step, shape (SEQUENCES, LENGTH, WIDTH)."""
    return tokens(SEQUENCES * LENGTH, seed=step).view(SEQUENCES, LENGTH, WIDTH)


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, share: slice, parts: int, max_norm: float
) -> tuple[list[float], list[float]]:
    """Losses on my share of each step's batch, and norms of all gradients."""
    losses, norms = [], []
    for step in range(STEPS):
        loss = objective(model(batch(step)[share])) * parts
        loss.backward()
        norms.append(clip_grad_norm_(model.parameters(), max_norm).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item() / parts)
    return losses, norms


def make_optimizer(model: nn.Module, kind: str) -> torch.optim.Optimizer:
    if kind == "adam":
        return torch.optim.AdamW(model.parameters(), lr=0.01, eps=_ADAM_EPS)
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def compare(
    sizes: dict[str, int], kind: str, max_norm: float, settings: dict[str, Any]
) -> dict[str, float]:
    """Return the largest relative errors after training, by what differs from one process."""
    mesh, moe_mesh = create_fsdp2_device_mesh(ParallelismSizes(**sizes))
    alone, model = Model().double(), Model().double()
    before = {name: each.detach().clone() for name, each in alone.named_parameters()}
    optimizer = make_optimizer(alone, kind)
    expected, norms = train(alone, optimizer, slice(None), 1, max_norm)
    plan = _PLAN if sizes.get("tp_size", 1) > 1 else None
    fsdp2_strategy_parallelize(
        model, mesh, moe_mesh=moe_mesh, mp_policy=_EXACT, tp_shard_plan=plan, **settings
    )
    data = get_flat_mesh(mesh, "dp_cp")
    rows = SEQUENCES // data.size()
    share = slice(data.get_local_rank() * rows, (data.get_local_rank() + 1) * rows)
    losses, seen_norms = train(model, make_optimizer(model, kind), share, data.size(), max_norm)
    total = torch.tensor(losses, dtype=torch.float64)
    dist.all_reduce(total, group=data.get_group())
    seen = {name: full(each) for name, each in model.named_parameters()}
    return {
        "losses": _relative(total, expected),
        "norms": _relative(seen_norms, norms),
        "parameters": training_error(seen, dict(alone.named_parameters()), before)[0],
    }


def _relative(seen: Any, expected: list[float]) -> float:
    one, other = (torch.as_tensor(each, dtype=torch.float64) for each in (seen, expected))
    return ((one - other).norm() / other.norm()).item()


MESHES: dict[str, tuple[int, dict[str, int]]] = {
    "ep 2": (2, {"ep_size": 2}),
    "ep 2 x 2 shards": (4, {"ep_size": 2}),
    "ep 2 x tp 2": (4, {"ep_size": 2, "tp_size": 2}),
    "ep 2 x tp 4": (4, {"ep_size": 2, "tp_size": 4}),
    "ep 2 x 2 replicas x 2 shards": (4, {"ep_size": 2, "dp_replicate_size": 2}),
    "ep 2 x cp 2": (4, {"ep_size": 2, "cp_size": 2}),
}


def check(everyone: list[dict[str, float]], kind: str) -> None:
    # A step rounds a weight, which is up to a thousand times as large as what the step adds to it.
    # Adam divides a gradient by its size and eps, so that errors of the smallest grow by 1 / eps.
    bound = BOUND * STEPS * (1 / _ADAM_EPS if kind == "adam" else 1e3)
    for errors in everyone:
        assert max(errors.values()) < bound, errors


_CASES = {f"{name}, {kind}": (name, kind) for name in MESHES for kind in ("sgd", "adam")}
_SHORT = ("ep 2 x tp 2, adam",)


@pytest.mark.long
@pytest.mark.parametrize("case", in_tiers(_CASES, _SHORT, [*_CASES][::2]))
def test_training_equals_one_process(crew: Crew, case: str) -> None:
    name, kind = _CASES[case]
    ranks, sizes = MESHES[name]
    check(crew.run(compare, ranks, sizes, kind, 0.5, {}), kind)


SETTINGS: dict[str, dict[str, Any]] = {
    "checkpointing": {"activation_checkpointing": True},
    "kept after forward": {"reshard_after_forward": False},
    "offload": {"cpu_offload": True},
    "prefetch": {"enable_fsdp2_prefetch": True},
}


@pytest.mark.parametrize("name", in_tiers(SETTINGS, short=("checkpointing", "offload"), long=[]))
@pytest.mark.long
def test_training_with_setting_equals_one_process(crew: Crew, name: str) -> None:
    sizes = {"ep_size": 2, "tp_size": 2}
    check(crew.run(compare, 4, sizes, "sgd", 0.5, SETTINGS[name]), "sgd")


def warned_of(sizes: dict[str, int]) -> list[str]:
    """Return FSDP2's warnings in a forward: of outputs that must not be changed in place."""
    mesh, moe_mesh = create_fsdp2_device_mesh(ParallelismSizes(**sizes))
    model = Model().double()
    plan = _PLAN if "tp_size" in sizes else None
    fsdp2_strategy_parallelize(model, mesh, moe_mesh=moe_mesh, mp_policy=_EXACT, tp_shard_plan=plan)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model(batch(0))
    return [str(each.message) for each in caught]


@pytest.mark.parametrize("sizes", [{"ep_size": 2}, {"ep_size": 2, "tp_size": 2}], ids=str)
def test_outputs_of_experts_may_be_changed_in_place(crew: Crew, sizes: dict[str, int]) -> None:
    for messages in crew.run(warned_of, 4, sizes):
        assert not [message for message in messages if "FSDPExperts" in message]


def norms(norm_type: float) -> tuple[float, float, float]:
    """The total norm, that of one process, and the largest error after clipping by it."""
    sizes = ParallelismSizes(ep_size=2, tp_size=2)
    mesh, moe_mesh = create_fsdp2_device_mesh(sizes)
    alone, model = Model().double(), Model().double()
    objective(alone(batch(0))).backward()
    expected = torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.1, norm_type)
    fsdp2_strategy_parallelize(
        model, mesh, moe_mesh=moe_mesh, mp_policy=_EXACT, tp_shard_plan=_PLAN
    )
    objective(model(batch(0))).backward()
    total = clip_grad_norm_(model.parameters(), 0.1, norm_type)
    seen = {name: full(each.grad) for name, each in model.named_parameters()}  # type: ignore[arg-type]
    wanted = {name: each.grad for name, each in alone.named_parameters()}
    return total.item(), expected.item(), largest_error(seen, wanted, floor=1e-2)[0]


@pytest.mark.parametrize("norm_type", in_tiers([1.0, 2.0, float("inf")], [2.0]))
def test_norms_over_several_meshes_equal_one_process(crew: Crew, norm_type: float) -> None:
    for total, expected, wrong in crew.run(norms, 4, norm_type):
        # A norm sums over all elements, of which there are some thousands.
        assert total == pytest.approx(expected, rel=100 * BOUND)
        assert wrong < 100 * BOUND


def test_norms_that_are_not_finite_are_refused_if_asked() -> None:
    gradients = [torch.tensor([1.0, float("nan")])]
    assert get_total_norm(gradients).isnan()
    with pytest.raises(RuntimeError, match=r"total norm of order 2\.0 of gradients is nan"):
        get_total_norm(gradients, error_if_nonfinite=True)
    assert get_total_norm([]) == 0


def norms_with_nan() -> list[bool]:
    """Whether norms are nan if a value of the second rank's is, and only then."""
    mesh = meshverse.init_device_mesh("cpu", (2,))
    values = torch.tensor([float("inf"), float("nan")]) if dist.get_rank() else torch.ones(2)
    norms = [
        get_total_norm([DTensor.from_local(own, mesh, [placement], run_check=False)], norm_type)
        for placement in (Shard(0), Partial())
        for own in (values, values[:1])
        for norm_type in (2.0, math.inf)
    ]
    return [bool(each.isnan()) for each in norms]


def test_a_nan_on_one_rank_is_in_the_norm_of_all(crew: Crew) -> None:
    for seen in crew.run(norms_with_nan, 2):
        assert seen == [True, True, False, False] * 2


def norm_of_one_row(norm_type: float) -> str:
    mesh = meshverse.init_device_mesh("cpu", (2,))
    row = distribute_tensor(torch.ones(1, 3), mesh, [Shard(0)])  # the second rank has none
    with pytest.raises(ValueError, match="norm_type") as wrong:
        get_total_norm([row], norm_type)
    return str(wrong.value)


@pytest.mark.parametrize("norm_type", [-float("inf"), -1.0, 0.0, float("nan")])
def test_a_norm_without_a_value_on_some_ranks_is_refused_by_all(
    crew: Crew, norm_type: float
) -> None:
    for said in crew.run(norm_of_one_row, 2, norm_type):
        assert f"norm_type={norm_type} must be a number above 0" in said


def restore(folder: str) -> float:
    """Return the largest relative error of a checkpoint of a model and its optimizer."""
    mesh, moe_mesh = create_fsdp2_device_mesh(ParallelismSizes(ep_size=2))
    alone, model = Model().double(), Model().double()
    fsdp2_strategy_parallelize(model, mesh, moe_mesh=moe_mesh, mp_policy=_EXACT)
    optimizers = [make_optimizer(each, "sgd") for each in (alone, model)]
    for each, optimizer in zip((alone, model), optimizers, strict=True):
        objective(each(batch(0))).backward()
        optimizer.step()
    moments = [
        {name: optimizer.state[each]["momentum_buffer"] for name, each in module.named_parameters()}
        for module, optimizer in zip((alone, model), optimizers, strict=True)
    ]
    saved = {"model": model.state_dict(), "moments": moments[1]}
    checkpoint.save(saved, checkpoint_id=folder)
    loaded = {
        "model": {name: torch.zeros_like(each) for name, each in alone.state_dict().items()},
        "moments": {name: torch.zeros_like(each) for name, each in moments[0].items()},
    }
    checkpoint.load(loaded, checkpoint_id=folder)
    wanted = {"model": alone.state_dict(), "moments": moments[0]}
    return max(largest_error(loaded[part], wanted[part], floor=1e-2)[0] for part in wanted)


@pytest.mark.long
def test_checkpoint_is_that_of_one_process(crew: Crew) -> None:
    with tempfile.TemporaryDirectory() as folder:
        assert max(crew.run(restore, 4, str(Path(folder) / "checkpoint"))) < BOUND


def train_with_sleeps(
    sizes: dict[str, int], compiles: bool, n_sleeps: int, folder: str
) -> list[list[Any]]:
    """Return losses and norms of a run that is never disturbed, and of one that sleeps."""

    def run(rest: Callable[[], object]) -> list[Any]:
        mesh, moe_mesh = create_fsdp2_device_mesh(ParallelismSizes(**sizes))
        model = Model().double()
        plan = _PLAN if sizes.get("tp_size", 1) > 1 else None
        fsdp2_strategy_parallelize(
            model, mesh, moe_mesh=moe_mesh, mp_policy=_EXACT, tp_shard_plan=plan
        )
        if compiles:
            for layer in model.layers:
                layer.compile(backend="aot_eager")
        data = get_flat_mesh(mesh, "dp_cp")
        rows = SEQUENCES // data.size()
        share = slice(data.get_local_rank() * rows, (data.get_local_rank() + 1) * rows)
        optimizer = make_optimizer(model, "adam")
        seen = [train(model, optimizer, share, data.size(), 0.5)]
        for _ in range(n_sleeps):
            rest(model, optimizer)
            seen.append(train(model, optimizer, share, data.size(), 0.5))
        return seen

    def rest(*holders: object) -> None:
        sleep(folder)
        assert meshverse.revive(*holders)

    return [run(lambda *_: None), run(rest)]


@pytest.mark.parametrize(
    ("name", "compiles", "n_sleeps"),
    [
        pytest.param("ep 2 x tp 2", False, 2, marks=pytest.mark.long),
        pytest.param("ep 2 x tp 2", True, 2, marks=pytest.mark.sweep),
        pytest.param("ep 2 x 2 replicas x 2 shards", False, 20, marks=pytest.mark.sweep),
        pytest.param("ep 2 x tp 2", True, 20, marks=pytest.mark.sweep),
    ],
)
@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")
def test_training_goes_on_after_all_groups_have_ended(
    crew: Crew, tmp_path: Path, name: str, compiles: bool, n_sleeps: int
) -> None:
    ranks, sizes = MESHES[name]
    arguments = (sizes, compiles, n_sleeps, str(tmp_path))
    for undisturbed, slept in crew.run(train_with_sleeps, ranks, *arguments):
        assert slept == undisturbed
        assert len({str(each) for each in slept}) == n_sleeps + 1


class Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4)])


class Listed(nn.Module):
    """Experts as older models keep them: each a module."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Dense(), "ep=2: Dense has no experts to distribute"),
        (Listed(), "experts of Listed is a list of modules, as in transformers 4"),
    ],
)
def test_a_model_without_experts_to_hand_out_is_refused(model: nn.Module, message: str) -> None:
    before = dict(model.named_parameters())
    with fake_world(8):
        config = FSDP2Config()
        meshes = create_device_meshes(config, ParallelismSizes(ep_size=2))
        with pytest.raises(ValueError, match=message):
            FSDP2Manager(config, *meshes).parallelize(model)
    assert before == dict(model.named_parameters())


def test_a_number_of_experts_that_does_not_divide_is_refused() -> None:
    model = Model()
    before = dict(model.named_parameters())
    with fake_world(8):
        mesh, moe_mesh = create_fsdp2_device_mesh(ParallelismSizes(ep_size=4, tp_size=2))
        with pytest.raises(ValueError, match=r"mlp\.experts: its 6 experts .* 4 ranks"):
            fsdp2_strategy_parallelize(model, mesh, moe_mesh=moe_mesh, tp_shard_plan=_PLAN)
    assert before == dict(model.named_parameters())


def test_a_mesh_of_experts_of_other_ranks_or_axes_is_refused() -> None:
    with fake_world(8):
        mesh, moe_mesh = create_fsdp2_device_mesh(ParallelismSizes(ep_size=2))
        assert moe_mesh is not None
        for other in (moe_mesh["ep"], mesh):
            with pytest.raises(
                ValueError, match=r"must have \('ep_shard', 'ep'\) over 8:1, one pipeline stage"
            ):
                fsdp2_strategy_parallelize(Model(), mesh, moe_mesh=other)
