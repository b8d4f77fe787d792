"""Parts of a universe: meshes over some of its ranks, on the process groups that are there."""

from __future__ import annotations

import gc
import pickle
import weakref
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from helpers.worlds import group_names, groups_created
from meshverse import (
    DeviceMesh,
    Universe,
    init_device_mesh,
    init_mesh_partition,
    isolate,
    load_mesh,
    save_mesh,
)
from meshverse._torch_compat.backends import HowCreated
from meshverse.world import World

pytestmark = pytest.mark.usefixtures("world")  # rank 5 of 8, backend "fake"

_MINE = [4, 5, 6, 7]
_PARTS: dict[str, Any] = {
    "trainer": {"mesh_shape": (2, 2), "mesh_dim_names": ("dp", "tp")},
    "rollout": {"mesh_shape": (2, 2), "mesh_dim_names": ("dp", "tp")},
}


def _job(**extra: Any) -> DeviceMesh:
    return init_device_mesh("cpu", (2, 4), mesh_dim_names=("side", "rank"), **extra)


def _part(job: DeviceMesh, ranks: Any = _MINE, **extra: Any) -> DeviceMesh:
    extra = {"mesh_dim_names": ("tp",), "mesh_shape": (len(ranks),), **extra}
    return init_device_mesh("cpu", ranks=ranks, universe=job.universe, **extra)


# --- what is shared ------------------------------------------------------------------------------


def test_a_group_of_the_whole_is_not_made_again() -> None:
    job = _job()
    with groups_created(0):
        part = _part(job)
    assert part.get_group() is job.get_group("rank")
    assert part.mesh.tolist() == _MINE


def test_a_group_of_a_part_is_not_made_again_by_the_whole_or_another_part() -> None:
    universe = Universe(8)
    first = init_device_mesh("cpu", (2,), mesh_dim_names=("x",), ranks=[5, 6], universe=universe)
    with groups_created(0):
        other = init_device_mesh(
            "cpu", (2,), ranks=[6, 5], universe=universe, preserve_rank_order=False
        )
    with groups_created(2):  # of 4 ranks and of 2 others: 1 of 3 axes is known
        job = init_device_mesh("cpu", (2, 2, 2), ranks=[0, 1, 2, 3, 5, 6, 4, 7], universe=universe)
    assert first.get_group() is other.get_group() is job.get_group(2)
    assert first.universe is not other.universe  # the ranks are in another order


@pytest.mark.parametrize("ranks", [[1, 3, 5, 7], [7, 0, 5, 2], [5], list(range(7, -1, -1))])
def test_a_part_may_be_of_any_ranks(ranks: list[int]) -> None:
    job = _job()
    part = _part(job, ranks)
    assert part.mesh.tolist() == ranks
    assert part.get_coordinate() == (ranks.index(5),)
    assert part == init_device_mesh("cpu", (len(ranks),), mesh_dim_names=("tp",), ranks=ranks)


def test_groups_with_other_options_are_apart() -> None:
    job, minute = _job(), timedelta(minutes=1)
    with groups_created(1):
        part = _part(job, timeout=minute)
    with groups_created(1), isolate("mine"):
        isolated = part["tp"]
    with groups_created(0):  # under the same tag, the whole has it too
        assert _part(job, isolate="mine").get_group() is isolated.get_group()
    with groups_created(1):
        _part(job, [4, 5], backend_override={"tp": ("fake", None)}, isolate="other")
    assert "timeout=60s" in str(part.universe.explain())
    assert part.get_group() is not job.get_group("rank")


def test_a_part_has_the_timeout_of_the_whole_unless_it_says_another() -> None:
    job = _job(timeout=timedelta(seconds=77))
    assert "timeout=77s" in str(_part(job, [4, 5]).universe.explain())
    own = _part(job, [5, 6], timeout=timedelta(seconds=88))
    assert "timeout=88s" in str(own.universe.explain())
    with groups_created(0), pytest.raises(ValueError, match=r"together with timeout="):
        _part(job, [5, 6], timeout=timedelta(seconds=99))
    with pytest.raises(ValueError, match="timeout cannot be set for ranks 5, 6: a universe"):
        job.universe.part([5, 6], timeout=timedelta(seconds=99))


