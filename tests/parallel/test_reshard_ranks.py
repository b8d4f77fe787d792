"""Ranks that do not come to a move, do not agree, are interrupted or end while it runs."""

from __future__ import annotations

import multiprocessing
import os
import re
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses import FakeTensorMode
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from helpers.crew import Crew
from meshverse import init_device_mesh
from meshverse.agreement import Board
from meshverse.parallel import Reshard
from meshverse.parallel.reshard import exchange as exchange_module

pytestmark = [pytest.mark.processes, pytest.mark.timeout(200)]

_SOON = timedelta(seconds=4)


def _raises(kind: type[Exception], words: str, call: Callable[[], Any]) -> None:
    with pytest.raises(kind, match=words):
        call()


# --- ranks that do not come -----------------------------------------------------------------------


def _does_not_come() -> None:
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (3,))
    source = {"w": distribute_tensor(torch.ones(6), mesh, [Shard(0)], src_data_rank=None)}
    target = {"w": distribute_tensor(torch.zeros(6), mesh, [Replicate()], src_data_rank=None)}
    began = time.monotonic()
    if rank != 2:
        _raises(
            RuntimeError,
            "rank 2 did not come within 4 s. Came: ranks 0 to 1",
            lambda: Reshard(source, target, timeout=_SOON),
        )
        assert time.monotonic() - began < 12
    dist.barrier()
    if rank == 2:  # too late: told the same, at once
        _raises(
            RuntimeError,
            "rank 2 did not come within 4 s",
            lambda: Reshard(source, target, timeout=_SOON),
        )
    move = Reshard(source, target, timeout=_SOON)
    move()
    dist.barrier()
    for tensor in target.values():
        tensor.to_local().zero_()
    began = time.monotonic()
    if rank != 2:
        _raises(
            RuntimeError,
            "(?s)run 2 did not begin, for which rank 2 did not come.*targets are as they were",
            move,
        )
        assert time.monotonic() - began < 12
        _raises(RuntimeError, "run 2 did not begin", move)
        assert "closed or failed" in repr(move)
        assert not target["w"].to_local().any()
    dist.barrier()
    again = Reshard(source, target)
    again()
    assert torch.equal(target["w"].to_local(), torch.ones(6))


def test_a_rank_that_does_not_come_is_named(four: Crew) -> None:
    four.run(_does_not_come, 3)


def _sides_absent() -> None:
    rank = dist.get_rank()
    ones = {"w": torch.ones(4)}
    _raises(
        RuntimeError, "no rank gave a target within 4 s", lambda: Reshard(ones, None, timeout=_SOON)
    )
    _raises(
        RuntimeError,
        "no rank gave a source or a target",
        lambda: Reshard(None, {}, timeout=_SOON),
    )
    came_too = "rank 2 came too. Give the same ranks|give different ranks=|without this rank"
    both = (ones, {"w": torch.zeros(4)})
    if rank < 2:
        dist.barrier()
        _raises(RuntimeError, came_too, lambda: Reshard(*both, ranks=[0, 1], timeout=_SOON))
    else:
        work = dist.barrier(async_op=True)
        _raises(RuntimeError, came_too, lambda: Reshard(*both, ranks=[0, 1], timeout=_SOON))
        work.wait()


def test_sides_that_nobody_gives_and_ranks_too_many(four: Crew) -> None:
    four.run(_sides_absent, 3)


def _late_with_a_part() -> None:
    """A rank that meets others' earlier move of the name is told so, and not left without data."""
    rank = dist.get_rank()
    pair = init_device_mesh("cpu", (2,), ranks=[0, 1])
    if rank < 2:
        source = {"w": distribute_tensor(torch.ones(4), pair, [Shard(0)], src_data_rank=None)}
        target = {"w": distribute_tensor(torch.zeros(4), pair, [Replicate()], src_data_rank=None)}
        Reshard(source, target)()
        assert torch.equal(target["w"].to_local(), torch.ones(4))
    dist.barrier()
    if rank == 2:
        _raises(
            RuntimeError,
            r"(?s)without this rank.*name=",
            lambda: Reshard({"w": torch.ones(4)}, {"w": torch.zeros(4)}),
        )


def test_a_rank_that_others_did_not_wait_for(four: Crew) -> None:
    four.run(_late_with_a_part, 3)


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
                    r"(?s)target 'w' has changed since .*was \(8,\).*is \(4,\).*Nothing was sent"
                )
            else:
                words = f"(?s)rank {rounds} cannot run: .*target 'w' has changed.*Nothing was sent"
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
        words = "FakeTensorMode" if rank == 0 else "rank 0 cannot run.*FakeTensorMode"
        _raises(RuntimeError, words, move)
    move()
    dist.barrier()
    if rank == 0:
        work = move(async_op=True)
        assert not work.is_completed()
        _raises(RuntimeError, "the last run is still under way", move)
        _raises(TimeoutError, "still under way", lambda: work.wait(timedelta(milliseconds=1)))
        dist.barrier()
        work.wait()
    else:
        dist.barrier()
        move()
    move.close()
    move.close()
    _raises(RuntimeError, r"close\(\) was called", move)


