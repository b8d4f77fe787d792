"""Every way to ask for expert parallelism: it is applied, as on one process, or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from expert_models import WIDTH, Model, objective, tokens
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from helpers.crew import Crew
from helpers.tiers import in_tiers
from helpers.worlds import fake_world, groups_created
from meshverse import DeviceMesh, init_device_mesh
from meshverse.parallel import (
    FSDP2Config,
    FSDP2Manager,
    ParallelismSizes,
    Replicated,
    clip_grad_norm_,
    create_device_meshes,
    create_fsdp2_device_mesh,
    create_megatron_fsdp_device_mesh,
    create_moe_mesh,
    fsdp2_strategy_parallelize,
    get_flat_mesh,
    megatron_fsdp_strategy_parallelize,
)
from meshverse.parallel.models.modules import StageOf, mark_as_stage
from meshverse.parallel.strategies import fsdp2

_EXACT = MixedPrecisionPolicy()
_CONFIG = FSDP2Config(mp_policy=_EXACT)
_SEQUENCES, _LENGTH = 24, 2
_NO_DEGREES = ["2", 2.0, True, -1, 0]


def _root(**sizes: int) -> DeviceMesh:
    return create_fsdp2_device_mesh(ParallelismSizes(**sizes))[0]


def _by_function(model: nn.Module, mesh: DeviceMesh, **experts: Any) -> DeviceMesh:
    fsdp2_strategy_parallelize(model, mesh, mp_policy=_EXACT, **experts)
    return mesh


def _by_manager(model: nn.Module, mesh: DeviceMesh, *args: Any, **experts: Any) -> DeviceMesh:
    assert FSDP2Manager(_CONFIG, mesh, *args, **experts).parallelize(model) is model
    return mesh


def _all_meshes(model: nn.Module, **sizes: int) -> DeviceMesh:
    return _by_manager(model, *create_device_meshes(_CONFIG, ParallelismSizes(**sizes)))


def _stage(mesh: DeviceMesh) -> DeviceMesh:
    return mesh["dp_replicate", "dp_shard", "cp", "tp"]


ENTRANCES: dict[str, Callable[[nn.Module], DeviceMesh]] = {
    "all meshes, manager": lambda model: _all_meshes(model, ep_size=2),
    "root mesh made for it, function": lambda model: _by_function(model, _root(ep_size=2)),
    "root mesh made for it, manager": lambda model: _by_manager(model, _root(ep_size=2)),
    "degree, function": lambda model: _by_function(model, _root(), ep_size=2),
    "degree, manager": lambda model: _by_manager(model, _root(), ep_size=2),
    "a stage's part, function": lambda model: _by_function(model, _stage(_root(ep_size=2))),
}


def _equals_one_process(entrance: str) -> None:
    alone, model = Model().double(), Model().double()
    mesh = ENTRANCES[entrance](model)
    down: Any = model.layers[0].mlp.experts.down_proj
    assert down.device_mesh.mesh_dim_names[-1] == "ep"
    assert down.device_mesh["ep"].size() == 2
    _compare(alone, model, get_flat_mesh(mesh, "dp_cp"))


def _compare(alone: nn.Module, model: nn.Module, data: DeviceMesh) -> None:
    """Outputs, gradients, and these once clipped, of a share of the batch on each data rank."""
    batch = tokens(_SEQUENCES * _LENGTH).view(_SEQUENCES, _LENGTH, WIDTH)
    rows = _SEQUENCES // data.size()
    share = slice(data.get_local_rank() * rows, (data.get_local_rank() + 1) * rows)
    expected, output = alone(batch), model(batch[share])
    torch.testing.assert_close(output, expected[share])
    objective(expected).backward()
    (objective(output) * data.size()).backward()
    _compare_gradients(model, alone)
    norm = torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.1)
    torch.testing.assert_close(clip_grad_norm_(model.parameters(), 0.1), norm)
    _compare_gradients(model, alone)


def _compare_gradients(model: nn.Module, alone: nn.Module) -> None:
    for seen, wanted in zip(model.parameters(), alone.parameters(), strict=True):
        assert isinstance(seen.grad, DTensor)
        assert wanted.grad is not None
        torch.testing.assert_close(seen.grad.full_tensor(), wanted.grad)


@pytest.mark.parametrize("entrance", in_tiers(ENTRANCES, list(ENTRANCES)[:1]))
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.long)])
def test_every_entrance_equals_one_process(crew: Crew, ranks: int, entrance: str) -> None:
    crew.run(_equals_one_process, ranks, entrance)


# --- replicas ------------------------------------------------------------------------------------

# Number of ranks, degrees, and the axes of the experts' parameters with their sizes.
REPLICAS: dict[str, tuple[int, dict[str, int], dict[str, int]]] = {
    "shards in each": (
        8,
        {"ep_size": 2, "dp_replicate_size": 2},
        {"dp_replicate": 2, "ep_shard": 2, "ep": 2},
    ),
    "all experts once in each": (
        8,
        {"ep_size": 2, "dp_replicate_size": 4},
        {"dp_replicate": 4, "ep_shard": 1, "ep": 2},
    ),
    "with tensor parallelism": (
        8,
        {"ep_size": 2, "dp_replicate_size": 2, "tp_size": 2},
        {"dp_replicate": 2, "ep_shard": 2, "ep": 2},
    ),
    "experts over several": (
        6,
        {"ep_size": 2, "dp_replicate_size": 2},
        {"ep_shard": 3, "ep": 2},
    ),
}


def _replicated(sizes: dict[str, int]) -> dict[str, int]:
    alone, model = Model().double(), Model().double()
    mesh = _root(**sizes)
    plan = {
        "layers.*.up": ColwiseParallel(),
        "layers.*.down": RowwiseParallel(),
        **dict.fromkeys(("layers.*.norm", "layers.*.mlp"), Replicated()),
    }
    _by_function(model, mesh, tp_shard_plan=plan)
    down: Any = model.layers[0].mlp.experts.down_proj
    _compare(alone, model, get_flat_mesh(mesh, "dp_cp"))
    axes = down.device_mesh.mesh_dim_names
    return dict(zip(axes, down.device_mesh.shape, strict=True))


@pytest.mark.long
@pytest.mark.parametrize("name", in_tiers(REPLICAS, short=("experts over several",)))
def test_experts_have_the_replicas_of_the_rest(crew: Crew, name: str) -> None:
    ranks, sizes, axes = REPLICAS[name]
    assert crew.run(_replicated, ranks, sizes) == [axes] * ranks


# --- one mesh, and what does not fit -------------------------------------------------------------


def test_the_mesh_of_the_experts_is_the_one_that_was_made() -> None:
    with fake_world(8):
        mesh, moe_mesh = create_device_meshes(_CONFIG, ParallelismSizes(ep_size=4))
        with groups_created(0):
            managers = [
                FSDP2Manager(_CONFIG, mesh),
                FSDP2Manager(_CONFIG, mesh, moe_mesh),
                FSDP2Manager(_CONFIG, mesh, ep_size=4),
                FSDP2Manager(_CONFIG, mesh, moe_mesh, ep_size=4),
            ]
        assert all(manager.moe_mesh is moe_mesh for manager in managers)


def test_a_model_without_experts_is_trained_on_the_same_meshes_if_said() -> None:
    with fake_world(8):
        mesh = _root(ep_size=2)
        assert FSDP2Manager(_CONFIG, mesh, ep_size=1).moe_mesh is None
        model = nn.Sequential(nn.Linear(8, 8))
        before = dict(model.named_parameters())
        with pytest.raises(ValueError, match="ep=2: Sequential has no experts"):
            fsdp2_strategy_parallelize(model, mesh)
        assert dict(model.named_parameters()) == before
        fsdp2_strategy_parallelize(model, mesh, ep_size=1)
        model = FSDP2Manager(_CONFIG, mesh, ep_size=1).parallelize(nn.Sequential(nn.Linear(8, 8)))
        assert isinstance(model[0].weight, DTensor)


@pytest.mark.parametrize("wrong", _NO_DEGREES)
def test_what_is_no_degree_is_refused(wrong: Any) -> None:
    message = rf"ep_size={wrong!r} of type \w+ must be an int above 0"
    with fake_world(8):
        mesh = _root()
        with pytest.raises(ValueError, match=message):
            FSDP2Manager(_CONFIG, mesh, ep_size=wrong)
        with pytest.raises(ValueError, match=message):
            FSDP2Manager(_CONFIG, None, ep_size=wrong)
        model = Model()
        before = dict(model.named_parameters())
        with pytest.raises(ValueError, match=message):
            fsdp2_strategy_parallelize(model, mesh, ep_size=wrong)
        assert dict(model.named_parameters()) == before


def test_degrees_that_do_not_fit_are_refused() -> None:
    with fake_world(8):
        mesh, moe_mesh = create_fsdp2_device_mesh(ParallelismSizes(ep_size=2))
        with pytest.raises(ValueError, match="ep_size=4, but the experts' mesh has ep=2"):
            FSDP2Manager(_CONFIG, mesh, moe_mesh, ep_size=4)
        with pytest.raises(ValueError, match="ep_size=1, but the experts' mesh has ep=2"):
            fsdp2_strategy_parallelize(Model(), mesh, moe_mesh=moe_mesh, ep_size=1)
        with pytest.raises(ValueError, match=r"ep_size=3 must .* divides the 8 ranks"):
            FSDP2Manager(_CONFIG, mesh, ep_size=3)
        with pytest.raises(ValueError, match=r"ep_size=2 .*need a mesh, but device_mesh=None"):
            FSDP2Manager(_CONFIG, None, ep_size=2)
        with pytest.raises(
            ValueError, match=r"over the layout 8:1: it must have .* over 1:0, one pipeline stage"
        ):
            FSDP2Manager(_CONFIG, mesh["tp"], moe_mesh)


def test_a_stage_has_experts_of_its_own() -> None:
    with fake_world(8, 5):
        mesh = _root(pp_size=2, ep_size=2)
        stage = mesh["dp_replicate", "dp_shard", "cp", "tp"]
        manager = FSDP2Manager(_CONFIG, stage)
        assert manager.moe_mesh is create_moe_mesh(mesh, ep_size=2)
        assert manager.moe_mesh.mesh.tolist() == [[4, 5], [6, 7]]


def test_axes_over_which_nothing_is_split_are_refused() -> None:
    with fake_world(8):
        mesh = _root(cp_size=2)
        model = Model()
        before = dict(model.named_parameters())
        with pytest.raises(ValueError, match=r"has 8 ranks, .* over 4 of them: .*'dp_shard'"):
            fsdp2_strategy_parallelize(model, mesh, dp_shard_cp_mesh_name="dp_shard")
        assert dict(model.named_parameters()) == before


# --- Megatron-FSDP -------------------------------------------------------------------------------


@pytest.mark.parametrize("degree", ["pp_size", "dp_replicate_size", "ep_size"])
def test_megatron_fsdp_makes_no_mesh_with_degrees_it_has_not(degree: str) -> None:
    message = f"Megatron-FSDP does not support {degree}=2"
    with fake_world(8), groups_created(0), pytest.raises(ValueError, match=message):
        create_megatron_fsdp_device_mesh(ParallelismSizes(**{degree: 2}))


@pytest.mark.parametrize(
    ("sizes", "shard_dim", "message"),
    [
        ({"pp_size": 2}, "dp", "Megatron-FSDP does not support pp=2"),
        ({"dp_replicate_size": 2}, "dp", "Megatron-FSDP does not support dp_replicate=2"),
        ({"ep_size": 2}, "dp", "Megatron-FSDP does not support ep_size=2"),
        ({"cp_size": 2}, "dp", r"has 8 ranks, .* over 4 of them: \('dp',\) of 4, \('tp',\) of 1"),
    ],
)
def test_megatron_fsdp_refuses_what_it_would_not_apply(
    sizes: dict[str, int], shard_dim: str, message: str
) -> None:
    model = Model()
    before = dict(model.named_parameters())
    with fake_world(8):
        mesh = _root(**sizes)
        with pytest.raises(ValueError, match=message):
            megatron_fsdp_strategy_parallelize(model, mesh, dp_shard_dim=shard_dim)
    assert dict(model.named_parameters()) == before


# --- with pipeline stages ------------------------------------------------------------------------


def _two_stages(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """A model that says it is this rank's stage of two."""
    mark_as_stage(model, StageOf(mesh.get_local_rank("pp"), 2, range(2), model_has_experts=True))
    return model


