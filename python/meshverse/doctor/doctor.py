"""The examination, step by step. All ranks of a job do it together."""

from __future__ import annotations

import itertools
import os
import socket
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from meshverse import Universe, init_device_mesh
from meshverse.planner import Plan, View, plan
from meshverse.report.environment import environment_report
from meshverse.wording import rank_list

from .examination import Examination, judge
from .membership import Membership, NotAllHereError, Report, rank_from_environment

_calls = itertools.count()
_LONGEST, _SHORTEST = timedelta(days=30), timedelta(milliseconds=1)

_STORE_TURNS, _CLOCK_TURNS, _SMALL_TURNS, _LARGE_TURNS, _COMPUTE_TURNS = 20, 5, 20, 5, 5
_MATRIX = 512


def examine(
    views: Sequence[View | Mapping[str, int] | str] = (),
    *,
    backend: str | None = None,
    timeout: timedelta = timedelta(seconds=60),
    large_bytes: int = 16 << 20,
    report: Report | None = None,
) -> Examination:
    """Check the ranks of a job, and the process groups that these views of it make.

    All ranks of the job call this, each in a process that torchrun (or another launcher that sets
    RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT) has started, and before `init_process_group`: it
    makes the default process group itself, and destroys it.

    Args:
        views: as of `meshverse.planner.plan`; the world's size is that of the job. By default one
            axis of all ranks.
        backend: by default "nccl" where there is CUDA, else "gloo".
        timeout: how long to wait for another rank: from 1 ms to 30 days.
        large_bytes: of the large all-reduce, on each rank.
        report: called on one rank with the `Examination`, or with the `NotAllHereError` that all
            ranks raise. The others wait until it has returned. So it can print, although a
            launcher such as torchrun ends all ranks as soon as one has failed.

    Returns:
        The same on all ranks.

    Raises:
        NotAllHereError: a rank did not answer in time; the message names it.
        ValueError: the views do not fit the job, the launcher's variables are missing or no
            numbers, the backend is not there, a timeout or size that cannot be, or there is a
            default process group already. Nothing was started then.
    """
    call = next(_calls)  # first: also a rank that cannot take part has then had this call
    rank, world_size = rank_from_environment()
    _check_limits(timeout, large_bytes)
    planned = plan(
        views or [{"world": world_size}],
        world_size=world_size,
        backend=backend or _default_backend(),
        rank=rank,
    )
    _check_backend(planned.backend)
    if dist.is_initialized():
        raise ValueError(
            "There is a default process group already. The examination makes its own: call it "
            "before init_process_group() or after destroy_process_group()."
        )
    report = report or (lambda _: None)
    try:
        membership = Membership(rank, world_size, timeout, call, report)
    except NotAllHereError as error:  # of this rank alone: it cannot reach the others
        report(error)
        raise
    with membership.heartbeat():
        measured = membership.gather(
            "measured", _Examiner(planned, membership, timeout).measure(large_bytes)
        )
        found = None if measured is None else judge(planned, measured)
        if found is not None:
            report(found)
        data = membership.broadcast("found", found and found.to_dict())
        membership.gather("read", True)  # rank 0 may host the store, so it leaves last
    return Examination.from_dict(data)


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
    """Make this rank's device the current one; set afterwards what was set before."""
    if "nccl" not in backend:
        yield torch.device("cpu")
        return
    local = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local % max(torch.cuda.device_count(), 1))
    with _blocking_wait(), torch.cuda.device(device):
        yield device


@contextmanager
def _blocking_wait() -> Iterator[None]:
    """Keep NCCL from ending the process if a rank does not answer: no rank would name that one."""
    name = "TORCH_NCCL_BLOCKING_WAIT"
    before = os.environ.get(name)
    os.environ.setdefault(name, "1")
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)