def test_a_changed_layout_is_told_to_all(four: Crew) -> None:
    four.run(_changes, 2)


def _different_sets() -> None:
    """Moves of different ranks, in different order; and ranks that have no part."""
    rank = dist.get_rank()
    pairs = {"a": (0, 1), "b": (1, 2), "c": (0, 2)}
    order = {0: "ac", 1: "ba", 2: "bc", 3: ""}[rank]
    if rank == 1:
        time.sleep(0.3)
    moves = {}
    for name in order:
        giver, _ = pairs[name]
        whole = {"w": torch.full((3,), ord(name))}
        empty = {"w": torch.zeros(3, dtype=torch.int64)}
        source, target = (whole, None) if rank == giver else (None, empty)
        moves[name] = Reshard(source, target, name=name, ranks=list(pairs[name])), empty
    # Their first use in another order, without waiting for one before the next.
    works = [moves[name][0](async_op=True) for name in (order[::-1] if rank else order)]
    for work in works:
        work.wait()
    for name in order:
        if rank == pairs[name][1]:
            assert moves[name][1]["w"].tolist() == [ord(name)] * 3
    # Rank 2 calls with nothing; rank 3 does not call.
    mesh = init_device_mesh("cpu", (2,), ranks=[0, 1])
    source = target = None
    if rank < 2:
        source = {"w": distribute_tensor(torch.ones(4), mesh, [Shard(0)], src_data_rank=None)}
        target = {"w": distribute_tensor(torch.zeros(4), mesh, [Replicate()], src_data_rank=None)}
    if rank < 3:
        with Reshard(source, target, name="d", timeout=timedelta(seconds=20)) as move:
            move()
            assert move.ranks == (0, 1)
    assert target is None or torch.equal(target["w"].to_local(), torch.ones(4))


def test_moves_of_different_ranks(four: Crew) -> None:
    four.run(_different_sets, 4)


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
    move = Reshard(source, target, timeout=_SOON)
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
    move = Reshard(source, target, timeout=_SOON)
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


def test_an_interrupted_run_is_the_last(four: Crew) -> None:
    four.run(_interrupted, 2)


def test_buffers_outlive_a_run_that_is_interrupted_while_it_waits(four: Crew) -> None:
    four.run(_interrupted_while_it_waits, 2)


def _one_does_not_run() -> int:
    rank = dist.get_rank()
    source = {"w": torch.ones(4)} if rank == 0 else None
    target = {"w": torch.zeros(4)} if rank else None
    move = Reshard(source, target, timeout=_SOON)
    reads, read = [], Board.read

    def counted(self: Board, key: str) -> str:
        reads.append(key)
        return read(self, key)

    Board.read = counted
    try:
        if rank != 2:
            _raises(RuntimeError, "run 1 did not begin, for which rank 2 did not come", move)
    finally:
        Board.read = read
    dist.barrier()
    return sum("/at/" in key for key in reads)


def test_one_rank_looks_who_is_behind(four: Crew) -> None:
    """All of them would be ranks * ranks reads of the store."""
    assert sorted(four.run(_one_does_not_run, 4)) == [0, 0, 0, 4]


# --- processes that end ---------------------------------------------------------------------------


def _dies(rank: int, folder: str, dying: int) -> None:
    torch.set_num_threads(1)
    file = Path(folder) / "port"
    if rank == 0:  # the store ends with rank 0
        store = dist.TCPStore("localhost", 0, 3, is_master=True, wait_for_workers=False)
        (file.parent / "new").write_text(str(store.port))
        (file.parent / "new").rename(file)
    else:
        while not file.exists():
            time.sleep(0.01)
        store = dist.TCPStore("localhost", int(file.read_text()), 3, False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=3)
    source = {"w": torch.full((1 << 16,), 3.0)} if rank == dying else None
    target = {"w": torch.zeros(1 << 16)} if rank != dying else None
    move = Reshard(source, target, timeout=timedelta(seconds=6), buffer_bytes=1 << 14)
    move()
    for tensor in (target or {}).values():
        tensor.zero_()
    if rank == dying:
        _die_later()
    began = time.monotonic()
    errors = [_error_of(move) for _ in range(2)]
    move.close()  # also where the store has ended
    is_told = all("run 2 failed" in e and "its old value or its new one" in e for e in errors)
    values = set(target["w"].tolist()) if target else set()
    is_good = is_told and values <= {0.0, 3.0}
    said = "good" if is_good else f"{errors} {values}"
    (file.parent / str(rank)).write_text(f"{said} {time.monotonic() - began:.0f}")
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
        process.join(60)
        process.kill()
    assert ranks[dying].exitcode == 9
    for rank in {0, 1, 2} - {dying}:
        assert re.fullmatch(r"good (\d|1\d)", (tmp_path / str(rank)).read_text())
