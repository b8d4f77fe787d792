"""Numbers that ranks agree on count only what they did together, not what one of them did alone."""

from __future__ import annotations

import logging
import pickle
import threading
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from helpers.all_reduce import reached_by
from helpers.crew import Crew
from meshverse import DeviceMesh, Universe, init_device_mesh, load_mesh, save_mesh

_AXES = ("dp", "tp")


def _mesh(shape: tuple[int, ...] = (2, 2), **changed: Any) -> DeviceMesh:
    return init_device_mesh("cpu", shape, **{"mesh_dim_names": _AXES, **changed})


def _load() -> None:
    state = save_mesh(DeviceMesh("cpu", torch.arange(4).view(2, 2), _init_backend=False))
    load_mesh({**state, "serial": 7})


def _fail_to_compare() -> None:
    with pytest.raises(RuntimeError, match="not_there"):
        _mesh(backend_override={"not_there": "gloo"})


def _fail_to_meet() -> None:
    with pytest.raises(RuntimeError, match="1 of 2 members joined"):
        _mesh(timeout=timedelta(seconds=0.3))  # short-timeout: it must elapse


def _make_a_universe() -> None:
    Universe(4)


def _adopt() -> None:
    DeviceMesh.from_group(dist.group.WORLD, "cpu")


_ALONE = {
    "loaded": _load,
    "refused": _fail_to_compare,
    "failed": _fail_to_meet,
    "empty": _make_a_universe,
    "adopted": _adopt,
}


def _sent_by_rank_0(what: str) -> tuple[bool, list[int]]:
    """Rank 0 does something alone, all make two equal meshes, rank 0 sends one of them."""
    if dist.get_rank() == 0:
        _ALONE[what]()
    dist.barrier()
    first, second = _mesh(), _mesh()
    assert first.get_group("dp") is not second.get_group("dp")
    sent = [pickle.dumps(second["dp"])]
    dist.broadcast_object_list(sent)
    loaded = pickle.loads(sent[0])
    return loaded is second["dp"], reached_by(loaded.get_group())


@pytest.mark.parametrize("what", _ALONE)
def test_a_mesh_that_is_sent_lands_in_the_same_universe_on_all_ranks(crew: Crew, what: str) -> None:
    for rank, (is_the_same, reached) in enumerate(crew.run(_sent_by_rank_0, 4, what)):
        assert is_the_same
        assert reached == ([1, 0, 1, 0] if rank % 2 == 0 else [0, 1, 0, 1])


def _made_in_threads() -> bool:
    """Two threads make equal meshes in another order on each rank; rank 0 sends one of them."""
    made: dict[str, DeviceMesh] = {}

    def make(tag: str) -> None:
        made[tag] = _mesh(isolate=tag, lazy=True)

    for tag in ("a", "b") if dist.get_rank() == 0 else ("b", "a"):
        thread = threading.Thread(target=make, args=(tag,))
        thread.start()
        thread.join(30)
    sent = [pickle.dumps(made["a"]["dp"])]
    dist.broadcast_object_list(sent)
    loaded = pickle.loads(sent[0])
    return loaded.get_group() is made["a"].get_group("dp")


def test_a_mesh_made_in_a_thread_is_found_by_its_groups(crew: Crew) -> None:
    assert crew.run(_made_in_threads, 4) == [True] * 4


def _after_a_world_of_one(folder: str) -> str:
    """Rank 0 alone was in a world of its own; then all ranks build, and one differs."""
    rank = dist.get_rank()
    dist.barrier()
    dist.destroy_process_group()
    if rank == 0:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        init_device_mesh("cpu", (1,))
        dist.destroy_process_group()
    store = dist.FileStore(f"{folder}/second", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    try:
        _mesh((2, 1) if rank == 0 else (1, 2))
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_a_world_that_one_rank_had_before_changes_nothing(crew: Crew, tmp_path: Any) -> None:
    answers = crew.run(_after_a_world_of_one, 2, str(tmp_path))
    # Nothing waits here: the first rank to come has its mesh before the other one differs.
    assert sorted("building different meshes" in text for text in answers)[1]
    assert [text for text in answers if "dp=2, tp=1" in text and "dp=1, tp=2" in text]


# --- what turns the comparison off ---------------------------------------------------------------


def _logged(way: str) -> list[str]:
    """Return the log while one rank's calls are no longer compared."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = records.append  # type: ignore[method-assign]
    logging.getLogger("meshverse").addHandler(handler)
    try:
        if way == "thread":
            thread = threading.Thread(target=_mesh)
            thread.start()
            thread.join(30)
        elif dist.get_rank() == 0:
            _fail_to_meet()
        dist.barrier()
        for _ in range(3):
            _mesh()
    finally:
        logging.getLogger("meshverse").removeHandler(handler)
    lines = [record.getMessage() for record in records]
    return [line for line in lines if "compares" in line]  # not that equal meshes were made


@pytest.mark.parametrize("way", ["thread", "failed call"])
def test_the_log_says_once_that_calls_are_no_longer_compared(crew: Crew, way: str) -> None:
    why = {"thread": "a thread other than the main", "failed call": "one raised RuntimeError on"}
    for rank, lines in enumerate(crew.run(_logged, 4, way)):
        if rank > 0:  # where all ranks stop, the first one says so for all
            assert lines == []
            continue
        [line] = lines
        assert "no longer compares some calls" in line
        assert why[way] in line
