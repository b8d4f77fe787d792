"""Ranks that build different meshes are told so within seconds, by name, instead of hanging."""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from helpers.all_reduce import reached_by
from helpers.crew import WORLD_TIMEOUT_SECONDS, Crew
from meshverse import (
    DeviceMesh,
    Universe,
    init_device_mesh,
    isolate,
    load_mesh,
    save_mesh,
)
from meshverse import _torch_compat as compat
from meshverse.universe.consistency import RootOrders
from meshverse.world.world import World

_AXES = ("dp", "tp")
_ODD_RANK = 2
_TIMEOUT = timedelta(seconds=1.5)  # of what ranks that agree wait for the odd one


class Ending(NamedTuple):
    """How a rank's mesh ended: what it was told, and after how many seconds."""

    message: str
    seconds: float


def _mesh(shape: tuple[int, ...] = (2, 2), **changed: Any) -> DeviceMesh:
    given = {"mesh_dim_names": _AXES, "timeout": _TIMEOUT, **changed}
    return init_device_mesh("cpu", shape, **given)


def _from_ranks(ranks: list[list[int]]) -> DeviceMesh:
    universe = Universe(torch.tensor(ranks), timeout=_TIMEOUT)
    return DeviceMesh("cpu", ranks, mesh_dim_names=_AXES, universe=universe)


def _options(threads: int) -> Any:
    options = dist.ProcessGroupGloo._Options()
    options._threads = threads
    return options


def _derived(*calls: Callable[[DeviceMesh], Any]) -> DeviceMesh:
    mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("a", "b", "c"), timeout=_TIMEOUT)
    for call in calls:
        call(mesh)
    return mesh


def _flatten_all(mesh: DeviceMesh) -> None:
    mesh["a", "b"].flatten("all", isolate="mine")


def _split_a(mesh: DeviceMesh) -> None:
    mesh.unflatten("a", (1, 2), ("d", "e"), isolate="mine")


def _isolated() -> None:
    with isolate("mine"):
        _mesh()


# What all ranks but the odd one do, and what that does.
_DIFFERENCES: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "shape": (lambda: _mesh((2, 2)), lambda: _mesh((4, 1))),
    "number of axes": (lambda: _mesh((2, 2)), lambda: _mesh((4,), mesh_dim_names=("dp",))),
    "names": (lambda: _mesh(), lambda: _mesh(mesh_dim_names=("tp", "dp"))),
    "order of ranks": (
        lambda: _from_ranks([[0, 1], [2, 3]]),
        lambda: _from_ranks([[0, 2], [1, 3]]),
    ),
    "backend": (lambda: _mesh(), lambda: _mesh(backend_override={"tp": "cpu:gloo"})),
    "options": (lambda: _mesh(), lambda: _mesh(options=_options(threads=5))),
    "options of an axis": (lambda: _mesh(), lambda: _mesh(backend_override={"dp": _options(3)})),
    "timeout": (lambda: _mesh(), lambda: _mesh(timeout=_TIMEOUT * 2)),
    "timeout that is the world's": (
        lambda: _mesh((4, 1)),
        lambda: _mesh((4, 1), timeout=timedelta(seconds=WORLD_TIMEOUT_SECONDS)),
    ),
    "laziness": (lambda: _mesh(), lambda: _mesh(lazy=True)),
    "isolation": (lambda: _mesh(), _isolated),
    "order of calls": (
        lambda: _derived(_flatten_all, _split_a),
        lambda: _derived(_split_a, _flatten_all),
    ),
    "what is derived": (
        lambda: _derived(_split_a),
        lambda: _derived(lambda m: m.unflatten("b", (1, 2), ("d", "e"), isolate="mine")),
    ),
}
# Over a part of the world, which only its ranks build.
_PART = {
    "shape of a part": (
        lambda: _part((3,), ("dp",)),
        lambda: _part((1, 3), _AXES),
    ),
    "order of a part's ranks": (
        lambda: _part((3,), ("dp",)),
        lambda: _part((3,), ("dp",), ranks=[3, 2, 0]),
    ),
}
_ALL = {**_DIFFERENCES, **_PART}


def _part(shape: tuple[int, ...], names: tuple[str, ...], ranks: Any = (0, 2, 3)) -> None:
    if dist.get_rank() != 1:
        init_device_mesh("cpu", shape, mesh_dim_names=names, ranks=ranks, timeout=_TIMEOUT)