@pytest.mark.parametrize("rank", in_tiers([0, 7], [7]))
@pytest.mark.parametrize("how", in_tiers(["given", "asked when made", "degree"], ["given"]))
@pytest.mark.parametrize("whole", [True, False], ids=["all stages' mesh", "one stage's mesh"])
@pytest.mark.parametrize("entrance", [_by_function, _by_manager])
def test_a_stage_has_its_experts_handed_out(
    rank: int, how: str, whole: bool, entrance: Callable[..., DeviceMesh]
) -> None:
    with fake_world(8, rank):
        asked = 1 if how == "degree" else 2
        mesh, experts = create_fsdp2_device_mesh(ParallelismSizes(pp_size=2, ep_size=asked))
        model = _two_stages(Model(), mesh)
        given = {"given": {"moe_mesh": experts}, "degree": {"ep_size": 2}}.get(how, {})
        entrance(model, mesh if whole else _stage(mesh), **given)
        down: Any = model.layers[0].mlp.experts.down_proj
        assert down.device_mesh["ep"].size() == 2
        ranks = set(down.device_mesh.mesh.flatten().tolist())
        assert ranks <= set(range(4) if rank < 4 else range(4, 8))


def test_an_experts_mesh_across_stages_is_refused() -> None:
    with fake_world(8, 0):
        mesh = _root(pp_size=2, ep_size=2)
        across = init_device_mesh(
            "cpu", (2, 2, 2), mesh_dim_names=("ep_shard", "ep", "pp"), universe=mesh.universe
        )["ep_shard", "ep"]
        model = _two_stages(Model(), mesh)
        with pytest.raises(ValueError, match=r"has the axes .* must have .* one pipeline stage of"):
            fsdp2_strategy_parallelize(model, mesh, moe_mesh=across)
        with pytest.raises(ValueError, match=r"has the axes .* must have .* one pipeline stage of"):
            FSDP2Manager(_CONFIG, mesh, across)