def test_a_part_has_the_rank_that_was_passed_to_the_whole() -> None:
    whole = Universe(8, rank=3)  # in a world where this process is rank 5
    part = whole.part([2, 3])
    assert (part.rank, part.position, part.rank_was_passed) == (3, 1, True)
    assert part.part([3]).position == 0
    own = whole.part([2, 3, 4], rank=4)
    assert (own.rank, own.position) == (4, 2)
    with pytest.raises(
        ValueError, match="rank cannot be set for ranks 2, 3, 4: a universe or part"
    ):
        whole.part([2, 3, 4], rank=2)
    assert whole.part([2, 3, 4], rank=4) is own
    assert whole.group([4, 5]) is dist.GroupMember.NON_GROUP_MEMBER
    refused = r"ranks 2, 3 was created with rank=3, but this process is rank 5"
    with groups_created(0), pytest.raises(ValueError, match=refused):
        whole.group([2, 3])
    assert not Universe(8).part([4, 5]).rank_was_passed


def test_a_part_has_the_rank_of_the_whole_without_a_default_group() -> None:
    dist.destroy_process_group()
    whole, decoupled = Universe(8, rank=3), Universe(8, rank=3, decoupled=True)
    assert whole.part([2, 3]).position == 1
    mesh = init_device_mesh("xla", (2, 2), ranks=[3, 4, 5, 6], universe=whole)
    assert (mesh.universe.rank, mesh.get_coordinate()) == (3, (0, 0))
    mesh, same, apart = (
        DeviceMesh("cpu", [2, 3], universe=universe, _init_backend=False)
        for universe in (whole, Universe(8, rank=3), decoupled)
    )
    assert mesh == same
    assert mesh != apart  # until it is bound


def test_groups_that_all_ranks_make_are_not_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    # Ranks that are not in the group take part in making it: none of them may sit it out.
    monkeypatch.setattr(
        World, "how_created", lambda self, backend: HowCreated(False, "so says a test", False)
    )
    job = _job()
    with groups_created(1):
        part = _part(job)
    assert part.get_group() is not job.get_group("rank")


@pytest.mark.usefixtures("shared")
def test_parts_where_the_whole_process_shares() -> None:
    job, apart = _job(), init_device_mesh("cpu", (2,), ranks=[5, 6])
    with groups_created(0):
        part = _part(job, [6, 5], preserve_rank_order=False)
    assert part.get_group() is apart.get_group()
    job.universe.destroy()
    assert apart.get_group().size() == 2


def test_a_shared_group_that_was_destroyed_is_gone_for_the_whole_too() -> None:
    job = _job()
    part = _part(job)
    dist.destroy_process_group(part.get_group())
    for mesh in (job, part):
        with pytest.raises(RuntimeError, match="a new mesh has a new group"):
            mesh.get_group("rank" if mesh is job else None)


# --- a part by itself ----------------------------------------------------------------------------


def test_a_part_is_a_root_of_its_own() -> None:
    job = _job()
    parts = init_mesh_partition("cpu", _PARTS, universe=job.universe)
    trainer, rollout = parts["trainer"], parts["rollout"]
    assert trainer.flatten("all").mesh.tolist() == [0, 1, 2, 3]
    assert rollout.flatten("all").mesh.tolist() == [4, 5, 6, 7]
    assert job.flatten("all").size() == 8
    assert rollout["tp"]._get_root_mesh() is rollout is rollout.universe.root
    assert job["rank"]._get_root_mesh() is job is job.universe.root
    assert rollout.get_group("all") is job.get_group("rank")
    assert job.get_group("all").size() == 8
    with pytest.raises(RuntimeError, match="Cannot concatenate DeviceMeshes derived from diff"):
        DeviceMesh.concatenate([job["rank"], rollout["tp"]])


def test_a_part_equals_the_mesh_that_is_made_apart() -> None:
    part, apart = _part(_job()), init_device_mesh("cpu", (4,), mesh_dim_names=("tp",), ranks=_MINE)
    assert part == apart
    assert hash(part) == hash(apart)
    assert part.get_group() is not apart.get_group()