def _build(difference: str, odd_one_first: bool) -> tuple[Ending, Ending]:
    """How the call ended in which the ranks differ, and how the next call ended."""
    usual, odd = _ALL[difference]
    is_odd = dist.get_rank() == _ODD_RANK
    time.sleep(0.5 if is_odd != odd_one_first else 0)
    meshes: list[Any] = []
    ending = _ending_of(lambda: meshes.append((odd if is_odd else usual)()))
    if _is_told(ending) or (difference in _PART and dist.get_rank() == 1):
        return ending, ending
    time.sleep(3)  # until the ranks that differ know it
    if difference == "what is derived":  # the next call that all ranks of that mesh make
        usual = partial(_flatten_all, *meshes)
    return ending, _ending_of(usual)


def _ending_of(build: Callable[[], Any]) -> Ending:
    start, message = time.monotonic(), "no error"
    try:
        build()
    except RuntimeError as error:
        message = str(error)
    return Ending(message, time.monotonic() - start)


def _is_told(ending: Ending) -> bool:
    return "Ranks are building different meshes" in ending.message


# Ranks that wait for no other rank have left the call before the difference is known.
_NOBODY_WAITS = {"timeout that is the world's"}
_SOME_WAIT = {"what is derived", "laziness"}


@pytest.mark.parametrize("odd_one_first", [False, True], ids=["odd one last", "odd one first"])
@pytest.mark.parametrize("difference", _ALL)
def test_all_ranks_of_a_call_are_told_who_differs(
    crew: Crew, difference: str, odd_one_first: bool
) -> None:
    endings = crew.run(_build, 4, difference, odd_one_first)
    members = [0, 1, 2, 3] if difference in _DIFFERENCES else [0, 2, 3]
    told_late = [rank for rank in members if not _is_told(endings[rank][0])]
    if difference not in _NOBODY_WAITS | _SOME_WAIT:
        assert told_late == [], endings
    assert len(told_late) <= 3
    for rank in members:
        ending, after = endings[rank]
        assert ending.seconds < 5
        if rank in told_late:
            assert ending.message == "no error"
            assert "Ranks were building different meshes in an earlier call" in after.message
            assert after.seconds < 5
        ranks, texts = zip(*_descriptions(after.message), strict=True)
        assert _ODD_RANK in ranks
        assert len(set(ranks)) == len(set(texts)) == len(texts) >= 2
        assert all("over ranks " in text for text in texts)
        if rank not in told_late:
            assert ranks[0] == rank
            assert _differences(after.message), after.message
            assert all(re.search(r" at .*test_consistency.py:\d+: ", text) for text in texts)
            assert re.search(r"rank \d, which came (first|later): ", after.message)


def _differences(message: str) -> list[str]:
    """The lines that say what differs, which come first."""
    before, _, _ = message.partition("Who builds what:")
    return re.findall(r"^  [a-z].*: .* on ranks? \d.*$", before, re.MULTILINE)


def _descriptions(message: str) -> list[tuple[int, str]]:
    """Who built what."""
    found = re.findall(r"^  rank (\d)(?:, which came \w+)?: (.*)$", message, re.MULTILINE)
    return [(int(rank), text) for rank, text in found]


# --- what is no difference -----------------------------------------------------------------------


def _histories_of_their_own() -> list[int]:
    rank = dist.get_rank()
    if rank < 2:
        init_device_mesh("cpu", (2,), mesh_dim_names=("part",))
    if rank in (1, 3):
        DeviceMesh("cpu", [1, 3], mesh_dim_names=("other",))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=_AXES)
    return reached_by(mesh.get_group("dp"))


def _known_views_on_one_rank() -> list[int]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=_AXES)
    if dist.get_rank() == 0:
        mesh["tp"].flatten("alias")
        mesh.unflatten("dp", (2,), ("renamed",))
    mesh.flatten("all")
    return reached_by(mesh.get_group("dp"))


def _loaded_on_one_rank() -> list[int]:
    if dist.get_rank() == 0:
        state = save_mesh(DeviceMesh("cpu", torch.arange(4).view(2, 2), _init_backend=False))
        load_mesh(state)
    return reached_by(_mesh().get_group("dp"))


def _a_thread_on_one_rank() -> list[int]:
    if dist.get_rank() == 0:
        thread = threading.Thread(target=_mesh)
        thread.start()
        thread.join(30)
    else:
        _mesh()
    return reached_by(_mesh(mesh_dim_names=("x", "y")).get_group("x"))


