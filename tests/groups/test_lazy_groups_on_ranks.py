"""Lazy groups on real ranks: made by their members alone, in any order that can work."""

from __future__ import annotations

import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from helpers.all_reduce import reached_by
from helpers.crew import Crew
from helpers.worlds import group_names
from meshverse import DeviceMesh, init_device_mesh

_AXES = ("dp", "tp")


def _mesh(**extra) -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=_AXES, lazy=True, **extra)


def _members_alone() -> tuple[list[int], int]:
    """Ranks 0 and 1 use an axis, ranks 2 and 3 another one; nobody waits for the others."""
    mesh = _mesh(timeout=timedelta(seconds=60))
    before = group_names()
    axis = "tp" if dist.get_rank() < 2 else "dp"
    if axis == "dp":
        return [], len(group_names() - before)
    return reached_by(mesh.get_group(axis)), len(group_names() - before)


def test_its_members_suffice(crew: Crew) -> None:
    first, second, third, fourth = crew.run(_members_alone, 4)
    assert first == second == ([1, 1, 0, 0], 1)
    assert third == fourth == ([], 0)


def _train() -> list[float]:
    torch.manual_seed(0)
    mesh = _mesh()
    model = torch.nn.Linear(8, 4)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(2):
        loss = model(torch.ones(4, 8)).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    whole = distribute_tensor(torch.arange(8.0), mesh["tp"], [Shard(0)]).full_tensor()
    assert whole.equal(torch.arange(8.0))
    return losses


def test_fsdp_and_dtensor_make_what_they_use(crew: Crew) -> None:
    losses = crew.run(_train, 4)
    assert losses[0] == losses[1] == losses[2] == losses[3]
    assert losses[0][1] < losses[0][0]


def _in_a_circle() -> str:
    """Each rank first uses the axis along which its neighbor is in the other group."""
    mesh = _mesh(timeout=timedelta(seconds=30))
    first = {0: "tp", 1: "dp", 3: "tp", 2: "dp"}[dist.get_rank()]
    try:
        mesh.get_group(first)
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_ranks_that_wait_for_one_another_get_an_error(crew: Crew) -> None:
    for message in crew.run(_in_a_circle, 4):
        assert ": deadlock: rank " in message
        for step in (
            "rank 0 waits to create the process group of axis 'tp' with ranks [0, 1] at ",
            "rank 1 waits to create the process group of axis 'dp' with ranks [1, 3] at ",
            "rank 3 waits to create the process group of axis 'tp' with ranks [2, 3] at ",
            "rank 2 waits to create the process group of axis 'dp' with ranks [0, 2] at ",
        ):
            assert f"{step}{__file__}:" in message
        assert "warm_up()" in message


def _after_a_circle() -> list[int]:
    _in_a_circle()
    dist.barrier()
    mesh = _mesh()
    return reached_by(mesh.get_group("tp"))


def test_after_the_error_the_same_groups_can_be_made(crew: Crew) -> None:
    for rank, reached in enumerate(crew.run(_after_a_circle, 4)):
        assert reached == ([1, 1, 0, 0] if rank < 2 else [0, 0, 1, 1])


def _different_orders_after_warm_up() -> list[list[int]]:
    mesh = _mesh()
    reports = mesh.universe.warm_up()
    assert sorted(report.axes for report in reports) == [("dp",), ("tp",)]
    order = _AXES if dist.get_rank() in (0, 3) else _AXES[::-1]
    works = {
        axis: dist.all_reduce(torch.ones(1), group=mesh.get_group(axis), async_op=True)
        for axis in order
    }
    for work in works.values():
        work.wait()
    return [reached_by(mesh.get_group(axis)) for axis in _AXES]


def test_warm_up_lets_ranks_use_axes_in_any_order(crew: Crew) -> None:
    for rank, (dp, tp) in enumerate(crew.run(_different_orders_after_warm_up, 4)):
        assert dp == ([1, 0, 1, 0] if rank % 2 == 0 else [0, 1, 0, 1])
        assert tp == ([1, 1, 0, 0] if rank < 2 else [0, 0, 1, 1])


def _used_by_one_member_only() -> tuple[str, float]:
    mesh = _mesh(timeout=timedelta(seconds=2))  # short-timeout: it must elapse
    start, message = time.monotonic(), "not used"
    if dist.get_rank() == 0:
        try:
            mesh.get_group("tp")
        except RuntimeError as error:
            message = str(error)
    return message, time.monotonic() - start


def test_members_that_never_come_are_named(crew: Crew) -> None:
    (message, seconds), *others = crew.run(_used_by_one_member_only, 4)
    assert message.startswith(
        "Rank 0 could not create the process group of axis 'tp' with ranks [0, 1]: rank 0 waited "
        "0:00:02: 1 of 2 members joined; missing: ranks [1]. Those that joined may have made"
    )
    assert seconds >= 2
    assert {result for result, _ in others} == {"not used"}
