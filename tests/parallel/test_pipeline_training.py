"""Pipelines with tensor parallelism, FSDP2 and replicas in their stages, against one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pipelines import EXACT, loss_of
from rounding import training_error
from tiny_models import (
    BATCH,
    BOUND,
    STEPS,
    batch,
    full,
    full_weights,
    make_model,
    make_optimizer,
)
from torch import Tensor, nn
from torch.distributed.tensor.parallel import loss_parallel

import meshverse
from helpers.crew import Crew
from helpers.sleeping import sleep
from helpers.tiers import in_tiers
from meshverse.parallel import (
    ParallelismSizes,
    create_fsdp2_device_mesh,
    fsdp2_strategy_parallelize,
    get_flat_mesh,
    pipeline_schedule,
    pipeline_stages,
)

pytest.importorskip("transformers", reason="transformers is not installed")

_MAX_NORM = 0.5
_TIED = {"tie_word_embeddings": True}

# By name: ranks, degrees, and what else is said to `compare`.
CASES: dict[str, tuple[int, dict[str, int], dict[str, Any]]] = {
    "pp 4": (4, {"pp_size": 4}, {}),
    "pp 4, tied": (4, {"pp_size": 4}, _TIED),
    "pp 2 x dp 2": (4, {"pp_size": 2}, {"accumulate": 2}),
    "pp 2 x dp 2, tied": (4, {"pp_size": 2}, {"accumulate": 2, **_TIED}),
    "pp 2 x tp 2": (4, {"pp_size": 2, "tp_size": 2}, {}),
    "pp 2 of 2 x tp 2, tied": (4, {"pp_size": 2, "tp_size": 2}, {"virtual": 2, **_TIED}),
    "pp 2 of 2 x dp 2": (4, {"pp_size": 2}, {"virtual": 2, "accumulate": 2}),
    "pp 2 x tp 2 x dp 2, tied": (8, {"pp_size": 2, "tp_size": 2}, {"accumulate": 2, **_TIED}),
    "pp 2 of 2 x tp 2 x dp 2": (8, {"pp_size": 2, "tp_size": 2}, {"virtual": 2}),
    "pp 2 x 2 replicas x 2 shards": (8, {"pp_size": 2, "dp_replicate_size": 2}, {}),
    "GPipe": (4, {"pp_size": 2, "tp_size": 2}, {"schedule": "GPipe"}),
    "LoopedBFS": (4, {"pp_size": 2, "tp_size": 2}, {"schedule": "LoopedBFS", "virtual": 2}),
    "checkpointing": (4, {"pp_size": 2}, {"settings": {"activation_checkpointing": True}}),
    "kept after forward": (4, {"pp_size": 2}, {"settings": {"reshard_after_forward": False}}),
    # Its frequencies are a buffer, and the length that they are for is an attribute.
    "frequencies by length": (
        4,
        {"pp_size": 2},
        {
            "max_position_embeddings": 4,
            "rope_parameters": {"rope_type": "dynamic", "factor": 8.0, "rope_theta": 10000.0},
        },
    ),
    "sliding windows, 2 and 3 layers": (
        4,
        {"pp_size": 2, "tp_size": 2},
        {"family": "gemma2", "num_hidden_layers": 5, "layers_per_stage": (2, 3)},
    ),
}


def train_alone(model: nn.Module, batches: list[list[Tensor]]) -> dict[str, list[float]]:
    """Train on lists of batches, one list a step, whose gradients add up."""
    optimizer, losses, norms = make_optimizer(model), [], []
    for step in batches:
        for tokens in step:
            loss = loss_of(model(input_ids=tokens, use_cache=False).logits, tokens)
            loss.backward()
            losses.append(loss.item())
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), _MAX_NORM).item())
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": losses, "norms": norms}


def train_in_stages(
    stages: list[Any],
    mesh: Any,
    batches: list[list[Tensor]],
    microbatches: int,
    schedule: str | None,
) -> dict[str, list[float]]:
    """As `train_alone`, of this rank's stages on its share of each batch."""
    pipeline = pipeline_schedule(stages, mesh["pp"], loss_of, microbatches, schedule=schedule)
    parameters = [each for stage in stages for each in stage.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.2, momentum=0.9)
    data, losses, norms = get_flat_mesh(mesh, "dp_cp"), [], []
    for step in batches:
        for tokens in step:
            share = tokens.chunk(data.size())[data.get_local_rank()]
            with loss_parallel():
                given = pipeline.step(share, target=share)
            total = torch.stack(given).mean() if given else torch.zeros(())
            total = full(total).clone()
            dist.all_reduce(total, group=mesh.get_group("pp"))
            dist.all_reduce(total, group=data.get_group())
            losses.append(total.item() / data.size())
        norms.append(pipeline.clip_grad_norm_(_MAX_NORM).item())
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": losses, "norms": norms}


