"""Marks for what some of the supported versions of torch cannot do."""

from __future__ import annotations

import inspect

import pytest
import torch
import torch.distributed as dist
from torch.distributed import device_mesh as stock_module
from torch.distributed.device_mesh import DeviceMesh as StockDeviceMesh

# 2.13 made equal layouts equal objects. Before, two layouts of the same ranks could differ in how
# they were written, so stock meshes differ where ours do not, and print other strides.
HAS_CANONICAL_LAYOUTS = hasattr(stock_module, "_FlatLayout")

needs_canonical_layouts = pytest.mark.skipif(
    not HAS_CANONICAL_LAYOUTS, reason="stock's layouts are canonical from torch 2.13 on"
)

_VERSION = tuple(map(int, torch.__version__.split(".")[:2]))
AT_LEAST_2_12 = _VERSION >= (2, 12)
AT_LEAST_2_14 = _VERSION >= (2, 14)
AT_LEAST_2_15 = _VERSION >= (2, 15)

# The compiler of 2.11 runs a mesh's methods itself: it creates a lazy group, as eager code does,
# and prints errors of its own about groups that have ended.
needs_opaque_meshes = pytest.mark.skipif(
    not AT_LEAST_2_12, reason="torch.compile knows meshes as opaque objects from torch 2.12 on"
)

# Until 2.11, stock refuses the name of an axis to unflatten.
UNFLATTENS_BY_NAME = _VERSION > (2, 11)

needs_stock_rank_order = pytest.mark.skipif(
    "preserve_rank_order" not in inspect.signature(StockDeviceMesh.__init__).parameters,
    reason="stock keeps the order of ranks from torch 2.15 on",
)

# Before 2.13, c10d splits a backend once for each device type that it serves.
needs_one_split = pytest.mark.skipif(
    "device_types" not in (dist.ProcessGroup.split_group.__doc__ or ""),
    reason="c10d splits a backend of two device types once, if asked to, from torch 2.13 on",
)
