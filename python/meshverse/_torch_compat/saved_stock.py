"""Reading a saved mesh of torch's own class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch.distributed as dist

from .groups import find_group
from .layouts import FLATTENED_ARE_DISTINCT, from_torch_layout, to_torch_layout
from .private_names import StockDeviceMesh


class StockState(NamedTuple):
    """The attributes of a saved stock mesh, not checked. 2.11-2.15.

    Attributes:
        fields: of the mesh, as `save_mesh` writes them.
        rank_map: tensor of global ranks.
        rank: global rank of the process that saved it.
        group_names: the names its groups had in the program that saved it, one per axis.
        root: the mesh it was derived from, which may be yet to be loaded; None for a root.
        flattened: meshes that were flattened from it or its submeshes.
    """

    fields: dict[str, Any]
    rank_map: Any
    rank: Any
    group_names: list[str]
    root: Any
    flattened: list[Any]


def read_stock_state(state: Mapping[str, Any]) -> StockState:
    """Return what the pickled attributes of a stock mesh say.

    Raises:
        AttributeError, KeyError, OverflowError, TypeError, ValueError: they are of another version
            of torch, or no mesh's.
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
    """Whether a stock mesh has no attributes yet, because the file's meshes refer to each other.

    Pickle then makes both objects first, and gives them their attributes one after the other.
    """
    return type(mesh) is StockDeviceMesh and not vars(mesh)


def is_made_by_stock(name: str, ranks: list[int]) -> bool:
    """Whether a group of this name is live, has these ranks in any order, and torch's mesh made it.

    The description of such a group is "mesh_" and the name of the axis. Groups that a program makes
    itself have other descriptions. The default group, on which torch puts meshes too, has none.
    """
    group = find_group(name)
    if group is None:
        return False
    is_of_mesh = group.group_desc.startswith("mesh_") or group is dist.group.WORLD
    return is_of_mesh and sorted(dist.get_process_group_ranks(group)) == sorted(ranks)
