"""`meshverse plan --saves`: counts of what c10d creates, and published figures with sources."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import pytest
from torch.distributed.device_mesh import init_device_mesh as stock_init_device_mesh

from helpers.worlds import fake_world, live_groups
from meshverse import Universe, init_device_mesh
from meshverse.explain.communicator_memory import COMMUNICATOR_BYTES
from meshverse.tools.commands.main import main
from meshverse.tools.planner import plan, saves

_VIEWS = ["pp=2,dp=4,tp=4,cp=1", "pp=2,batch=4,tp=4", "world=32"]


def _n_communicators(create: Callable[..., object], shares: bool) -> int:
    """Number of groups of several ranks, besides the default one, that these views create."""
    with fake_world(32, 13):
        before = live_groups()
        universe = {"universe": Universe(32)} if shares else {}
        for view in _VIEWS:
            sizes = dict(axis.split("=") for axis in view.split(","))
            create("cpu", tuple(map(int, sizes.values())), mesh_dim_names=tuple(sizes), **universe)
        groups = live_groups()
    return sum(len(ranks) > 1 for name, ranks in groups.items() if name not in before)


def test_the_counts_are_those_of_c10d() -> None:
    costs = saves(plan(_VIEWS, rank=13))
    torchs = _n_communicators(stock_init_device_mesh, shares=False)
    assert (
        costs.communicators == (torchs, _n_communicators(init_device_mesh, shares=True)) == (6, 3)
    )


def test_groups_of_one_rank_have_no_communicator() -> None:
    costs = saves(plan(_VIEWS))
    assert (costs.groups, costs.communicators) == ((7, 4), (6, 3))


def test_the_groups_that_are_shared_are_named() -> None:
    costs = saves(plan(_VIEWS, rank=13))
    assert sum(one.stock_copies - 1 for one in costs.shared) == costs.groups[0] - costs.groups[1]
    lines = re.findall(r"^  (\w[\w ]*?) +(\d+) +x(\d+)$", str(costs), re.MULTILINE)
    assert lines == [("pp", "2", "2"), ("dp batch", "4", "2"), ("tp", "4", "2")]
    assert not saves(plan(["a=2,b=4"])).shared
    assert "Created once" not in str(saves(plan(["a=2,b=4"])))


def test_ranges_are_sums_over_the_communicators() -> None:
    costs = saves(plan(["a=2,b=4"]))
    assert costs.memory == ((2 * COMMUNICATOR_BYTES["nccl"], 544e6 + 688e6),) * 2
    assert costs.start == ((4.0, 12.0),) * 2
    shared = saves(plan(["a=2,b=4", "c=2,d=4", "e=2,f=2,g=2"]))
    assert shared.memory is not None
    assert shared.start is not None
    torchs, ours = shared.memory
    assert torchs.most - ours.most == 2 * 544e6 + 688e6
    assert (shared.start[0].least, shared.start[1].least) == (14.0, 8.0)


@pytest.mark.parametrize("size", [10, 2 << 30])
def test_a_measured_size_is_no_range(size: int) -> None:
    costs = saves(plan(["a=2,b=4", "a=2,c=4"], communicator_bytes={"NCCL": size}))
    assert costs.memory == ((4 * size, 4 * size), (2 * size, 2 * size))
    assert re.search(r"device memory +\d+ \w+ +\d+ \w+ +\d", str(costs))
    assert "device memory: your measurement" in str(costs)
    assert costs.to_dict()["sources"]["device memory"].startswith("your measurement")


@pytest.mark.parametrize("size", [-5, True, 1.5, float("nan"), None])
def test_a_measured_size_is_a_number_of_bytes(size) -> None:
    with pytest.raises(ValueError, match="give an int of 0 or more, in bytes"):
        plan(["a=2,b=4"], communicator_bytes={"nccl": size})
    with fake_world(2, 0), pytest.raises(ValueError, match="give an int of 0 or more, in bytes"):
        init_device_mesh("cpu", (2,)).universe.explain(communicator_bytes={"nccl": size})


def test_every_figure_names_its_source(capsys) -> None:
    command = ["plan", "pp=8,dp=160,tp=8", "--view", "pp=8,replicate=4,shard=40,tp=8", "--saves"]
    assert main(command) == 0
    text = capsys.readouterr().out
    rows = re.findall(r"^  (\S[\w -]+?)  +\d", text, re.MULTILINE)
    assert rows == ["process groups", "communicators", "device memory", "start-up", "pp", "tp"]
    for row in ("process groups", "device memory", "start-up"):
        assert f"\n{row}: " in text
    assert text.count("https://github.com/NVIDIA/nccl/issues/") >= 3
    assert "Not known:\n" in text
    assert main([*command, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["communicators"] == {"torch": 7, "meshverse": 5}
    assert data["shared"] == [{"axes": [name], "size": 8, "torch": 2} for name in ("pp", "tp")]
    assert data["memory"]["torch"]["least"] < data["memory"]["torch"]["most"]
    assert set(data["sources"]) == {"process groups", "device memory", "start-up"}


@pytest.mark.parametrize("backend", ["gloo", "ucc"])
def test_other_backends_have_counts_only(backend: str, capsys) -> None:
    assert main(["plan", "dp=4,tp=8", "--saves", "--backend", backend]) == 0
    text = capsys.readouterr().out
    assert f"For communicators of backend {backend}, there are no figures." in text
    assert "device memory" not in text
    assert "start-up" not in text