def test_a_stage_without_experts_is_no_error_if_its_model_has_some() -> None:
    with fake_world(8, 0):
        mesh = _root(pp_size=2, ep_size=2)
        model = nn.Sequential(nn.Linear(8, 8))
        with pytest.raises(ValueError, match="has no experts to distribute"):
            fsdp2_strategy_parallelize(model, _stage(mesh))
        fsdp2_strategy_parallelize(_two_stages(model, mesh), mesh)
        assert isinstance(model[0].weight, DTensor)


@pytest.mark.parametrize("name", ["dp_cp", "dp_shard", "tp"])
def test_the_name_for_the_loss_does_not_change_gradients(name: str, monkeypatch) -> None:
    parts = []
    shard = fsdp2.shard_experts

    def note(*args: Any, **settings: Any) -> None:
        parts.append(settings["parts"])
        shard(*args, **settings)

    monkeypatch.setattr(fsdp2, "shard_experts", note)
    with fake_world(8, 0):
        mesh = _root(dp_replicate_size=2, ep_size=2)
        fsdp2_strategy_parallelize(Model(), mesh, dp_cp_mesh_name=name)
    assert parts == [8]


@pytest.mark.parametrize("rank", [0, 7])
def test_a_stage_is_refused_sequence_parallelism(rank: int) -> None:
    with fake_world(8, rank):
        mesh = _root(pp_size=2, tp_size=2)
        model = _two_stages(Model(), mesh)
        before = dict(model.named_parameters())
        with pytest.raises(ValueError, match=r"sequence_parallel=True for stage \d of 2 of Model"):
            fsdp2_strategy_parallelize(model, mesh, sequence_parallel=True)
        assert dict(model.named_parameters()) == before


def test_a_mesh_created_with_two_degrees_of_experts_needs_one_of_them() -> None:
    with fake_world(8):
        mesh, moe_mesh = create_fsdp2_device_mesh(ParallelismSizes(ep_size=2))
        where = {"universe": mesh.universe}
        assert create_fsdp2_device_mesh(ParallelismSizes(ep_size=2), **where)[1] is moe_mesh
        assert FSDP2Manager(_CONFIG, mesh).moe_mesh is moe_mesh
        assert create_fsdp2_device_mesh(ParallelismSizes(), **where) == (mesh, None)
        for part in (mesh, _stage(mesh)):
            message = r"created several times in its universe, with ep_size=1 and 2\. Pass"
            with pytest.raises(ValueError, match=message):
                FSDP2Manager(_CONFIG, part)
            assert FSDP2Manager(_CONFIG, part, moe_mesh).moe_mesh is moe_mesh
            assert FSDP2Manager(_CONFIG, part, ep_size=1).moe_mesh is None
