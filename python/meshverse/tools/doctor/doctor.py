"""Steps of an examination, which all ranks of a job take together."""

from __future__ import annotations

import itertools
import json
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
from meshverse.tools.environment import environment_report
from meshverse.tools.planner import Plan, View, plan
from meshverse.wording import rank_list

from .examination import Examination, judge
from .membership import Membership, NotAllHereError, Report, rank_from_environment

_calls = itertools.count()
_LONGEST, _SHORTEST = timedelta(days=30), timedelta(milliseconds=1)
_LARGEST = 1 << 40  # bytes of an all-reduce

# Number of repetitions of each measurement.
_STORE_TURNS, _CLOCK_TURNS, _SMALL_TURNS, _LARGE_TURNS, _COMPUTE_TURNS = 20, 5, 20, 5, 5
_MATRIX = 512  # rows and columns


def examine(
    views: Sequence[View | Mapping[str, int] | str] = (),
    *,
    backend: str | None = None,
    timeout: timedelta = timedelta(seconds=60),
    large_bytes: int = 16 << 20,
    report: Report | None = None,
    own_process: bool = False,
) -> Examination:
    """Check the ranks of a job, and the process groups that the job's views need.

    All ranks of the job must call this before `init_process_group`, each in a process started by
    torchrun or by another launcher that sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. It
    creates a default process group and destroys it at the end.

    Args:
        views: views as for `meshverse.tools.planner.plan`, over all ranks of the job. By default,
            one axis of all ranks.
        backend: backend of all groups; by default "nccl" if CUDA is available, else "gloo".
        timeout: how long to wait for another rank: from 1 ms to 30 days.
        large_bytes: size of the large all-reduce on each rank, at most 2**40.
        report: function that one rank calls with the `Examination`, or with the `NotAllHereError`
            that all ranks raise. The others wait until it has returned (at most about 30 seconds
            and the timeout), so it can print before a launcher such as torchrun ends all ranks. An
            error that it raises is raised on this rank; the others end as if there were none.
        own_process: whether this process does nothing else. With NCCL, its environment then gets
            `TORCH_NCCL_BLOCKING_WAIT=1`, if unset: a timeout should then raise, instead of ending
            the process before it can report. (In torch 2.11, it did not when it was tried.)

    Returns:
        The examination, the same on all ranks.

    Raises:
        NotAllHereError: a rank did not answer in time, or failed; the message names it.
        ValueError: the views do not fit the job, the launcher's variables are missing or malformed,
            the backend is not available or transfers nothing ("fake"), the timeout or a size is out
            of range, or a default process group exists already. Nothing was started.
    """
    call = next(_calls)  # counted before any error, so that all ranks count the same
    rank, world_size = rank_from_environment()
    _check_limits(timeout, large_bytes)
    planned = plan(
        views or [{"world": world_size}],
        world_size=world_size,
        backend=_default_backend() if backend is None else backend,
        rank=rank,
    )
    _check_backend(planned.backend)
    if dist.is_initialized():
        raise ValueError(
            "There is a default process group already. examine() creates its own: call it before "
            "init_process_group() or after destroy_process_group()."
        )
    report = report or (lambda _: None)
    try:
        membership = Membership(rank, world_size, timeout, call, report)
    except NotAllHereError as error:  # this rank cannot reach the store, so it reports by itself
        report(error)
        raise
    with membership.heartbeat():
        measured = membership.gather(
            "measured",
            _Examiner(planned, membership, timeout, own_process).measure(large_bytes),
        )
        found = None if measured is None else judge(planned, measured)
        try:
            if found is not None:
                report(found)
        finally:  # the others do not wait for a report that failed
            data = membership.broadcast("found", found and found.to_dict())
            membership.gather("read", True)  # rank 0 may host the store, so it leaves last
    return Examination.from_dict(data)


def _check_limits(timeout: Any, large_bytes: Any) -> None:
    if not isinstance(timeout, timedelta) or not _SHORTEST <= timeout <= _LONGEST:
        raise ValueError(f"timeout={timeout!r}: give a timedelta from 1 ms to 30 days.")
    is_int = isinstance(large_bytes, int) and not isinstance(large_bytes, bool)
    if not is_int or not 1 <= large_bytes <= _LARGEST:
        raise ValueError(f"large_bytes={large_bytes!r}: give an int from 1 to 2**40 (1 TiB).")


def _check_backend(backend: str) -> None:
    """Check that torch has every part of a backend, such as "cpu:gloo,cuda:nccl".

    Raises:
        ValueError: torch lacks a part, a part transfers nothing, or a part is NCCL and there is no
            CUDA device.
    """
    unusable = (dist.Backend.UNDEFINED, "fake")  # "fake" transfers nothing
    known = [name for name in dist.Backend.backend_list if name not in unusable]
    available = [name for name in known if dist.is_backend_available(name)]
    parts = backend.split(",")
    for part in parts:
        device, _, name = part.rpartition(":")
        if len(parts) > 1 and not device:
            raise ValueError(
                f"{part!r} in the backend {backend!r} has no device: write 'cpu:gloo,cuda:nccl'."
            )
        if name not in available:
            raise ValueError(
                f"The backend {backend!r} cannot be examined. This torch has "
                f"{', '.join(available)}."
            )
        if name == "nccl" and not torch.cuda.is_available():
            raise ValueError(f"The backend {backend!r} needs a CUDA device, and there is none.")


def _default_backend() -> str:
    return "nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"


@contextmanager
def _own_device(backend: str) -> Iterator[torch.device]:
    """Yield this rank's device; a CUDA device is the current one until the end of the block."""
    if "nccl" not in backend:
        yield torch.device("cpu")
        return
    local = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local % max(torch.cuda.device_count(), 1))
    with torch.cuda.device(device):
        yield device


