"""Moves that cannot be: every rank is told why, before anything is sent."""

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
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from helpers.crew import Crew
from meshverse import Topology, init_device_mesh
from meshverse.parallel import Reshard

pytestmark = [pytest.mark.processes, pytest.mark.timeout(200)]

_SOON = timedelta(seconds=4)


def _raises(kind: type[Exception], words: str, call: Callable[[], Any]) -> None:
    with pytest.raises(kind, match=words):
        call()


def _one(tensor: Any, name: Any = "w") -> dict[Any, Any]:
    return {name: tensor}


class _Tagged(Tensor):
    pass


# --- inputs of one rank -------------------------------------------------------------------------


def _wrong_inputs() -> list[tuple[type[Exception], str, Any]]:
    """What rank 0 gives as a source: the error's type, its words."""
    eight = torch.ones(8)
    return [
        (TypeError, "of type list: give a dict of tensors by name", [eight]),
        (TypeError, "has the name 3 of type int: give str", {3: eight}),
        (TypeError, "'w' is a float: give a DTensor", _one(1.0)),
        (TypeError, "'w' is a meta tensor", _one(torch.ones(8, device="meta"))),
        (TypeError, r"'w' is a torch.sparse_coo tensor", _one(eight.to_sparse())),
        (
            TypeError,
            "'w' is a quantized",
            _one(torch.quantize_per_tensor(eight, 1, 0, torch.qint8)),
        ),
        (TypeError, "'w' is a nested", _one(torch.nested.nested_tensor([eight]))),
        (TypeError, "'w' is a _Tagged, whose data cannot", _one(eight.as_subclass(_Tagged))),
        (TypeError, "'w' is a FakeTensor, whose data", _one(FakeTensorMode().from_tensor(eight))),
    ]


def _of_one_rank() -> None:
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2,))
    target = {"w": torch.zeros(8)}
    cases = _wrong_inputs()
    partial = DTensor.from_local(torch.ones(8), mesh, [Partial()])
    cases.append((ValueError, r"has the placement P.*redistribute it to Replicate", _one(partial)))
    words = r"of shape \(9,\) has a local tensor of shape \(3,\) .* say \(5,\)"
    cases.append((ValueError, words, _one(_lying(mesh))))
    freed = torch.ones(8)
    freed.untyped_storage().resize_(0)
    cases.append((ValueError, "'w' has no memory", _one(freed)))
    for kind, words, source in cases:
        if rank == 0:
            _raises(kind, words, lambda s=source: Reshard(s, target))
        else:
            _raises(RuntimeError, "rank 0 cannot take part", lambda: Reshard(target, None))
    with FakeTensorMode() if rank == 0 else torch.no_grad():
        kind, words = (TypeError, "FakeTensorMode") if rank == 0 else (RuntimeError, "rank 0")
        _raises(kind, words, lambda: Reshard(target, None))
    # Nothing is left of all that: a good move runs.
    Reshard({"w": torch.ones(8)} if rank else None, target)()
    assert torch.equal(target["w"], torch.ones(8))


def _lying(mesh: Any) -> DTensor:
    return DTensor.from_local(
        torch.ones(3), mesh, [Shard(0)], run_check=False, shape=torch.Size([9]), stride=(1,)
    )


def test_tensors_that_cannot_be_moved(four: Crew) -> None:
    four.run(_of_one_rank, 2)


def _wrong_settings() -> None:
    """One rank gives what is wrong: it raises, and the others need not wait for it."""
    rank = dist.get_rank()
    ones, zeros = {"w": torch.ones(8)}, {"w": torch.zeros(8)}

    def fails(_: str) -> str:
        raise LookupError("no such name")

    cases: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (TypeError, "buffer_bytes='1': give an int", {"buffer_bytes": "1"}),
        (TypeError, "buffer_bytes=True: give an int", {"buffer_bytes": True}),
        (ValueError, "buffer_bytes=1023: give at least 1024", {"buffer_bytes": 1023}),
        (
            ValueError,
            "of 3 ranks: give one with nodes",
            {"topology": Topology({"node": list("aab")})},
        ),
        (ValueError, "give one with nodes", {"topology": Topology({"rack": list("ab")})}),
        (TypeError, r"topology='aab' of type str", {"topology": "aab"}),
        (ValueError, "timeout", {"timeout": timedelta(0)}),
        (TypeError, r"rename=\['w'\] of type list", {"rename": ["w"]}),
        (TypeError, "rename gives None for source 'w'", {"rename": lambda name: None}),
        (LookupError, "no such name", {"rename": fails}),
        (ValueError, r"ranks=\[0, 7\].*rank 7", {"ranks": [0, 7]}),
        (ValueError, r"ranks=\[0, 0\]", {"ranks": [0, 0]}),
        (TypeError, r"ranks='01'", {"ranks": "01"}),
    ]
    for kind, words, given in cases:
        began = time.monotonic()
        if rank == 0:
            _raises(kind, words, lambda g=given: Reshard(ones, None, **g))
        else:
            _raises(RuntimeError, "rank 0 cannot take part", lambda: Reshard(None, zeros))
        assert time.monotonic() - began < 15, given
    two = {"a": torch.ones(1), "b": torch.ones(1)}
    if rank == 0:
        _raises(
            ValueError,
            "rename gives 'c' for source 'b' and for 'a'",
            lambda: Reshard(two, None, rename=lambda name: "c"),
        )
    else:
        _raises(RuntimeError, "rank 0 cannot take part", lambda: Reshard(None, zeros))
    Reshard(ones, zeros)()
    assert torch.equal(zeros["w"], ones["w"])


