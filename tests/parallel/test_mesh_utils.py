"""Building a trainer's meshes: shapes, inferred degrees, refusals, and what is made for them."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist

from helpers.worlds import fake_world, group_names, groups_created, in_worlds, live_groups
from meshverse import DeviceMesh
from meshverse.parallel import (
    DDPConfig,
    FSDP2Config,
    MegatronFSDPConfig,
    MeshAxisName,
    MeshSpec,
    ParallelismSizes,
    create_device_meshes,
    create_fsdp2_device_mesh,
    create_megatron_fsdp_device_mesh,
    create_moe_mesh,
    get_flat_mesh,
    get_fsdp_dp_mesh,
    get_submesh,
    register_flattened_axes,
    unflatten_compat,
    validate_mesh_spec,
)

_FULL = ParallelismSizes(pp_size=4, dp_replicate_size=2, tp_size=8, cp_size=2, ep_size=64)
_AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
_FLATTENED = {
    "dp": ("dp_replicate", "dp_shard"),
    "dp_shard_cp": ("dp_shard", "cp"),
    "dp_cp": ("dp_replicate", "dp_shard", "cp"),
}


def _ranks_by_axes(shape: tuple[int, ...], kept: tuple[str, ...], rank: int) -> list[int]:
    """The ranks that differ from one in some axes only: cut out of a tensor of all ranks."""
    ranks = torch.arange(math.prod(shape)).reshape(shape)
    place = torch.nonzero(ranks == rank)[0].tolist()
    index = tuple(slice(None) if a in kept else i for a, i in zip(_AXES, place, strict=True))
    return ranks[index].flatten().tolist()


@contextlib.contextmanager
def _nothing_created(mesh: DeviceMesh | None = None) -> Iterator[None]:
    groups = group_names()
    explained = None if mesh is None else mesh.universe.explain().to_dict()
    yield
    assert group_names() == groups
    assert explained == (None if mesh is None else mesh.universe.explain().to_dict())


# --- names and degrees ---------------------------------------------------------------------------


def test_axis_names_are_their_strings() -> None:
    assert {name.value for name in MeshAxisName} == {
        *("pp", "dp", "dp_replicate", "dp_shard", "dp_shard_cp", "dp_cp", "cp", "tp"),
        *("ep", "ep_shard"),
    }
    for name in MeshAxisName:
        assert name == name.value
        assert hash(name) == hash(name.value)
        assert f"{name}" == str(name) == name.value


def test_sizes_are_frozen_and_by_keyword() -> None:
    sizes = ParallelismSizes()
    assert (sizes.dp_size, sizes.dp_replicate_size) == (None, None)
    assert (sizes.tp_size, sizes.pp_size, sizes.cp_size, sizes.ep_size) == (1, 1, 1, 1)
    with pytest.raises(AttributeError):
        sizes.tp_size = 2  # type: ignore[misc]
    with pytest.raises(TypeError):
        ParallelismSizes(2)  # type: ignore[misc]


@pytest.mark.parametrize("inferred", [None, -1])
def test_unset_degrees(world, inferred) -> None:
    sizes = ParallelismSizes(
        dp_size=inferred, dp_replicate_size=None, tp_size=None, pp_size=None, cp_size=None
    )
    mesh, moe_mesh = create_device_meshes(FSDP2Config(), sizes)
    assert mesh.shape == (1, 1, 8, 1, 1)
    assert moe_mesh is None


@pytest.mark.parametrize("wrong", [0, -2, "2", 2.0, True, -1])
@pytest.mark.parametrize(
    "name", ["dp_size", "dp_replicate_size", "tp_size", "pp_size", "cp_size", "ep_size"]
)
def test_what_is_no_degree_is_refused(name, wrong) -> None:
    if (name, wrong) == ("dp_size", -1):
        pytest.skip("to be inferred")
    with pytest.raises(
        ValueError, match=rf"{name}={wrong!r} of type \w+ is no degree: give an int"
    ):
        ParallelismSizes(**{name: wrong})


@pytest.mark.parametrize("config", [FSDP2Config(), MegatronFSDPConfig()])
def test_without_a_process_group_a_world_size_is_needed(config) -> None:
    with pytest.raises(ValueError, match="world_size=None, and there is no process group"):
        create_device_meshes(config, ParallelismSizes())


# --- FSDP2's meshes ------------------------------------------------------------------------------


@in_worlds((32, 0), (32, 21))
def test_every_axis_has_its_ranks(world) -> None:
    sizes = ParallelismSizes(pp_size=2, dp_replicate_size=2, cp_size=2, tp_size=2, ep_size=4)
    mesh, moe_mesh = create_device_meshes(FSDP2Config(), sizes, world_size=32)
    assert mesh is not None
    assert moe_mesh is not None
    shape = (2, 2, 2, 2, 2)
    assert (mesh.mesh_dim_names, mesh.shape) == (_AXES, shape)
    for name, sources in {**{axis: (axis,) for axis in _AXES}, **_FLATTENED}.items():
        flat = get_flat_mesh(mesh, name)
        assert flat.mesh_dim_names == (name,)
        assert flat.mesh.tolist() == _ranks_by_axes(shape, sources, world.rank)
        assert dist.get_process_group_ranks(flat.get_group()) == flat.mesh.tolist()
    stage = _ranks_by_axes(shape, _AXES[1:], world.rank)
    assert moe_mesh.mesh_dim_names == ("ep_shard", "ep")
    assert moe_mesh.mesh.tolist() == torch.tensor(stage).reshape(4, 4).tolist()


@in_worlds((10_240, 0), (10_240, 777), (10_240, 10_239))
def test_at_scale_each_distinct_group_is_made_once(world) -> None:
    with groups_created(10):  # 5 axes, 3 flattened ones, ep_shard and ep: all distinct
        mesh, moe_mesh = create_device_meshes(FSDP2Config(), _FULL, world_size=10_240)
    assert mesh is not None
    assert moe_mesh is not None
    explained = mesh.universe.explain()
    assert explained.created == len({group.ranks for group in explained.groups}) == 10
    groups = live_groups()
    assert len(groups) == len(set(groups.values())) == 11  # with the default group
    with groups_created(0):
        hybrid = get_fsdp_dp_mesh(mesh)
        assert get_fsdp_dp_mesh(mesh) is hybrid
        assert get_submesh(mesh, ("dp_replicate", "dp_shard_cp")) is hybrid
        assert get_submesh(moe_mesh, "ep") is moe_mesh["ep"]
    assert mesh.universe.explain().created == 10
    assert moe_mesh.universe is mesh.universe


def test_axes_of_size_one_share_their_group(world) -> None:
    with groups_created(1):  # of size 1; dp_shard and what it is flattened into are the world
        mesh, _ = create_fsdp2_device_mesh(ParallelismSizes(), world_size=8)
    assert mesh.shape == (1, 1, 8, 1, 1)
    assert get_flat_mesh(mesh, "dp_cp").get_group() is dist.group.WORLD


_DEGREES = [  # of 16 ranks: (pp, replicas, cp, tp), with more than one shard where replicated
    (pp, replicas, cp, tp)
    for pp, replicas, cp, tp in itertools.product((1, 2), repeat=4)
    if replicas == 1 or replicas < 16 // (pp * cp * tp)
]


@pytest.mark.parametrize("degrees", _DEGREES)
@in_worlds((16, 5))
def test_all_combinations_build_and_share_one_root(world, degrees) -> None:
    pp, replicas, cp, tp = degrees
    sizes = ParallelismSizes(
        pp_size=pp, dp_replicate_size=replicas, cp_size=cp, tp_size=tp, ep_size=2
    )
    mesh, moe_mesh = create_fsdp2_device_mesh(sizes, world_size=16)
    assert moe_mesh is not None
    data = get_fsdp_dp_mesh(mesh)
    sliced = (data, mesh["tp"], moe_mesh, moe_mesh["ep"], get_flat_mesh(mesh, "dp_cp"))
    assert {id(each._get_root_mesh()) for each in sliced} == {id(mesh)}
    assert DeviceMesh.concatenate([data, mesh["tp"]]).size() == data.size() * tp


def test_dp_is_inferred(world) -> None:
    mesh, _ = create_fsdp2_device_mesh(ParallelismSizes(tp_size=2, cp_size=2), world_size=8)
    assert mesh.shape == (1, 1, 2, 2, 2)
    mesh, _ = create_fsdp2_device_mesh(ParallelismSizes(dp_size=4, tp_size=2), world_size=8)
    assert mesh.shape == (1, 1, 4, 1, 2)


# --- other strategies ----------------------------------------------------------------------------


@pytest.mark.parametrize(("cp", "flattened"), [(1, ()), (2, ("dp_cp",))])
def test_megatron_fsdp(world, cp, flattened) -> None:
    sizes = ParallelismSizes(tp_size=2, cp_size=cp)
    mesh, moe_mesh = create_device_meshes(MegatronFSDPConfig(), sizes, world_size=8)
    assert mesh is not None
    assert moe_mesh is None
    assert (mesh.mesh_dim_names, mesh.shape) == (("dp", "cp", "tp"), (4 // cp, cp, 2))
    for name in flattened:
        assert get_flat_mesh(mesh, name).shape == (4,)
    if not flattened:
        with pytest.raises(KeyError, match="dp_cp"):
            get_flat_mesh(mesh, "dp_cp")
    assert create_megatron_fsdp_device_mesh(sizes, world_size=8) == mesh


def test_ddp_has_no_meshes(world) -> None:
    with _nothing_created():
        assert create_device_meshes(DDPConfig(), ParallelismSizes(), world_size=8) == (None, None)


@dataclass
class _Unknown:
    """A config of no strategy."""


@pytest.mark.parametrize(
    ("config", "sizes", "message"),
    [
        (MegatronFSDPConfig(), {"dp_replicate_size": 2, "pp_size": 2}, "Megatron-FSDP .*replic.*2"),
        (DDPConfig(), {"dp_replicate_size": 2}, "DDP does not support .*dp_replicate_size=2"),
        (_Unknown(), {"dp_replicate_size": 3}, "_Unknown does not support .*dp_replicate_size=3"),
        (_Unknown(), {"tp_size": 2}, "Unknown strategy config _Unknown.*FSDP2Config"),
        (MegatronFSDPConfig(), {"pp_size": 2, "ep_size": 2}, "not support pipeline .*pp_size=2"),
        (MegatronFSDPConfig(), {"ep_size": 4}, "not support expert parallelism: ep_size=4"),
        (DDPConfig(), dict.fromkeys(("tp_size", "pp_size"), 2), "DDP .*tensor .*tp_size=2"),
        (DDPConfig(), dict.fromkeys(("pp_size", "cp_size"), 2), "DDP .*pipeline .*pp_size=2"),
        (DDPConfig(), dict.fromkeys(("cp_size", "ep_size"), 2), "DDP .*context .*cp_size=2"),
        (DDPConfig(), {"ep_size": 2}, "DDP does not support expert parallelism: ep_size=2"),
        (FSDP2Config(), {"tp_size": 3}, r"8 ranks .*tp_size=3 \* cp_size=1 \* pp_size=1 = 3"),
        (FSDP2Config(), {"tp_size": 16}, r"8 ranks .*tp_size=16"),
        (FSDP2Config(), {"dp_size": 2, "tp_size": 2}, r"dp_size=2 \* tp_size=2.* = 4.* 8 ranks"),
        (FSDP2Config(), {"dp_size": 16}, r"dp_size=16 .* = 16, but there are 8 ranks"),
        (MegatronFSDPConfig(), {"dp_size": 2}, r"dp_size=2 .* = 2, but there are 8 ranks"),
        (FSDP2Config(), {"dp_replicate_size": 3}, "dp_size=8 .*dp_replicate_size=3"),
        (FSDP2Config(), {"dp_replicate_size": 8}, "dp_replicate_size=8 .*below dp_size=8"),
        (FSDP2Config(), {"dp_replicate_size": 16}, "dp_size=8 .*dp_replicate_size=16"),
        (FSDP2Config(), {"ep_size": 3}, r"ep_size=3 .* 8 ranks .*dp_size=8 \* cp_size=1"),
        (FSDP2Config(), {"pp_size": 2, "ep_size": 8}, "ep_size=8 .* 4 ranks of a pipeline stage"),
    ],
)
def test_refusals_name_the_numbers_and_create_nothing(world, config, sizes, message) -> None:
    with _nothing_created(), pytest.raises(ValueError, match=message):
        create_device_meshes(config, ParallelismSizes(**sizes), world_size=8)


@pytest.mark.parametrize("config", [FSDP2Config(), MegatronFSDPConfig()])
@pytest.mark.parametrize("world_size", [4, 16])
def test_another_world_size_than_the_worlds(world, config, world_size) -> None:
    message = f"world_size={world_size}, but the world has 8 ranks"
    with _nothing_created(), pytest.raises(ValueError, match=message):
        create_device_meshes(config, ParallelismSizes(), world_size=world_size)


@pytest.mark.parametrize("config", [FSDP2Config(), MegatronFSDPConfig(), DDPConfig()])
@pytest.mark.parametrize("world_size", ["8", 8.0, True, -1, 0])
def test_no_number_of_ranks(world, config, world_size) -> None:
    message = rf"world_size={world_size!r} of type \w+: give an int above 0"
    with _nothing_created(), pytest.raises(ValueError, match=message):
        create_device_meshes(config, ParallelismSizes(), world_size=world_size)


@pytest.mark.parametrize(
    ("sizes", "changed", "message"),
    [
        ({"dp_size": 4}, {}, r"dp_size=4 .* = 4, but there are 8 ranks"),
        ({}, {"world_size": 4}, "world_size=4, but the world has 8 ranks"),
        ({}, {"ranks": [0, 1]}, r"ranks=\[0, 1\]: DDP has no mesh to place on them"),
    ],
)
def test_ddp_refuses_other_ranks_than_all(world, sizes, changed, message) -> None:
    with _nothing_created(), pytest.raises(ValueError, match=message):
        create_device_meshes(DDPConfig(), ParallelismSizes(**sizes), **changed)


@pytest.mark.parametrize("ep_size", ["2", True, 0, -2, 2.0, None])
def test_no_degree_of_experts(world, ep_size) -> None:
    mesh, _ = create_fsdp2_device_mesh(ParallelismSizes(), world_size=8)
    with _nothing_created(mesh), pytest.raises(ValueError, match=f"ep_size={ep_size!r}: expected"):
        create_moe_mesh(mesh, ep_size=ep_size)


def test_meshes_of_torch_have_no_flattened_axes_to_find(world) -> None:
    stock = torch.distributed.init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
    assert get_flat_mesh(stock, "tp").size() == 2
    with pytest.raises(TypeError, match=r"torch's own.*'dp_cp'.*meshverse\.install"):
        get_flat_mesh(stock, "dp_cp")


def test_moe_mesh_of_a_part_or_by_a_bad_degree(world) -> None:
    mesh, _ = create_fsdp2_device_mesh(ParallelismSizes(pp_size=2), world_size=8)
    with _nothing_created(mesh):
        with pytest.raises(ValueError, match="ep_size=3 must divide the 4 ranks"):
            create_moe_mesh(mesh, ep_size=3)
        with pytest.raises(ValueError, match=r"mesh of 4 ranks .* universe of 8"):
            create_moe_mesh(mesh["dp_shard"], ep_size=2)


# --- device type ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cuda", "backends", "expected"),
    [
        (True, "cuda:nccl,cpu:gloo", "cuda"),
        (True, "cpu:gloo,cuda:gloo", "cpu"),
        (False, "cuda:nccl", "cpu"),
        (True, None, "cuda"),
        (False, None, "cpu"),
    ],
)
def test_device_type(monkeypatch, cuda, backends, expected) -> None:
    from meshverse.parallel.meshes import create

    # This machine need not have a GPU, so what torch says of it is replaced.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(dist, "is_initialized", lambda: backends is not None)
    monkeypatch.setattr(dist, "get_backend_config", lambda: backends)
    assert create._device_type() == expected


def test_device_type_in_a_gloo_world(four) -> None:
    assert four.run(_device_type_here, 2) == ["cpu", "cpu"]


def _device_type_here() -> str:
    mesh, _ = create_fsdp2_device_mesh(ParallelismSizes(), world_size=2)
    return mesh.device_type


# --- specs ---------------------------------------------------------------------------------------


def test_a_good_spec_is_accepted_and_frozen() -> None:
    spec = MeshSpec((2, 4), ("dp", "tp"), {"world": ("dp", "tp"), "copy": ("dp",)})
    validate_mesh_spec(spec)
    assert spec.size == 8
    assert MeshSpec((2,), ("dp",)).flattened_axes == {}
    with pytest.raises(AttributeError):
        spec.shape = (8,)  # type: ignore[misc]


@pytest.mark.parametrize(
    ("shape", "axes", "flattened", "message"),
    [
        ((2, 4), ("dp",), {}, r"\(2, 4\) with axes \('dp',\): 2 sizes for 1 names"),
        ((2,), ("dp", "tp"), {}, "1 sizes for 2 names"),
        ((), (), {}, "0 sizes for 0 names"),
        ((2, 0), ("dp", "tp"), {}, r"\{'tp': 0\}"),
        ((-1, 2.0), ("dp", "tp"), {}, r"\{'dp': -1, 'tp': 2.0\}"),
        ((2, 2), ("dp", "dp"), {}, r"repeat \['dp'\]"),
        ((2, 2), ("dp", "tp"), {"tp": ("dp", "tp")}, "'tp' has the name of an axis"),
        ((2, 2), ("dp", "tp"), {"x": ("dp", "cp")}, r"'x' of \('dp', 'cp'\).*\('dp', 'tp'\)"),
        ((2, 2), ("dp", "tp"), {"x": ("tp", "dp")}, "in this order"),
        ((2, 2), ("dp", "tp"), {"x": ("dp", "dp")}, "each once"),
        ((2, 2), ("dp", "tp"), {"x": ()}, r"'x' of \(\)"),
    ],
)
def test_bad_specs_are_value_errors(shape, axes, flattened, message) -> None:
    with pytest.raises(ValueError, match=message):
        validate_mesh_spec(MeshSpec(shape, axes, flattened))


# --- asking for submeshes ------------------------------------------------------------------------


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    sizes = ParallelismSizes(pp_size=2, dp_replicate_size=2, cp_size=2, tp_size=2)
    with fake_world(32, 21):
        yield create_fsdp2_device_mesh(sizes, world_size=32)[0]


@pytest.mark.parametrize(
    "names",
    [
        ("dp_replicate", "dp_shard_cp"),
        ("dp", "cp"),
        ("dp", "cp", "tp"),
        ("dp_cp", "tp"),
        ("pp", "dp_cp"),
        ("pp", "dp_replicate", "dp_shard_cp", "tp"),
        ("dp_shard_cp", "tp"),
        (MeshAxisName.DP_SHARD_CP, MeshAxisName.TP),
        ("dp_replicate", "dp_shard"),
        ("tp", "dp_cp"),
    ],
)
def test_submeshes_are_made_once_on_known_groups(mesh, names) -> None:
    with groups_created(0):
        submesh = get_submesh(mesh, names)
        assert get_submesh(mesh, list(names)) is submesh
    assert submesh.mesh_dim_names == tuple(map(str, names))
    assert all(type(name) is str for name in submesh.mesh_dim_names)
    assert submesh.universe is mesh.universe
    assert submesh._get_root_mesh() is mesh
    for name in names:
        assert submesh.get_group(name) is get_flat_mesh(mesh, name).get_group()
    parts = [_FLATTENED.get(name, (name,)) for name in names]
    shape = tuple(get_flat_mesh(mesh, name).size() for name in names)
    if list(names) != ["tp", "dp_cp"]:  # in the order of the mesh: the ranks ascend
        expected = _ranks_by_axes((2,) * 5, tuple(itertools.chain(*parts)), 21)
        assert submesh.mesh.tolist() == torch.tensor(expected).reshape(shape).tolist()


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("data", r"'data'.*\('pp', 'dp_replicate'.*\('dp', 'dp_shard_cp', 'dp_cp'\)"),
        (("tp", "ep"), "'ep'"),
        (("dp", "dp_cp"), r"\('dp', 'dp_cp'\).*overlap"),
        (("dp_shard_cp", "dp_shard"), "overlap"),
        (("tp", "tp"), "each once"),
        ((), "one or more"),
        (("tp", "cp"), "order"),
    ],
)
def test_impossible_submeshes_are_key_errors_and_create_nothing(mesh, names, message) -> None:
    with _nothing_created(mesh), pytest.raises(KeyError, match=message):
        get_submesh(mesh, names)


def test_one_name_is_the_flat_mesh(mesh) -> None:
    for name in (*_AXES, *_FLATTENED):
        assert get_submesh(mesh, name) is get_submesh(mesh, (name,)) is get_flat_mesh(mesh, name)


def test_flattened_axes_are_found_from_any_mesh_of_the_universe(mesh) -> None:
    part = mesh["dp_shard", "cp"]
    assert get_flat_mesh(part, "dp_cp") is get_flat_mesh(mesh, "dp_cp")
    assert get_flat_mesh(get_flat_mesh(mesh, "dp"), "dp") is get_flat_mesh(mesh, "dp")
    with pytest.raises(KeyError, match=r"'tp': the mesh has the axes \('dp_shard', 'cp'\)"):
        get_flat_mesh(part, "tp")


@pytest.mark.parametrize(
    ("replicas", "cp", "names", "shape"),
    [
        (1, 1, ("dp_shard",), (8,)),
        (2, 1, ("dp_replicate", "dp_shard"), (2, 4)),
        (1, 2, ("dp_shard_cp",), (8,)),
        (2, 2, ("dp_replicate", "dp_shard_cp"), (2, 4)),
        (1, 8, ("dp_shard_cp",), (8,)),
    ],
)
@pytest.mark.parametrize(("pp", "tp"), [(1, 1), (2, 2)])
def test_the_mesh_for_fsdp(replicas, cp, names, shape, pp, tp) -> None:
    sizes = ParallelismSizes(pp_size=pp, dp_replicate_size=replicas, cp_size=cp, tp_size=tp)
    with fake_world(8 * pp * tp, 3):
        mesh, _ = create_fsdp2_device_mesh(sizes, world_size=8 * pp * tp)
        with groups_created(0):
            data = get_fsdp_dp_mesh(mesh, "dp_replicate", "dp_shard_cp")
            assert get_fsdp_dp_mesh(mesh) is data
        assert (data.mesh_dim_names, data.shape) == (names, shape)
        if cp == 1:
            assert data is mesh[names]


def test_resolution_does_not_depend_on_other_parallelisms() -> None:
    """The same request has the same ranks, relative to its own degrees, whatever else is on."""
    seen = set()
    for pp, tp in itertools.product((1, 2), repeat=2):
        sizes = ParallelismSizes(pp_size=pp, tp_size=tp, dp_replicate_size=2, cp_size=2)
        with fake_world(8 * pp * tp, 0):
            mesh, _ = create_fsdp2_device_mesh(sizes, world_size=8 * pp * tp)
            hybrid = get_submesh(mesh, ("dp_replicate", "dp_shard_cp"))
            seen.add(str((hybrid.mesh // tp).tolist()))
    assert seen == {"[[0, 1, 2, 3], [4, 5, 6, 7]]"}


def test_registering_and_unflattening(mesh) -> None:
    register_flattened_axes(mesh, {"stage": ("dp_replicate", "dp_shard", "cp", "tp")})
    assert get_flat_mesh(mesh, "stage").size() == 16
    split = unflatten_compat(mesh, "dp_shard", (1, 2), ("outer", "inner"))
    assert split.mesh_dim_names == ("pp", "dp_replicate", "outer", "inner", "cp", "tp")
    experts = unflatten_compat(mesh, "stage", (4, 4), ("ep_shard", "ep"))
    assert (experts.mesh_dim_names, experts.shape) == (("ep_shard", "ep"), (4, 4))
    with _nothing_created(mesh):
        with pytest.raises(KeyError, match="'none'"):
            unflatten_compat(mesh, "none", (1, 2), ("a", "b"))
        with pytest.raises(ValueError, match="product"):
            unflatten_compat(mesh, "dp_shard", (3, 2), ("a", "b"))
        with pytest.raises(KeyError, match="nope"):
            register_flattened_axes(mesh, {"x": ("nope", "tp")})
        with pytest.raises(ValueError, match="stage"):
            register_flattened_axes(mesh, {"stage": ("cp", "tp")})
