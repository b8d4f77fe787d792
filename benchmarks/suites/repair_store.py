"""Costs: what heartbeats and a repair ask of the store of a job, and how much a store can answer.

A few processes of a large job are played by the code that real ones run. What the others would have
written is in the store before. One process's operations are then taken times all ranks.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from crews import in_crew
from harness import OURS, Check, Outcome, Run
from meshverse.repair.heartbeat import Heartbeat
from meshverse.repair.membership import (
    Decision,
    JobStore,
    Membership,
    Process,
    Signature,
    Status,
    _host,
    beat_seconds,
    pause_seconds,
)
from suites.counting_store import CountingStore

__all__ = ["measure_store"]

_NAME, _LOST_AFTER = "job", 10.0
_PER_HOST = 8
_LOST, _LEADER, _FOLLOWER = 5, 0, 1  # ranks
_CLIENTS, _LIMIT_S = 4, 300
_SERVED_S = 4.0
_OPERATIONS = "operations"
_COMPUTED = "store: computed, from a death to new ranks that all know, at most"
"""A beat of the process on the same host that watches, a beat of all others, the decision, a pause.
"""
_COMPUTED_LIMIT_S = 15.0


def measure_store(run: Run, outcome: Outcome) -> None:
    """Count what a job asks of its store, and measure what one store answers."""
    sizes = run.choose([1_024, 10_240], [1_024])
    idle = run.choose(10_240, 1_024)
    served = _serve(idle)
    capacity = outcome.of("store: operations a second that it answers", idle)
    capacity.unit = _OPERATIONS
    capacity.add(OURS, served)
    for size in sizes:
        beats = outcome.of("store: operations a second, heartbeats of all ranks", size)
        beats.add(OURS, _beat(size) * size)
        of_one = outcome.of("store: operations of one rank in a repair", size)
        of_one.add(OURS, _follow(size))
        of_leader = outcome.of("store: operations of the rank that decides", size)
        n_operations, _ = _lead(size, dist.HashStore())
        of_leader.add(OURS, n_operations)
        for one in (beats, of_one, of_leader):
            one.unit = _OPERATIONS
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        client = dist.TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)
        _, decision = _lead(size, client)
        outcome.of("store: the decision, once all have signed", size).add(OURS, decision * 1e9)
        seconds = max(in_crew(_CLIENTS, _replay, size, limit_s=_LIMIT_S))
        outcome.of("store: a repair's operations of all ranks, answered", size).add(
            OURS, seconds * 1e9
        )
        at_most = 2 * beat_seconds(size) + decision + max(pause_seconds(size) for _ in range(1_000))
        outcome.of(_COMPUTED, size).add(OURS, at_most * 1e9)
        claim = f"store, {size:,} ranks: {_COMPUTED.partition(': ')[2]}"
        limit = _COMPUTED_LIMIT_S * 1e9
        outcome.checks.append(Check(claim, at_most * 1e9, limit, at_least=False, unit="ns"))
        claim = f"store, {size:,} ranks: heartbeats, of what it answers"
        outcome.checks.append(Check(claim, beats.median(OURS) / served, 0.5, at_least=False))


# --- a job of many ranks, most of which only exist in the store -----------------------------------


def _fill(jobs: JobStore, size: int) -> Decision:
    """Write what a job of many ranks has in its store while it runs."""
    hosts = [f"10.0.{host // 250}.{host % 250}" for host in range(-(-size // _PER_HOST))]
    for number in range(size):
        host = hosts[number // _PER_HOST]
        jobs.write(f"beat/{number}", "1")
        jobs.write(f"process/{number}", json.dumps(Process(number, 1, host, host, None)))
    decision = Decision(0, list(range(size)), step=0)
    jobs.write("world/0", json.dumps(vars(decision)))
    jobs.write("status", json.dumps(Status(0, "", "")))
    return decision


def _join(jobs: JobStore, number: int, size: int) -> Membership:
    """Join as the process of this number."""
    jobs.write("arrivals", str(number))
    joined = Membership(
        jobs,
        [size],
        None,
        "10.0.0.0",
        lost_after=_LOST_AFTER,
        slow_after=60.0,
        replaced_within=0.0,
        started_within=60.0,
    )
    assert joined.own.number == number
    return joined


def _lose(jobs: JobStore, size: int, without: Sequence[int]) -> None:
    """Lose a rank: the alarm is raised, and all others and a spare sign but for some."""
    jobs.remove(f"beat/{_LOST}")
    jobs.write(f"beat/{size}", "1")  # the spare, which is seen to run
    spare = Process(size, os.getpid(), _host(), "10.0.0.0", None)
    jobs.write(f"process/{size}", json.dumps(spare))
    jobs.write("status", json.dumps(Status(0, f"process {_LOST} is lost", "")))
    signed = [number for number in range(size) if number not in (_LOST, *without)]
    lines = [Signature(number, 100) for number in signed] + [Signature(size)]
    jobs.append("signed/1", "\n".join(json.dumps(line) for line in lines))


def _beat(size: int) -> float:
    """Return the operations a second of one process's heartbeat."""
    store = CountingStore(dist.HashStore())
    jobs = JobStore(store, _NAME)
    decision = _fill(jobs, size)
    own = _join(jobs, 0, size).own
    alarms: list[Any] = []
    heartbeat = Heartbeat(jobs, own, 1_000.0, 1_000.0, lambda *alarm: alarms.append(alarm))
    heartbeat.follow(decision)
    beats = 4
    time.sleep(beat_seconds(1) * 1.5)  # its first beat comes before it follows the world
    before, start = store.counts.total(), time.monotonic()
    time.sleep(beats * beat_seconds(size))
    asked, seconds = store.counts.total() - before, time.monotonic() - start
    heartbeat.stop()
    assert not alarms, alarms
    return asked / seconds


