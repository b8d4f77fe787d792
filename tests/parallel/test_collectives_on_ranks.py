"""Collectives of real processes: every operation in every group, and what closing frees."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist

import meshverse
from helpers.held import grown, held, held_after
from helpers.ports import held_port
from helpers.sleeping import sleep
from helpers.worlds import group_names
from meshverse.parallel import Collective, MeshCollective, Meshes, SingleProcessCollective

_GROUPS = {  # of rank r of four in tensor-parallel pairs, on nodes of so many processes
    "world": lambda rank, node: [0, 1, 2, 3],
    "local": lambda rank, node: list(range(rank // node * node, rank // node * node + node)),
    "tp": lambda rank, node: [rank // 2 * 2, rank // 2 * 2 + 1],
    "dp": lambda rank, node: [rank % 2, rank % 2 + 2],
}


def _four_processes(node: int = 2, **changed: Any) -> MeshCollective:
    rank = dist.get_rank()
    sizes = {"local_world_size": node, "local_rank": rank % node, "tp_size": 2, **changed}
    return MeshCollective(rank, 4, device_type="cpu", **sizes)


def _limited(whole: MeshCollective, name: str) -> Collective:
    if name == "world":
        return whole
    if name == "dp":  # any group of the meshes: by giving both
        replicas = whole.meshes.parallel_mesh.size(0)
        axis = "dp_replicate" if replicas == 2 else "dp_shard"
        group = whole.meshes.parallel_mesh.get_group(axis)
        return MeshCollective(
            group.rank(),
            group.size(),
            local_world_size=whole.local.world_size,
            local_rank=whole.local_rank,
            device_type="cpu",
            mesh=whole.meshes,
            process_group=group,
        )
    return {"local": whole.local, "tp": whole.tp_world}[name]


def _results(collective: Collective, value: int) -> dict[str, Any]:
    """Return the results of all operations for a process that contributes a value: plain data."""
    collective.barrier()
    results: dict[str, Any] = {"who": (collective.rank, collective.world_size)}
    for name in ("SUM", "MAX", "MIN", "PRODUCT"):
        tensor = torch.full((2, 3), float(value + 1))
        collective.all_reduce(tensor, getattr(dist.ReduceOp, name))
        results[name] = tensor.tolist()
    default = torch.tensor(float(value))
    collective.all_reduce(default)
    results["default"] = default.item()
    strided = torch.full((3, 2), float(value)).t()
    collective.all_reduce(strided)
    results["strided"] = strided.tolist()
    parameter = torch.nn.Parameter(torch.tensor([float(value)]))
    collective.all_reduce(parameter)
    results["parameter"] = parameter.tolist()
    columns = torch.tensor([[value, 10 + value]])
    results["gathered"] = collective.all_gather(columns).tolist()
    results["gathered scalar"] = collective.all_gather(torch.tensor(value)).tolist()
    results["gathered strided"] = collective.all_gather(columns.t()).tolist()
    conjugate = torch.tensor([complex(1, value)]).conj()  # the bit alone, as that of its imag
    results["gathered conjugate"] = collective.all_gather(conjugate).tolist()
    results["gathered negative"] = collective.all_gather(conjugate.imag).tolist()
    results["list"] = [each.tolist() for each in collective.all_gather_to_list(columns)]
    results["objects"] = collective.all_gather_objects({"value": value, "text": "x" * value})
    results["sent"], results["sent objects"] = [], []
    for source in range(collective.world_size):
        tensor = torch.full((2, 2), value)
        strided = torch.full((3, 2), value).t()
        collective.broadcast(tensor, source)
        collective.broadcast(strided, src=source)
        results["sent"].append((tensor.tolist(), strided.tolist()))
        items = [value, {"from": value}]
        collective.broadcast_objects(items, source)
        results["sent objects"].append(items)
    items = [value]
    collective.broadcast_objects(items)
    results["default source"] = items
    return results


def _expected(values: list[int], mine: int) -> dict[str, Any]:
    """The same, worked out from what all processes contribute."""
    raised = [float(value + 1) for value in values]
    combined = {
        "SUM": sum(raised),
        "MAX": max(raised),
        "MIN": min(raised),
        "PRODUCT": torch.tensor(raised).prod().item(),
    }
    columns = [[[value, 10 + value]] for value in values]
    return {
        "who": (values.index(mine), len(values)),
        **{name: [[value] * 3] * 2 for name, value in combined.items()},
        "default": float(sum(values)),
        "strided": [[float(sum(values))] * 3] * 2,
        "parameter": [float(sum(values))],
        "gathered": [column[0] for column in columns],
        "gathered scalar": values,
        "gathered strided": [[each] for column in columns for each in column[0]],
        "gathered conjugate": [complex(1, -value) for value in values],
        "gathered negative": [-value for value in values],
        "list": columns,
        "objects": [{"value": value, "text": "x" * value} for value in values],
        "sent": [([[value] * 2] * 2, [[value] * 3] * 2) for value in values],
        "sent objects": [[value, {"from": value}] for value in values],
        "default source": values[:1],
    }


@pytest.mark.parametrize("node", [2, 4])
@pytest.mark.parametrize("name", _GROUPS)
def test_all_operations(crew, name, node) -> None:
    for rank, results in enumerate(crew.run(_all_operations, 4, name, node)):
        assert results == _expected(_GROUPS[name](rank, node), rank)


def _all_operations(name: str, node: int) -> dict[str, Any]:
    whole = _four_processes(node)
    results = _results(_limited(whole, name), dist.get_rank())
    _close_together(whole)
    return results


def _close_together(collective: MeshCollective) -> None:
    dist.barrier()  # as with c10d's groups, nobody leaves while others still connect
    collective.close()


def test_a_process_alone_gives_what_a_world_of_one_gives(crew) -> None:
    alone = _results(SingleProcessCollective("cpu"), 7)
    assert alone == _expected([7], 7)
    assert crew.run(_world_of_one, 1) == [alone]


def _world_of_one() -> dict[str, Any]:
    collective = MeshCollective(0, 1, local_world_size=1, local_rank=0, device_type="cpu")
    results = _results(collective, 7)
    collective.close()
    return results


def test_sources_are_ranks_of_the_group_never_global_ones(crew) -> None:
    for message in crew.run(_bad_source, 4):
        assert "Source rank 2 of a collective of 2 processes" in message


def _bad_source() -> str:
    whole = _four_processes()
    try:
        whole.local.broadcast(torch.zeros(1), src=2)
    except ValueError as error:
        return str(error)
    finally:
        _close_together(whole)
    return "no error"


# --- in a part of the world ----------------------------------------------------------------------


def test_in_a_subset_of_the_world(crew) -> None:
    outside, *inside = crew.run(_in_a_subset, 4)
    assert outside is None
    for index, (results, pairs) in enumerate(inside):
        assert results == _expected([1, 2, 3], index + 1)
        assert pairs == ([1], [1, 2, 3])


def _in_a_subset() -> Any:
    members = dist.new_group([1, 2, 3])
    if dist.get_rank() == 0:
        return None
    collective = MeshCollective(
        members.rank(),
        3,
        local_world_size=3,
        local_rank=members.rank(),
        device_type="cpu",
        process_group=members,
    )
    results = _results(collective, dist.get_rank())
    parallel, physical = collective.meshes
    mine = dist.get_process_group_ranks(parallel.get_group("tp"))
    node = dist.get_process_group_ranks(physical.get_group("local_ranks"))
    collective.close()
    assert dist.get_process_group_ranks(members) == [1, 2, 3]  # not ours: still there
    return results, ([1] if len(mine) == 1 else mine, node)


# --- process groups that have ended --------------------------------------------------------------


def _after_a_sleep(folder: str) -> list[Any]:
    whole = _four_processes()
    given = _limited(whole, "dp")
    kinds = [whole, whole.local, whole.tp_world, given]
    before = [_results(one, dist.get_rank()) for one in kinds]
    old = given.process_group
    for _ in range(2):
        sleep(folder)
        assert meshverse.revive(whole, given)
    assert given.process_group is not old
    return [before, [_results(one, dist.get_rank()) for one in kinds]]


@pytest.mark.long
def test_goes_on_after_all_groups_have_ended(crew, tmp_path) -> None:
    for before, after in crew.run(_after_a_sleep, 4, str(tmp_path)):
        assert before == after


# --- closing -------------------------------------------------------------------------------------


@pytest.mark.long
def test_closing_frees_what_was_made(fresh_crew) -> None:
    for before, during, after in fresh_crew.run(_close_twice, 4):
        assert grown(before, during).keys() == before.keys()
        assert grown(before, after) == {}
        assert after["groups"] == before["groups"]


def _close_twice() -> list[dict[str, int]]:
    _work_once()  # what torch sets up once and keeps
    before, names = held(), group_names()
    collective = _four_processes(sharding_world_size=1)
    collective.local.all_gather_objects(1)
    collective.tp_world.barrier()
    during = held()
    dist.barrier()
    collective.close()
    collective.close()
    collective.local.close()
    dist.barrier()
    after = held_after(before)
    assert group_names() == names
    return [before, during, after]


def _work_once() -> None:
    collective = _four_processes()
    collective.local.all_gather_objects(1)
    _close_together(collective)


def test_closing_a_part_frees_nothing(crew) -> None:
    assert crew.run(_close_parts, 4) == [6.0] * 4


def _close_parts() -> float:
    collective = _four_processes()
    collective.local.close()
    collective.tp_world.close()
    _limited(collective, "dp").close()
    tensor = torch.tensor(float(dist.get_rank()))
    collective.tp_world.all_reduce(tensor)
    _limited(collective, "dp").all_reduce(tensor)
    _close_together(collective)
    return tensor.item()


def test_meshes_that_were_given_are_left(crew) -> None:
    assert crew.run(_given_meshes, 4) == [True] * 4


def _given_meshes() -> bool:
    whole = _four_processes()
    rank = dist.get_rank()
    second = MeshCollective(
        rank, 4, local_world_size=2, local_rank=rank % 2, device_type="cpu", mesh=whole.meshes
    )
    assert isinstance(second.meshes, Meshes)
    before = group_names()
    second.close()
    unchanged = group_names() == before
    _close_together(whole)
    return unchanged


def test_it_starts_and_ends_the_world_itself(crew, tmp_path) -> None:
    assert crew.run(_own_world, 2, held_port(), str(tmp_path / "store")) == [(2, False), (2, False)]


def _own_world(port: int, store: str) -> tuple[float, bool]:
    rank = dist.get_rank()
    dist.barrier()
    dist.destroy_process_group()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    collective = MeshCollective(rank, 2, local_world_size=2, local_rank=rank, device_type="cpu")
    tensor = torch.ones(())
    collective.all_reduce(tensor)
    collective.barrier()
    collective.close()
    with pytest.raises(RuntimeError, match="world of this collective was destroyed"):
        collective.barrier()
    ended = not dist.is_initialized()
    # The crew ends the world it started: give it one.
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    return tensor.item(), not ended
