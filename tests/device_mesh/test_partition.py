"""Parts of the world: where they lie, that they do not overlap, and what ranks outside may do."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from helpers.worlds import groups_created
from meshverse import DeviceMesh, init_device_mesh, init_mesh_partition
from meshverse.universe.world_universes import universes_here

pytestmark = pytest.mark.usefixtures("world")  # rank 5 of 8, backend "fake"


def _part(*shape: int, **extra: Any) -> Any:
    return {"mesh_shape": shape, "mesh_dim_names": ("dp", "tp")[: len(shape)], **extra}


def test_parts_follow_one_another() -> None:
    with groups_created(2):
        meshes = init_mesh_partition("cpu", {"a": _part(3), "b": _part(2, 2), "c": _part(1)})
    assert [mesh.mesh.tolist() for mesh in meshes.values()] == [[0, 1, 2], [[3, 4], [5, 6]], [7]]
    assert meshes["b"].get_coordinate() == (1, 0)
    assert meshes["a"].get_coordinate() is meshes["c"].get_coordinate() is None


def test_parts_may_lie_anywhere() -> None:
    parts = {"a": _part(2, ranks=[7, 5]), "b": _part(2, ranks=torch.tensor([0, 3]))}
    meshes = init_mesh_partition("cpu", parts)
    assert meshes["a"].mesh.tolist() == [7, 5]
    assert meshes["a"].get_coordinate() == (1,)


def test_parts_have_arguments_of_their_own_and_common_ones() -> None:
    minute, hour = timedelta(minutes=1), timedelta(hours=1)
    parts = {"a": _part(4), "b": _part(4, timeout=hour)}
    meshes = init_mesh_partition("cpu", parts, timeout=minute)
    assert "timeout=60s" in str(meshes["a"].universe.explain())
    assert "timeout=3600s" in str(meshes["b"].universe.explain())


_REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "overlap": (
        {"a": _part(4, ranks=[0, 1, 2, 3]), "b": _part(3, ranks=[2, 5, 3])},
        r"Parts 'a' and 'b' of a partition have ranks \[2, 3\] in common",
    ),
    "overlap of tensors": (
        {"a": _part(2, ranks=torch.tensor([0, 1])), "b": _part(2, ranks=torch.tensor([1, 2]))},
        r"Parts 'a' and 'b' of a partition have ranks \[1\] in common",
    ),
    "some without ranks": (
        {"a": _part(2, ranks=[0, 1]), "b": _part(2)},
        r"Parts \['a'\] of \['a', 'b'\] have `ranks`",
    ),
    "too few ranks": (
        {"a": _part(2), "b": _part(2, 2)} | {"a": _part(2, ranks=[0]), "b": _part(1, ranks=[1])},
        r"mesh_shape \(2,\) has 2 ranks, but `ranks` lists 1",
    ),
    "an unknown backend in the last part": (
        {"a": _part(6), "b": _part(2, backend_override={"dp": "nxcl"})},
        "Unknown backend 'nxcl'",
    ),
    "too large for the world": (
        {"a": _part(4), "b": _part(5)},
        r"Part 'b' of a partition includes rank 8.*ranks 0 to 7",
    ),
}


@pytest.mark.parametrize("case", _REFUSED)
def test_what_is_no_partition_is_refused_and_makes_nothing(case: str) -> None:
    parts, message = _REFUSED[case]
    with groups_created(0), pytest.raises(ValueError, match=message):
        init_mesh_partition("cpu", parts)


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ({"mesh_dim_names": ("dp",)}, "Part 'b' of a partition has no mesh_shape"),
        ({"mesh_shap": (2,)}, "Part 'b' .* has 'mesh_shap'.* Did you mean 'mesh_shape'?"),
        ({"mesh_shape": (2,), "device": "cpu"}, "Part 'b' .* has 'device', which is not an arg"),
    ],
)
def test_a_part_that_is_misspelled_is_named(part: dict[str, Any], said: str, world) -> None:
    with groups_created(0), pytest.raises(TypeError, match=said):
        init_mesh_partition("cpu", {"a": _part(2), "b": part})


# --- ranks outside -------------------------------------------------------------------------------


@pytest.fixture
def outside() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"), ranks=(1, 2, 3, 4))


def test_a_rank_outside_may_hold_print_slice_and_compare(outside: DeviceMesh) -> None:
    assert repr(outside) == "DeviceMesh((dp=2, tp=2), 'cpu', stride=(2, 1))"
    assert repr(outside["tp"]) == "DeviceMesh((tp=2), 'cpu', stride=(1,))"
    assert outside.mesh.tolist() == [[1, 2], [3, 4]]
    assert outside["tp"] is outside["tp"] == outside["tp"]
    assert outside.get_coordinate() is None
    assert outside.flatten("all").size() == 4
    assert outside.unflatten("tp", (1, 2), ("a", "b")).shape == (2, 1, 2)
    assert outside.universe.explain().created == 0


def test_a_rank_outside_gets_an_error_that_it_has_no_group(outside: DeviceMesh) -> None:
    with pytest.raises(IndexError, match=r"Rank 5 is not in .*tp=2.* over ranks 1, 2"):
        outside.get_group("tp")


def test_ranks_are_as_many_as_the_mesh_has(world) -> None:
    with pytest.raises(ValueError, match=r"mesh_shape \(2, 2\) has 4 ranks, but `ranks` lists 3"):
        init_device_mesh("cpu", (2, 2), ranks=[0, 1, 2])
    with pytest.raises(ValueError, match="list every global rank once"):
        init_device_mesh("cpu", (2, 2), ranks=[0, 1, 2, 2])


def test_parts_before_one_that_fails_are_given_up(world) -> None:
    def refuse(*_: Any) -> Any:
        raise RuntimeError("no more of these")

    dist.Backend.register_backend("refusing", refuse, devices=["cpu"])
    parts = {
        "first": _part(2, 2, ranks=[0, 1, 2, 3]),
        "second": _part(4, ranks=[4, 5, 6, 7], backend_override={"dp": "refusing"}),
    }
    before = universes_here()
    for _ in range(3):
        with pytest.raises(RuntimeError, match="no more of these"):
            init_mesh_partition("cpu", parts)
        assert universes_here() == before
    parts["second"] = _part(4, ranks=[4, 5, 6, 7])
    meshes = init_mesh_partition("cpu", parts)
    assert dist.get_process_group_ranks(meshes["second"].get_group()) == [4, 5, 6, 7]
    assert universes_here()[len(before) :] == [mesh.universe for mesh in meshes.values()]
