"""Reading a saved mesh of torch's own class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch.distributed as dist

from .c10d_groups import find_c10d_group
from .private_names import StockDeviceMesh
from .stock_layouts import FLATTENED_ARE_DISTINCT, from_torch_layout, to_torch_layout


class StockState(NamedTuple):
    """The attributes of a saved stock mesh, not checked. 2.11-2.15.

    Attributes:
        fields: fields of the mesh in the form that `saved_mesh.save_mesh` writes.
        rank_map: tensor of the root mesh's global ranks.
        rank: global rank of the process that saved the mesh.
        group_names: names of its groups in the program that saved it, one per axis.
        root: its root mesh, which may not be loaded yet; None if it is itself a root.
        flattened: meshes that were flattened from it or its submeshes.
    """

    fields: dict[str, Any]
    rank_map: Any
    rank: Any
    group_names: list[str]
    root: Any
    flattened: list[Any]


def read_stock_state(state: Mapping[str, Any]) -> StockState:
    """Return the contents of the pickled attributes of a stock mesh.

    Raises:
        AttributeError, KeyError, OverflowError, TypeError, ValueError: the attributes are those of
            another version of torch, or not those of a mesh.
    """
    layout = from_torch_layout(state["_layout"])
    as_rooted = to_torch_layout(layout, flattened=False)
    fields = {
        "device_type": state["_device_type"],
        "axes": [(list(axis.sizes), list(axis.strides)) for axis in layout],
        "names": state["_mesh_dim_names"],
        "preserve_rank_order": state.get("_preserve_rank_order", False),
        "flattened": FLATTENED_ARE_DISTINCT and len(layout) == 1 and as_rooted != state["_layout"],
        "keys": [],
        "tags": [],
    }
    return StockState(
        fields,
        state["_rank_map"],
        state["_rank"],
        list(state["_dim_group_names"]),
        state.get("_root_mesh"),
        list(state["_flatten_mapping"].values()),
    )


def is_unread(mesh: object) -> bool:
    """Whether a stock mesh that is being loaded has no attributes yet.

    If two meshes in a file refer to each other, pickle first creates both objects, and then sets
    the attributes of one after the other.
    """
    return type(mesh) is StockDeviceMesh and not vars(mesh)


def is_made_by_stock(name: str, ranks: list[int]) -> bool:
    """Whether a live group of this name has these ranks, in any order, and a stock mesh uses it.

    The description of a group that a stock mesh created is "mesh_" and the name of the axis. Groups
    that a program creates have other descriptions. The default group, which meshes can use too,
    counts as well.
    """
    group = find_c10d_group(name)
    if group is None:
        return False
    is_of_mesh = group.group_desc.startswith("mesh_") or group is dist.group.WORLD
    return is_of_mesh and sorted(dist.get_process_group_ranks(group)) == sorted(ranks)
