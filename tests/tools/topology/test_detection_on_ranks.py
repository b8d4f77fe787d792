"""Real processes tell each other where they are, and their groups follow it."""

from __future__ import annotations

import contextlib
import socket
import tempfile
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed import fake_pg  # noqa: F401  # the backend "fake"

import meshverse
from helpers.crew import Crew
from helpers.turns import wait_until_they_wait
from meshverse import Topology, init_device_mesh
from meshverse.tools.topology import detection
from meshverse.world import World

_SHORT = timedelta(seconds=1)  # short-timeout: it must elapse


def _on_this_machine() -> dict[str, dict[str, str]]:
    return Topology.detect().to_dict()


def test_processes_of_one_machine_are_on_one_node(crew: Crew) -> None:
    on_one = {"node": {socket.gethostname(): "0-3"}}
    assert crew.run(_on_this_machine, 4) == [on_one] * 4


def _machines_of_one_name(boots: str) -> dict[str, dict[str, str]]:
    file = Path(tempfile.mkdtemp()) / "boot_id"
    file.write_text(boots[dist.get_rank()] * 36 + "\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(detection, "_BOOT_ID", file)
        patch.setenv("SLURMD_NODENAME", "localhost")
        return Topology.detect().to_dict()


def test_machines_of_one_name_are_distinguished(crew: Crew) -> None:
    nodes = {"localhost (aaaaaaaa)": "0,2-3", "localhost (bbbbbbbb)": "1"}
    assert crew.run(_machines_of_one_name, 4, "abaa") == [{"node": nodes}] * 4


def _pretended() -> tuple[dict[str, dict[str, str]], list[list[int]], list[int], float, str]:
    rank = dist.get_rank()
    topology = Topology.detect(
        node="ab"[rank % 2], domain=f"d{rank % 2}", switches={"switch": "leaf"}
    )
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"), topology=topology)
    groups = [dist.get_process_group_ranks(mesh.get_group(name)) for name in ("dp", "tp")]
    total = torch.tensor(float(rank))
    dist.all_reduce(total, group=mesh.get_group("tp"))
    nodes = [group.nodes for group in mesh.universe.explain().groups]
    return topology.to_dict(), groups, nodes, float(total), str(mesh.mesh.tolist())


def test_groups_follow_the_nodes(crew: Crew) -> None:
    for rank, (answer, (dp, tp), nodes, total, ranks) in enumerate(crew.run(_pretended, 4)):
        assert answer == {
            "node": {"a": "0,2", "b": "1,3"},
            "domain": {"d0": "0,2", "d1": "1,3"},
            "switch": {"leaf": "0-3"},
        }
        assert ranks == "[[0, 2], [1, 3]]"
        assert tp == [rank % 2, rank % 2 + 2]  # the ranks of one node
        assert dp == [rank // 2 * 2, rank // 2 * 2 + 1]
        assert nodes == [2, 1]
        assert total == sum(tp)


def _again_and_again() -> list[int]:
    sizes = []
    for turn in range(3):
        node = str(dist.get_rank() // (turn + 1))
        sizes.append(len(Topology.detect(node=node).levels[0].parts))
    return sizes


def test_ranks_detect_again(crew: Crew) -> None:
    assert crew.run(_again_and_again, 4) == [[4, 2, 2]] * 4


def _keys_left(world_size: int) -> list[str]:
    """The ranks whose lines are in the store after all have read the answer."""
    world = World.current()
    assert world is not None
    store = world.run_keys
    assert store is not None
    Topology.detect(node="a")
    dist.barrier()
    return [
        str(rank) for rank in range(world_size) if store.read(f"rendezvous/topology/0/0/{rank}")
    ]


def test_the_lines_of_the_ranks_are_removed(crew: Crew) -> None:
    assert crew.run(_keys_left, 4, 4) == [[]] * 4


def _without_rank(absent: int) -> str:
    rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
    if rank == absent:
        store.wait(["they got an error"])
        with pytest.raises(RuntimeError, match="detect") as caught:
            Topology.detect(timeout=_SHORT)
        return str(caught.value)
    others = [other for other in range(dist.get_world_size()) if other != absent]
    is_first = rank == others[0]
    if is_first:  # the one that gives up comes when the others wait
        wait_until_they_wait(*others[1:])
    with pytest.raises(RuntimeError, match="detect") as caught:
        Topology.detect(timeout=_SHORT if is_first else None)
    if store.add("errors", 1) == dist.get_world_size() - 1:
        store.set("they got an error", "yes")
    return str(caught.value)


def test_a_rank_that_does_not_come_is_named_to_all(crew: Crew) -> None:
    answers = crew.run(_without_rank, 4, 2)
    assert len(set(answers)) == 1  # also the one that comes late
    assert "waited 0:00:01: 3 of 4 members joined; missing: ranks [2]." in answers[0]


@pytest.mark.long
def test_rank_0_is_named_where_it_does_not_come(crew: Crew) -> None:
    answers = crew.run(_without_rank, 4, 0)
    assert len(set(answers)) == 1
    assert "3 of 4 members joined; missing: ranks [0]." in answers[0]


def _one_fails_first(file: str) -> tuple[str, int]:
    rank = dist.get_rank()
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setenv("SLURM_TOPOLOGY_ADDR", "leaf")
            patch.setenv("SLURM_TOPOLOGY_ADDR_PATTERN", "switch.node")
        with pytest.raises((ValueError, RuntimeError)) as caught:
            Topology.detect()
    network_file = file if rank == 1 else None
    with pytest.raises(OSError, match="nowhere") if rank == 1 else contextlib.nullcontext():
        Topology.detect(node=f"n{rank}", network_file=network_file)
    dist.barrier()
    return str(caught.value), len(Topology.detect(node=f"n{rank}").levels[0].parts)


def test_a_rank_that_fails_by_itself_tells_the_others_and_all_can_try_again(
    crew: Crew, tmp_path: Path
) -> None:
    answers = crew.run(_one_fails_first, 4, str(tmp_path / "nowhere"))
    assert [parts for _, parts in answers] == [4] * 4
    assert answers[1][0].startswith("SLURM_TOPOLOGY_ADDR='leaf' does not fit its pattern")
    for rank in (0, 2, 3):  # at once: they do not wait for their timeout
        assert answers[rank][0].startswith("Topology.detect() failed on rank 1: SLURM_TOPOLOGY")


def _one_gives_a_wrong_timeout() -> tuple[str, int]:
    rank = dist.get_rank()
    with pytest.raises((ValueError, TypeError, RuntimeError)) as caught:
        Topology.detect(timeout=timedelta(seconds=-1) if rank == 1 else None)
    return str(caught.value), len(Topology.detect(node=f"n{rank}").levels[0].parts)


def test_a_wrong_timeout_on_one_rank_is_counted_there(crew: Crew) -> None:
    answers = crew.run(_one_gives_a_wrong_timeout, 4)
    assert [parts for _, parts in answers] == [4] * 4
    for rank in (0, 2, 3):
        assert answers[rank][0] == f"Topology.detect() failed on rank 1: {answers[1][0]}"


def _two_runs_on_one_store(folder: str) -> list[dict[str, dict[str, str]]]:
    rank, size, seen = dist.get_rank(), dist.get_world_size(), []
    own = dist.PrefixStore("kept", dist.FileStore(f"{folder}/store", size))
    for names in ("aabb", "abab"):
        dist.barrier()
        dist.destroy_process_group()
        dist.init_process_group("cpu:fake", store=own, rank=rank, world_size=size)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        seen.append(Topology.detect(node=names[rank]).to_dict())
        mesh.universe.destroy()
        dist.destroy_process_group()
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(f"{folder}/{names}", size),
            rank=rank,
            world_size=size,
        )
    return seen


def test_a_later_run_on_the_same_store_does_not_read_what_an_earlier_one_wrote(
    crew: Crew, tmp_path: Path
) -> None:
    expected = [{"node": {"a": "0-1", "b": "2-3"}}, {"node": {"a": "0,2", "b": "1,3"}}]
    assert crew.run(_two_runs_on_one_store, 4, str(tmp_path)) == [expected] * 4


def _two_runs_of_which_the_first_revives(folder: str) -> dict[str, dict[str, str]]:
    rank, size = dist.get_rank(), dist.get_world_size()

    def next_world(backend: str, store: dist.Store) -> None:
        dist.barrier()
        dist.destroy_process_group()
        dist.init_process_group(backend, store=store, rank=rank, world_size=size)

    own = dist.PrefixStore("kept", dist.FileStore(f"{folder}/store", size))
    Topology.detect(node="a")
    names = ("dp", "tp")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names, check_consistency=False)
    next_world("cpu:gloo", own)
    assert meshverse.revive() == (mesh.universe,)
    Topology.detect(node="aabb"[rank])
    dist.barrier()
    mesh.universe.destroy()
    next_world("cpu:fake", own)
    Topology.detect(node="a")
    seen = Topology.detect(node="abab"[rank]).to_dict()
    next_world("gloo", dist.FileStore(f"{folder}/last", size))
    return seen


def test_a_later_run_does_not_read_what_a_revived_world_wrote(crew: Crew, tmp_path: Path) -> None:
    expected = {"node": {"a": "0,2", "b": "1,3"}}
    assert crew.run(_two_runs_of_which_the_first_revives, 4, str(tmp_path)) == [expected] * 4


def _some_tell_no_switch() -> str:
    rank = dist.get_rank()
    with pytest.raises(ValueError, match="gives no switch") as caught:
        Topology.detect(node=f"n{rank}", switches={} if rank == 2 else {"switch": "leaf"})
    return str(caught.value)


def test_a_rank_that_tells_less_than_the_others_is_named(crew: Crew) -> None:
    for text in crew.run(_some_tell_no_switch, 4):
        assert text.startswith("Rank 2 on node 'n2' gives no switch, but rank 0 gives 'leaf'")


def _differ() -> str:
    nodes = ["aabb", "abab"][dist.get_rank() == 3]
    with pytest.raises(RuntimeError) as caught:
        init_device_mesh(
            "cpu", (2, 2), mesh_dim_names=("dp", "tp"), topology=Topology({"node": list(nodes)})
        )
    return str(caught.value)


def test_ranks_with_different_topologies_get_an_error(crew: Crew) -> None:
    for text in crew.run(_differ, 4):
        assert "Ranks are building different meshes" in text


def test_there_are_no_ranks_to_ask_before_the_default_group() -> None:
    with pytest.raises(RuntimeError, match="call init_process_group"):
        Topology.detect()
