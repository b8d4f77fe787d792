"""Threads that called in shared process groups, which torch's flight recorder keeps."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist

import meshverse
from helpers.crew import Crew
from helpers.tiers import in_tiers
from meshverse import init_device_mesh

_AXES = ("dp", "tp")


def _reduce(group: dist.ProcessGroup, times: int = 1) -> None:
    for _ in range(times):
        dist.all_reduce(torch.ones(1), group=group)


def _in_thread(group: dist.ProcessGroup, name: str, done: threading.Event) -> threading.Thread:
    """Reduce once in a thread of this name, which then waits for the event."""
    begun = threading.Event()

    def work() -> None:
        _reduce(group)
        begun.set()
        done.wait()

    thread = threading.Thread(target=work, name=name)
    thread.start()
    begun.wait()
    return thread


def _seen_in_one_universe() -> tuple[dict[str, Any], str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=_AXES)
    other = init_device_mesh("cpu", (2, 2), mesh_dim_names=("x", "tensor"), universe=mesh.universe)
    done = threading.Event()
    _reduce(mesh.get_group("tp"), 3)
    _reduce(mesh.get_group("dp"))
    threads = [_in_thread(other.get_group("tensor"), "reducer", done) for _ in range(2)]
    report = mesh.universe.explain()
    done.set()
    for thread in threads:
        thread.join()
    text = " ".join(str(report).split())  # which wraps at the width of a terminal
    return {", ".join(each.requests): each.threads for each in report.groups}, text


def test_several_threads_in_one_group_of_two_axes(crew: Crew) -> None:
    for threads, text in crew.run(_seen_in_one_universe, 4):
        assert threads == {
            "dp, x": {"MainThread": 1},
            "tp, tensor": {"MainThread": 3, "reducer": 1, "reducer #2": 1},
        }
        assert "Shared, and called by several threads: tp, tensor (ranks " in text
        assert "by MainThread (3 calls), reducer (1 call), reducer #2 (1 call). If" in text
        assert text.count("Shared, and called") == 1


def _seen_in_two_universes(share: str) -> list[dict[str, int]]:
    meshverse.install(share="world" if share == "world" else "mesh")
    try:
        meshes = [init_device_mesh("cpu", (2, 2), mesh_dim_names=_AXES) for _ in range(2)]
    finally:
        meshverse.uninstall()
    for mesh in meshes:
        _reduce(mesh.get_group("tp"))
    return [mesh.universe.explain().groups[1].threads for mesh in meshes]


@pytest.mark.parametrize("share", in_tiers(["mesh", "world"], ["world"]))
def test_a_group_of_two_universes_is_shared_too(crew: Crew, share: str) -> None:
    seen = {"MainThread": 2} if share == "world" else {}
    assert crew.run(_seen_in_two_universes, 4, share) == [[seen] * 2] * 4


def _seen_after(what: str) -> dict[str, int]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=_AXES)
    init_device_mesh("cpu", (2, 2), mesh_dim_names=("x", "tensor"), universe=mesh.universe)
    group = mesh.get_group("tp")
    if what == "a thread that has ended":
        done = threading.Event()
        done.set()
        _in_thread(group, "reducer", done).join()
    elif what != "no call":
        _reduce(group)
    with pytest.MonkeyPatch.context() as patch:
        if what == "a call, with the recorder off":
            patch.setenv("TORCH_FR_BUFFER_SIZE", "0")
        return mesh.universe.explain().groups[1].threads


def test_what_is_not_recorded_is_not_said(crew: Crew) -> None:
    assert crew.run(_seen_after, 4, "a call") == [{"MainThread": 1}] * 4
    # The groups of the next world have the same names.
    assert crew.run(_seen_after, 4, "no call") == [{}] * 4
    assert crew.run(_seen_after, 4, "a call, with the recorder off") == [{}] * 4
    for threads in crew.run(_seen_after, 4, "a thread that has ended"):
        assert list(threads.values()) == [1]
        assert "MainThread" not in threads  # its name is lost, but not that it was another one