def test_every_way_leads_to_the_same_part() -> None:
    job = _job()
    part = _part(job).universe
    assert part is job.universe.part(torch.tensor(_MINE)) is job.universe.parts[0]
    assert DeviceMesh("cpu", [[4, 5], [6, 7]], universe=job.universe).universe is part
    assert init_device_mesh("cpu", (2, 2), universe=part).universe is part
    assert init_mesh_partition("cpu", _PARTS, universe=job.universe)["rollout"].universe is part
    assert (part.whole, job.universe.whole) == (job.universe, None)
    assert job.universe.part(8) is job.universe


def test_parts_of_parts() -> None:
    job = _job()
    stage = _part(job)
    with groups_created(1):
        half = init_device_mesh("cpu", (2,), ranks=[4, 5], universe=stage.universe)
    with groups_created(0):
        again = _part(job, [4, 5])
    assert half.get_group() is again.get_group()
    assert half.universe.whole is stage.universe
    assert job.universe.explain().created == 3
    job.universe.destroy()
    with pytest.raises(RuntimeError, match="universe of ranks 4, 5 was destroyed"):
        half.get_group()


def test_parts_follow_one_another_on_the_ranks_of_the_universe() -> None:
    universe = Universe([7, 6, 5, 4, 3, 2])
    parts = {"a": {"mesh_shape": (2,)}, "b": {"mesh_shape": (1, 3)}}
    meshes = init_mesh_partition("cpu", parts, universe=universe)
    assert [mesh.mesh.tolist() for mesh in meshes.values()] == [[7, 6], [[5, 4, 3]]]


# --- what is asked of the whole ------------------------------------------------------------------


def test_explain_tells_of_all_parts() -> None:
    job = _job()
    parts = init_mesh_partition("cpu", _PARTS, universe=job.universe)
    parts["rollout"].flatten("all")
    report = job.universe.explain()
    assert report.parts == ("ranks 0 to 3", "ranks 4, 5, 6, 7")
    assert (report.requested, report.created, report.saved) == (5, 4, 1)
    by_ranks = {group.ranks: group for group in report.groups}
    assert by_ranks[4, 5, 6, 7].requests == {"rank": 1, "all": 1}
    assert by_ranks[4, 5, 6, 7].over == ("ranks 0 to 7", "ranks 4, 5, 6, 7")
    assert by_ranks[4, 5].over == ("ranks 4, 5, 6, 7",)
    assert "Its parts: ranks 0 to 3; ranks 4, 5, 6, 7." in str(report)
    assert report.to_dict()["groups"][0]["over"] == ("ranks 0 to 7",)
    own = parts["rollout"].universe.explain()
    assert (own.requested, own.created, own.parts) == (3, 2, ())
    assert str(job.universe.draw())
    assert job.universe.explain().to_html()


def test_one_destroy_ends_all() -> None:
    before = group_names()
    job = _job()
    parts = init_mesh_partition("cpu", _PARTS, universe=job.universe)
    job.universe.destroy()
    assert group_names() == before
    for mesh in (job, *parts.values()):
        assert mesh.universe.is_over
        with pytest.raises(RuntimeError, match="was destroyed"):
            _ = mesh.get_group(1) if mesh.get_coordinate() else mesh.universe.groups.check_usable()
    with pytest.raises(RuntimeError, match="The universe of ranks 0 to 7 was destroyed"):
        _part(job, [5, 6])
    job.universe.destroy()


def test_ended_parts_are_let_go() -> None:
    job = _job()
    ended = []
    for ranks in ([0, 5], [1, 5], [5, 6]):
        part = job.universe.part(ranks)
        init_device_mesh("cpu", (2,), ranks=ranks, universe=job.universe)
        part.destroy()
        ended.append(weakref.ref(part))
        del part
    job.universe.part([2, 5])
    gc.collect()
    assert [part() for part in ended] == [None] * 3


def test_a_part_is_destroyed_alone() -> None:
    job = _job()
    part = _part(job, mesh_shape=(2, 2), mesh_dim_names=("dp", "tp"))
    shared = part.flatten("all").get_group()
    before = group_names()
    part.universe.destroy()
    assert len(before - group_names()) == 2
    assert job.get_group("rank") is shared
    assert job.universe.parts == ()
    assert job.universe.explain().created == 2
    with groups_created(2):
        again = _part(job, mesh_shape=(2, 2), mesh_dim_names=("dp", "tp"))
    assert again.universe is not part.universe
    assert again != part


