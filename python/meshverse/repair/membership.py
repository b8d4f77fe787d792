"""Membership: which processes are the ranks of a job, decided in a store that outlives them.

A job goes through a sequence of worlds, numbered from 0. The store has one status: the number of
the current world, and whether an alarm was raised in it. Each change of the status is a
`compare_set`. From one world to the next:

1. A process that finds another one lost raises the alarm of the current world, once.
2. The ranks of the current world then sign for the next one. Spares sign as soon as they wait for
   it, mostly before the alarm.
3. One of them, the leader, waits until each rank has signed or is lost itself. It decides who is
   which rank of the next world, and makes that the current one. If the leader is lost, another
   process takes over; the first decision that is stored counts.

So no process is ever a rank in two worlds at once, and two worlds never exist side by side: a rank
that did not sign in time finds that it is not in the current world, and ends itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch.distributed as dist

from meshverse.world.text_store import TextStore

_POLL_SECONDS = 0.03
_OPERATIONS_A_SECOND = 10_000  # of all processes of a job together, at most
_random = random.Random()  # not Python's global generator, which belongs to the user


class Process(NamedTuple):
    """A process of a job.

    Attributes:
        number: its number, in the order of arrival, from 0.
        pid: process id on its host.
        host: id of the host and of the process ids on it (of the container).
        address: address of the host, for other hosts.
        rank: rank that it asks for; None for any.
    """

    number: int
    pid: int
    host: str
    address: str
    rank: int | None

    def __str__(self) -> str:
        return f"process {self.pid} on {self.address}"


class Signature(NamedTuple):
    """A process's signature for the next world.

    Attributes:
        process: number of the process.
        step: number of steps that its state includes; -1 if it has no state.
        is_torn: whether its state is incomplete, as it was changed halfway.
    """

    process: int
    step: int = -1
    is_torn: bool = False


@dataclass
class Decision:
    """The ranks of a world.

    Attributes:
        world: number of the world, from 0.
        processes: number of the process of each rank.
        new_ranks: ranks whose process has no state yet.
        step: number of steps that the most advanced state includes; a rank one step behind finishes
            its pending commit when it enters. -1 if the state must be loaded.
        is_revived: whether meshes and models of the world before are revived, as some rank has a
            state; else all ranks build them together.
        is_resized: whether there are more or fewer ranks than before.
        reason: why the world before ended.
        lost: numbers of the processes that were ranks before and are not any more.
    """

    world: int
    processes: list[int]
    new_ranks: list[int] = field(default_factory=list)
    step: int = -1
    is_revived: bool = False
    is_resized: bool = False
    reason: str = ""
    lost: list[int] = field(default_factory=list)


class Status(NamedTuple):
    """The status of a job.

    Attributes:
        world: number of the current world; -1 before the first.
        alarm: why the current world must end; "" if it goes on.
        over: "complete" if the job has finished, or why it cannot go on; "" while it runs.
        step: number of steps of the job that has finished; else -1.
    """

    world: int
    alarm: str
    over: str
    step: int = -1


FIRST = Status(-1, "the job begins", "")


class JobStore(TextStore):
    """The store of a job, with the keys of one job, for one thread.

    Args:
        store: store that outlives all processes.
        name: name of the job.
    """

    def __init__(self, store: Any, name: str) -> None:
        super().__init__(store, f"meshverse repair/{name}")

    def status(self) -> Status:
        """Return the status of the job."""
        text = self.read("status")
        return Status(*json.loads(text)) if text else FIRST

    def change_status(self, old: Status, new: Status) -> bool:
        """Change the status, if it is still `old`; return whether this call changed it."""
        before = "" if old == FIRST else json.dumps(old)
        after = json.dumps(new)
        return self.replace("status", before, after) == after

    def decision(self, world: int) -> Decision | None:
        """Return the decision on a world, or None if there is none."""
        text = self.read(f"world/{world}")
        return Decision(**json.loads(text)) if text else None

    def process(self, number: int) -> Process | None:
        """Return a process by number; None if it is lost, and its keys are removed."""
        text = self.read(f"process/{number}")
        return Process(*json.loads(text)) if text else None


class Signs:
    """Signs of life of other processes, as this thread of this process sees them.

    Silence is measured on a clock that stands still while this thread does, such as on a host that
    was suspended: others that were suspended with it then have time to give a sign.

    Args:
        store: store of the job.
        own: this process.
        lost_after: seconds without a sign after which a process is lost.
    """

    def __init__(self, store: JobStore, own: Process, lost_after: float) -> None:
        self._store, self._own, self.lost_after = store, own, lost_after
        self._processes: dict[int, Process] = {}
        self._beats: dict[int, tuple[str, float, bool]] = {}  # beat, since when, whether it changed
        self._seconds, self._last_look = 0.0, time.monotonic()

    def why_lost(self, number: int) -> str:
        """Return why a process is lost; "" if it may be alive."""
        self._advance()
        process = self._process(number)
        if process is None:
            return f"process {number} has left"
        if process.host == self._own.host and _is_dead(process.pid):
            return f"{process} has died"
        beat = self._store.read(f"beat/{number}")
        if not beat:
            return f"{process} has left"
        last, since, _ = self._beats.get(number, ("", 0.0, False))
        if beat != last:
            self._beats[number] = (beat, self._seconds, bool(last))
        elif self._seconds - since > self.lost_after:
            return f"{process} gave no sign of life for {self.lost_after:g} s"
        return ""

    def is_alive(self, number: int) -> bool:
        """Return whether a process has given a sign since it was first asked for."""
        process = self._process(number)
        if process is None or self.why_lost(number):
            return False
        return self._beats[number][2] or (process.host == self._own.host and _runs(process.pid))

    def _advance(self) -> None:
        now = time.monotonic()
        self._seconds += min(now - self._last_look, self.lost_after / 2)
        self._last_look = now

    def _process(self, number: int) -> Process | None:
        known = self._processes.get(number) or self._store.process(number)
        if known is not None:
            self._processes[number] = known
        return known


def _state_of(pid: int) -> str:
    """Return the state of a process as Linux names it, such as "S"; "" if it is not known."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "X" if os.path.isdir("/proc/self") else ""
    except ProcessLookupError:
        return "X"  # it has ended meanwhile
    except OSError:
        return ""  # this process has too many open files, for example