def _told_and_tried_again() -> list[int]:
    """All ranks are told, twice, and try again with the right mesh."""
    long = timedelta(seconds=30)
    is_odd = dist.get_rank() == _ODD_RANK
    with pytest.raises(RuntimeError, match="building different meshes"):
        _mesh((4, 1) if is_odd else (2, 2), timeout=long)
    mesh = _mesh(timeout=long)
    with pytest.raises(RuntimeError, match="building different meshes"):
        mesh["dp", "tp"].flatten("all", isolate="wrong" if is_odd else "x")
    mesh["dp", "tp"].flatten("all", isolate="x")
    again = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "etp"))
    assert World.current().state(RootOrders).of(again.universe.rank_map.fingerprint).is_compared()
    return reached_by(again.get_group("ep"))


@pytest.mark.parametrize(
    "program",
    [
        _histories_of_their_own,
        _known_views_on_one_rank,
        _loaded_on_one_rank,
        _a_thread_on_one_rank,
        _told_and_tried_again,
    ],
)
def test_what_ranks_may_do_differently(crew: Crew, program: Callable[[], list[int]]) -> None:
    for rank, reached in enumerate(crew.run(program, 4)):
        assert reached == ([1, 0, 1, 0] if rank % 2 == 0 else [0, 1, 0, 1])


def _late_for_one_of_several() -> list[str]:
    """Every other group of an axis fails, as a member is late; then all go on."""
    mesh = _mesh(timeout=timedelta(seconds=2))
    dist.barrier()
    if dist.get_rank() == _ODD_RANK:
        time.sleep(4)
    said = []
    for name in "xyz":
        said.append(_ending_of(partial(mesh["dp"].flatten, name, isolate=name)).message)
        dist.barrier()
    return said


def test_a_call_that_failed_on_some_ranks_is_no_difference(crew: Crew) -> None:
    for rank, (first, *others) in enumerate(crew.run(_late_for_one_of_several, 4)):
        assert others == ["no error"] * 2
        assert (first == "no error") == (rank % 2 == 1)


# --- ranks that disagree about which ranks -------------------------------------------------------

_OVER_OTHER_RANKS = {
    "overlapping": [[0, 1, 2], [0, 1, 2], [1, 2, 3], [1, 2, 3]],
    "one left out": [[0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 2, 3], [1, 2, 3]],
    "a neighbour each": [[0, 1], [1, 2], [2, 3], [0, 3]],
    "another third": [[0, 1, 2], [0, 1, 3], [0, 1, 2], [0, 1, 3]],
}


def _over_other_ranks(way: str) -> tuple[Ending, list[int]]:
    rank = dist.get_rank()
    ranks = _OVER_OTHER_RANKS[way][rank]
    build = partial(DeviceMesh, "cpu", ranks, mesh_dim_names=("dp",), isolate="not the world")
    dist.barrier()  # who comes after the others were told comes to their next attempt
    ending = _ending_of(build)
    dist.barrier()
    # The same ranks can make the right mesh after that, and views of it.
    mesh = DeviceMesh("cpu", [0, 1, 2, 3], mesh_dim_names=("all",), isolate="not the world")
    return ending, reached_by(mesh.unflatten("all", (2, 2), _AXES).get_group("tp"))


@pytest.mark.parametrize("way", _OVER_OTHER_RANKS)
def test_ranks_that_build_over_other_ranks_are_told_soon(crew: Crew, way: str) -> None:
    for rank, (ending, reached) in enumerate(crew.run(_over_other_ranks, 4, way)):
        mine = _OVER_OTHER_RANKS[way][rank]
        assert ending.message.startswith(
            f"Rank {rank} could not make the process group of axis 'dp' with ranks {mine}: "
            "ranks wait for one another: "
        )
        # Descriptions, and whose they are.
        named = re.findall(r"rank (\d) waits in axis 'dp' .*? with ranks (\[.*?\])", ending.message)
        assert len({ranks for _, ranks in named}) >= 2
        assert all(str(_OVER_OTHER_RANKS[way][int(who)]) == ranks for who, ranks in named)
        assert ending.seconds < 8
        assert reached == ([1, 1, 0, 0] if rank < 2 else [0, 0, 1, 1])


