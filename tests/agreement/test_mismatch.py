"""Ranks that build different meshes get an error within seconds, with their names: no hang."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import device_mesh as stock

from helpers.crew import WORLD_TIMEOUT_SECONDS, Crew
from helpers.differing import (
    AXES,
    ODD_RANK,
    TIMEOUT,
    error_of,
    raised_by_the_call,
    small_mesh,
)
from helpers.tiers import in_tiers
from helpers.turns import say_when_compared, wait_for_comparison
from meshverse import DeviceMesh, Universe, init_device_mesh, installed, isolate
from meshverse.agreement import ComparedCalls, RanksDifferError
from meshverse.store import StoreKeys


def _from_ranks(ranks: list[list[int]]) -> DeviceMesh:
    universe = Universe(torch.tensor(ranks), timeout=TIMEOUT)
    return DeviceMesh("cpu", ranks, mesh_dim_names=AXES, universe=universe)


def _options(threads: int) -> Any:
    options = dist.ProcessGroupGloo._Options()
    options._threads = threads
    return options


def _derived(*calls: Callable[[DeviceMesh], Any]) -> DeviceMesh:
    mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("a", "b", "c"), timeout=TIMEOUT)
    for call in calls:
        call(mesh)
    return mesh


def _flatten_all(mesh: DeviceMesh) -> None:
    mesh["a", "b"].flatten("all", isolate="mine")


def _split_a(mesh: DeviceMesh) -> None:
    mesh.unflatten("a", (1, 2), ("d", "e"), isolate="mine")


def _isolated() -> None:
    with isolate("mine"):
        small_mesh()


# What all ranks but the odd one do, and what that does.
_DIFFERENCES: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "shape": (lambda: small_mesh((2, 2)), lambda: small_mesh((4, 1))),
    "number of axes": (
        lambda: small_mesh((2, 2)),
        lambda: small_mesh((4,), mesh_dim_names=("dp",)),
    ),
    "names": (lambda: small_mesh(), lambda: small_mesh(mesh_dim_names=("tp", "dp"))),
    "order of ranks": (
        lambda: _from_ranks([[0, 1], [2, 3]]),
        lambda: _from_ranks([[0, 2], [1, 3]]),
    ),
    "backend": (
        lambda: small_mesh(),
        lambda: small_mesh(backend_override={"tp": "cpu:gloo"}),
    ),
    "options": (lambda: small_mesh(), lambda: small_mesh(options=_options(threads=5))),
    "options of an axis": (
        lambda: small_mesh(),
        lambda: small_mesh(backend_override={"dp": _options(3)}),
    ),
    "timeout": (lambda: small_mesh(), lambda: small_mesh(timeout=TIMEOUT * 2)),
    "timeout that is the world's": (
        lambda: small_mesh((4, 1)),
        lambda: small_mesh((4, 1), timeout=timedelta(seconds=WORLD_TIMEOUT_SECONDS)),
    ),
    "laziness": (lambda: small_mesh(), lambda: small_mesh(lazy=True)),
    "isolation": (lambda: small_mesh(), _isolated),
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
        lambda: _part((1, 3), AXES),
    ),
    "order of a part's ranks": (
        lambda: _part((3,), ("dp",)),
        lambda: _part((3,), ("dp",), ranks=[3, 2, 0]),
    ),
}
_ALL = {**_DIFFERENCES, **_PART}


def _part(shape: tuple[int, ...], names: tuple[str, ...], ranks: Any = (0, 2, 3)) -> None:
    if dist.get_rank() != 1:
        init_device_mesh("cpu", shape, mesh_dim_names=names, ranks=ranks, timeout=TIMEOUT)


def _build(difference: str, odd_one_first: bool) -> tuple[str, str]:
    """Return how a call ended in which ranks disagree, and how the next call ended."""
    usual, odd = _ALL[difference]
    is_odd = dist.get_rank() == ODD_RANK
    others = [rank for rank in _members(difference) if rank != ODD_RANK]
    meshes: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        say_when_compared(patch)
        if is_odd != odd_one_first:
            wait_for_comparison(*(others if is_odd else [ODD_RANK]))
        error = error_of(lambda: meshes.append((odd if is_odd else usual)()))
    dist.barrier()  # by now the ranks that differ know it
    if difference in _PART and dist.get_rank() == 1:
        return error, error
    if difference == "what is derived" and meshes:  # the next call that all ranks of that mesh make
        usual = partial(_flatten_all, *meshes)
    return error, error_of(usual)


def _members(difference: str) -> list[int]:
    return [0, 2, 3] if difference in _PART else [0, 1, 2, 3]


# Ranks that wait for no other rank have left the call before the difference is known.
_NOBODY_WAITS = {"timeout that is the world's"}
_SOME_WAIT = {"what is derived", "laziness"}


_CASES = [(difference, odd_one_first) for odd_one_first in (True, False) for difference in _ALL]
_SHORT = [("shape", True)]
_LONG = [(difference, True) for difference in _ALL] + [("shape", False), ("laziness", False)]


@pytest.mark.parametrize(
    ("difference", "odd_one_first"),
    in_tiers(_CASES, _SHORT, _LONG),
    ids=[f"{name}-odd one {'first' if first else 'last'}" for name, first in _CASES],
)
def test_all_ranks_of_a_call_get_an_error_that_says_who_differs(
    crew: Crew, difference: str, odd_one_first: bool
) -> None:
    errors = crew.run(_build, 4, difference, odd_one_first)
    members = _members(difference)
    raised_later = [rank for rank in members if not raised_by_the_call(errors[rank][0])]
    if difference not in _NOBODY_WAITS | _SOME_WAIT:
        assert raised_later == [], [errors[rank] for rank in raised_later]
    assert len(raised_later) <= 3
    assert len({errors[rank][1] for rank in members}) == 1  # a mismatch is final
    for rank in members:
        error, after = errors[rank]
        assert error in (after, "no error")
        ranks, texts = zip(*_descriptions(after), strict=True)
        assert ODD_RANK in ranks
        assert len(set(ranks)) == len(set(texts)) == len(texts) == 2
        assert all("over ranks " in text for text in texts)
        assert _differences(after), after
        assert all(re.search(r" at .*\.py:\d+\n    groups ", text) for text in texts)


def _learns_late() -> str:
    """Rank 1 learns of the mismatch when the one that it waits for joins; others have left."""
    store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
    usual, times = ComparedCalls.find_mismatch, itertools.count()

    def find_mismatch(self: ComparedCalls, run_keys: StoreKeys) -> RanksDifferError | None:
        if rank == 1 and next(times) == 0:
            store.set("rank 1 looks", "")
            store.wait(["rank 3 has joined", "ranks 0 and 2 have raised"])
        return usual(self, run_keys)

    def join(self: StoreKeys, key: str, amount: int = 1) -> int:
        if rank == 3 and key.startswith("rendezvous/"):
            store.wait(["rank 1 looks"])
        count = usual_count(self, key, amount)
        if rank == 3 and key.startswith("rendezvous/"):
            store.set("rank 3 has joined", "")
        return count

    usual_count = StoreKeys.count
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ComparedCalls, "find_mismatch", find_mismatch)
        patch.setattr(StoreKeys, "count", join)
        say_when_compared(patch)
        if rank == 2:
            wait_for_comparison(0, 1, 3)
        error = error_of(lambda: small_mesh(timeout=TIMEOUT * (2 if rank == 2 else 1)))
        if rank in (0, 2) and store.add("have raised", 1) == 2:
            store.set("ranks 0 and 2 have raised", "")
    dist.barrier()
    return error


def test_a_rank_that_learns_of_it_when_its_group_is_complete_raises_in_its_next_wait(
    crew: Crew,
) -> None:
    errors = crew.run(_learns_late, 4)
    assert [raised_by_the_call(error) for error in errors] == [True] * 4, errors


def _differences(message: str) -> list[str]:
    """The lines that say what differs, which come first."""
    before, _, _ = message.partition("Meshes by rank:")
    return re.findall(r"^  [a-z].*: .* on ranks? \d.*$", before, re.MULTILINE)


def _descriptions(message: str) -> list[tuple[int, str]]:
    """Each rank that the error names, with its mesh."""
    found = re.findall(r"^  rank (\d): (.*\n    .*)$", message, re.MULTILINE)
    return [(int(rank), text) for rank, text in found]


def _with_torchs_names(calls: str) -> str:
    shape = (4, 1) if dist.get_rank() == ODD_RANK else (2, 2)
    ranks = torch.arange(4).view(shape)
    with installed():
        if calls == "init_device_mesh":
            return error_of(lambda: stock.init_device_mesh("cpu", shape, mesh_dim_names=AXES))
        return error_of(lambda: stock.DeviceMesh("cpu", ranks, mesh_dim_names=AXES))


@pytest.mark.parametrize("calls", ["init_device_mesh", "DeviceMesh"])
def test_the_error_names_the_function_of_torch_that_the_program_called(
    crew: Crew, calls: str
) -> None:
    descriptions = {
        text for error in crew.run(_with_torchs_names, 4, calls) for _, text in _descriptions(error)
    }
    assert descriptions
    assert all(text.startswith(f"{calls} (dp=") for text in descriptions), descriptions


def _unchecked(way: str) -> str:
    if way == "environment":
        os.environ["MESHVERSE_CHECK_CONSISTENCY"] = "0"
    names = ("x", "y") if dist.get_rank() == ODD_RANK else AXES
    changed = {"check_consistency": False} if way == "argument" else {}
    try:
        # other names, but the same groups
        return error_of(lambda: small_mesh(mesh_dim_names=names, **changed))
    finally:
        os.environ.pop("MESHVERSE_CHECK_CONSISTENCY", None)


@pytest.mark.parametrize("way", ["argument", "environment"])
def test_the_comparison_can_be_turned_off(crew: Crew, way: str) -> None:
    assert set(crew.run(_unchecked, 4, way)) == {"no error"}
    assert any(raised_by_the_call(error) for error in crew.run(_unchecked, 4, "not at all"))