class _Examiner:
    """Measurements of one rank, in steps that all ranks take together.

    Args:
        planned: plan of the groups to create.
        membership: membership of the job, which records the steps.
        timeout: how long to wait for another rank.
        own_process: as for `examine`.
    """

    def __init__(
        self, planned: Plan, membership: Membership, timeout: timedelta, own_process: bool
    ) -> None:
        self._plan, self._membership, self._timeout = planned, membership, timeout
        self._own_process = own_process
        self._host = socket.gethostname()

    def measure(self, large_bytes: int) -> dict[str, Any]:
        """Measure the store, the clock, this rank's speed and its groups; return plain data."""
        rank, everybody = self._plan.mine.rank, range(self._plan.world)
        with self._step("the health check", everybody):
            mine = {
                "--backend": self._plan.backend,
                "--megabytes": large_bytes / 2**20,
                "groups": [[each.axes, each.layout] for each in self._plan.groups],
            }
            everyone = self._membership.gather("here", mine)
            for other, theirs in enumerate(everyone or ()):
                for name, value in json.loads(json.dumps(mine)).items():
                    if theirs[name] != value:
                        raise self._membership.own_failure(
                            f"Rank {other} was started with {name} {theirs[name]}, and rank {rank} "
                            f"with {value}",
                            "Start all ranks with the same arguments.",
                        )
            self._membership.broadcast("all here")
        report: dict[str, Any] = {"host": self._host}
        with self._step("its measurements of the store"):
            report["environment"] = environment_report()
            report["store_seconds"] = _store_seconds(self._membership.store, rank)
        if self._own_process and "nccl" in self._plan.backend:  # what was reported is the user's
            os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")
        with _own_device(self._plan.backend) as device:
            try:
                with self._step("the start of the default process group", everybody):
                    dist.init_process_group(
                        self._plan.backend,
                        store=dist.PrefixStore("default group", self._membership.store),
                        rank=rank,
                        world_size=self._plan.world,
                        timeout=self._timeout,
                    )
                with self._step("the barriers", everybody):
                    report["clock"] = _clock_readings()
                with self._step("its multiplications of matrices"):
                    report["compute_seconds"] = _compute_seconds(device)
                with self._step("the creation of the process groups", everybody):
                    groups = self._create_groups(device.type)
                report["groups"] = [
                    self._measure(group, axes.axes, device, large_bytes)
                    for group, axes in zip(groups, self._plan.groups, strict=True)
                ]
            finally:
                if dist.is_initialized():
                    dist.destroy_process_group()
        return report

    def _create_groups(self, device_type: str) -> list[dist.ProcessGroup]:
        universe: Universe | None = None
        for view in self._plan.views:
            sizes, names = tuple(view.sizes.values()), tuple(view.sizes)
            mesh = init_device_mesh(device_type, sizes, mesh_dim_names=names, universe=universe)
            for name, parts in view.flattened.items():
                mesh[parts].flatten(name)
            universe = mesh.universe
        assert universe is not None  # a plan has a view
        groups = [group.name for group in universe.explain().groups]
        return [universe.process_groups[name] for name in groups if name is not None]

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
        with self._step(f"the barrier before axis {axes[0]}", range(self._plan.world)):
            dist.barrier()
        with self._step(f"the all-reduces of axis {', '.join(axes)}", ranks):
            return _measure_group(group, device, large_bytes)

    @contextmanager
    def _step(self, what: str, ranks: Sequence[int] = ()) -> Iterator[None]:
        """Run a step; if it fails, raise an error that all ranks raise.

        Args:
            what: the step.
            ranks: ranks that take the step together, so that the error names the missing ones; by
                default, this rank takes it alone.
        """
        try:
            self._membership.begin(what, self._host)
            yield
        except NotAllHereError:
            raise
        except Exception as error:
            failed = f"Rank {self._plan.mine.rank} on {self._host} failed in {what}"
            why = f"The error was: {_first_line(error)}"
            if not ranks:
                raise self._membership.own_failure(failed, why) from error
            raise self._membership.failure(
                f"{failed}, with ranks {rank_list(ranks)}", f" {why}"
            ) from error


# --- measurements of one rank -------------------------------------------------------------------


def _store_seconds(store: dist.Store, rank: int) -> float:
    """Measure the time to write and read a key of the store: the median of 20, in seconds."""

    def write_and_read() -> None:
        store.set(f"latency {rank}", "x")
        store.get(f"latency {rank}")

    return _median_seconds(write_and_read, _STORE_TURNS)


def _clock_readings() -> list[float]:
    """Read this rank's clock after each of 5 barriers, which all ranks leave at about one time."""
    readings = []
    for _ in range(_CLOCK_TURNS):
        dist.barrier()
        readings.append(time.time())
    return readings


def _compute_seconds(device: torch.device) -> float:
    """Measure a product of two 512 x 512 matrices on this rank: the median of 5, in seconds."""
    matrix = torch.ones(_MATRIX, _MATRIX, device=device)

    def multiply() -> None:
        torch.mm(matrix, matrix)
        _finish(device)

    multiply()
    return _median_seconds(multiply, _COMPUTE_TURNS)


def _measure_group(
    group: dist.ProcessGroup, device: torch.device, large_bytes: int
) -> dict[str, Any]:
    """Check sums of all-reduces in a group, then time small and large ones. All members call this.

    Args:
        group: group to measure.
        device: device of the tensors.
        large_bytes: size of the large tensor.
    """
    ranks = dist.get_process_group_ranks(group)
    # If a rank's contribution is lost or added twice, at least one of these two sums changes.
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
    """Return one rank's measurements of one group as plain data; times are medians in seconds."""
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


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def _finish(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
