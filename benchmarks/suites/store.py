"""Operations of a whole job on its store at set-up: recorded from one rank, replayed for all.

What a rank's set-up of the five views asks for is recorded in a fake world, by a store that notes
every operation. What NCCL asks for is added by its rule: of each communicator, the first rank sets
an id of 128 bytes and every other rank gets it. The operations of all ranks are then made on a real
TCPStore, by a few client processes that each play their share of the ranks in ascending order.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # noqa: F401 - makes the backend known
from torch.distributed import device_mesh as stock

import meshverse
from crews import in_crew
from harness import OURS, STOCK, Check, Outcome, Run
from suites.counting_store import CountingStore
from trainer_views import Degrees, answers, five_views

__all__ = ["METHOD", "SCALE", "TITLE", "run"]

_CLIENTS = 4
TITLE = "What setting up five views asks of the store"
METHOD = (
    "operations of one rank, recorded in a fake world; those of NCCL by its rule; replayed for "
    f"all ranks by {_CLIENTS} client processes on one TCPStore over loopback; wall clock"
)
SCALE = "ranks"
_UNCOMPARED = "Meshverse, not compared"
_SIDES: dict[str, Callable[..., Any]] = {
    STOCK: stock.init_device_mesh,
    OURS: meshverse.init_device_mesh,
    _UNCOMPARED: partial(meshverse.init_device_mesh, check_consistency=False),
}
_DEGREES = {
    1_024: Degrees(pp=4, dp_shard=32, tp=8, ep=16),
    10_240: Degrees(),
}
_ID = b"\x01" * 128
_LIMIT_S = 120


class _Communicator(NamedTuple):
    """All groups of one kind: `size` ranks `stride` apart.

    Attributes:
        name: distinct for each kind of one side.
        size: ranks of a group.
        stride: from one rank of a group to the next.
    """

    name: str
    size: int
    stride: int

    def first_rank(self, rank: int) -> int:
        """Return the first rank of this rank's group."""
        return rank - rank // self.stride % self.size * self.stride


class _Recorded(NamedTuple):
    """Requests of one rank: of Python, the operations; of NCCL, the communicators."""

    rank: int
    operations: list[tuple[str, tuple[Any, ...]]]
    communicators: list[_Communicator]


def run(run: Run) -> Outcome:
    """Record and replay each side at each scale."""
    sizes = run.choose(list(_DEGREES), [1_024])
    repetitions = run.choose(3, 1)
    outcome = Outcome()
    step, steps = itertools.count(), len(sizes) * repetitions * len(_SIDES)
    for size in sizes:
        recorded = _record_all(size)
        for side, one in recorded.items():
            per_rank = outcome.of("operations of all ranks", size)
            per_rank.unit = "operations"
            per_rank.add(side, size * (len(one.operations) + len(one.communicators)))
        for repetition in range(repetitions):
            for side in list(_SIDES)[:: 1 if repetition % 2 == 0 else -1]:
                run.tell(next(step), steps, f"{size:,} ranks, {side}")
                outcome.of("time to answer them", size).add(side, _replay(size, recorded[side]))
    for measurement in outcome.measurements:
        measurement.figure = "store"
    outcome.measurements.sort(key=lambda one: one.operation)
    outcome.checks = _checks(outcome, sizes)
    return outcome


def _record_all(size: int) -> dict[str, _Recorded]:
    """Return a rank's requests on each side, once its views were seen to be the same."""
    recorded, seen = {}, []
    for side in _SIDES:
        several = [_record(side, size, rank) for rank in (0, 777 % size, size - 1)]
        assert len({_kinds(one) for one, _ in several}) == 1, "ranks ask for unlike things"
        recorded[side] = several[1][0]
        seen.append(several[1][1])
    assert all(views == seen[0] for views in seen), "the sides' views differ"
    return recorded


def _kinds(recorded: _Recorded) -> Any:
    names = Counter(name for name, _ in recorded.operations)
    shapes = Counter((one.size, one.stride) for one in recorded.communicators)
    return tuple(sorted(names.items())), tuple(sorted(shapes.items()))


def _record(side: str, size: int, rank: int) -> tuple[_Recorded, dict[str, Any]]:
    store = CountingStore(dist.HashStore(), keep_arguments=True)
    hook = sys.excepthook  # torch wraps it once more in every world
    dist.init_process_group("fake", rank=rank, world_size=size, store=store)
    try:
        before = set(dist.distributed_c10d._world.pg_names)
        store.operations.clear()
        views = five_views(_SIDES[side], _DEGREES[size])
        operations = list(store.operations)
        groups = [one for one in dist.distributed_c10d._world.pg_names if one not in before]
        members = [dist.get_process_group_ranks(group) for group in groups]
        communicators = [
            _Communicator(f"{side}-{index}", len(ranks), ranks[1] - ranks[0])
            for index, ranks in enumerate(members)
            if len(ranks) > 1  # with one rank there is nothing to communicate
        ]
        for ranks in members:
            assert len(ranks) < 2 or ranks == list(
                range(ranks[0], ranks[-1] + 1, ranks[1] - ranks[0])
            ), "not evenly spaced"
        return _Recorded(rank, operations, communicators), {
            name: answers(view) for name, view in views.items()
        }
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook


def _replay(size: int, recorded: _Recorded) -> float:
    """Nanoseconds until the store has answered all ranks."""
    spans = in_crew(_CLIENTS, _play_ranks, size, recorded, limit_s=_LIMIT_S)
    keys = sum(-(-size // one.size) for one in recorded.communicators)
    keys += len({arguments[0] for _, arguments in recorded.operations})
    starts, ends, counts = zip(*spans, strict=True)
    assert counts[0] >= keys, f"{counts[0]} keys in the store, not {keys}"
    return float(max(ends) - min(starts))


def _play_ranks(
    client: int, store: dist.Store, size: int, recorded: _Recorded
) -> tuple[int, int, int]:
    """Play every `_CLIENTS`th rank; start, end and the number of keys at the end."""
    _meet(store, "ready")
    start = time.monotonic_ns()  # one clock for all processes of a machine
    for rank in range(client, size, _CLIENTS):
        for name, arguments in recorded.operations:
            getattr(store, name)(*_as_rank(rank, recorded.rank, arguments))
        for one in recorded.communicators:
            # The first rank is the lowest, and each client goes upwards: nobody waits in a circle.
            first = one.first_rank(rank)
            key = f"{one.name}/{first}"
            if rank == first:
                store.set(key, _ID)
            else:
                assert store.get(key) == _ID
    end = time.monotonic_ns()
    _meet(store, "done")
    return start, end, store.num_keys()


def _as_rank(rank: int, recorded: int, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments of another rank: what a rank writes begins with its number."""
    *others, last = arguments
    mine = f"{recorded} ".encode()
    if isinstance(last, bytes) and last.startswith(mine):
        return (*others, f"{rank} ".encode() + last.removeprefix(mine))
    return arguments


def _meet(store: dist.Store, where: str) -> None:
    if store.add(where, 1) == _CLIENTS:
        store.set(f"{where}, all", b"1")
    store.wait([f"{where}, all"])


def _checks(outcome: Outcome, sizes: list[int]) -> list[Check]:
    checks = []
    for size in sizes:
        for operation in ("operations of all ranks", "time to answer them"):
            samples = outcome.of(operation, size).samples
            claim = f"{operation}, {size:,} ranks: of stock's"
            checks.append(Check.within(claim, 1, samples[STOCK], samples[OURS]))
    return checks
