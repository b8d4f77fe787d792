"""`backend_override` in all its forms: what is asked for reaches the group; equals share one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch.distributed as dist

from helpers.fake_options import fake_options, raises
from helpers.observation import OURS, STOCK, Family
from helpers.worlds import groups_created
from meshverse import DeviceMesh, init_device_mesh

pytestmark = pytest.mark.usefixtures("world")  # rank 5 of 8, backend "fake"

_NAMES = ("dp", "tp")
_RANKS = [[0, 1, 2, 3], [4, 5, 6, 7]]


def _mesh(family: Family = OURS, **extra) -> DeviceMesh:
    return family.init_device_mesh("cpu", (2, 4), mesh_dim_names=_NAMES, **extra)


_FORMS: dict[str, Callable[[Family], DeviceMesh]] = {
    "by name": lambda f: _mesh(f, backend_override={"tp": fake_options()}),
    "by index": lambda f: _mesh(f, backend_override={1: fake_options()}),
    "with the backend": lambda f: _mesh(f, backend_override={"tp": ("fake", fake_options())}),
    "beside a backend": lambda f: _mesh(f, backend_override={"tp": fake_options(), 0: "fake"}),
    "one pair an axis": lambda f: f.DeviceMesh(
        "cpu",
        _RANKS,
        mesh_dim_names=_NAMES,
        backend_override=((None, None), ("fake", fake_options())),
    ),
    "of an unflattened axis, by name": lambda f: f.init_device_mesh(
        "cpu", (8,), mesh_dim_names=("world",)
    )._unflatten(0, (2, 4), _NAMES, backend_override={"tp": fake_options()}),
    "of an unflattened axis, by index": lambda f: f.init_device_mesh(
        "cpu", (8,), mesh_dim_names=("world",)
    )._unflatten(0, (2, 4), _NAMES, backend_override={1: ("fake", fake_options())}),
}


@pytest.mark.parametrize("family", [STOCK, OURS], ids=["stock", "ours"])
@pytest.mark.parametrize("form", _FORMS)
def test_options_reach_the_group_and_no_other(form: str, family: Family) -> None:
    mesh = _FORMS[form](family)
    assert raises(mesh.get_group("tp"))
    assert not raises(mesh.get_group("dp"))
    assert dist.get_process_group_ranks(mesh.get_group("tp")) == [4, 5, 6, 7]


@pytest.mark.parametrize("family", [STOCK, OURS], ids=["stock", "ours"])
@pytest.mark.parametrize(
    "override",
    [lambda: fake_options(), lambda: ("fake", fake_options()), lambda: ["fake", fake_options()]],
    ids=["options", "pair", "list"],
)
def test_options_reach_a_flattened_group(family: Family, override: Callable) -> None:
    flat = _mesh(family)._flatten("all", override())
    assert raises(flat.get_group())
    assert not raises(dist.group.WORLD)


def test_one_pair_an_axis_may_be_a_list_or_a_mapping() -> None:
    for override in (
        [(None, None), (None, fake_options())],
        {"tp": fake_options()},
        {1: fake_options()},
    ):
        mesh = DeviceMesh("cpu", _RANKS, mesh_dim_names=_NAMES, backend_override=override)
        assert raises(mesh.get_group("tp"))
        assert not raises(mesh.get_group("dp"))


# --- what shares a group -------------------------------------------------------------------------

_DEFAULTS_WRITTEN_OUT = {
    "backend": lambda: "fake",
    "options": lambda: fake_options(raises=False),
    "backend and no options": lambda: ("fake", None),
    "neither": lambda: (None, None),
    "both": lambda: ("fake", fake_options(raises=False)),
    "none": lambda: None,
}


@pytest.mark.parametrize("written_out", _DEFAULTS_WRITTEN_OUT)
def test_the_default_written_out_is_the_default(written_out: str) -> None:
    override = _DEFAULTS_WRITTEN_OUT[written_out]
    mesh = _mesh()
    with groups_created(0):
        view = init_device_mesh(
            "cpu", (2, 4), backend_override={1: override()}, universe=mesh.universe
        )
        flat = mesh["tp"].flatten("alias", override())
    assert view.get_group(1) is flat.get_group() is mesh.get_group("tp")


@pytest.mark.parametrize(
    "override",
    [
        lambda: fake_options(raises=True),
        lambda: fake_options(raises=False, seconds=70),
        lambda: ("fake", fake_options(raises=False, seconds=70)),
        lambda: "cpu:fake",
    ],
    ids=["another field", "another timeout", "another timeout, in a pair", "another backend"],
)
def test_equal_overrides_share_one_group_that_is_not_the_default(override: Callable) -> None:
    mesh = _mesh()
    shape, universe = (2, 4), mesh.universe
    with groups_created(1):
        one = init_device_mesh("cpu", shape, backend_override={1: override()}, universe=universe)
        two = mesh["tp"].flatten("alias", override())
    assert one.get_group(1) is two.get_group()
    assert one.get_group(1) is not mesh.get_group("tp")
    assert one.get_group(0) is mesh.get_group("dp")


def test_different_timeouts_do_not_share() -> None:
    mesh = _mesh()
    with groups_created(3):
        groups = {
            mesh["tp"]
            .flatten(f"alias_{seconds}", fake_options(raises=False, seconds=seconds))
            .get_group()
            for seconds in (5, 6, 7.5)
        }
    assert len(groups) == 3


def test_an_override_of_the_whole_world_is_not_the_default_group() -> None:
    with groups_created(1):
        mesh = init_device_mesh("cpu", (8,), backend_override={0: fake_options()})
    assert raises(mesh.get_group())
    assert not raises(dist.group.WORLD)


def test_options_changed_afterwards_change_nothing() -> None:
    options = fake_options(raises=False)
    mesh = _mesh(backend_override={"tp": options})
    options.error_on_collective = True
    with groups_created(0):
        same = mesh["tp"].flatten("same", fake_options(raises=False))
    assert same.get_group() is mesh.get_group("tp")
    with groups_created(1):
        other = mesh["tp"].flatten("other", options)
    assert raises(other.get_group())
    assert not raises(same.get_group())


def test_the_users_options_object_is_not_written_to() -> None:
    options = fake_options(raises=False, seconds=70)
    before = {
        name: getattr(options, name)
        for name in ("_timeout", "backend", "group_name", "global_ranks_in_group")
    }
    _mesh(backend_override={"tp": options})
    assert before == {name: getattr(options, name) for name in before}


def test_explain_names_what_differs_from_the_defaults() -> None:
    mesh = _mesh(backend_override={"tp": fake_options(seconds=70)})
    dp, tp = (group.options for group in mesh.universe.explain().groups)
    assert "error_on_collective" not in dp
    assert "error_on_collective=True" in tp
    assert "timeout=70s" in tp