def test_lazy_groups_and_warm_up() -> None:
    before = group_names()
    job = _job(lazy=True)
    parts = init_mesh_partition("cpu", _PARTS, universe=job.universe)
    parts["rollout"].flatten("all")
    assert group_names() == before
    with pytest.raises(KeyError, match=r"'sides'.* Did you mean 'side'\?"):
        job.universe.warm_up(["sides"])
    with groups_created(1):
        assert [one.axes for one in job.universe.warm_up(["tp"])] == [("tp",)]
    with groups_created(3):
        assert len(job.universe.warm_up()) == 4
    hows = {group.how for group in job.universe.explain().groups}
    assert hows == {"created by its members at first use"}


# --- saved and loaded ----------------------------------------------------------------------------


def test_a_parts_mesh_is_pickled_and_found() -> None:
    part = _part(_job())
    assert pickle.loads(pickle.dumps(part)) is part
    assert load_mesh(save_mesh(part)) is part


def test_a_loaded_mesh_is_bound_to_a_part() -> None:
    state = {**save_mesh(_part(_job())), "decoupled": True}
    loaded, job = load_mesh(state), _job()
    with groups_created(0):
        loaded.bind(job.universe)
    assert loaded.universe is job.universe.parts[0]
    assert loaded.get_group() is job.get_group("rank")
    with pytest.raises(ValueError, match=r"cannot be bound to .*: it has no ranks \[6, 7\]"):
        load_mesh(state).bind(Universe(6))


# --- what is refused -----------------------------------------------------------------------------


def test_a_part_is_of_ranks_of_its_universe() -> None:
    universe = Universe([2, 3, 4, 5])
    with groups_created(0):
        for make in (
            lambda: init_device_mesh("cpu", (2,), ranks=[5, 6], universe=universe),
            lambda: DeviceMesh("cpu", [5, 6], universe=universe),
            lambda: universe.part([5, 6]),
        ):
            with pytest.raises(ValueError, match=r"cannot be in a universe of .* no ranks \[6\]"):
                make()
        placed: dict[str, Any] = {"trainer": {"mesh_shape": (1,), "ranks": [2]}}
        placed["rollout"] = {"mesh_shape": (2,), "ranks": [6, 7]}
        with pytest.raises(ValueError, match=r"Part 'rollout' .* has ranks \[6, 7\], which the"):
            init_mesh_partition("cpu", placed, universe=universe)
        with pytest.raises(ValueError, match="'rollout' of a partition takes 4 ranks after the 4"):
            init_mesh_partition("cpu", _PARTS, universe=universe)
    assert universe.parts == ()


def test_a_mesh_of_fewer_ranks_says_which() -> None:
    with pytest.raises(ValueError, match="some of its ranks, give ranks= too"):
        init_device_mesh("cpu", (4,), universe=_job().universe)


@pytest.mark.parametrize("make", [init_mesh_partition, init_device_mesh])
def test_a_mesh_is_no_universe(make: Any) -> None:
    given: Any = _PARTS if make is init_mesh_partition else (8,)
    with pytest.raises(TypeError, match=r"give the universe of a mesh, mesh.universe"):
        make("cpu", given, universe=_job())


def test_names_that_are_near_are_suggested() -> None:
    parts = init_mesh_partition("cpu", _PARTS)
    with pytest.raises(KeyError, match=r"There is no part 'trainr': .* Did you mean 'trainer'\?"):
        parts["trainr"]
    with pytest.raises(TypeError, match=r"has 'univers', which .* Did you mean 'universe'\?"):
        init_mesh_partition("cpu", _PARTS, univers=None)


def test_a_call_that_failed_leaves_no_part_so_that_it_can_be_repeated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = _job()

    def call() -> DeviceMesh:
        ranks, timeout = [3, 5, 6], timedelta(minutes=1)
        return _part(job, ranks, timeout=timeout)

    def refuse(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no more of these")

    with monkeypatch.context() as patch:
        patch.setattr(dist.distributed_c10d, "_new_process_group_helper", refuse)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="no more of these"):
                call()
            assert job.universe.parts == ()
    mesh = call()
    assert dist.get_process_group_ranks(mesh.get_group()) == [3, 5, 6]
    assert job.universe.parts == (mesh.universe,)
