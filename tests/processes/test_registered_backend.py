"""A backend that is not torch's: its options, which Meshverse has never heard of, make keys."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

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
        "told": str(mesh.universe.explain()),
    }


def test_options_of_an_unknown_type_are_compared_by_what_they_say(crew: Crew) -> None:
    for rank, seen in enumerate(crew.run(_share_by_options, 4)):
        assert seen["shared"]
        assert seen["apart"] == 5
        assert seen["snapshot"]
        assert seen["reached"] == [[1, 1, 0, 0] if rank < 2 else [0, 0, 1, 1]] * 4
        assert seen["given"] == [1, 7, 1 << 20]
        assert "chunk_bytes=7" in seen["told"]
        assert seen["plain"]
