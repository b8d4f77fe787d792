"""A backend that is not torch's: its options, which Meshverse has never heard of, make keys."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from helpers.all_reduce import reached_by
from helpers.crew import Crew
from meshverse import init_device_mesh

_AXES = ("dp", "tp")


def _options_class() -> Any:
    """A subclass of c10d's options, as an out-of-tree backend has one."""
    base = torch._C._distributed_c10d.Backend.Options

    class _RingOptions(base):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            super().__init__("ring", timedelta(minutes=30))
            self.chunk_bytes = 1 << 20
            self.algorithm = "ring"
            self.devices = {"eth0": 0.5}

    return _RingOptions


def _register(kind: Any, seen: list[Any]) -> None:
    """Register a backend "ring": gloo underneath, with the options it is given on record."""

    def create(common: Any, options: Any) -> Any:
        seen.append(options)
        return dist.ProcessGroupGloo(
            common.store, common.group_rank, common.group_size, timeout=common.timeout
        )

    if "ring" not in dist.Backend.backend_list:
        dist.Backend.register_backend("ring", create, extended_api=True, devices=["cpu"])
    dist.Backend._plugins["RING"] = dist.Backend._plugins["RING"]._replace(creator_fn=create)


class _Device:
    """A handle: it has a name, and a lock that nobody can copy."""

    def __init__(self) -> None:
        self.name = "eth0"
        self.lock = threading.Lock()


def _handles_and_data() -> dict[str, Any]:
    kind, seen = _options_class(), []
    _register(kind, seen)
    given, inherited = kind(), kind()
    for options in (given, inherited):
        options.device, options.lock = _Device(), threading.Lock()
        options.by_name = {"eth0": [options.device]}
    same = kind()
    same.device, same.lock, same.by_name = given.device, given.lock, {"eth0": [given.device]}

    mesh = init_device_mesh(
        "cpu", (2, 2), mesh_dim_names=_AXES, backend_override={"tp": ("ring", given)}
    )
    view = mesh.unflatten("tp", (2,), ("view",), backend_override={"view": ("ring", same)})
    other = kind()
    other.device, other.lock, other.by_name = _Device(), given.lock, {}
    apart = mesh.unflatten("tp", (2,), ("apart",), backend_override={"apart": ("ring", other)})

    (received, _) = seen
    received.devices["eth0"] = received.chunk_bytes = 0  # as backends write to what they are given
    received.by_name.clear()
    again = mesh.unflatten("tp", (2,), ("again",), backend_override={"again": ("ring", given)})
    return {
        "handles": received.device is given.device and received.lock is given.lock,
        "data": (given.devices, given.chunk_bytes, list(given.by_name)),
        "shared": view.get_group("view") is mesh.get_group("tp") is again.get_group("again"),
        "apart": apart.get_group("apart") is not mesh.get_group("tp"),
        "reached": reached_by(apart.get_group("apart")),
    }


def test_handles_reach_the_backend_and_data_is_a_snapshot(crew: Crew) -> None:
    for rank, seen in enumerate(crew.run(_handles_and_data, 4)):
        assert seen["handles"]
        assert seen["data"] == ({"eth0": 0.5}, 1 << 20, ["eth0"])
        assert seen["shared"]
        assert seen["apart"]
        assert seen["reached"] == ([1, 1, 0, 0] if rank < 2 else [0, 0, 1, 1])


def _options_that_take_arguments() -> dict[str, Any]:
    base, seen = torch._C._distributed_c10d.Backend.Options, []

    class _Options(base):  # type: ignore[misc, valid-type]
        def __init__(self, rings: int) -> None:
            super().__init__("ring", timedelta(seconds=75))
            self.rings = rings
            self.hints = ["a"]

    _register(_Options, seen)
    given = _Options(3)
    mesh = init_device_mesh(
        "cpu", (2, 2), mesh_dim_names=_AXES, backend_override={"tp": ("ring", given)}
    )
    (received,) = seen
    received.rings, received._timeout = 0, timedelta(seconds=31)
    received.hints.append("b")
    return {
        "type": type(received) is _Options,
        "given": (given.rings, given.hints, given._timeout.total_seconds()),
        "reached": reached_by(mesh.get_group("tp")),
    }


def test_options_that_take_arguments_are_a_snapshot_too(crew: Crew) -> None:
    for rank, seen in enumerate(crew.run(_options_that_take_arguments, 4)):
        assert seen["type"]
        assert seen["given"] == (3, ["a"], 75.0)
        assert seen["reached"] == ([1, 1, 0, 0] if rank < 2 else [0, 0, 1, 1])


def _share_by_options() -> dict[str, Any]:
    kind, seen = _options_class(), []
    _register(kind, seen)

    def options(**changed: Any) -> Any:
        made = kind()
        for name, value in changed.items():
            setattr(made, name, value)
        return made

    mesh = init_device_mesh(
        "cpu", (2, 2), mesh_dim_names=_AXES, backend_override={"tp": ("ring", options())}
    )

    def group(override: Any) -> Any:
        view = mesh.unflatten("tp", (2,), ("view",), backend_override={"view": override})
        return view.get_group("view")

    shared = group(("ring", options()))
    changed = [
        group(("ring", options(**change)))
        for change in ({"chunk_bytes": 1}, {"algorithm": "tree"}, {"devices": {"eth0": 0.25}})
    ]
    mine = options(chunk_bytes=7)
    first = group(("ring", mine))
    mine.chunk_bytes = 8  # after use: what it said when it was given counts
    again = group(("ring", options(chunk_bytes=7)))
    return {
        "shared": shared is mesh.get_group("tp"),
        "plain": group("ring") is mesh.get_group("tp"),
        "apart": len({g.group_name for g in [mesh.get_group("tp"), *changed, first]}),
        "snapshot": again is first,
        "reached": [reached_by(g) for g in (shared, *changed)],
        "given": sorted({o.chunk_bytes for o in seen if o is not None}),
        "report": str(mesh.universe.explain()),
    }


def test_options_of_an_unknown_type_are_compared_by_what_they_say(crew: Crew) -> None:
    for rank, seen in enumerate(crew.run(_share_by_options, 4)):
        assert seen["shared"]
        assert seen["apart"] == 5
        assert seen["snapshot"]
        assert seen["reached"] == [[1, 1, 0, 0] if rank < 2 else [0, 0, 1, 1]] * 4
        assert seen["given"] == [1, 7, 1 << 20]
        assert "chunk_bytes=7" in seen["report"]
        assert seen["plain"]


def _refused() -> str:
    def refuse(common: Any, options: Any) -> Any:
        raise RuntimeError("this machine has no ring")

    _register(_options_class(), [])
    plugins = dist.Backend._plugins
    plugins["RING"] = plugins["RING"]._replace(creator_fn=refuse)
    with pytest.raises(RuntimeError) as raised:
        init_device_mesh("cpu", (2,), mesh_dim_names=("dp",), backend_override={"dp": "ring"})
    return str(raised.value)


def test_what_a_backend_refuses_is_not_laid_to_other_ranks(crew: Crew) -> None:
    for rank, answer in enumerate(crew.run(_refused, 2)):
        assert answer == (
            f"Rank {rank} could not create the process group of axis 'dp' with ranks [0, 1]: this "
            "machine has no ring"
        )