def _is_dead(pid: int) -> bool:
    return _state_of(pid) in ("X", "Z")


def _runs(pid: int) -> bool:
    return _state_of(pid) in ("R", "S", "D", "I")


class Membership:
    """This process's part in a job. For the main thread.

    Args:
        store: store of the job.
        sizes: acceptable numbers of ranks.
        rank: rank that this process asks for in the first world; None for any.
        lost_after: seconds without a sign of life after which a process is lost.
        slow_after: seconds after which a rank that lives, but does not sign, counts as lost.
        replaced_within: seconds to wait for processes that replace lost ranks, before the job goes
            on with fewer, or ends.
        started_within: seconds to wait for the processes of the first world.
        whole_replica: function of ranks that are left, which returns those to keep first if the
            next world has fewer ranks.
    """

    def __init__(
        self,
        store: JobStore,
        sizes: Collection[int],
        rank: int | None,
        address: str,
        *,
        whole_replica: Callable[[Collection[int]], Collection[int]],
        lost_after: float,
        slow_after: float,
        replaced_within: float,
        started_within: float,
    ) -> None:
        self._store, self._sizes = store, sorted(sizes)
        number = store.count("arrivals") - 1
        self.own = Process(number, os.getpid(), _host(), address, rank)
        store.write(f"beat/{number}", "0")  # first: a process without a beat has left
        store.write(f"process/{number}", json.dumps(self.own))
        self.signs = Signs(store, self.own, lost_after)
        self._slow_after, self._replaced_within = slow_after, replaced_within
        self._started_within, self._whole_replica = started_within, whole_replica
        self._signed_for = -1
        self._silent = (-1, 0.0)  # a world with an alarm, and since when it lacks a leader

    def next_world(
        self,
        after: int,
        signature: Signature,
        check: Callable[[], None],
        become_spare: Callable[[], None],
    ) -> Decision:
        """Sign for the next world and return the first later one in which this process is a rank.

        Args:
            after: number of the world in which this process is a rank now; -1 for none.
            signature: its signature.
            check: function that is called while this process waits; it raises if that is pointless.
            become_spare: function that is called if the next world has fewer ranks than there are
                processes, and this one is left over.

        Raises:
            JobOverError: the job has finished, or cannot go on.
            LeftOutError: the current world does not include this process, which had not signed.
        """
        while True:
            status = self._store.status()
            if status.over:
                raise JobOverError(status.over, status.step)
            if status.world > after:
                decision = self._store.decision(status.world)
                if decision is not None and self.own.number in decision.processes:
                    return decision
                if after >= 0 and self._signed_for < status.world:
                    raise LeftOutError
                if after >= 0:
                    after, signature = -1, Signature(self.own.number)
                    become_spare()
            if self._signed_for <= status.world:
                self._signed_for = status.world + 1
                self._store.append(f"signed/{self._signed_for}", f"{json.dumps(signature)}\n")
            if status.alarm and (status.world == after or self._should_spare_lead(status)):
                self._lead(status)
            check()
            time.sleep(pause_seconds(self._sizes[-1]))

    def finish(self, world: int, step: int, n_ranks: int) -> None:
        """Store that the job has finished in a world, and wait until all of its ranks know.

        A rank that does not come within `lost_after` seconds is not waited for.
        """
        deadline = time.monotonic() + self.signs.lost_after
        with contextlib.suppress(dist.DistError):  # the store has ended already
            while not (status := self._store.status()).over and status.world == world:
                self._store.change_status(status, status._replace(over="complete", step=step))
            n_closed = self._store.count("closed")
            while n_closed < n_ranks and time.monotonic() < deadline:
                time.sleep(pause_seconds(n_ranks))
                n_closed = self._store.count("closed", 0)

    def _should_spare_lead(self, status: Status) -> bool:
        """Return whether this spare should try to lead to the next world."""
        leader = self._store.read(f"leader/{status.world + 1}")
        if leader:
            return True  # `_lead` takes over if that process is lost
        world, since = self._silent
        if world != status.world:
            self._silent = status.world, time.monotonic()
            return False
        return time.monotonic() - since > self.signs.lost_after

    # --- the leader ------------------------------------------------------------------------------

    def _lead(self, status: Status) -> None:
        """Decide on the next world, if this process is the leader, or the leader is lost."""
        world, own = status.world + 1, str(self.own.number)
        leader = self._store.replace(f"leader/{world}", "", own)
        if leader != own:
            if not self.signs.why_lost(int(leader)):
                return
            if self._store.replace(f"leader/{world}", leader, own) != own:
                return
        _Election(self, status).run()

    def signed(self, world: int) -> dict[int, Signature]:
        """Return who has signed for a world, by number of the process, in the order of signing."""
        lines = self._store.read(f"signed/{world}").splitlines()
        return {one.process: one for one in (Signature(*json.loads(line)) for line in lines)}


