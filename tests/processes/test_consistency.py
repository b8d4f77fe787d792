"""Ranks that build different meshes are told so within seconds, by name, instead of hanging."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from helpers.all_reduce import reached_by
from helpers.crew import Crew
from meshverse import DeviceMesh, Universe, init_device_mesh, isolate
from meshverse.world import World

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


def _derived(*calls: Callable[[DeviceMesh], Any]) -> None:
    mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("a", "b", "c"), timeout=_TIMEOUT)
    for call in calls:
        call(mesh)


def _flatten_all(mesh: DeviceMesh) -> None:
    mesh["a", "b"].flatten("all")


def _flatten_own(mesh: DeviceMesh) -> None:
    mesh["b"].flatten("own", isolate="mine")


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
    "isolation": (lambda: _mesh(), _isolated),
    "order of calls": (
        lambda: _derived(_flatten_all, _flatten_own),
        lambda: _derived(_flatten_own, _flatten_all),
    ),
    "what is derived": (
        lambda: _derived(lambda m: m.unflatten("a", (1, 2), ("d", "e"), isolate="mine")),
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


def _build(difference: str, odd_one_first: bool) -> Ending:
    usual, odd = _ALL[difference]
    is_odd = dist.get_rank() == _ODD_RANK
    time.sleep(0.5 if is_odd != odd_one_first else 0)
    start, message = time.monotonic(), "no error"
    try:
        (odd if is_odd else usual)()
    except RuntimeError as error:
        message = str(error)
    return Ending(message, time.monotonic() - start)


def _is_told(ending: Ending) -> bool:
    return "Ranks are building different meshes" in ending.message


@pytest.mark.parametrize("difference", _ALL)
def test_a_rank_that_differs_is_told_by_name(crew: Crew, difference: str) -> None:
    endings = crew.run(_build, 4, difference, False)
    told = endings[_ODD_RANK]
    assert _is_told(told), told
    assert told.seconds < 2
    assert f"rank {_ODD_RANK}: " in told.message
    assert "which came first: " in told.message
    first = int(told.message.split(", which came first")[0].rpartition("rank ")[2])
    assert first != _ODD_RANK
    mine, theirs = (line.split(": ", 1)[1] for line in told.message.splitlines()[1:3])
    assert mine != theirs
    assert all("over RankMap(" in text for text in (mine, theirs))
    # The others wait for it, but no longer than their timeout.
    for rank, ending in enumerate(endings):
        assert ending.seconds < _TIMEOUT.total_seconds() + 5, (rank, ending)


@pytest.mark.parametrize("difference", ["shape", "order of a part's ranks"])
def test_all_are_told_where_the_odd_one_came_first(crew: Crew, difference: str) -> None:
    endings = crew.run(_build, 4, difference, True)
    members = [0, 1, 3] if difference in _DIFFERENCES else [0, 3]
    for rank in members:
        assert _is_told(endings[rank])
        assert endings[rank].seconds < 2
        assert f"rank {_ODD_RANK}, which came first" in endings[rank].message


# --- what is no difference -----------------------------------------------------------------------


def _histories_of_their_own() -> list[int]:
    rank = dist.get_rank()
    if rank < 2:
        init_device_mesh("cpu", (2,), mesh_dim_names=("part",))
    if rank in (1, 3):
        DeviceMesh("cpu", [1, 3], mesh_dim_names=("other",))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=_AXES)
    return reached_by(mesh.get_group("dp"))


def _timeouts_of_their_own() -> list[int]:
    seconds = 20 + dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=_AXES, timeout=timedelta(seconds=seconds))
    return reached_by(mesh.get_group("dp"))


def _known_views_on_one_rank() -> list[int]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=_AXES)
    if dist.get_rank() == 0:
        mesh["tp"].flatten("alias")
        mesh.unflatten("dp", (2,), ("renamed",))
    mesh.flatten("all")
    return reached_by(mesh.get_group("dp"))


@pytest.mark.parametrize(
    "program", [_histories_of_their_own, _timeouts_of_their_own, _known_views_on_one_rank]
)
def test_what_ranks_may_do_differently(crew: Crew, program: Callable[[], list[int]]) -> None:
    for rank, reached in enumerate(crew.run(program, 4)):
        assert reached == ([1, 0, 1, 0] if rank % 2 == 0 else [0, 1, 0, 1])


# --- turned off, and its price -------------------------------------------------------------------


def _unchecked(way: str) -> Ending:
    if way == "environment":
        os.environ["MESHVERSE_CHECK_CONSISTENCY"] = "0"
    names = ("x", "y") if dist.get_rank() == _ODD_RANK else _AXES
    changed = {"check_consistency": False} if way == "argument" else {}
    start, message = time.monotonic(), "no error"
    try:
        _mesh(mesh_dim_names=names, **changed)  # other names, but the same groups
    except RuntimeError as error:
        message = str(error)
    finally:
        os.environ.pop("MESHVERSE_CHECK_CONSISTENCY", None)
    return Ending(message, time.monotonic() - start)


@pytest.mark.parametrize("way", ["argument", "environment"])
def test_the_comparison_can_be_turned_off(crew: Crew, way: str) -> None:
    assert {ending.message for ending in crew.run(_unchecked, 4, way)} == {"no error"}
    assert any(_is_told(ending) for ending in crew.run(_unchecked, 4, "not at all"))


def _count_store_operations() -> list[int]:
    with pytest.MonkeyPatch.context() as patch:
        return _counts(patch)


def _counts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    world = World.current()
    counting = _Counting(world.store)
    monkeypatch.setattr(World, "store", counting)
    counts = []
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=_AXES)
    counts.append(counting.operations)
    mesh["dp"], mesh["tp"].flatten("alias"), mesh.unflatten("tp", (2, 1), ("a", "b"))
    counts.append(counting.operations)
    mesh.unflatten("tp", (2, 1), ("a", "b"))
    counts.append(counting.operations)
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
    # The second call made one group: of the one-rank axis.
    assert crew.run(_count_store_operations, 4) == [[1, 2, 2]] * 4
