"""Topologies and plans are made and asked under a default device, fake tensors and the like."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from meshverse import Topology, init_device_mesh
from meshverse.tools.planner import plan
from meshverse.tools.planner.crossings import Places, crossings_of
from meshverse.tools.planner.views import as_view

_PARTS = {"node": ["a", "b"] * 4, "switch": ["s"] * 8}
_IN_TURN = Topology(_PARTS)
_UNIFORM = Topology.uniform(8, node_size=2, switch_size=4)


@contextlib.contextmanager
def _default_device_of_meta():
    before = torch.get_default_device()
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None if before.type == "cpu" else before)


_MODES = pytest.mark.parametrize(
    "mode",
    [
        lambda: torch.device("meta"),
        _default_device_of_meta,
        FakeTensorMode,
        torch.inference_mode,
    ],
    ids=["meta", "default device of meta", "fake", "inference"],
)
_Mode = Callable[[], contextlib.AbstractContextManager[object]]


@_MODES
def test_a_topology_is_made(mode: _Mode) -> None:
    with mode():
        by_hand = Topology(_PARTS)
        uniform = Topology.uniform(8, node_size=2, switch_size=4)
    assert by_hand == _IN_TURN
    assert uniform == _UNIFORM
    of_rank = by_hand.levels[0].of_rank
    assert of_rank.tolist() == [0, 1] * 4
    assert not of_rank.is_inference()


@_MODES
def test_a_topology_is_asked(mode: _Mode) -> None:
    names, shape = ("dp", "tp"), (2, 4)
    with mode():
        same = (Topology(_PARTS) == _IN_TURN, _IN_TURN == _UNIFORM)
        spans = _IN_TURN.spans("node", [0, 2, 4])
        data = _IN_TURN.to_dict()
        sizes = _IN_TURN.levels[0].sizes
        order = _IN_TURN.order(shape, names)
        cost = _IN_TURN.cost(order, shape, names)
        of_list = _IN_TURN.cost(order.tolist(), shape, names)
        by_number = _IN_TURN.cost(None, shape, names)
    assert same == (True, False)
    assert spans == 1
    assert data == {"node": {"a": "0,2,4,6", "b": "1,3,5,7"}, "switch": {"s": "0-7"}}
    assert sizes.tolist() == [4, 4]
    assert order.tolist() == _IN_TURN.order(shape, names).tolist() == [0, 2, 4, 6, 1, 3, 5, 7]
    assert cost == of_list == _IN_TURN.cost(order, shape, names) < by_number


@_MODES
def test_levels_that_do_not_fit_raise(mode: _Mode) -> None:
    with mode(), pytest.raises(ValueError, match="Node 'a' is on two switch parts: rank 0 is on"):
        Topology({"node": list("aab"), "switch": list("sts")})


@_MODES
def test_a_file_is_written_and_read(mode: _Mode, tmp_path) -> None:
    with mode():
        _IN_TURN.save(tmp_path / "t.json")
        read = Topology.from_file(tmp_path / "t.json")
    assert read == _IN_TURN
    (tmp_path / "holes.json").write_text('{"node": {"a": "0-1,4"}}')
    with mode(), pytest.raises(ValueError, match="ranks 2-3 are on no node"):
        Topology.from_file(tmp_path / "holes.json")


@_MODES
def test_a_mesh_is_placed(mode: _Mode, world) -> None:
    with mode():
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"), topology=_IN_TURN)
        nodes = [group.nodes for group in mesh.universe.explain().groups]
    assert mesh.mesh.tolist() == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert nodes == [2, 1]


def test_a_tensor_without_values_is_no_order() -> None:
    with pytest.raises(RuntimeError, match="a meta tensor of shape"):
        _IN_TURN.cost(torch.empty(8, dtype=torch.int64, device="meta"), (2, 4))


@_MODES
def test_what_an_axis_crosses(mode: _Mode) -> None:
    axis = as_view("dp=2,tp=4", None).axis_layouts()["tp"]
    with mode():
        places = [Places.in_blocks("node", 8, 2), *Places.of_topology(_IN_TURN)]
        counts = [each.count for each in places]
        crossings = crossings_of(axis, places)
    assert counts == [4, 2, 1]
    assert [(each.max, each.busiest) for each in crossings] == [(2, 1), (2, 4), (1, 0)]


@pytest.mark.parametrize("asked", [{"topology": _IN_TURN}, {"node_size": 2, "domain_size": 4}])
def test_a_plan_is_made_under_a_default_device(asked) -> None:
    expected = str(plan(["dp=2,tp=4"], **asked))
    for mode in (torch.device("meta"), FakeTensorMode()):
        with mode:
            planned = plan(["dp=2,tp=4"], **asked)
        assert str(planned) == expected