def compare(
    sizes: dict[str, int],
    virtual: int = 1,
    schedule: str | None = None,
    accumulate: int = 1,
    settings: dict[str, Any] | None = None,
    layers_per_stage: tuple[int, ...] | None = None,
    **fields: Any,
) -> dict[str, float]:
    """Return the largest relative errors of a pipeline, by what differs from one process."""
    fields = {"num_hidden_layers": 4, "tie_word_embeddings": False, **fields}
    mesh, moe_mesh = create_fsdp2_device_mesh(ParallelismSizes(**sizes))
    alone, model = make_model(**fields).double(), make_model(**fields).double()
    before = full_weights(alone)
    batches = [[batch(step * 10 + each) for each in range(accumulate)] for step in range(STEPS)]
    expected = train_alone(alone, batches)
    stages = pipeline_stages(model, mesh["pp"], virtual=virtual, layers_per_stage=layers_per_stage)
    for stage in stages:
        fsdp2_strategy_parallelize(
            stage, mesh, moe_mesh=moe_mesh, mp_policy=EXACT, **(settings or {})
        )
    share = BATCH // get_flat_mesh(mesh, "dp_cp").size()
    seen = train_in_stages(stages, mesh, batches, min(4, share), schedule)
    wanted = dict(alone.named_parameters(remove_duplicate=False))
    for name in wanted.keys() - before.keys():  # the head, if it is tied
        before[name] = before["model.embed_tokens.weight"]
    trained = {name: full(each) for stage in stages for name, each in stage.named_parameters()}
    assert len(trained) > 8
    error, _ = training_error(trained, {name: wanted[name] for name in trained}, before)
    return {"weights": error} | {
        name: max(abs(a / b - 1) for a, b in zip(seen[name], expected[name], strict=True))
        for name in seen
    }


def compare_case(sizes: dict[str, int], keywords: dict[str, Any]) -> dict[str, float]:
    return compare(sizes, **keywords)


# One stage a rank and several, tied or not, with data and with tensor parallelism.
_SHORT = ("pp 2 of 2 x tp 2, tied",)


@pytest.mark.parametrize("name", in_tiers(CASES, _SHORT, [*CASES][::3]))
def test_a_pipeline_trains_as_one_process_does(crew: Crew, name: str) -> None:
    ranks, sizes, keywords = CASES[name]
    for errors in crew.run(compare_case, ranks, sizes, keywords):
        assert max(errors.values()) < BOUND, errors


# --- process groups that have ended ---------------------------------------------------------------


def _with_sleeps(folder: str, n_sleeps: int, virtual: int) -> list[Any]:
    sizes = ParallelismSizes(pp_size=2)
    mesh, _ = create_fsdp2_device_mesh(sizes)
    model = make_model(num_hidden_layers=4, tie_word_embeddings=True)
    stages = pipeline_stages(model, mesh["pp"], virtual=virtual)
    for stage in stages:
        fsdp2_strategy_parallelize(stage, mesh, mp_policy=EXACT)
        stage.compile(backend="aot_eager")
    schedule = pipeline_schedule(stages, mesh["pp"], loss_of, 2)
    optimizer = make_optimizer(nn.ModuleList(stages))
    data = get_flat_mesh(mesh, "dp_cp")
    rows = BATCH // data.size()
    own = slice(data.get_local_rank() * rows, (data.get_local_rank() + 1) * rows)
    seen: list[Any] = []
    for step in range(4):
        if step and n_sleeps:
            sleep(folder)
            assert meshverse.revive(schedule, optimizer)
        tokens = batch(step)[own]
        losses = schedule.step(tokens, target=tokens)
        seen.append([loss.item() for loss in losses])
        seen.append(schedule.clip_grad_norm_(_MAX_NORM).item())
        optimizer.step()
        optimizer.zero_grad()
        seen.append([loss.item() for loss in schedule.eval(tokens, target=tokens)])
    return seen


def _undisturbed_and_slept(folder: str, virtual: int) -> list[list[Any]]:
    return [_with_sleeps(folder, n_sleeps, virtual) for n_sleeps in (0, 3)]


@pytest.mark.parametrize("virtual", [1, 2])
@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_a_compiled_pipeline_goes_on_after_all_groups_have_ended(
    crew: Crew, tmp_path: Path, virtual: int
) -> None:
    arguments = (str(tmp_path), virtual)
    for undisturbed, slept in crew.run(_undisturbed_and_slept, 4, *arguments):
        assert slept == undisturbed
        assert len({str(each) for each in slept}) > 4
