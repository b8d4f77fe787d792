"""The examination, step by step. All ranks of a job do it together."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from meshverse import Universe, init_device_mesh
from meshverse.planner import Plan, View, plan
from meshverse.report.environment import environment_report
from meshverse.report.tables import shortened_ranks

from .examination import Examination
from .measuring import (
    GroupMeasured,
    clock_readings,
    compute_seconds,
    measure_group,
    store_seconds,
)
from .roll_call import NotAllHereError, RollCall, open_store
from .verdict import judge

__all__ = ["examine"]


def examine(
    views: Sequence[View | Mapping[str, int] | str],
    *,
    backend: str | None = None,
    timeout: timedelta = timedelta(seconds=60),
    large_bytes: int = 16 << 20,
) -> Examination:
    """Check the ranks of a job, and the process groups that these views of it make.

    All ranks of the job call this, each in a process that torchrun (or another launcher that sets
    RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT) has started, and before `init_process_group`: it
    makes the default process group itself, and destroys it.

    Args:
        views: as of `meshverse.planner.plan`; the world's size is that of the job.
        backend: by default "nccl" where there is CUDA, else "gloo".
        timeout: how long to wait for another rank.
        large_bytes: of the large all-reduce, on each rank.

    Returns:
        The same on all ranks.

    Raises:
        NotAllHereError: a rank did not answer in time; the message names it.
        ValueError: the views do not fit the job, or the launcher's variables are missing.
    """
    rank, world_size = _place_of_this_rank()
    planned = plan(views, world_size=world_size, backend=backend or _default_backend(), rank=rank)
    store = open_store(rank, world_size, timeout)
    roll = RollCall(store, rank, world_size, timeout)
    examiner = _Examiner(planned, store, roll, timeout)
    try:
        with roll.living():
            measured = roll.gather("measured", examiner.measure(large_bytes))
            found = None if measured is None else judge(planned, measured)
            data = roll.tell("found", None if found is None else found.to_dict())
            roll.gather("read", True)  # rank 0 may host the store, so it leaves last
    except NotAllHereError as error:
        if rank == 0:
            roll.tell_failure(str(error))
        raise
    return found or Examination.from_dict(data)


def _place_of_this_rank() -> tuple[int, int]:
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in names if name not in os.environ]
    if missing:
        raise ValueError(
            f"{', '.join(missing)} not set: start one process for each rank, such as with torchrun "
            "--nproc-per-node 4 -m meshverse doctor dp=2,tp=2."
        )
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def _default_backend() -> str:
    return "nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"


class _Examiner:
    """Measures what one rank can.

    Args:
        planned: the groups to make.
        store: of the job.
        roll: what the ranks note for each other.
        timeout: how long to wait for another rank.
    """

    def __init__(
        self, planned: Plan, store: dist.Store, roll: RollCall, timeout: timedelta
    ) -> None:
        self._plan, self._store, self._roll, self._timeout = planned, store, roll, timeout
        self._host = socket.gethostname()

    def measure(self, large_bytes: int) -> dict[str, Any]:
        """All that this rank has to tell, as plain data."""
        rank, everybody = self._plan.mine.rank, range(self._plan.world)
        with self._step("the roll call", everybody):
            self._roll.gather("here", True)
            self._roll.tell("all here")
        report: dict[str, Any] = {
            "host": self._host,
            "environment": environment_report(),
            "store_seconds": store_seconds(self._store, rank),
        }
        device = self._start()
        try:
            with self._step("the barriers", everybody):
                report["clock"] = clock_readings()
            report["compute_seconds"] = compute_seconds(device)
            with self._step("making the process groups", everybody):
                groups = self._make_groups(device.type)
            report["groups"] = [
                asdict(self._measure(group, axes.axes, device, large_bytes))
                for group, axes in zip(groups, self._plan.groups, strict=True)
            ]
        finally:
            dist.destroy_process_group()
        return report

    def _start(self) -> torch.device:
        backend, local = self._plan.backend, int(os.environ.get("LOCAL_RANK", "0"))
        device = torch.device("cpu")
        if "nccl" in backend:
            # Else NCCL ends the process when a rank does not answer, and nobody says which one.
            os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")
            device = torch.device("cuda", local % max(torch.cuda.device_count(), 1))
            torch.cuda.set_device(device)
        with self._step("starting the default process group", range(self._plan.world)):
            dist.init_process_group(
                backend,
                store=dist.PrefixStore("default group", self._store),
                rank=self._plan.mine.rank,
                world_size=self._plan.world,
                timeout=self._timeout,
            )
        return device

    def _make_groups(self, device_type: str) -> list[dist.ProcessGroup]:
        universe: Universe | None = None
        for view in self._plan.views:
            sizes, names = tuple(view.sizes.values()), tuple(view.sizes)
            mesh = init_device_mesh(device_type, sizes, mesh_dim_names=names, universe=universe)
            for name, parts in view.flattened.items():
                mesh[parts].flatten(name)
            universe = mesh.universe
        assert universe is not None  # a plan has a view
        made = [group.name for group in universe.explain().groups]
        return [universe.process_groups[name] for name in made if name is not None]

    def _measure(
        self,
        group: dist.ProcessGroup,
        axes: Sequence[str],
        device: torch.device,
        large_bytes: int,
    ) -> GroupMeasured:
        ranks = dist.get_process_group_ranks(group)
        if len(ranks) == 1:
            return GroupMeasured(tuple(ranks), True, 0.0, 0.0, large_bytes)
        with self._step(f"waiting for all before axis {axes[0]}", range(self._plan.world)):
            dist.barrier()
        with self._step(f"the all-reduces of axis {', '.join(axes)}", ranks):
            return measure_group(group, device, large_bytes)

    @contextmanager
    def _step(self, what: str, ranks: Sequence[int]) -> Any:
        """A step that other ranks take part in: if it fails, say which of them are behind."""
        self._roll.begin(what, self._host)
        try:
            yield
        except NotAllHereError:
            raise
        except RuntimeError as error:
            who = self._roll.who_is_behind(ranks)
            reason = str(error).splitlines()[0]
            raise NotAllHereError(
                f"Rank {self._plan.mine.rank} on {self._host} failed in {what}, with ranks "
                f"{shortened_ranks(ranks)}: {who or 'no rank is behind'}. The error was: {reason}"
            ) from error