def _follow(size: int) -> int:
    """Return the operations of a rank that signs, and waits for a decision made by another."""
    store = CountingStore(dist.HashStore())
    jobs = JobStore(store, _NAME)
    decision = _fill(jobs, size)
    member = _join(jobs, _FOLLOWER, size)
    jobs.write("leader/1", str(_LEADER))
    _lose(jobs, size, [_FOLLOWER])
    decision.world, decision.processes[_LOST] = 1, size

    def decide() -> None:
        jobs.write("world/1", json.dumps(vars(decision)))
        jobs.write("status", json.dumps(Status(1, "", "")))

    timer = threading.Timer(beat_seconds(size), decide)  # by then the last rank has signed
    store.counts.clear()
    timer.start()
    found = member.next_world(0, Signature(_FOLLOWER, 100), *[lambda: None] * 2)
    assert found.processes[_LOST] == size
    return store.counts.total() - 2  # the two that were written here


def _lead(size: int, store: dist.Store) -> tuple[int, float]:
    """Return the operations of the rank that decides, and the seconds."""
    counting = CountingStore(store)
    jobs = JobStore(counting, _NAME)
    _fill(jobs, size)
    leader = _join(jobs, _LEADER, size)
    _lose(jobs, size, [])
    counting.counts.clear()
    start = time.perf_counter()
    leader._lead(jobs.status())
    seconds = time.perf_counter() - start
    decision = jobs.decision(1)
    assert decision is not None
    assert decision.new_ranks == [_LOST]
    return counting.counts.total(), seconds


# --- what a store answers -------------------------------------------------------------------------


def _serve(n_idle: int) -> float:
    """Return the operations a second that one store answers, with many connections open."""
    found = in_crew(_CLIENTS, _ask, n_idle // _CLIENTS, limit_s=_LIMIT_S)
    return float(sum(found))


def _ask(client: int, store: dist.TCPStore, n_idle: int) -> float:
    """Make the operations of heartbeats, as fast as they are answered."""
    # Plain connections: torch's own look up the name of each other host, which can take seconds.
    idle = [socket.create_connection((store.host, store.port)) for _ in range(n_idle)]
    jobs = JobStore(store, _NAME)
    if client == 0:
        jobs.write("status", json.dumps(Status(0, "", "")))
    _meet(store, "ready")
    n_asked, start = 0, time.monotonic()
    while (seconds := time.monotonic() - start) < _SERVED_S:
        for number in range(client, 1_000, _CLIENTS):
            jobs.write(f"beat/{number}", str(n_asked))
            jobs.status()
            jobs.read(f"beat/{(number + _CLIENTS) % 1_000}")
            n_asked += 3
    _meet(store, "done")
    for connection in idle:
        connection.close()
    return n_asked / seconds


def _replay(client: int, store: dist.TCPStore, size: int) -> float:
    """Sign for many ranks and read the decision for each; return the seconds."""
    jobs = JobStore(store, _NAME)
    if client == 0:
        decision = _fill(jobs, size)
    _meet(store, "ready")
    start = time.monotonic()
    for number in range(client, size, _CLIENTS):
        jobs.status()
        jobs.append("signed/1", json.dumps(Signature(number, 100)))
    _meet(store, "signed")
    if client == 0:
        decision.world = 1
        jobs.write("world/1", json.dumps(vars(decision)))
        jobs.write("status", json.dumps(Status(1, "", "")))
    _meet(store, "decided")
    for _ in range(client, size, _CLIENTS):
        jobs.status()
        assert len(jobs.read("world/1")) > 4 * size
        jobs.read("address/1")
    return time.monotonic() - start


def _meet(store: dist.Store, where: str) -> None:
    if store.add(where, 1) == _CLIENTS:
        store.set(f"{where}, all", b"1")
    store.wait([f"{where}, all"])