def test_settings_that_are_wrong(four: Crew) -> None:
    four.run(_wrong_settings, 2)


# --- sides that do not fit ------------------------------------------------------------------------


def _misfits() -> None:
    """All ranks raise the same."""
    rank = dist.get_rank()
    cluster = Topology({"node": list("ab")})
    ones = torch.ones(8)
    cases: list[tuple[type[Exception], str, Any, Any, dict[str, Any]]] = [
        (
            ValueError,
            r"no tensor named 'layer.weight', .*\(near 'layer.weight', it has 'layers.weight'\)",
            {"layer.weight": ones},
            {"layers.weight": ones},
            {},
        ),
        (
            ValueError,
            "the source has no tensor named 'b', which the target has",
            {"a": ones},
            {"a": torch.zeros(8), "b": ones},
            {},
        ),
        (
            ValueError,
            r"'w' has the shape \(8,\) in the source and \(4,\) in the target",
            _one(ones),
            _one(torch.ones(4)),
            {},
        ),
        (
            ValueError,
            "'w' is float32 in the source and int64 in the target, which cannot hold",
            _one(ones),
            _one(torch.ones(8, dtype=torch.int64)),
            {},
        ),
        (
            ValueError,
            "'w' is complex64 in the source and float32",
            _one(torch.ones(8, dtype=torch.complex64)),
            _one(torch.ones(8)),
            {},
        ),
        (
            RuntimeError,
            "ranks . and . give different buffer_bytes: ",
            _one(ones),
            _one(torch.ones(8)),
            {"buffer_bytes": 2048 + rank},
        ),
        (
            RuntimeError,
            "give different topology",
            _one(ones),
            _one(torch.ones(8)),
            {"topology": cluster if rank else None},
        ),
        (
            RuntimeError,
            "give different ranks=",
            _one(ones),
            _one(torch.ones(8)),
            {"ranks": [0, 1] if rank else None},
        ),
    ]
    for kind, words, source, target, given in cases:
        has = (source, None) if rank == 0 else (None, target)
        _raises(kind, words, lambda h=has, g=given: Reshard(*h, **g))
    # A rank that has fewer tensors than the others on its mesh.
    mesh = init_device_mesh("cpu", (2,))
    both = {name: distribute_tensor(torch.ones(8), mesh, [Shard(0)]) for name in "ab"}
    fewer = {"a": both["a"]} if rank else both
    whole = {name: torch.zeros(8) for name in "ab"}
    _raises(ValueError, "source 'b'.*rank 1", lambda: Reshard(fewer, whole))
    other = {**both, "b": distribute_tensor(torch.ones(8), mesh, [Replicate()])}
    _raises(ValueError, "source 'b'.*rank 1", lambda: Reshard(other if rank else both, whole))
    wide = {"w": distribute_tensor(torch.ones(8 + 2 * rank), mesh, [Replicate()])}
    _raises(ValueError, "'w'", lambda: Reshard(wide, {"w": torch.zeros(8)}))
    Reshard(both, whole)()
    assert torch.equal(whole["b"], torch.ones(8))


def test_sides_that_do_not_fit(four: Crew) -> None:
    four.run(_misfits, 2)


def _memory_shared() -> None:
    """Refused where a write would change what is read, or what is written by another name."""
    held = torch.arange(12.0)
    grid = torch.arange(24.0).view(4, 6)

    def overlap(source: Tensor, target: Tensor) -> None:
        _raises(
            ValueError,
            "source 'w' and target 'w' overlap in memory on this rank",
            lambda: Reshard(_one(source), _one(target)),
        )

    overlap(held[:8], held[4:])
    overlap(grid[:2], grid[1:3])
    overlap(grid[:, :3], grid[:, 2:5])
    overlap(grid[:3, :3], grid[:3, :3].T)
    numbers = torch.ones(4, dtype=torch.complex64)
    overlap(numbers, numbers.conj())
    for what, target in (
        ("'w'", torch.zeros(1).expand(8)),
        ("'w'", torch.zeros(2, 1).expand(2, 4)),
    ):
        _raises(
            ValueError,
            f"target {what} is expanded",
            lambda t=target: Reshard(_one(torch.ones(t.shape)), _one(t)),
        )
    _raises(
        ValueError,
        "targets 'a' and 'b' overlap in memory",
        lambda: Reshard({"a": torch.ones(8), "b": torch.ones(8)}, {"a": held[:8], "b": held[4:]}),
    )
    # What only lies between is no overlap; nor is the same tensor under two names, or itself.
    assert torch.equal(held, torch.arange(12.0))
    Reshard(_one(grid[:, :3]), _one(grid[:, 3:]))()
    assert torch.equal(grid[:, 3:], torch.arange(24.0).view(4, 6)[:, :3])
    halves = torch.zeros(4, 6)
    Reshard(
        {"a": torch.ones(4, 3), "b": torch.full((4, 3), 2.0)},
        {"a": halves[:, ::2], "b": halves[:, 1::2]},
    )()
    assert torch.equal(halves, torch.tensor([1.0, 2.0]).repeat(4, 3))
    tied = torch.zeros(8)
    Reshard({"a": torch.ones(8), "b": torch.ones(8)}, {"a": tied, "b": tied})()
    assert torch.equal(tied, torch.ones(8))
    Reshard({"a": tied, "b": held}, {"b": torch.zeros(12), "a": tied})()
    Reshard(_one(torch.ones(1).expand(8)), _one(tied))()


def test_tensors_that_share_memory(four: Crew) -> None:
    four.run(_memory_shared, 1)


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
