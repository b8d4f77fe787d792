"""The examination, step by step. All ranks of a job do it together."""

from __future__ import annotations

import itertools
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
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

_calls = itertools.count()
_LONGEST, _SHORTEST = timedelta(days=30), timedelta(milliseconds=1)


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
        timeout: how long to wait for another rank: from 1 ms to 30 days.
        large_bytes: of the large all-reduce, on each rank.

    Returns:
        The same on all ranks.

    Raises:
        NotAllHereError: a rank did not answer in time; the message names it.
        ValueError: the views do not fit the job, the launcher's variables are missing or no
            numbers, the backend is not there, a timeout or size that cannot be, or there is a
            default process group already. Nothing was started then.
    """
    call = next(_calls)  # first: also a rank that cannot take part has then had this call
    rank, world_size = _place_of_this_rank()
    _check_limits(timeout, large_bytes)
    planned = plan(views, world_size=world_size, backend=backend or _default_backend(), rank=rank)
    _check_backend(planned.backend)
    if dist.is_initialized():
        raise ValueError(
            "There is a default process group already. The examination makes its own: call it "
            "before init_process_group() or after destroy_process_group()."
        )
    store = open_store(rank, world_size, timeout, call)
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
    world_size = _variable("WORLD_SIZE", 1, None)
    rank = _variable("RANK", 0, world_size - 1)
    _variable("MASTER_PORT", 1, 2**16 - 1)
    for name, smallest in (("LOCAL_WORLD_SIZE", 1), ("LOCAL_RANK", 0)):
        if name in os.environ:
            _variable(name, smallest, None)
    return rank, world_size


def _variable(name: str, smallest: int, largest: int | None) -> int:
    text = os.environ[name].strip()
    value = int(text) if text.isdecimal() else -1
    if value < smallest or (largest is not None and value > largest):
        limit = f"of at least {smallest}" if largest is None else f"from {smallest} to {largest}"
        raise ValueError(
            f"{name}={os.environ[name]!r} in the environment: the launcher has to give an int "
            f"{limit}."
        )
    return value


def _check_limits(timeout: Any, large_bytes: Any) -> None:
    if not isinstance(timeout, timedelta) or not _SHORTEST <= timeout <= _LONGEST:
        raise ValueError(f"timeout={timeout!r}: give a timedelta from 1 ms to 30 days.")
    if isinstance(large_bytes, bool) or not isinstance(large_bytes, int) or large_bytes < 1:
        raise ValueError(f"large_bytes={large_bytes!r}: give an int above 0.")


def _check_backend(backend: str) -> None:
    """Check that torch has every part of a backend, such as "cpu:gloo,cuda:nccl".

    Raises:
        ValueError: it has not, or it is NCCL and there is no CUDA device.
    """
    known = [name for name in dist.Backend.backend_list if name != dist.Backend.UNDEFINED]
    there = [name for name in known if dist.is_backend_available(name)]
    parts = backend.split(",")
    for part in parts:
        device, _, name = part.rpartition(":")
        if len(parts) > 1 and not device:
            raise ValueError(
                f"{part!r} in the backend {backend!r} has no device: write 'cpu:gloo,cuda:nccl'."
            )
        if name not in there:
            raise ValueError(
                f"The backend {backend!r} is not in this torch, which has {', '.join(there)}."
            )
        if name == "nccl" and not torch.cuda.is_available():
            raise ValueError(f"The backend {backend!r} needs a CUDA device, and there is none.")


def _default_backend() -> str:
    return "nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"


@contextmanager
def _own_device(backend: str) -> Iterator[torch.device]:
    """The device of this rank, as the current one. What was set before is set again after it."""
    if "nccl" not in backend:
        yield torch.device("cpu")
        return
    local = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local % max(torch.cuda.device_count(), 1))
    with _blocking_wait(), torch.cuda.device(device):
        yield device


@contextmanager
def _blocking_wait() -> Iterator[None]:
    """Else NCCL ends the process when a rank does not answer, and nobody says which one."""
    name = "TORCH_NCCL_BLOCKING_WAIT"
    before = os.environ.get(name)
    os.environ.setdefault(name, "1")
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)


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
        with _own_device(self._plan.backend) as device:
            try:
                self._start()
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
                if dist.is_initialized():
                    dist.destroy_process_group()
        return report

    def _start(self) -> None:
        with self._step("starting the default process group", range(self._plan.world)):
            dist.init_process_group(
                self._plan.backend,
                store=dist.PrefixStore("default group", self._store),
                rank=self._plan.mine.rank,
                world_size=self._plan.world,
                timeout=self._timeout,
            )

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
