"""The warning of a slice by a flattened name: as often as stock's, and of the same module."""

from __future__ import annotations

import operator
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed.device_mesh as stock_module
from torch.distributed.device_mesh import DeviceMesh as StockDeviceMesh
from torch.utils._pytree import tree_map

from helpers.observation import OURS, STOCK, Family
from helpers.versions import needs_canonical_layouts

pytestmark = pytest.mark.usefixtures("world")  # rank 5 of 8

_BOTH = pytest.mark.parametrize(
    "family",
    [pytest.param(STOCK, marks=needs_canonical_layouts, id="stock"), pytest.param(OURS, id="ours")],
)


def _root(family: Family) -> StockDeviceMesh:
    mesh = family.init_device_mesh("cpu", (2, 2, 1, 2), mesh_dim_names=("dp", "cp", "ep", "tp"))
    mesh["dp", "cp"]._flatten("dp_cp")
    mesh["ep", "tp"]._flatten("ep_tp")
    return mesh


def _caught(
    action: Callable[[], Any], *, filters: str = "default"
) -> list[warnings.WarningMessage]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter(filters)  # type: ignore[arg-type]
        action()
    return [warning for warning in caught if "Slicing a flattened dim" in str(warning.message)]


def _from_several_lines(mesh: StockDeviceMesh) -> None:
    _ = mesh["dp_cp"]
    _ = mesh["dp_cp"]
    _ = mesh["dp_cp", "tp"]
    for _ in range(3):
        _ = mesh[["dp_cp"]]
    mesh.__getitem__("ep_tp")
    tree_map(mesh.__getitem__, {"by code of torch's": "dp_cp"})
    _ = operator.getitem(mesh, "dp_cp")
    exec(compile("mesh['dp_cp']", "another file", "exec"), {"mesh": mesh})


@_BOTH
def test_it_is_shown_once_wherever_it_is_called_from(family: Family) -> None:
    mesh = _root(family)
    (warning,) = _caught(lambda: _from_several_lines(mesh))
    assert warning.category is UserWarning
    assert warning.filename == stock_module.__file__


@_BOTH
def test_it_is_raised_at_every_slice(family: Family) -> None:
    mesh = _root(family)
    seen = _caught(lambda: _from_several_lines(mesh), filters="always")
    assert len(seen) == 10
    assert len({(warning.filename, warning.lineno) for warning in seen}) == 1
    both = _caught(lambda: mesh["dp_cp", "ep_tp"], filters="always")
    assert len(both) == 2  # one a name


@_BOTH
def test_a_filter_finds_it_by_torchs_module(family: Family) -> None:
    mesh = _root(family)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", module=r"torch\.distributed\.device_mesh")
        assert mesh["dp_cp"].shape == (4,)
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="Users need to bookkeep the flattened mesh directly"):
            _ = mesh["dp_cp"]


@_BOTH
def test_it_comes_before_what_is_wrong_with_the_slice(family: Family) -> None:
    mesh = _root(family)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="Slicing a flattened dim"):
            _ = mesh["dp", "dp_cp"]
        with pytest.raises(UserWarning, match="Slicing a flattened dim"):
            _ = mesh["tp", "dp_cp"]
        with pytest.raises(KeyError, match="nowhere"):
            _ = mesh["dp_cp", "nowhere"]


def test_the_words_are_stocks() -> None:
    texts = [
        str(warning.message)
        for family in (STOCK, OURS)
        for warning in _caught(lambda: _root(family)["dp_cp"], filters="always")  # noqa: B023
    ]
    assert len(texts) == 2
    assert texts[0] == texts[1]
    assert "__warningregistry__" in vars(sys.modules[StockDeviceMesh.__module__])
