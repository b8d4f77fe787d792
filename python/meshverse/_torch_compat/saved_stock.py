"""Reading a saved mesh of torch's own class, and a hook on loading one."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch.distributed as dist

from .groups import find_group
from .layouts import FLATTENED_ARE_APART, from_torch_layout, to_torch_layout
from .private_names import StockDeviceMesh


class StockState(NamedTuple):
    """The attributes of a saved stock mesh, not checked. 2.11-2.15.

    Attributes:
        axes: sizes and strides of every axis, as `save_mesh` writes them.
        rank_map: tensor of global ranks.
        group_names: the names its groups had in the program that saved it, one per axis.
        root: the mesh it was derived from, which may be yet to be loaded; None for a root.
        flattened: meshes that were flattened from it or its submeshes.
    """

    device_type: Any
    axes: list[tuple[list[int], list[int]]]
    names: Any
    rank_map: Any
    rank: Any
    preserve_rank_order: Any
    is_flattened: bool
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
    return StockState(
        state["_device_type"],
        [(list(axis.sizes), list(axis.strides)) for axis in layout],
        state["_mesh_dim_names"],
        state["_rank_map"],
        state["_rank"],
        state.get("_preserve_rank_order", False),
        FLATTENED_ARE_APART and len(layout) == 1 and as_rooted != state["_layout"],
        list(state["_dim_group_names"]),
        state.get("_root_mesh"),
        list(state["_flatten_mapping"].values()),
    )


def hook_setstate(take_in: Callable[[StockDeviceMesh, dict[str, Any]], bool]) -> None:
    """Call a function for each stock mesh that is loaded or copied, before torch fills it in.

    Args:
        take_in: gets the mesh, which has no attributes yet, and the saved attributes. Returns
            whether it has filled in the mesh; if not, torch does.
    """
    stock = StockDeviceMesh.__setstate__

    @functools.wraps(stock)
    def setstate(self: StockDeviceMesh, state: dict[str, Any]) -> None:
        if type(self) is not StockDeviceMesh or not take_in(self, state):
            stock(self, state)

    StockDeviceMesh.__setstate__ = setstate  # type: ignore[method-assign]


def is_made_by_stock(name: str, ranks: list[int]) -> bool:
    """Whether torch's own mesh made a live group of this name, with these ranks in any order.

    The description of such a group is "mesh_" and the name of the axis. Groups that a program makes
    itself have other descriptions.
    """
    group = find_group(name)
    if group is None or not group.group_desc.startswith("mesh_"):
        return False
    return sorted(dist.get_process_group_ranks(group)) == sorted(ranks)