class _Election:
    """The decision on the next world, by its leader."""

    def __init__(self, membership: Membership, status: Status) -> None:
        self._by, self._store, self._status = membership, membership._store, status
        self._before = None if status.world < 0 else self._store.decision(status.world)
        self._begin = time.monotonic()
        self._why_lost: dict[int, str] = {}
        self._n_left = 0  # processes that can be ranks of the next world

    def run(self) -> None:
        """Wait for all ranks and for the spares that are needed, and decide."""
        own = str(self._by.own.number)
        while True:
            status = self._store.status()
            world = status.world + 1
            if status != self._status or self._store.read(f"leader/{world}") != own:
                return  # another process took over
            signed = self._by.signed(world)
            ranks = self._ranks(signed)
            if ranks is None:
                time.sleep(_POLL_SECONDS)
                continue
            if not ranks:
                self._store.change_status(status, status._replace(over=self._why_over()))
                return
            decision = self._decision(world, ranks, signed)
            text = json.dumps(vars(decision))
            self._store.replace(f"world/{world}", "", text)
            if self._store.change_status(status, Status(world, "", "")):
                self._clean_up(world)
            return

    def _ranks(self, signed: Mapping[int, Signature]) -> list[int] | None:
        """Return the process of each rank; None to wait, [] if there are too few."""
        before = [] if self._before is None else self._before.processes
        waited = time.monotonic() - self._begin
        for number in before:
            if number not in signed and number not in self._why_lost:
                why = self._by.signs.why_lost(number)
                if not why and waited > self._by._slow_after:
                    why = f"process {number} did not come to repair() within {waited:.0f} s"
                if not why:
                    return None
                self._why_lost[number] = why
        staying, were_there = [number for number in before if number in signed], {*before}
        spares = [number for number in signed if number not in were_there]
        sizes, wanted, limit = self._by._sizes, len(before), self._by._replaced_within
        if self._before is None:
            wanted, limit = sizes[-1], self._by._started_within
        # Even without `replaced_within`, spares that wait need time to sign for this world.
        limit = max(limit, 1.0 + 2 * pause_seconds(sizes[-1]))
        n_there = len(staying) + len(spares)
        if n_there < wanted and waited < limit:
            return None
        if self._before is None:
            spares = [number for number in spares if not self._by.signs.why_lost(number)]
            if len(spares) < n_there and waited < limit:
                return None
            n_there = len(spares)
        elif spares:
            # Spares of other hosts show within two beats that they are alive; see `is_alive`.
            spares = [number for number in spares if self._by.signs.is_alive(number)]
            longest = 3 * beat_seconds(sizes[-1])
            if len(staying) + len(spares) < min(wanted, n_there) and waited < longest:
                return None
            n_there = len(staying) + len(spares)
        self._n_left = n_there
        size = max((size for size in sizes if size <= n_there), default=0)
        if size == len(before):
            free = iter(spares)
            return [number if number in signed else next(free) for number in before]
        if self._before is None:
            spares = self._by_wish(spares)
        if 0 < size < len(staying):
            return self._kept(size, staying, signed)
        return [*staying, *spares][:size]

    def _kept(
        self, size: int, staying: Sequence[int], signed: Mapping[int, Signature]
    ) -> list[int]:
        """Return the ranks of a smaller world: those first that hold the whole state."""
        assert self._before is not None
        before = self._before.processes
        rank_of = {number: rank for rank, number in enumerate(before)}
        usable = [one for one in staying if signed[one].step >= 0 and not signed[one].is_torn]
        ranks = self._by._whole_replica([rank_of[number] for number in usable])
        replica = {before[rank] for rank in ranks}
        by_use = sorted(staying, key=lambda one: (one not in replica, signed[one].is_torn))
        return sorted(by_use[:size], key=rank_of.__getitem__)

    def _by_wish(self, numbers: list[int]) -> list[int]:
        """Sort processes by the ranks that they ask for, if these differ; else within hosts."""
        known = [process for number in numbers if (process := self._store.process(number))]
        hosts = list(dict.fromkeys(process.host for process in known))

        asked = [process.rank for process in known]
        are_distinct = len({*asked}) == len(asked)

        def place(process: Process) -> Any:
            host = 0 if are_distinct else hosts.index(process.host)
            return host, process.rank or 0, process.number

        return [process.number for process in sorted(known, key=place)]

    def _decision(self, world: int, ranks: list[int], signed: Mapping[int, Signature]) -> Decision:
        before = [] if self._before is None else self._before.processes
        were_there, are_there = {*before}, {*ranks}
        states = [signed[number] for number in ranks if number in were_there]
        step = max((one.step for one in states), default=-1)
        if any(one.is_torn for one in states):
            step = -1
        new = [rank for rank, number in enumerate(ranks) if signed[number].step < 0]
        reason = "; ".join(self._why_lost.values()) or self._status.alarm
        lost = [number for number in before if number not in are_there]
        is_resized = self._before is not None and len(ranks) != len(before)
        is_revived = not is_resized and len(new) < len(ranks)
        return Decision(world, ranks, new, step, is_revived, is_resized, reason, lost)

    def _why_over(self) -> str:
        why = "; ".join(self._why_lost.values()) or self._status.alarm
        sizes = " or ".join(map(str, self._by._sizes))
        left = "1 process is left" if self._n_left == 1 else f"{self._n_left} processes are left"
        return (
            f"{left}, and the job needs {sizes} ranks ({why}). Start "
            "more processes, as spares, or allow fewer ranks with ranks=[...]."
        )

    def _clean_up(self, world: int) -> None:
        """Remove keys that nobody reads once a world is decided."""
        with contextlib.suppress(dist.DistError):
            self._store.remove(f"signed/{world}")
            self._store.remove(f"leader/{world}")
            self._store.remove(f"address/{world - 1}")
            self._store.remove(f"world/{world - 2}")
            for number in [] if self._before is None else self._before.lost:
                self._store.remove(f"beat/{number}")
                self._store.remove(f"process/{number}")


