"""All that can be asked of a mesh without its process groups: by users, and by torch's own code."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
    empty,
    zeros,
)
from torch.distributed.tensor._utils import (
    compute_global_tensor_info,
    compute_local_shape_and_global_offset,
)

from helpers.observation import attempt
from meshverse import DeviceMesh, Universe, init_device_mesh, isolate, load_mesh, save_mesh
from meshverse.parallel import MeshCollective, Meshes, get_flat_mesh, get_fsdp_dp_mesh, get_submesh
from meshverse.universe.world_universes import find_universe, universes_over

Question = Callable[[DeviceMesh], object]

AXES = ("dp_replicate", "dp_shard", "tp")
PERMUTED = [[[6, 1], [4, 3]], [[2, 5], [0, 7]]]
DIMS = (None, 0, 1, 2, -1, -3, 9, True, 0.0, [0], "tp", "dp_shard", "flat", "nowhere")

# --- lazy meshes of eight ranks ------------------------------------------------------------------


def lazy_cube() -> DeviceMesh:
    """(2, 2, 2) over ranks 0 to 7."""
    return init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=AXES, lazy=True)


def _permuted(preserve_rank_order: bool) -> DeviceMesh:
    return DeviceMesh(
        "cpu",
        PERMUTED,
        mesh_dim_names=AXES,
        preserve_rank_order=preserve_rank_order,
        universe=Universe(torch.tensor(PERMUTED), lazy=True),
    )


def lazy_meshes() -> dict[str, DeviceMesh]:
    """Return the ways to get a mesh without creating a process group. All ranks call this."""
    cube, nameless = lazy_cube(), init_device_mesh("cpu", (2, 2, 2), lazy=True)
    with isolate("apart"):
        apart = cube["tp"]
    return {
        "root": cube,
        "slice": cube["dp_shard"],
        "slice of two": cube["dp_replicate", "tp"],
        "flattened": cube["dp_replicate", "dp_shard"].flatten("flat"),
        "unflattened": cube.unflatten("tp", (1, 2), ("one", "two")),
        "concatenated": DeviceMesh.concatenate([cube["dp_shard"], cube["tp"]]),
        "isolated": apart,
        "one of all submeshes": cube._get_all_submeshes("tp")[2],
        "loaded": load_mesh(save_mesh(cube["tp"])),
        "nameless": nameless,
        "permuted": _permuted(preserve_rank_order=False),
        "permuted, in order": _permuted(preserve_rank_order=True),
        "part of the world": init_device_mesh(
            "cpu", (1, 2), mesh_dim_names=("dp_shard", "tp"), ranks=[5, 2], lazy=True
        ),
        "without me": init_device_mesh("cpu", (2,), mesh_dim_names=("tp",), lazy=True),
        "over the world": init_device_mesh("cpu", (8,), mesh_dim_names=("tp",), lazy=True),
    }


# --- what users ask ------------------------------------------------------------------------------

_LOCAL_RANKS: Question = lambda mesh: [  # noqa: E731
    attempt(lambda dim=dim: mesh.get_local_rank(dim)) for dim in DIMS
]

OF_MESH: dict[str, Question] = {
    "decouple_backend_at_save": lambda mesh: mesh.decouple_backend_at_save,
    "description": lambda mesh: mesh.description,
    "device_type": lambda mesh: mesh.device_type,
    "flattened": lambda mesh: dict(mesh.flattened),
    "draw": lambda mesh: (str(mesh.draw()), mesh.draw(0, node_size=4).to_html()),
    "get_coordinate": lambda mesh: mesh.get_coordinate(),
    "get_local_rank": _LOCAL_RANKS,
    "get_rank": lambda mesh: mesh.get_rank(),
    "group_names": lambda mesh: mesh.group_names,
    "has_groups": lambda mesh: mesh.has_groups,
    "layout": lambda mesh: mesh.layout,
    "mesh": lambda mesh: attempt(lambda: mesh.mesh.tolist()),
    "mesh_dim_names": lambda mesh: mesh.mesh_dim_names,
    "ndim": lambda mesh: mesh.ndim,
    "shape": lambda mesh: mesh.shape,
    "size": lambda mesh: [mesh.size(), mesh.size(0), mesh.size(-1)],
    "universe": lambda mesh: repr(mesh.universe),
}
OF_MESH_BY_OPERATORS: dict[str, Question] = {
    "repr": lambda mesh: (repr(mesh), str(mesh), f"{mesh}"),
    "hash": hash,
    "==": lambda mesh: (mesh == mesh.universe.root, mesh == lazy_cube),
    "[]": lambda mesh: [attempt(lambda name=name: mesh[name]) for name in AXES],
    "in": lambda mesh: mesh in [mesh.universe.root],
    "with": lambda mesh: mesh.__enter__().__exit__(None, None, None),
    "copy": lambda mesh: (copy.copy(mesh), copy.deepcopy(mesh)),
    "pickle": lambda mesh: pickle.loads(pickle.dumps(mesh)),
    "save_mesh, load_mesh": lambda mesh: load_mesh(save_mesh(mesh)),
}
USES_GROUPS_OF_MESH = {
    "get_group": "gives a group out",
    "get_all_groups": "gives groups out",
    "from_group": "takes groups that are there",
    "bind": "gives a mesh groups",
    "abort": "ends groups",
    "flatten": "names a new group",
    "unflatten": "names new groups",
    "concatenate": "joins meshes on the groups they have",
}

OF_UNIVERSE: dict[str, Question] = {
    "explain": lambda mesh: (str(mesh.universe.explain()), mesh.universe.explain().to_json()),
    "explain_with": lambda mesh: str(mesh.universe.explain_with(None)),
    "draw": lambda mesh: attempt(lambda: str(mesh.universe.draw(node_size=4))),
    "flattened": lambda mesh: dict(mesh.universe.flattened),
    "set_saved_serial": lambda mesh: mesh.universe.set_saved_serial(mesh.universe.serial),
    "root": lambda mesh: mesh.universe.root,
    "rank_views": lambda mesh: (mesh.universe.rank_views.tensor, mesh.universe.rank_views.tuple),
    "parts": lambda mesh: mesh.universe.parts,
    "known_part": lambda mesh: mesh.universe.known_part(mesh.universe.rank_map),
    "check_has": lambda mesh: mesh.universe.check_has(mesh.universe.rank_map),
    "serial": lambda mesh: mesh.universe.serial,
}
# Not of the universe itself, but of its groups and meshes, and of all universes.
OF_UNIVERSE_INSIDE: dict[str, Question] = {
    "groups": lambda mesh: list(mesh.universe.groups),
    "universes over": lambda mesh: universes_over(mesh.universe.rank_map),
    "find universe": lambda mesh: find_universe(mesh.universe.rank_map, mesh.universe.serial),
    "renew names": lambda mesh: [
        mesh.universe.meshes.renew_names(name) for name in mesh.group_names or ()
    ],
    "use checked group names": lambda mesh: mesh.universe.meshes.use_checked_group_names(),
    "note world end": lambda mesh: (
        mesh.universe.meshes.note_world_end(),
        mesh.get_coordinate(),
    ),
    "find": lambda mesh: mesh.universe.meshes.find(mesh._intern_key),
    "intern": lambda mesh: mesh.universe.meshes.intern(mesh, mesh._intern_key),
    "note": lambda mesh: mesh.universe.meshes.note(mesh),
    "has made": lambda mesh: [
        mesh.universe.groups.has_made(name) for name in mesh.group_names or ()
    ],
    "planned": lambda mesh: [
        mesh.universe.groups.find_planned(name) for name in mesh.group_names or ()
    ],
    "best_match": lambda mesh: [mesh.universe.groups.best_match(a, "tp") for a in mesh.layout],
    "key digest": lambda mesh: [
        mesh.universe.groups.key_digest(axis, name)
        for axis, name in zip(mesh.layout, mesh.group_names or (), strict=False)
    ],
    "known names": lambda mesh: mesh.universe.groups.request_known(
        mesh.description.layout, mesh.description.labels
    ),
    "known": lambda mesh: [
        mesh.universe.groups.known(axis, digest)
        for axis, digest in zip(mesh.layout, mesh._key_digests, strict=False)
    ],
}
USES_GROUPS_OF_UNIVERSE = {
    "warm_up": "makes groups",
    "suspend": "talks to groups",
    "resume": "talks to groups",
    "memory_stats": "asks groups",
    "bind": "gives meshes groups",
    "group": "makes a group of a list of ranks",
    "groups_of": "makes groups of lists of ranks",
    "part": "makes a universe",
    "destroy": "ends groups",
    "abort": "ends groups",
}

# --- what torch's own code asks, as DTensor does -------------------------------------------------

_SHAPE = (5, 6)


def _placements(mesh: DeviceMesh, first: Placement | None = None) -> list[Placement]:
    return [first or Shard(0), *[Shard(1)] * (mesh.ndim - 1)]


def _tensor(mesh: DeviceMesh) -> DTensor:
    local = torch.ones(2, 2) if mesh.get_coordinate() is not None else torch.empty(0, 2)
    return DTensor.from_local(local, mesh, _placements(mesh), run_check=False)


def _moved_without_talking(mesh: DeviceMesh) -> DTensor:
    whole = DTensor.from_local(torch.ones(_SHAPE), mesh, [Replicate()] * mesh.ndim, run_check=False)
    return whole.redistribute(placements=_placements(mesh))


OF_TORCH: dict[str, Question] = {
    "_is_current_rank_part_of_mesh": lambda mesh: mesh._is_current_rank_part_of_mesh(),
    "_sym_get_coordinate": lambda mesh: attempt(lambda: mesh._sym_get_coordinate(0)),
    "_coordinate_on_dim": lambda mesh: mesh._coordinate_on_dim,
    "_compute_coordinate_on_dim": lambda mesh: attempt(mesh._compute_coordinate_on_dim),
    "_rank_map": lambda mesh: (mesh._rank_map, mesh._flatten_rank_map, mesh._layout),
    "_stable_hash": lambda mesh: mesh._stable_hash(),
    "_get_root_mesh": lambda mesh: mesh._get_root_mesh(),
    "_get_root_mesh_dim": lambda mesh: attempt(mesh._get_root_mesh_dim),
    "_get_all_submeshes": lambda mesh: attempt(lambda: mesh._get_all_submeshes("tp")),
    "number of groups": lambda mesh: (len(mesh._dim_group_names), list(mesh._dim_group_names)),
    "names as a slice": lambda mesh: mesh._dim_group_names[:],
    "_pg_registry": lambda mesh: dict(mesh._pg_registry),
    "local shape": lambda mesh: compute_local_shape_and_global_offset(
        _SHAPE, mesh, _placements(mesh)
    ),
    "global shape": lambda mesh: compute_global_tensor_info(
        torch.ones(2, 2), mesh, _placements(mesh)
    ),
    "DTensor.from_local": _tensor,
    "DTensor, printed": lambda mesh: repr(_tensor(mesh)),
    "DTensor, pieces": lambda mesh: attempt(lambda: _tensor(mesh).__create_chunk_list__()),
    "DTensor, pointwise": lambda mesh: (_tensor(mesh) * 2).relu() + _tensor(mesh),
    "DTensor, sum": lambda mesh: _tensor(mesh).sum(),  # partial: nothing is reduced yet
    "DTensor, replicated to sharded": _moved_without_talking,
    "DTensor, plan of a checkpoint": lambda mesh: create_default_local_save_plan(
        {"weight": _tensor(mesh)}, is_coordinator=True
    ),
    "DTensor, pickled": lambda mesh: pickle.loads(pickle.dumps(_tensor(mesh))),
    "distribute_tensor": lambda mesh: distribute_tensor(
        torch.ones(_SHAPE), mesh, _placements(mesh), src_data_rank=None
    ),
    "zeros": lambda mesh: zeros(_SHAPE, device_mesh=mesh, placements=_placements(mesh)),
    "empty": lambda mesh: empty(_SHAPE, device_mesh=mesh, placements=_placements(mesh, Partial())),
}

# --- what meshverse.parallel asks ----------------------------------------------------------------


def _collective(cube: DeviceMesh) -> MeshCollective:
    rank = cube.get_rank()
    physical = init_device_mesh(
        "cpu", (2, 4), mesh_dim_names=("nodes", "local_ranks"), universe=cube.universe
    )
    return MeshCollective(
        rank,
        8,
        local_world_size=4,
        local_rank=rank % 4,
        device_type="cpu",
        mesh=Meshes(cube, physical),
    )


def places(collective: MeshCollective) -> list[Any]:
    """Return this process's ranks in a collective, its node's and its tensor-parallel group's."""
    limited = (collective, collective.local, collective.tp_world, collective.tp_world.local)
    return [
        (each.rank, each.world_size, each.dp_rank, each.tp_rank, each.is_master) for each in limited
    ] + [collective.is_local_master]


OF_PARALLEL: dict[str, Question] = {  # asked of `lazy_cube()`
    "get_flat_mesh": lambda mesh: get_flat_mesh(mesh, "tp"),
    "get_submesh": lambda mesh: get_submesh(mesh, ("dp_replicate", "tp")),
    "get_fsdp_dp_mesh": lambda mesh: get_fsdp_dp_mesh(mesh, "dp_replicate", "dp_shard"),
    "MeshCollective": lambda mesh: places(_collective(mesh)),
}
