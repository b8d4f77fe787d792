"""A call concerns the ranks of the mesh that it makes: pipeline stages may differ."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

import meshverse
from helpers.all_reduce import reached_by
from helpers.crew import Crew
from meshverse import DeviceMesh

_TIMEOUT = timedelta(seconds=60)


def _stages() -> DeviceMesh:
    names = ("pp", "dp")
    return meshverse.init_device_mesh("cpu", (2, 4), mesh_dim_names=names, timeout=_TIMEOUT)


def _split_in_their_own_way() -> list[list[int]]:
    """Each stage splits its axis in its own way; then both split the root alike."""
    root = _stages()
    first_stage = dist.get_rank() < 4
    sizes, names = ((2, 2), ("x", "y")) if first_stage else ((4, 1), ("all", "one"))
    split = root["dp"]._unflatten(0, sizes, names)
    seen = [reached_by(split.get_group(name)) for name in names]
    both = root._unflatten("dp", (2, 2), ("replicate", "shard"))
    return [*seen, reached_by(both.get_group("shard"))]


def test_stages_may_split_their_axes_each_in_its_own_way(crew: Crew) -> None:
    for rank, (first, second, both) in enumerate(crew.run(_split_in_their_own_way, 8)):
        pair = [int(other // 2 == rank // 2) for other in range(8)]
        if rank < 4:
            assert first == [int(other < 4 and other % 2 == rank % 2) for other in range(8)]
            assert second == pair
        else:
            assert first == [int(other >= 4) for other in range(8)]
            assert second == [int(other == rank) for other in range(8)]
        assert both == pair


def _derived_alone_then_by_all() -> list[list[int]]:
    """One stage knows more groups than the other when all make the same call."""
    root = _stages()
    if dist.get_rank() < 4:
        one = root["dp"].unflatten(0, (4, 1), ("own", "one"))
        assert one.get_group("one").size() == 1
        root["dp"].unflatten(0, (1, 4), ("first", "rest"), isolate="again")
    whole = root.flatten("w", isolate="again")
    split = root.unflatten("dp", (4, 1), ("x", "y"))  # whose groups the first stage has already
    return [reached_by(mesh.get_group(0)) for mesh in (whole, split["y"], split["x"])]


def test_a_stage_may_have_groups_already_that_a_call_of_all_makes(crew: Crew) -> None:
    for rank, (whole, one, mine) in enumerate(crew.run(_derived_alone_then_by_all, 8)):
        assert whole == [1] * 8
        assert one == [int(other == rank) for other in range(8)]
        assert mine == [int(other // 4 == rank // 4) for other in range(8)]


def _split_in_their_own_way_then_flatten() -> list[int]:
    root = _stages()
    sizes, names = ((2, 2), ("x", "y")) if dist.get_rank() < 4 else ((4, 1), ("all", "one"))
    root["dp"].unflatten(0, sizes, names)
    root.unflatten("dp", (2, 2), ("replicate", "shard"))
    return reached_by(root.flatten("w", isolate="again").get_group())


def test_stages_that_split_in_their_own_way_flatten_alike(crew: Crew) -> None:
    assert crew.run(_split_in_their_own_way_then_flatten, 8) == [[1] * 8] * 8


def _more_on_one_stage() -> str:
    """One stage alone derives several meshes; then one of its ranks differs from the others."""
    root = _stages()
    rank = dist.get_rank()
    if rank >= 4:
        root["dp"].unflatten(0, (2, 2), ("a", "b"))
        root["dp"].flatten("own", isolate="x")
        with meshverse.isolate("sliced"):
            _ = root["dp"]
        own = root["dp"].unflatten(0, (2, 2), ("c", "d"), isolate="y")
        assert DeviceMesh.concatenate([own["c"], own["d"]]).get_group("c") is own.get_group("c")
    outcome = ""
    try:
        root["dp"].unflatten(0, (4, 1) if rank == 5 else (2, 2), ("e", "f"), isolate="z")
    except RuntimeError as error:
        outcome = str(error).partition("\n")[0]
    root.flatten("all", isolate="again")  # of the other ranks too, who have not disagreed
    return outcome


def test_a_difference_concerns_the_ranks_of_one_stage(crew: Crew) -> None:
    for rank, answer in enumerate(crew.run(_more_on_one_stage, 8)):
        assert answer == ("Ranks are building different meshes:" if rank >= 4 else "")
