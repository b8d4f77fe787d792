"""Programs as the documentation writes them, for mypy to check; nothing runs this."""

from __future__ import annotations

from typing_extensions import assert_type

import meshverse
from meshverse import Watch, watch


def watches(seconds: float | None) -> None:
    """A watch is there unless it may be ended."""
    assert_type(watch(), Watch)
    assert_type(watch(60), Watch)
    with watch(seconds=60):
        watch(seconds=120, on_stuck=lambda hang: print(hang.text)).stop()
    assert_type(watch(seconds), Watch | None)
    watch(None)


def names(mesh: meshverse.DeviceMesh) -> meshverse.Explanation:
    """Subpackages and names of the package itself."""
    planned = meshverse.tools.planner.plan(["dp=4"])
    assert_type(planned, meshverse.tools.planner.Plan)
    assert_type(meshverse.parallel.ParallelismSizes(tp_size=2).tp_size, int | None)
    assert_type(meshverse.tools.planner.saves(planned).communicators, tuple[int, int])
    meshverse.no_such_name  # type: ignore[attr-defined]  # noqa: B018
    return mesh.universe.explain()