def _one_is_not_in_a_hurry() -> tuple[list[str], str]:
    """What is logged, and the error, where one rank of a group never makes it."""
    told: list[logging.LogRecord] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = told.append  # type: ignore[method-assign]
    logging.getLogger("meshverse").addHandler(handler)
    message = "no error"
    if dist.get_rank() < 2:
        try:
            timeout = timedelta(seconds=8)
            init_device_mesh("cpu", (3,), mesh_dim_names=("dp",), ranks=[0, 1, 2], timeout=timeout)
        except RuntimeError as error:
            message = str(error)
    return [record.getMessage() for record in told], message


def test_ranks_that_wait_long_say_so_and_for_whom(crew: Crew) -> None:
    for rank, (warnings, message) in enumerate(crew.run(_one_is_not_in_a_hurry, 4)):
        if rank > 1:
            assert (warnings, message) == ([], "no error")
            continue
        missing = "2 of 3 members came; not seen were ranks [2]. Those that did not come have died"
        [warning] = warnings
        assert f"Rank {rank} has waited 5 s to make axis 'dp' of" in warning
        assert f"with ranks [0, 1, 2]: {missing}" in warning
        assert f"Rank {rank} could not make the process group of axis 'dp'" in message
        assert f"waited 0:00:08: {missing}" in message


# --- turned off, and its price -------------------------------------------------------------------


def _unchecked(way: str) -> Ending:
    if way == "environment":
        os.environ["MESHVERSE_CHECK_CONSISTENCY"] = "0"
    names = ("x", "y") if dist.get_rank() == _ODD_RANK else _AXES
    changed = {"check_consistency": False} if way == "argument" else {}
    try:
        # other names, but the same groups
        return _ending_of(lambda: _mesh(mesh_dim_names=names, **changed))
    finally:
        os.environ.pop("MESHVERSE_CHECK_CONSISTENCY", None)


@pytest.mark.parametrize("way", ["argument", "environment"])
def test_the_comparison_can_be_turned_off(crew: Crew, way: str) -> None:
    assert {ending.message for ending in crew.run(_unchecked, 4, way)} == {"no error"}
    assert any(_is_told(ending) for ending in crew.run(_unchecked, 4, "not at all"))


def _count_store_operations() -> list[int]:
    world = World.current()
    counting = _Counting(world.store)
    counts = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(World, "store", counting)
        patch.setattr(compat, "creation_blocks", lambda backend: False)  # meetings are not counted
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=_AXES)
        counts.append(counting.operations)
        mesh["dp"], mesh["tp"].flatten("alias"), mesh.unflatten("tp", (2, 1), ("a", "b"))
        counts.append(counting.operations)
        mesh.unflatten("tp", (2, 1), ("a", "b"))
        counts.append(counting.operations)
        dist.barrier()
        mesh.universe.destroy()
    return counts


class _Counting:
    """A store that counts what is asked of it."""

    def __init__(self, store: Any) -> None:
        self._store, self.operations = store, 0

    def __getattr__(self, name: str) -> Any:
        self.operations += 1
        return getattr(self._store, name)


def test_one_store_operation_a_rank_and_call(crew: Crew) -> None:
    # Before the first call, ranks agree on the number of the run, by two operations each. The
    # second call made one group: of the one-rank axis.
    assert crew.run(_count_store_operations, 4) == [[3, 4, 4]] * 4


class _SmallStore(dist.Store):
    """A store written in Python that lacks `compare_set`, as torchelastic's for etcd does."""

    def __init__(self, store: dist.Store) -> None:
        super().__init__()
        self._store = store

    def set(self, key: str, value: Any) -> None:
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        return self._store.get(key)

    def add(self, key: str, amount: int) -> int:
        return self._store.add(key, amount)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._store.wait(keys, timeout or _TIMEOUT)

    def check(self, keys: list[str]) -> bool:
        return self._store.check(keys)


@pytest.mark.parametrize(
    ("store", "can"), [(_SmallStore(dist.HashStore()), False), (dist.HashStore(), True)]
)
def test_a_store_that_cannot_compare_is_not_asked_to(store: dist.Store, can: bool) -> None:
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        init_device_mesh("cpu", (1, 1), mesh_dim_names=_AXES)
        assert (World.current().store is not None) == can
    finally:
        dist.destroy_process_group()


def test_a_new_life_on_the_store_of_the_old_one_begins_anew() -> None:
    store = dist.HashStore()  # which keeps its keys, as a launcher's does
    for names in (("a", "b"), ("c", "d")):
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        init_device_mesh("cpu", (1, 1), mesh_dim_names=names)
        dist.destroy_process_group()
