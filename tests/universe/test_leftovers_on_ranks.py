"""A group that a failed call left on one rank, beside lazy groups of the same ranks and options."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from helpers.all_reduce import reached_by
from helpers.crew import Crew
from helpers.tiers import in_tiers
from helpers.turns import wait_until_they_wait
from helpers.worlds import fake_world
from meshverse import DeviceMesh, Universe, init_device_mesh
from meshverse._torch_compat.backends import timeout_of
from meshverse.universe import universe_groups
from meshverse.universe.universe_groups import share_world_wide


def _universe(*, lazy: bool = False, seconds: int = 60) -> Universe:
    return Universe(2, lazy=lazy, timeout=timedelta(seconds=seconds))


def _mesh(universe: Universe) -> DeviceMesh:
    # The tag keeps the axis from using the default group.
    return init_device_mesh(
        "cpu", (2, 1), mesh_dim_names=("a", "b"), universe=universe, isolate="x"
    )


def _lazy_part(universe: Universe) -> DeviceMesh:
    """Return a mesh of a part, whose group has the ranks and options of axis "a" of `_mesh`."""
    part = universe.part([1, 0], lazy=True)
    return init_device_mesh(
        *("cpu", (2,)), mesh_dim_names=("c",), universe=part, isolate="x", preserve_rank_order=False
    )


@contextmanager
def _interrupted_after_a_group() -> Iterator[None]:
    """Interrupt rank 0 in this block, when it has created one group."""
    create, groups_created = universe_groups.create_by_members, list[str]()

    def interrupted(group: Any, *rest: Any, **named: Any) -> Any:
        if groups_created:
            raise KeyboardInterrupt
        groups_created.append(group.name)
        return create(group, *rest, **named)

    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() > 0:
            yield
        else:
            patch.setattr(universe_groups, "create_by_members", interrupted)
            with pytest.raises(KeyboardInterrupt):
                yield


def _names_if_whole(*axes: tuple[DeviceMesh, str]) -> list[str]:
    """Return the names of groups that reach both ranks."""
    used = [mesh.get_group(axis) for mesh, axis in axes]
    assert [reached_by(group) for group in used] == [[1, 1]] * len(used)
    return [group.group_name for group in used]


def _another_universe_waits() -> list[str]:
    """Rank 0 makes the eager mesh again while rank 1 waits for it in a lazy one."""
    universe, lazy = _universe(), _universe(lazy=True)
    with _interrupted_after_a_group():
        mesh = _mesh(universe)
    if dist.get_rank() == 0:
        wait_until_they_wait(1)
        mesh = _mesh(universe)
    return _names_if_whole((_mesh(lazy), "a"), (mesh, "a"))


def _another_universe_comes_later() -> list[str]:
    """Rank 0 makes the eager mesh again before rank 1 uses the lazy one."""
    universe, lazy = _universe(), _universe(lazy=True)
    with _interrupted_after_a_group():
        mesh = _mesh(universe)
    if dist.get_rank() == 0:
        mesh = _mesh(universe)
    dist.barrier()
    return _names_if_whole((_mesh(lazy), "a"), (mesh, "a"))


def _planned_by_a_lazy_part(*, before: bool) -> list[str]:
    """The next eager mesh finds the group planned by a lazy part of its universe."""
    universe, other = _universe(), _universe()
    if before:
        part = _lazy_part(other)
    with _interrupted_after_a_group():
        mesh = _mesh(universe)
    if dist.get_rank() == 0:
        mesh = _mesh(universe)
    if not before:
        part = _lazy_part(other)
    names = _names_if_whole((_mesh(other), "a"), (part, "c"), (mesh, "a"))
    assert names[0] == names[1]
    return names[1:]


def _planned_by_a_lazy_part_before() -> list[str]:
    return _planned_by_a_lazy_part(before=True)


def _planned_by_a_lazy_part_after() -> list[str]:
    return _planned_by_a_lazy_part(before=False)


_SEPARATE = (
    _another_universe_waits,
    _another_universe_comes_later,
    _planned_by_a_lazy_part_before,
    _planned_by_a_lazy_part_after,
)


@pytest.mark.parametrize(
    "program",
    in_tiers(_SEPARATE, [_another_universe_waits, _planned_by_a_lazy_part_before]),
    ids=lambda program: program.__name__[1:],
)
def test_a_lazy_universe_has_a_group_of_its_own(crew: Crew, program: Any) -> None:
    first, second = crew.run(program, 2)
    assert first == second
    assert len(set(first)) == 2


def _lazy_part_of_the_same() -> list[str]:
    universe = _universe()
    with _interrupted_after_a_group():
        mesh = _mesh(universe)
    if dist.get_rank() == 0:
        mesh = _mesh(universe)
    return _names_if_whole((_lazy_part(mesh.universe), "c"), (mesh, "a"))


def _lazy_part_of_one_made_again() -> list[str]:
    """As the universe of the failed call is gone, rank 0 has a new one."""
    with _interrupted_after_a_group():
        mesh = _mesh(_universe())
    if dist.get_rank() == 0:
        mesh = _mesh(_universe())
    return _names_if_whole((_lazy_part(mesh.universe), "c"), (mesh, "a"))


def _shared_world_wide() -> list[str]:
    share_world_wide(True)
    try:
        universe, lazy = _universe(), _universe(lazy=True)
        with _interrupted_after_a_group():
            mesh = _mesh(universe)
        if dist.get_rank() == 0:
            mesh = _mesh(universe)
        return _names_if_whole((_mesh(lazy), "a"), (mesh, "a"))
    finally:
        share_world_wide(False)


def _shared_after_another_universe() -> list[str]:
    """All ranks go on with another universe, which uses the leftover; then comes its lazy part."""
    with _interrupted_after_a_group():
        _mesh(_universe())
    mesh = _mesh(_universe())
    return _names_if_whole((_lazy_part(mesh.universe), "c"), (mesh, "a"))


_SHARED = (
    _lazy_part_of_the_same,
    _lazy_part_of_one_made_again,
    _shared_world_wide,
    _shared_after_another_universe,
)


@pytest.mark.parametrize(
    "program",
    in_tiers(_SHARED, [_lazy_part_of_one_made_again, _shared_world_wide]),
    ids=lambda program: program.__name__[1:],
)
def test_lazy_meshes_that_share_with_the_failed_call_share_its_group(
    crew: Crew, program: Any
) -> None:
    first, second = crew.run(program, 2)
    assert first == second
    assert len(set(first)) == 1


def _timeouts(meshes: list[DeviceMesh]) -> list[float]:
    """Return the timeouts of groups that reach both ranks, in seconds."""
    used = [mesh.get_group("a") for mesh in meshes]
    assert [reached_by(group) for group in used] == [[1, 1]] * len(used)
    found = [timeout_of(group) for group in used]
    return [0.0 if timeout is None else timeout.total_seconds() for timeout in found]


def _another_timeout(*, waits: bool) -> list[float]:
    universe = _universe()
    with _interrupted_after_a_group():
        mesh = _mesh(universe)
    if dist.get_rank() == 0:
        if waits:
            wait_until_they_wait(1)
        mesh = _mesh(universe)
    if not waits:
        dist.barrier()
    return _timeouts([mesh, _mesh(_universe(seconds=120)), _mesh(_universe(seconds=60))])


def _another_timeout_after_the_retry() -> list[float]:
    return _another_timeout(waits=False)


def _another_timeout_before_the_retry() -> list[float]:
    return _another_timeout(waits=True)


def _two_timeouts_failed() -> list[float]:
    for seconds in (60, 120):
        with _interrupted_after_a_group():
            _mesh(_universe(seconds=seconds))
    return _timeouts([_mesh(_universe(seconds=seconds)) for seconds in (60, 120, 60)])


@pytest.mark.parametrize(
    "program",
    [_another_timeout_after_the_retry, _another_timeout_before_the_retry, _two_timeouts_failed],
    ids=lambda program: program.__name__[1:],
)
def test_a_leftover_is_used_with_its_own_options_only(crew: Crew, program: Any) -> None:
    assert crew.run(program, 2) == [[60, 120, 60]] * 2


def test_without_a_rendezvous_only_the_next_call_uses_a_leftover() -> None:
    # The other ranks, whose call did not fail, create the later mesh's group under a new name.
    with fake_world(8, 0):
        universe = _universe()
        with _interrupted_after_a_group():
            _mesh(universe)
        again, later = _mesh(universe), _mesh(_universe())
        first, second = (mesh.get_group("a").group_name for mesh in (again, later))
        assert (first[-2:], second[-2:]) == ("-0", "-1")
        assert first[:-2] == second[:-2]
