"""FSDP2's own meshes: with an integer `reshard_after_forward`, each `fully_shard` makes one.

They share process groups if they are made from the same mesh. So do those that are made from
FSDP2's default meshes, which are all on the default group.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh as StockDeviceMesh
from torch.distributed.fsdp import fully_shard

import meshverse
from helpers.crew import Crew
from helpers.observation import Family
from helpers.sides import SIDES, mesh_class, side
from helpers.sleeping import sleep
from helpers.tiers import in_tiers
from helpers.training import TOLERANCE, make_model, train, train_alone
from helpers.worlds import fake_world, group_names, groups_created
from meshverse import DeviceMesh, init_device_mesh

_BLOCKS = 16


def _one_axis(family: Family) -> StockDeviceMesh:
    return family.init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))


def _hybrid(family: Family) -> StockDeviceMesh:
    return family.init_device_mesh("cpu", (1, 4), mesh_dim_names=("replicate", "shard"))


def _slice(family: Family) -> StockDeviceMesh:
    return family.init_device_mesh("cpu", (4, 1), mesh_dim_names=("dp", "tp"))["dp"]


_MESHES: dict[str, Callable[[Family], StockDeviceMesh | None]] = {
    "one axis": _one_axis,
    "hybrid": _hybrid,
    "slice": _slice,
    "default": lambda family: None,
}


def _wrap(mesh: StockDeviceMesh | None, blocks: int = _BLOCKS) -> nn.Sequential:
    model = make_model(blocks)
    for block in model:
        fully_shard(block, mesh=mesh, reshard_after_forward=2)
    fully_shard(model, mesh=mesh)
    return model


def _resharded_on(model: nn.Sequential) -> list[StockDeviceMesh]:
    """The meshes that FSDP2 created."""
    groups = [block._get_fsdp_state()._fsdp_param_group for block in model]  # type: ignore[operator]
    return [group.post_forward_mesh_info.mesh for group in groups]


def _trained(side_name: str, way: str) -> dict[str, Any]:
    with side(side_name) as family:
        mesh = _MESHES[way](family)
        before = group_names()
        model = _wrap(mesh)
        created = group_names() - before
        made = _resharded_on(model)
        data = mesh if mesh is None or mesh.ndim == 1 else mesh["shard"]
        seen = {
            "created": len(created),
            "losses": train(model, data or family.init_device_mesh("cpu", (4,))),
            "classes": {type(each) for each in made},
            "ranks": {str(each.mesh.tolist()) for each in made},
        }
        dist.barrier()
        if isinstance(made[0], DeviceMesh):
            for universe in {each.universe for each in made}:
                universe.destroy()
            assert group_names().isdisjoint(created)
        return seen


_CASES = list(product(SIDES, _MESHES))


@pytest.mark.long
@pytest.mark.parametrize(
    ("side_name", "way"), in_tiers(_CASES, [("ours", "one axis")], _CASES[::3])
)
def test_sixteen_blocks_share_two_groups_and_learn_as_one_process(
    crew: Crew, side_name: str, way: str
) -> None:
    losses, _ = train_alone(blocks=_BLOCKS)
    # FSDP2's default mesh is torch's own, unless Meshverse is installed.
    is_stock = side_name == "stock" or (side_name, way) == ("ours", "default")
    for answer in crew.run(_trained, 4, side_name, way):
        assert answer["losses"] == pytest.approx(losses, rel=TOLERANCE)
        assert answer["created"] == (2 * _BLOCKS if is_stock else 2)
        assert answer["classes"] == {mesh_class("stock" if is_stock else "ours")}
        assert answer["ranks"] == {"[[0, 1], [2, 3]]"}


def _revived(way: str, folder: str) -> dict[str, Any]:
    with side("installed") as family:
        mesh = _MESHES[way](family)
        model = _wrap(mesh, blocks=2)
        losses = train(model, clip=False)
        made = _resharded_on(model)
        sleep(folder)
        assert meshverse.revive()
        again = train(model, clip=False)
        with groups_created(0 if way == "one axis" else 2):  # the default meshes of this world
            model = _wrap(mesh, blocks=2)
        return {
            "losses": losses + again,
            "one mesh": made[0] == _resharded_on(model)[0],
            "undisturbed": train(_wrap(mesh, blocks=2), clip=False),
        }


@pytest.mark.long
@pytest.mark.parametrize("way", ["one axis", "default"])
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_they_go_on_in_a_revived_world(crew: Crew, way: str, tmp_path: Path) -> None:
    for answer in crew.run(_revived, 4, way, str(tmp_path)):
        assert answer["losses"][:3] == answer["undisturbed"]
        assert answer["losses"][3] < answer["losses"][0]
        assert answer["one mesh"]


# --- which meshes share: rank 5 of 8, backend "fake" ----------------------------------------------


@pytest.mark.usefixtures("world")
class TestWhatIsShared:
    @pytest.mark.parametrize("installed", [False, True])
    def test_layers_on_one_mesh_share_and_it_is_explained(self, installed: bool) -> None:
        with meshverse.installed() if installed else contextlib.nullcontext():
            mesh = init_device_mesh("cpu", (8,), mesh_dim_names=("dp",))
            with groups_created(2):
                made = _resharded_on(_wrap(mesh))
        assert all(each.universe is mesh.universe for each in made)
        report = mesh.universe.explain()
        assert (report.requested, report.created, report.saved) == (33, 2, 30)
        assert report.n_duplicates == 0

    def test_other_models_on_the_same_mesh_share_and_on_an_equal_one_do_not(self) -> None:
        meshes = [init_device_mesh("cpu", (8,), mesh_dim_names=("dp",)) for _ in range(2)]
        with groups_created(2):
            for _ in range(2):
                _wrap(meshes[0], blocks=1)
        with groups_created(2):
            _wrap(meshes[1], blocks=1)

    def test_layers_on_a_slice_share_in_a_part_with_the_axes_of_the_mesh(self) -> None:
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("outer", "inner", "tp"))
        data = mesh["outer", "inner"].flatten("data")
        with groups_created(0):  # the two axes of FSDP2's mesh have the ranks of "outer", "inner"
            made = _resharded_on(_wrap(data))
        assert made[0].universe in mesh.universe.parts
        assert made[0].mesh.tolist() == [[1, 3], [5, 7]]
        assert made[0].get_group(1) is mesh.get_group("inner")

    def test_hybrid_sharding(self) -> None:
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard"))
        with groups_created(2):
            made = _resharded_on(_wrap(mesh))
        assert made[0].mesh.tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]

    def test_options_of_the_universe_apply(self) -> None:
        mesh = init_device_mesh("cpu", (8,), timeout=timedelta(minutes=3), lazy=True)
        (made,) = _resharded_on(_wrap(mesh, blocks=1))
        known = {each.name: each for each in mesh.universe.explain().groups}
        for name in made.group_names:
            assert "timeout=180s" in known[name].options
            assert known[name].how == "created by its members at first use"

    def test_a_tag_is_inherited(self) -> None:
        plain = init_device_mesh("cpu", (8,), mesh_dim_names=("dp",))
        mesh = init_device_mesh("cpu", (8,), universe=plain.universe, isolate="own")
        (with_tag,), (without,) = (_resharded_on(_wrap(each, blocks=1)) for each in (mesh, plain))
        assert with_tag.description.axis_tags == ("own", "own")
        assert without.description.axis_tags == ("", "")
        assert with_tag.get_group(1) is not without.get_group(1)
        with meshverse.isolate("block"), groups_created(2):
            (inside,) = _resharded_on(_wrap(plain, blocks=1))
        assert inside.description.axis_tags == ("block", "block")

    def test_a_destroyed_mesh_ends_them(self) -> None:
        before = group_names()
        mesh = init_device_mesh("cpu", (8,), mesh_dim_names=("dp",))
        (made,) = _resharded_on(_wrap(mesh, blocks=1))
        mesh.universe.destroy()
        assert group_names() == before
        with pytest.raises(RuntimeError, match="was destroyed"):
            made.get_group(0)


@pytest.mark.usefixtures("world", "uninstalled_afterwards")
class TestDefaultMeshes:
    def test_they_share_with_one_another_only(self) -> None:
        meshverse.install()
        mine = init_device_mesh("cpu", (8,))
        with groups_created(2):
            made = _resharded_on(_wrap(None)) + _resharded_on(_wrap(None))
        assert len({each.universe for each in made}) == 1
        assert made[0].universe is not mine.universe
        with groups_created(2):
            _wrap(mine)

    def test_threads_use_one_universe(self) -> None:
        meshverse.install()
        with groups_created(2), ThreadPoolExecutor(8) as threads:
            list(threads.map(lambda _: _wrap(None, blocks=1), range(16)))

    def test_the_next_world_and_what_is_destroyed_begin_anew(self) -> None:
        meshverse.install()
        (first,) = _resharded_on(_wrap(None, blocks=1))
        first.universe.destroy()
        with groups_created(2):
            (second,) = _resharded_on(_wrap(None, blocks=1))
        dist.destroy_process_group()
        with fake_world(8, 5), groups_created(2):
            (third,) = _resharded_on(_wrap(None, blocks=1))
        assert len({each.universe for each in (first, second, third)}) == 3

    def test_world_wide_sharing_includes_them(self) -> None:
        meshverse.install()
        _wrap(None, blocks=1)
        meshverse.install(share="world")
        with groups_created(2):
            mine = init_device_mesh("cpu", (4, 2))
        with groups_created(0):
            (made,) = _resharded_on(_wrap(None, blocks=1))
        assert made.get_group(1) is mine.get_group(1)

    def test_without_install_they_are_torchs(self) -> None:
        with groups_created(2):
            (made,) = _resharded_on(_wrap(None, blocks=1))
        assert not isinstance(made, DeviceMesh)


@pytest.mark.parametrize("side_name", SIDES)
@pytest.mark.usefixtures("world")
def test_a_program_that_makes_equal_roots_gets_separate_groups(side_name: str) -> None:
    # It may have made the second one to let its collectives overlap with those of the first.
    with side(side_name) as family:
        first = family.init_device_mesh("cpu", (4, 2))
        roots = [
            family.init_device_mesh("cpu", (4, 2)),
            family.DeviceMesh("cpu", first.mesh),
            family.DeviceMesh("cpu", first.mesh.view(-1, 2)),
            family.DeviceMesh(device_type="cpu", mesh=first.mesh.flatten().view(4, 2)),
        ]
        assert all(root == first for root in roots)
        for axis in (0, 1):
            assert len({root.get_group(axis).group_name for root in (first, *roots)}) == 5
