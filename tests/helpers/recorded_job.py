"""A job's programs, run by a model of streams, and the dumps that torch's recorder writes of it.

Fields and states are those of getCollectiveTrace in torch's FlightRecorderDetail.hpp (2.11 to 2.15,
format 2.10), sequence numbers and names those of ProcessGroupNCCL.cpp, ProcessGroupGloo.cpp and
hooks/FlightRecorderHook.cpp. With NCCL, a rank enqueues its calls and goes on; a call starts once
those before it on its stream are over, and ends once all its ranks have started it. With gloo, a
rank waits in each call, and sends and receives are not recorded.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

BEGIN = 1_700_000_000  # time of the first call, in seconds since the epoch
_C10D = "/x/site-packages/torch/distributed/distributed_c10d.py"


class Step(NamedTuple):
    """A step of a rank's program: an operation, a batch of operations, or what ends the program.

    `group` is an axis; `peer` is a rank in the group. A step of kind "stops" keeps the CPU, one of
    kind "kernel" the GPU; "dies" ends the process without a dump, and "syncs" waits for the GPU.
    """

    kind: str
    group: str = ""
    shape: tuple[int, ...] = (4,)
    dtype: str = "Float"
    peer: int | None = None
    root: int = 0
    out: tuple[int, ...] | None = None
    is_async: bool = False
    batch: tuple[Step, ...] = ()
    line: int = 0  # of the program; 0 for the number of the step


class Format(NamedTuple):
    """A way of recording: the backend's name, and whether NCCL's timing is enabled."""

    backend: str
    is_timed: bool = False

    @property
    def is_gloo(self) -> bool:
        return self.backend == "gloo"


@dataclass
class _Enqueued:
    rank: int
    step: Step
    at: int  # index of the step in the program
    time: int
    lane: tuple[Any, ...]
    after: list[_Enqueued]
    collective: int
    p2p: int
    op: int
    is_busy: bool = False  # a kernel that does not end
    is_done: bool = False

    @property
    def parts(self) -> tuple[Step, ...]:
        return self.step.batch or (self.step,)

    @property
    def is_started(self) -> bool:
        return all(each.is_done for each in self.after)


@dataclass
class Job:
    """Programs of ranks, and the groups along each axis.

    Args:
        programs: steps of each rank.
        groups: ranks of the groups along each axis; "world" is added.
        changed: keys of entries to set after the run, by rank.
        later: seconds by which a rank's clock is ahead.
    """

    programs: Sequence[Sequence[Step]]
    groups: Mapping[str, Sequence[Sequence[int]]] = field(default_factory=dict)
    changed: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    later: Mapping[int, int] = field(default_factory=dict)

    def dumps(self, of: Format) -> dict[int, dict[str, Any]]:
        """Run the programs until nothing changes; return what each living rank dumps."""
        run = _Run(self, of)
        dead = {rank for rank, steps in enumerate(self.programs) if Step("dies") in steps}
        return {rank: run.dump(rank) for rank in range(len(self.programs)) if rank not in dead}

    def write(self, folder: Path, of: Format) -> None:
        for rank, dump in self.dumps(of).items():
            (folder / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(dump, protocol=2))


class _Run:
    def __init__(self, job: Job, of: Format) -> None:
        self.job, self.of = job, of
        world = range(len(job.programs))
        axes = {"world": [world], **job.groups}
        self.groups = [(axis, list(ranks)) for axis, each in axes.items() for ranks in each]
        self.queues: list[list[_Enqueued]] = [[] for _ in world]
        self.at = [0 for _ in world]
        while sum(map(self._advance, world)) or self._complete():
            pass

    def _name(self, rank: int, axis: str) -> int:
        """Return c10d's name of a rank's group: stock torch counts the groups of the program."""
        return next(i for i, (of, ranks) in enumerate(self.groups) if of == axis and rank in ranks)

    def _advance(self, rank: int) -> bool:
        """Enqueue a rank's next step, unless its CPU waits."""
        queue, program = self.queues[rank], self.job.programs[rank]
        if self.at[rank] == len(program):
            return False
        step = program[self.at[rank]]
        waits = step.kind == "syncs" or (self.of.is_gloo and bool(queue))
        if step.kind in ("stops", "dies") or (waits and not all(e.is_done for e in queue)):
            return False
        self.at[rank] += 1
        if step.kind != "syncs":
            self._enqueue(rank, step)
        return True

    def _enqueue(self, rank: int, step: Step) -> None:
        queue = self.queues[rank]
        is_p2p = any(part.peer is not None for part in step.batch or (step,))
        name = -1 if step.kind == "kernel" else self._name(rank, (step.batch or (step,))[0].group)
        same = [each for each in queue if each.lane[:1] == (name,)]
        lane = (name, step.peer, bool(step.batch)) if is_p2p else (name,)
        # A call waits for those on its own stream, and for all that the current stream waits for.
        after = [e for e in queue if e.lane == lane or not e.step.is_async]
        collective, p2p = (max((getattr(e, key) for e in same), default=0) for key in _NUMBERS)
        op = max((e.op for e in same), default=0) + 1
        time = BEGIN + self.at[rank] + self.job.later.get(rank, 0)
        busy = step.kind == "kernel"
        numbers = collective + (not is_p2p), p2p + is_p2p, op
        at = self.at[rank]
        queue.append(_Enqueued(rank, step, at, time, lane, after, *numbers, is_busy=busy))

    def _complete(self) -> bool:
        for queue in self.queues:
            for each in queue:
                if not each.is_done and each.is_started and not each.is_busy:
                    together = self._together(each)
                    if together is not None:
                        for other in together:
                            other.is_done = True
                        return True
        return False

    def _together(self, one: _Enqueued) -> list[_Enqueued] | None:
        """Return the launches that end with this one; None if it cannot end."""
        found, left = [one], [one]
        while left:
            each = left.pop()
            partners = self._partners(each)
            if partners is None:
                return None
            new = [p for p in partners if not any(p is f for f in found)]
            found += new
            left += new
        return found

    def _partners(self, one: _Enqueued) -> list[_Enqueued] | None:
        group = self.groups[one.lane[0]][1]
        found = []
        if one.parts[0].peer is None:
            for rank in group:
                other = next((e for e in self._started(rank, one.lane) if not e.is_done), None)
                if other is None or not _agree(one, other):
                    return None
                found.append(other)
            return found
        for part in one.parts:
            wanted = "recv" if part.kind == "send" else "send"
            me, peer = group.index(one.rank), group[part.peer or 0]
            found += (
                matching := [
                    other
                    for other in self.queues[peer]
                    if other.lane[0] == one.lane[0] and other.is_started and not other.is_done
                    for theirs in other.parts
                    if (theirs.kind, theirs.peer) == (wanted, me)
                ][:1]
            )
            if not matching:
                return None
        return found

    def _started(self, rank: int, lane: tuple[Any, ...]) -> list[_Enqueued]:
        return [e for e in self.queues[rank] if e.lane == lane and e.is_started]

    # --- the dump -----------------------------------------------------------------------------

    def dump(self, rank: int) -> dict[str, Any]:
        entries: list[dict[str, Any]] = []
        for each in self.queues[rank]:
            is_p2p = any(part.peer is not None for part in each.parts)
            if each.is_busy or (is_p2p and self.of.is_gloo):
                continue
            for index, part in enumerate(each.parts):
                events = each if not each.step.batch else None
                entries.append(self._entry(each, part, index, events))
            if each.step.batch:
                whole = Step("coalesced", shape=())
                entries.append(self._entry(each, whole, len(each.parts) - 1, each))
        for index, entry in enumerate(entries):
            entry["record_id"] = index
            entry.update(self.job.changed.get(rank, {}))
        config = {
            str(name): {"name": str(name), "desc": _description(axis), "ranks": str(ranks)}
            for name, (axis, ranks) in enumerate(self.groups)
            if rank in ranks
        }
        if self.of.is_gloo:  # which tells neither names nor ranks
            config = {key: {"name": "", "desc": "", "ranks": "[]"} for key in config}
        return {
            "version": "2.10",
            "comm_lib_version": "2.27.5",
            "nccl_comm_state": {},
            "pg_config": config,
            "pg_status": {},
            "entries": entries,
        }

    def _entry(
        self, each: _Enqueued, part: Step, index: int, events: _Enqueued | None
    ) -> dict[str, Any]:
        name, backend = each.lane[0], self.of.backend
        axis, ranks = self.groups[name]
        operation = part.kind
        if part.peer is not None:
            arrow = "->" if part.kind == "send" else "<-"
            operation = f"{part.kind} {ranks.index(each.rank)}{arrow}{part.peer}"
        is_done = events is not None and each.is_done
        is_started = events is not None and self.of.is_timed and each.is_started
        state = "completed" if is_done else "started" if is_started else "scheduled"
        time = each.time * 10**9
        sizes = [list(part.shape)] if part.shape or part.kind != "coalesced" else []
        function = "batch_isend_irecv" if each.step.batch else part.kind
        if part.peer is not None and part.is_async:
            function = f"i{part.kind}"
        return {
            "frames": [
                {"name": function, "filename": _C10D, "line": 9},
                {"name": "train", "filename": "/me/train.py", "line": part.line or each.at},
            ],
            "record_id": 0,
            "pg_id": name,
            "process_group": (str(name), _description(axis)),
            "thread_name": "python",
            "thread_id": "1",
            "collective_seq_id": each.collective,
            "p2p_seq_id": each.p2p,
            "op_id": each.op + index,
            "profiling_name": f"{backend}:{operation}",
            "time_created_ns": time,
            "input_sizes": sizes,
            "input_dtypes": [part.dtype] * len(sizes),
            "output_sizes": [list(part.out or part.shape)] if sizes else [],
            "output_dtypes": [part.dtype] * len(sizes),
            "state": "scheduled" if self.of.is_gloo else state,
            "time_discovered_started_ns": time if is_started and not self.of.is_gloo else None,
            "time_discovered_completed_ns": time if is_done and not self.of.is_gloo else None,
            "retired": is_done,
            "timeout_ms": 600_000,
            "is_p2p": part.peer is not None,  # not of the entry of a batch
        }


_NUMBERS = ("collective", "p2p")


def _description(axis: str) -> str:
    return "default_pg" if axis == "world" else f"mesh_{axis}"


def _agree(one: _Enqueued, other: _Enqueued) -> bool:
    def kinds(each: _Enqueued) -> list[tuple[object, ...]]:
        return [(p.kind, p.shape, p.dtype, p.root, p.out) for p in each.parts]

    return kinds(one) == kinds(other)
