"""A trainer's meshes by `meshverse.parallel` and the same steps with stock torch: 10,240 ranks.

The steps with stock torch are the cheapest that give meshes of one root, as FSDP2 needs: the
experts' mesh unflattens the flattened stage, and the mesh for FSDP2 is a concatenation. Both sides
make the groups of every axis of these meshes; stock makes one for the flattened stage besides.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from torch.distributed.device_mesh import DeviceMesh as StockDeviceMesh
from torch.distributed.device_mesh import init_device_mesh

from harness import Action, Bound, Comparison, Side
from meshverse.parallel import (
    FSDP2Config,
    ParallelismSizes,
    create_device_meshes,
    get_flat_mesh,
    get_fsdp_dp_mesh,
)
from reports import Quantity
from trainer_views import answers, count_process_groups
from worlds import fake_world

__all__ = ["TITLE", "comparisons", "quantities"]

TITLE = "A trainer's meshes with meshverse.parallel, 10,240 ranks"

_WORLD_SIZE, _RANK = 10_240, 777
_SIZES = ParallelismSizes(pp_size=4, dp_replicate_size=2, tp_size=8, cp_size=2, ep_size=64)
_AXES = {"pp": 4, "dp_replicate": 2, "dp_shard": 80, "cp": 2, "tp": 8}
_EXPERTS = {"ep_shard": 40, "ep": 64}
_FLATTENED = {
    "dp": ("dp_replicate", "dp_shard"),
    "dp_shard_cp": ("dp_shard", "cp"),
    "dp_cp": ("dp_replicate", "dp_shard", "cp"),
}


class _Built(NamedTuple):
    """What either side builds: the root, the experts' mesh and the flattened axes by name."""

    root: Any
    experts: Any
    flattened: dict[str, Any]


def _build_with_stock() -> _Built:
    root = init_device_mesh("cpu", tuple(_AXES.values()), mesh_dim_names=tuple(_AXES))
    flattened = {name: root[axes]._flatten(name) for name, axes in _FLATTENED.items()}
    stage = root["dp_replicate", "dp_shard", "cp", "tp"]._flatten("stage")
    experts = stage._unflatten(0, tuple(_EXPERTS.values()), tuple(_EXPERTS))
    return _Built(root, experts, flattened)


def _build_with_ours() -> _Built:
    root, experts = create_device_meshes(FSDP2Config(), _SIZES, world_size=_WORLD_SIZE)
    return _Built(root, experts, {name: get_flat_mesh(root, name) for name in _FLATTENED})


def _fsdp_mesh_with_stock(built: _Built) -> Any:
    parts = [built.root["dp_replicate"], built.flattened["dp_shard_cp"]]
    return StockDeviceMesh._concatenate(parts)


def _fsdp_mesh_with_ours(built: _Built) -> Any:
    return get_fsdp_dp_mesh(built.root)


_STOCK = {"build": _build_with_stock, "fsdp_mesh": _fsdp_mesh_with_stock}
_OURS = {"build": _build_with_ours, "fsdp_mesh": _fsdp_mesh_with_ours}


def comparisons() -> list[Comparison]:
    """What is timed, and what is to be reached."""
    return [
        _compare("build all meshes of a trainer", _build, Bound(at_least=100)),
        _compare("ask for FSDP2's mesh again", _ask_again, Bound(at_least=10)),
    ]


def _compare(title: str, operation: Callable[[dict[str, Any]], Action], bound: Bound) -> Comparison:
    stock, ours = partial(operation, _STOCK), partial(operation, _OURS)
    return Comparison(
        title,
        Side("stock", stock, _WORLD_SIZE, _RANK),
        Side("Meshverse", ours, _WORLD_SIZE, _RANK),
        bound,
    )


def _build(side: dict[str, Any]) -> Action:
    def answer() -> dict[str, Any]:
        built = side["build"]()
        meshes = {"root": built.root, "experts": built.experts, **built.flattened}
        meshes["fsdp"] = side["fsdp_mesh"](built)
        return {name: answers(mesh) for name, mesh in meshes.items()}

    return Action("fsdp_mesh(build())", side, answer)


def _ask_again(side: dict[str, Any]) -> Action:
    built = side["build"]()
    fsdp_mesh = side["fsdp_mesh"]
    fsdp_mesh(built)
    names = {"built": built, "fsdp_mesh": fsdp_mesh}
    return Action("fsdp_mesh(built)", names, lambda: answers(fsdp_mesh(built)), repeatable=True)


def quantities() -> list[Quantity]:
    """What is counted, and what is to be reached."""
    stock, ours = (_count_groups(side) for side in (_STOCK, _OURS))
    return [Quantity("process groups of these meshes", "groups", stock, ours, at_most=11)]


def _count_groups(side: dict[str, Any]) -> int:
    with fake_world(_WORLD_SIZE, _RANK):
        built = side["build"]()
        side["fsdp_mesh"](built)
        return count_process_groups()
