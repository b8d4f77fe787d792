"""A universe's timeout and options reach every group made in it, now and later."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from helpers.fake_options import fake_options, raises
from helpers.nccl_options import C10D_FIELDS, changed_nccl_options, needs_nccl, shown_fields
from helpers.worlds import groups_created
from meshverse import DeviceMesh, Universe, init_device_mesh
from meshverse._core import OptionsKey
from meshverse.options.group_options import GroupOptions

pytestmark = pytest.mark.usefixtures("world")  # rank 5 of 8, backend "fake"

_AXES = ("dp", "tp")
_MINUTE = timedelta(minutes=1)


def _mesh(**extra: Any) -> DeviceMesh:
    return init_device_mesh("cpu", (2, 4), mesh_dim_names=_AXES, **extra)


_DERIVED: dict[str, Callable[[DeviceMesh], DeviceMesh]] = {
    "the mesh": lambda mesh: mesh["tp"],
    "flattened": lambda mesh: mesh.flatten("all"),
    "unflattened": lambda mesh: mesh.unflatten("tp", (2, 2), ("a", "b"))["a"],
    "unflattened from flattened": lambda mesh: mesh.flatten("all").unflatten(
        "all", (4, 2), ("a", "b")
    )["a"],
    "a further mesh": lambda mesh: init_device_mesh(
        "cpu", (4, 2), mesh_dim_names=("a", "b"), universe=mesh.universe
    )["a"],
    "isolated": lambda mesh: mesh.unflatten("tp", (2, 2), ("a", "b"), isolate="mine")["a"],
}


def _timeout(mesh: DeviceMesh) -> timedelta | None:
    """The timeout that c10d was given for the group of a one-axis mesh."""
    name = mesh.get_group().group_name
    (group,) = (g for g in mesh.universe.groups if g.name == name)
    return group.request.options.timeout


@pytest.mark.parametrize("derived", _DERIVED)
def test_timeout_and_options_reach(derived: str) -> None:
    mesh = _DERIVED[derived](_mesh(timeout=_MINUTE, options=fake_options()))
    assert _timeout(mesh) == _MINUTE
    assert raises(mesh.get_group())
    assert not raises(dist.group.WORLD)


def test_an_axis_may_say_another() -> None:
    mesh = _mesh(
        timeout=_MINUTE,
        options=fake_options(),
        backend_override={"tp": fake_options(raises=False), "dp": fake_options(seconds=70)},
    )
    assert _timeout(mesh["tp"]) == _MINUTE  # a fresh object says no timeout
    assert not raises(mesh.get_group("tp"))
    assert _timeout(mesh["dp"]) == timedelta(seconds=70)


def test_options_may_carry_the_timeout_and_the_argument_wins() -> None:
    assert _timeout(_mesh(options=fake_options(seconds=70))["tp"]) == timedelta(seconds=70)
    assert _timeout(_mesh(options=fake_options(seconds=70), timeout=_MINUTE)["tp"]) == _MINUTE


def test_options_are_for_groups_of_their_backend_only() -> None:
    mesh = _mesh(options=fake_options(), backend_override={"tp": "cpu:fake"})
    assert not raises(mesh.get_group("tp"))
    assert raises(mesh.get_group("dp"))


def test_the_defaults_written_out_share_a_group_with_none() -> None:
    mesh = _mesh(timeout=_MINUTE, options=fake_options())
    with groups_created(0):
        for override in (
            "fake",
            fake_options(),
            ("fake", None),
            ("fake", fake_options(seconds=60)),
        ):
            view = init_device_mesh(
                "cpu", (2, 4), backend_override={1: override}, universe=mesh.universe
            )
            assert view.get_group(1) is mesh.get_group("tp")
    with groups_created(1):
        init_device_mesh(
            "cpu", (2, 4), backend_override={1: fake_options(raises=False)}, universe=mesh.universe
        )


def test_the_defaults_of_the_world_written_out_are_the_defaults() -> None:
    with groups_created(0):
        mesh = init_device_mesh(
            "cpu", (8,), mesh_dim_names=("world",), timeout=timedelta(minutes=30), options=None
        )
    assert mesh.get_group() is dist.group.WORLD
    with groups_created(1):
        mesh = init_device_mesh("cpu", (8,), mesh_dim_names=("world",), timeout=_MINUTE)
    assert mesh.get_group() is not dist.group.WORLD


def test_options_changed_after_use_change_nothing() -> None:
    options = fake_options()
    mesh = _mesh(options=options)
    options.error_on_collective = False
    assert raises(mesh.flatten("all").get_group())
    assert options._timeout == fake_options()._timeout, "c10d wrote to the user's object"


def test_a_universe_made_beforehand_has_them_too() -> None:
    universe = Universe(range(8), timeout=_MINUTE)
    mesh = DeviceMesh("cpu", torch.arange(8).view(2, 4), mesh_dim_names=_AXES, universe=universe)
    assert _timeout(mesh["dp"]) == _MINUTE


@needs_nccl
def test_what_c10d_is_given_has_every_field_of_nccl_options() -> None:
    seen = set()
    for name, options in changed_nccl_options():
        asked = GroupOptions.resolve(("nccl", options), dist.group.WORLD)
        given = asked.new_backend_options()
        assert given is not options
        assert shown_fields(OptionsKey.of("nccl", given, ignored=C10D_FIELDS)) == [name]
        assert shown_fields(OptionsKey.of("nccl", options, ignored=C10D_FIELDS)) == [name]
        seen.add(asked.key)
    assert len(seen) > 8


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        # short-timeout: it is refused
        ({"timeout": 5}, TypeError, r"timeout=5 of type int: give a datetime\.timedelta"),
        ({"timeout": timedelta(0)}, ValueError, "at least a millisecond"),
        # short-timeout: it is refused
        ({"timeout": timedelta(microseconds=999)}, ValueError, "at least a millisecond"),
        ({"timeout": -timedelta(seconds=60)}, ValueError, "at least a millisecond"),
        ({"options": "fake"}, TypeError, "options='fake' of type str: give an options object"),
    ],
)
def test_what_is_none_is_refused_and_makes_nothing(given, error, message: str) -> None:
    with groups_created(0), pytest.raises(error, match=message):
        _mesh(**given)


def test_what_belongs_to_a_universe_is_not_for_one_that_is_there() -> None:
    universe = _mesh().universe
    with pytest.raises(ValueError, match="together with timeout= and lazy="):
        _mesh(universe=universe, timeout=_MINUTE, lazy=True)