class _Examiner:
    """Takes the measurements of one rank.

    Args:
        planned: the groups to make.
        membership: of the job, for its steps.
        timeout: how long to wait for another rank.
    """

    def __init__(self, planned: Plan, membership: Membership, timeout: timedelta) -> None:
        self._plan, self._membership, self._timeout = planned, membership, timeout
        self._host = socket.gethostname()

    def measure(self, large_bytes: int) -> dict[str, Any]:
        """Measure the store, the clock, this rank's speed and its groups, as plain data."""
        rank, everybody = self._plan.mine.rank, range(self._plan.world)
        with self._step("the health check", everybody):
            self._membership.gather("here", True)
            self._membership.broadcast("all here")
        report: dict[str, Any] = {
            "host": self._host,
            "environment": environment_report(),
            "store_seconds": _store_seconds(self._membership.store, rank),
        }
        with _own_device(self._plan.backend) as device:
            try:
                with self._step("starting the default process group", everybody):
                    dist.init_process_group(
                        self._plan.backend,
                        store=dist.PrefixStore("default group", self._membership.store),
                        rank=rank,
                        world_size=self._plan.world,
                        timeout=self._timeout,
                    )
                with self._step("the barriers", everybody):
                    report["clock"] = _clock_readings()
                report["compute_seconds"] = _compute_seconds(device)
                with self._step("making the process groups", everybody):
                    groups = self._make_groups(device.type)
                report["groups"] = [
                    self._measure(group, axes.axes, device, large_bytes)
                    for group, axes in zip(groups, self._plan.groups, strict=True)
                ]
            finally:
                if dist.is_initialized():
                    dist.destroy_process_group()
        return report

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
    ) -> dict[str, Any]:
        ranks = dist.get_process_group_ranks(group)
        if len(ranks) == 1:
            return _group_dict(ranks, True, 0.0, 0.0, large_bytes)
        with self._step(f"waiting for all before axis {axes[0]}", range(self._plan.world)):
            dist.barrier()
        with self._step(f"the all-reduces of axis {', '.join(axes)}", ranks):
            return _measure_group(group, device, large_bytes)

    @contextmanager
    def _step(self, what: str, ranks: Sequence[int]) -> Iterator[None]:
        """Run a step that other ranks take part in; if it fails, name the ranks they wait for."""
        try:
            self._membership.begin(what, self._host)
            yield
        except NotAllHereError:
            raise
        except RuntimeError as error:
            raise self._membership.failure(
                f"Rank {self._plan.mine.rank} on {self._host} failed in {what}, with ranks "
                f"{rank_list(ranks)}",
                f" The error was: {str(error).splitlines()[0]}",
            ) from error


# --- measurements of one rank -------------------------------------------------------------------


def _store_seconds(store: dist.Store, rank: int) -> float:
    """Measure the seconds that writing and reading a key of the store take; the median of 20."""

    def write_and_read() -> None:
        store.set(f"latency {rank}", "x")
        store.get(f"latency {rank}")

    return _median_seconds(write_and_read, _STORE_TURNS)


def _clock_readings() -> list[float]:
    """Read this rank's clock after each of 5 barriers, which all ranks leave at nearly one time."""
    readings = []
    for _ in range(_CLOCK_TURNS):
        dist.barrier()
        readings.append(time.time())
    return readings


def _compute_seconds(device: torch.device) -> float:
    """Measure the seconds of a product of two 512 x 512 matrices on this rank; the median of 5."""
    matrix = torch.ones(_MATRIX, _MATRIX, device=device)

    def multiply() -> None:
        torch.mm(matrix, matrix)
        _finish(device)

    multiply()
    return _median_seconds(multiply, _COMPUTE_TURNS)


def _measure_group(
    group: dist.ProcessGroup, device: torch.device, large_bytes: int
) -> dict[str, Any]:
    """All-reduce known numbers in a group, then time small and large ones. Its members all call it.

    Args:
        group: to be measured.
        device: of the tensors.
        large_bytes: of the large tensor.
    """
    ranks = dist.get_process_group_ranks(group)
    # In one of these, a rank whose part is lost or comes twice changes the sum.
    mine = torch.tensor([dist.get_rank() + 1, 1], dtype=torch.int64, device=device)
    dist.all_reduce(mine, group=group)
    is_right = mine.tolist() == [sum(ranks) + len(ranks), len(ranks)]
    large = torch.ones(max(large_bytes // 4, 1), device=device)
    dist.all_reduce(large, group=group)
    is_right = is_right and bool((large == len(ranks)).all())
    small = torch.zeros(1, dtype=torch.int64, device=device)
    large.zero_()

    def seconds(tensor: torch.Tensor, turns: int) -> float:
        def once() -> None:
            dist.all_reduce(tensor, group=group)
            _finish(device)

        return _median_seconds(once, turns)

    small_seconds, large_seconds = seconds(small, _SMALL_TURNS), seconds(large, _LARGE_TURNS)
    return _group_dict(ranks, is_right, small_seconds, large_seconds, large.nbytes)


def _group_dict(
    ranks: Sequence[int], is_right: bool, small: float, large: float, large_bytes: int
) -> dict[str, Any]:
    """Return one rank's view of one group's all-reduces: whether sums were right, medians in s."""
    return {
        "ranks": list(ranks),
        "is_right": is_right,
        "small_seconds": small,
        "large_seconds": large,
        "large_bytes": large_bytes,
    }


def _median_seconds(action: Callable[[], None], turns: int) -> float:
    seconds = []
    for _ in range(turns):
        start = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def _finish(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
