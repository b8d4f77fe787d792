"""Ranks that do not come to a move, do not agree, are interrupted or end while it runs."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses import FakeTensorMode
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import meshverse
from helpers.crew import WORLD_TIMEOUT_SECONDS, Crew
from helpers.turns import wait_until_they_wait
from meshverse import init_device_mesh
from meshverse.parallel import Reshard, redistribute
from meshverse.parallel.reshard import exchange as exchange_module

pytestmark = pytest.mark.processes

_SOON = timedelta(seconds=4)  # short-timeout: it must elapse
_LONG = timedelta(seconds=60)
_AT_ONCE = timedelta(milliseconds=1)  # short-timeout: it must elapse
_WORLDS = WORLD_TIMEOUT_SECONDS  # for which an operation of the world would wait


def _raises(kind: type[Exception], words: str, call: Callable[[], Any]) -> None:
    with pytest.raises(kind, match=words):
        call()


# --- ranks that do not come -----------------------------------------------------------------------


def _does_not_come() -> None:
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (3,))
    source = {"w": distribute_tensor(torch.ones(6), mesh, [Shard(0)], src_data_rank=None)}
    target = {"w": distribute_tensor(torch.zeros(6), mesh, [Replicate()], src_data_rank=None)}
    dist.barrier()  # nobody waits for the mesh any more
    if rank == 0:
        wait_until_they_wait(1)
    if rank != 2:
        _raises(
            RuntimeError,
            r"ranks 0 to 2 could not create .*list them in ranks=.*missing: ranks \[2\]",
            lambda: Reshard(source, target, timeout=_LONG if rank else _SOON),
        )
    dist.barrier()
    move = Reshard(source, target, timeout=_LONG)
    move()
    dist.barrier()
    for tensor in target.values():
        tensor.to_local().zero_()
    if rank != 2:
        dist.distributed_c10d._set_pg_timeout(_SOON, move._group.group)
        _raises(
            RuntimeError,
            "(?s)run 2 did not begin, because a rank .* did not call it.*unchanged.*Construct",
            move,
        )
        _raises(RuntimeError, "run 2 did not begin", move)
        assert "closed or failed" in repr(move)
        assert not target["w"].to_local().any()
    dist.barrier()
    again = Reshard(source, target)
    again()
    assert torch.equal(target["w"].to_local(), torch.ones(6))


@pytest.mark.long
def test_a_rank_that_does_not_come_is_named(crew: Crew) -> None:
    crew.run(_does_not_come, 3)


def _sides_absent() -> None:
    ones = {"w": torch.ones(4)}
    _raises(ValueError, "the target has no tensor named 'w'", lambda: Reshard(ones, None))
    _raises(ValueError, "the source has no tensor named 'w'", lambda: Reshard({}, ones))
    with Reshard(None, {}) as move:
        move()  # moves nothing
    _raises(ValueError, r"redistribute\(None, ...\) on all ranks", _nobody_redistributes)


def _nobody_redistributes() -> None:
    redistribute(None, init_device_mesh("cpu", (1,)), [Shard(0)])


def test_sides_that_nobody_gives(crew: Crew) -> None:
    crew.run(_sides_absent, 3)


def _not_among_them() -> None:
    rank = dist.get_rank()
    ones, zeros = torch.ones(4), torch.zeros(4)
    if rank == 2:
        _raises(
            ValueError,
            r"ranks=\[0, 1\]\) is called by rank 2, which is not among them",
            lambda: Reshard({"w": ones}, {"w": zeros}, ranks=[0, 1]),
        )
    else:
        Reshard({"w": ones}, {"w": zeros}, ranks=[0, 1])()
        assert torch.equal(ones, zeros)


def test_a_rank_that_is_not_among_the_ranks_it_gives(crew: Crew) -> None:
    crew.run(_not_among_them, 3)


def _different_ranks_given() -> None:
    """They wait for one another in different groups; all get an error within the timeout."""
    rank = dist.get_rank()
    ranks = [0, 1] if rank == 0 else None
    sides = {"w": torch.ones(4)}, {"w": torch.zeros(4)}
    _raises(RuntimeError, "could not create", lambda: Reshard(*sides, ranks=ranks, timeout=_SOON))
    dist.barrier()
    with Reshard(*sides) as move:
        move()
    assert torch.equal(*(side["w"] for side in sides))


def test_ranks_that_give_different_ranks(crew: Crew) -> None:
    crew.run(_different_ranks_given, 3)


# --- moves that are not the same on all ranks -----------------------------------------------------


def _changes() -> None:
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2,))
    source = {"w": distribute_tensor(torch.ones(8), mesh, [Shard(0)], src_data_rank=None)}
    target = {"w": torch.zeros(8)}
    move = Reshard(source, target)
    move()
    for asynchronous in (False, True):
        for rounds in range(2):
            target["w"].zero_()
            if rank == rounds:
                keep = target["w"].data
                target["w"].data = torch.zeros(4)
            words = (
                f"(?s)rank {rounds} cannot run: target 'w' has changed since "
                r".*was \(8,\).*is \(4,\).*Nothing was sent"
            )
            if asynchronous:
                work = move(async_op=True)
                _raises(RuntimeError, words, work.wait)
            else:
                _raises(RuntimeError, words, move)
            if rank == rounds:
                target["w"].data = keep
            assert not target["w"].any()
            move()
            assert torch.equal(target["w"], torch.ones(8))
    # In a mode in which tensors have no data.
    with FakeTensorMode() if rank == 0 else torch.no_grad():
        words = "rank 0 cannot run.*FakeTensorMode"
        _raises(RuntimeError, words, move)
    move()
    dist.barrier()
    if rank == 0:
        work = move(async_op=True)
        assert not work.is_completed()
        _raises(RuntimeError, "the last run is still under way", move)
        _raises(TimeoutError, "still under way", lambda: work.wait(_AT_ONCE))
        dist.barrier()
        work.wait()
    else:
        dist.barrier()
        move()
    move.close()
    move.close()
    _raises(RuntimeError, r"close\(\) was called", move)


def test_a_changed_layout_raises_on_all_ranks(crew: Crew) -> None:
    crew.run(_changes, 2)


def _different_sets() -> None:
    """Moves of different ranks, in different order; and ranks that have no part."""
    rank = dist.get_rank()
    pairs = {"a": (0, 1), "b": (1, 2), "c": (0, 2)}
    order = {0: "ac", 1: "ba", 2: "bc", 3: ""}[rank]
    others_begin = dist.barrier(async_op=True)
    if rank == 1:
        others_begin.wait()
    moves = {}
    for name in order:
        giver, _ = pairs[name]
        whole = {"w": torch.full((3,), ord(name))}
        empty = {"w": torch.zeros(3, dtype=torch.int64)}
        source, target = (whole, None) if rank == giver else (None, empty)
        moves[name] = Reshard(source, target, ranks=list(pairs[name])), empty
    # Their first use in another order, without waiting for one before the next.
    works = [moves[name][0](async_op=True) for name in (order[::-1] if rank else order)]
    for work in works:
        work.wait()
    for name in order:
        if rank == pairs[name][1]:
            assert moves[name][1]["w"].tolist() == [ord(name)] * 3
    others_begin.wait()
    # Rank 2 has no tensors; rank 3 does not call.
    mesh = init_device_mesh("cpu", (2,), ranks=[0, 1])
    source = target = None
    if rank < 2:
        source = {"w": distribute_tensor(torch.ones(4), mesh, [Shard(0)], src_data_rank=None)}
        target = {"w": distribute_tensor(torch.zeros(4), mesh, [Replicate()], src_data_rank=None)}
    if rank < 3:
        with Reshard(source, target, ranks=[2, 0, 1], timeout=timedelta(seconds=60)) as move:
            move()
            assert move.ranks == (0, 1, 2)
    assert target is None or torch.equal(target["w"].to_local(), torch.ones(4))


def test_moves_of_different_ranks(crew: Crew) -> None:
    crew.run(_different_sets, 4)


def _open_at_once() -> int:
    """Process groups of three moves of the same ranks, one of which follows one that was closed."""
    sides = {"w": torch.ones(4)}, {"w": torch.zeros(4)}
    meshverse.install(share="world")
    try:
        first, second = Reshard(*sides), Reshard(*sides)
        groups = {id(first._group.group), id(second._group.group)}
        first.close()
        third = Reshard(*sides)
        groups.add(id(third._group.group))
        works = [move(async_op=True) for move in (second, third)]
        for work in works:
            work.wait()
        second.close()
        third.close()
    finally:
        meshverse.uninstall()
    return len(groups)


def test_moves_that_are_open_at_once_share_no_process_group(crew: Crew) -> None:
    assert min(crew.run(_open_at_once, 2)) >= 2


def _buffers_kept() -> int:
    """Bytes in buffers that failed runs left to c10d."""
    return sum(
        tensor.numel() * tensor.itemsize
        for under_way in exchange_module._abandoned
        for _, _, buffers in under_way
        for tensor in buffers
    )


def _interrupted() -> None:
    rank = dist.get_rank()
    source = {"w": torch.ones(4)} if rank == 0 else None
    target = {"w": torch.zeros(4)} if rank else None
    move = Reshard(source, target, timeout=_LONG)
    exchange = dist.batch_isend_irecv

    def interrupt(operations: list[dist.P2POp]) -> list[dist.Work]:
        exchange(operations)
        raise KeyboardInterrupt

    dist.batch_isend_irecv = interrupt
    try:
        with pytest.raises(KeyboardInterrupt):
            move()
    finally:
        dist.batch_isend_irecv = exchange
    # What it left under way must not be taken for a part of the next run.
    _raises(RuntimeError, "(?s)run 1 failed .*KeyboardInterrupt.*its old value or its new", move)
    assert _buffers_kept() >= 16


def _interrupted_while_it_waits() -> None:
    rank = dist.get_rank()
    source = {"w": torch.ones(4)} if rank == 0 else None
    target = {"w": torch.zeros(4)} if rank else None
    move = Reshard(source, target, timeout=_LONG)
    exchange = dist.batch_isend_irecv

    class Interrupted:
        def __init__(self, work: dist.Work) -> None:
            self.work = work

        def wait(self) -> None:
            raise KeyboardInterrupt

    dist.batch_isend_irecv = lambda operations: list(map(Interrupted, exchange(operations)))  # type: ignore[arg-type]
    try:
        with pytest.raises(KeyboardInterrupt):
            move()
    finally:
        dist.batch_isend_irecv = exchange
    assert _buffers_kept() >= 16


def test_an_interrupted_run_is_the_last(crew: Crew) -> None:
    crew.run(_interrupted, 2)


def test_buffers_outlive_a_run_that_is_interrupted_while_it_waits(crew: Crew) -> None:
    crew.run(_interrupted_while_it_waits, 2)


# --- processes that end ---------------------------------------------------------------------------


def _dies(rank: int, folder: str, dying: int) -> None:
    torch.set_num_threads(1)
    ports = dist.FileStore(f"{folder}/ports", 3)
    if rank == 0:  # the store ends with rank 0
        store = dist.TCPStore("localhost", 0, 3, is_master=True, wait_for_workers=False)
        ports.set("port", str(store.port))
    else:
        store = dist.TCPStore("localhost", int(ports.get("port")), 3, False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=3)
    source = {"w": torch.full((1 << 16,), 3.0)} if rank == dying else None
    target = {"w": torch.zeros(1 << 16)} if rank != dying else None
    move = Reshard(source, target, timeout=_LONG, buffer_bytes=1 << 14)
    move()
    for tensor in (target or {}).values():
        tensor.zero_()
    if rank == dying:
        _die_later()
    errors = [_error_of(move) for _ in range(2)]
    move.close()  # also where the store has ended
    has_message = all("run 2 failed" in e and "its old value or its new one" in e for e in errors)
    values = set(target["w"].tolist()) if target else set()
    is_good = has_message and values <= {0.0, 3.0}
    said = "good" if is_good else f"{errors} {values}"
    Path(folder, str(rank)).write_text(said)
    os._exit(0)  # without the others, nothing can be ended well


def _error_of(move: Reshard) -> str:
    try:
        move()
    except RuntimeError as error:
        return str(error)
    return ""


def _die_later() -> None:
    exchange, calls = dist.batch_isend_irecv, []

    def dies(operations: list[dist.P2POp]) -> list[dist.Work]:
        calls.append(operations)
        if len(calls) == 8:
            os._exit(9)
        return exchange(operations)

    dist.batch_isend_irecv = dies


@pytest.mark.parametrize("dying", [2, 0], ids=["of others", "with the store"])
def test_a_process_that_ends_in_the_middle_of_a_run(tmp_path: Path, dying: int) -> None:
    context = multiprocessing.get_context("forkserver")
    ranks = [context.Process(target=_dies, args=(r, str(tmp_path), dying)) for r in range(3)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(200)
        process.kill()
    assert ranks[dying].exitcode == 9
    for rank in {0, 1, 2} - {dying}:
        assert (tmp_path / str(rank)).read_text() == "good"