BEAT_SECONDS = 0.25  # between two signs of life of a process; longer in jobs of thousands


def beat_seconds(n_ranks: int) -> float:
    """Return the pause between two signs of life of a process."""
    return max(BEAT_SECONDS, 3 * n_ranks / _OPERATIONS_A_SECOND)


def pause_seconds(n_ranks: int) -> float:
    """Return a pause before a process that waits asks the store again."""
    return max(_POLL_SECONDS, 2 * n_ranks / _OPERATIONS_A_SECOND * _random.uniform(0.5, 1.5))


class JobOverError(Exception):
    """Signal that the job has finished, or cannot go on.

    Args:
        over: as in `Status`.
        step: as in `Status`.
    """

    def __init__(self, over: str, step: int) -> None:
        super().__init__(over)
        self.step = step


class LeftOutError(Exception):
    """Signal that the current world does not include this process, which was a rank."""


def own_address(store: dist.TCPStore) -> str:
    """Return the address of this host from which it reaches the store's host."""
    with contextlib.suppress(OSError):
        info = socket.getaddrinfo(store.host, store.port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(info[0], socket.SOCK_DGRAM) as probe:
            probe.connect(info[4])  # sends nothing
            return str(probe.getsockname()[0])
    return "127.0.0.1"


def _host() -> str:
    """Return an id of this host and of its process ids, which differ between containers."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            parts.append(file.read().strip())
        parts.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(parts)
