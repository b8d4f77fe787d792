"""Shards that one program saves and another loads, with torch's meshes or ours on either side.

The pattern of trainers that hand weights over by files: each rank saves its DTensors, each rank
loads one file, and then the ranks communicate on what they loaded.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from helpers.all_reduce import reached_by
from helpers.crew import Crew
from helpers.forked import SECONDS
from helpers.sides import mesh_class, side
from helpers.tiers import in_tiers
from helpers.worlds import live_groups
from meshverse import DeviceMesh

_NAMES = ("dp", "tp")


def _whole() -> torch.Tensor:
    return torch.arange(30.0).reshape(5, 6)  # uneven over two


def _mesh(family: Any) -> Any:
    return family.init_device_mesh("cpu", (2, 2), mesh_dim_names=_NAMES)


def _tensors(mesh: Any) -> dict[str, DTensor]:
    return {
        "two axes": distribute_tensor(_whole(), mesh, [Shard(0), Shard(1)]),
        "replicated": distribute_tensor(_whole(), mesh, [Replicate(), Shard(0)]),
        "slice": distribute_tensor(_whole(), mesh["tp"], [Shard(0)]),
        "flattened": distribute_tensor(_whole(), mesh._flatten("all"), [Shard(1)]),
    }


def _save(which: str, folder: str) -> list[str]:
    with side(which) as family:
        mesh = _mesh(family)
        torch.save(_tensors(mesh), f"{folder}/{dist.get_rank()}.pt")
        return list(mesh._dim_group_names)


def _file(folder: str, weights_only: bool = False) -> dict[str, DTensor]:
    return torch.load(f"{folder}/{dist.get_rank()}.pt", weights_only=weights_only)


def _take_numbers(mine: bool) -> None:
    # As a program has them that makes groups for its own use first: where a mesh's would be, and
    # of other ranks, or of none of mine.
    for ranks in ([0, 3], [1, 2], [0, 1], [2, 3]) if mine else ():
        dist.new_group(ranks)


def _load(
    which: str, folder: str, numbers_taken: bool = False, weights_only: bool = False
) -> dict[str, Any]:
    with side(which) as family:
        _take_numbers(numbers_taken)
        mesh = _mesh(family)
        if which != "stock":
            mesh._flatten("all")
        groups = set(live_groups())
        loaded = _file(folder, weights_only)
        seen: dict[str, Any] = {
            f"full {name}": value.full_tensor().equal(_whole()) for name, value in loaded.items()
        }
        both = loaded["two axes"] + _tensors(mesh)["two axes"]  # of the program's own mesh
        seen["sum"] = both.full_tensor().equal(2 * _whole())
        moved = loaded["two axes"].redistribute(placements=[Replicate(), Shard(0)])
        seen["moved"] = moved.full_tensor().equal(_whole())
        seen["mesh"] = loaded["two axes"].device_mesh == mesh
        seen["no new groups"] = set(live_groups()) == groups or which == "stock"
        if which != "stock" or numbers_taken:
            seen["groups"] = loaded["slice"].device_mesh.get_group() is mesh.get_group("tp")
        on_default_group = loaded.pop("flattened").device_mesh
        seen["default group"] = on_default_group.get_group() is dist.group.WORLD
        seen["classes"] = {type(value.device_mesh) for value in loaded.values()}
        return seen


def _all_right(answers: list[dict[str, Any]], which: str) -> None:
    for answer in answers:
        assert answer.pop("classes") == {mesh_class(which)}
        assert all(answer.values()), answer


@pytest.mark.parametrize("weights_only", [True, pytest.param(False, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    ("saved", "loaded"), [("stock", "stock"), ("ours", "ours"), ("ours", "installed")]
)
def test_saved_and_loaded_on_the_same_side(
    crew: Crew, saved: str, loaded: str, weights_only: bool, tmp_path: Path
) -> None:
    crew.run(_save, 4, saved, str(tmp_path))
    _all_right(crew.run(_load, 4, loaded, str(tmp_path), False, weights_only), loaded)


@pytest.mark.parametrize(
    ("numbers_taken", "weights_only"),
    in_tiers(itertools.product([True, False], [True, False]), [(True, True), (False, False)]),
)
def test_saved_on_stock_and_loaded_while_installed(
    crew: Crew, numbers_taken: bool, weights_only: bool, tmp_path: Path
) -> None:
    names = crew.run(_save, 4, "stock", str(tmp_path))
    assert all(name.isdigit() for mine in names for name in mine)
    answers = crew.run(_load, 4, "installed", str(tmp_path), numbers_taken, weights_only)
    _all_right(answers, "installed")


# --- files of other ranks, and meshes that are made later, or never ------------------------------


def _load_a_neighbors(folder: str) -> dict[str, Any]:
    with side("installed") as family:
        _take_numbers(True)
        mesh = _mesh(family)
        rank = dist.get_rank()
        theirs = torch.load(f"{folder}/{(rank + 1) % 4}.pt", weights_only=False)["two axes"]
        loaded = theirs.device_mesh
        return {
            "coordinate": list(loaded.get_coordinate()) == [rank // 2, rank % 2],
            "reached": [reached_by(loaded.get_group(name)) for name in _NAMES]
            == [reached_by(mesh.get_group(name)) for name in _NAMES],
        }


def test_a_neighbors_file_is_on_my_groups(crew: Crew, tmp_path: Path) -> None:
    crew.run(_save, 4, "stock", str(tmp_path))
    for answer in crew.run(_load_a_neighbors, 4, str(tmp_path)):
        assert all(answer.values()), answer


def _load_without_a_mesh(which: str, folder: str) -> dict[str, Any]:
    with side(which):
        _take_numbers(True)
        loaded = _file(folder)
        for name, value in loaded.items():
            if name == "flattened" and which == "installed":
                continue  # on the default group
            with pytest.raises(RuntimeError, match=r"without them.*mesh\.bind\(\)"):
                value.full_tensor()
        loaded["two axes"].device_mesh.bind()
        return {name: value.full_tensor().equal(_whole()) for name, value in loaded.items()}


@pytest.mark.parametrize(("saved", "loaded"), [("stock", "installed"), ("ours", "stock")])
def test_without_a_mesh_here_it_is_refused_until_bound(
    crew: Crew, saved: str, loaded: str, tmp_path: Path
) -> None:
    crew.run(_save, 4, saved, str(tmp_path))
    for answer in crew.run(_load_without_a_mesh, 4, loaded, str(tmp_path)):
        assert all(answer.values()), answer


def _load_where_all_ranks_make_groups(folder: str) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_DIST_INIT_BARRIER", "1")
        with side("installed") as family:
            mesh = _mesh(family)
            # Made by all ranks, as torch makes them: with numbers, and described as a mesh's.
            assert all(name.isdigit() for name in list(mesh._dim_group_names))
            loaded = _file(folder)["two axes"]
            return {
                "class": type(loaded.device_mesh) is DeviceMesh,
                "groups": loaded.device_mesh.get_all_groups() == mesh.get_all_groups(),
                "full": loaded.full_tensor().equal(_whole()),
            }


def test_groups_of_ours_that_have_numbers(crew: Crew, tmp_path: Path) -> None:
    crew.run(_save, 4, "stock", str(tmp_path))
    for answer in crew.run(_load_where_all_ranks_make_groups, 4, str(tmp_path)):
        assert all(answer.values()), answer


# --- a program without meshverse -----------------------------------------------------------------

_WITHOUT = """
import sys
sys.modules["meshverse"] = None
import torch, torch.distributed.tensor
torch.load(sys.argv[1], weights_only=False)
"""


@pytest.mark.long
def test_a_program_without_meshverse_cannot_read_ours(crew: Crew, tmp_path: Path) -> None:
    for which, reads in (("ours", False), ("stock", True)):
        crew.run(_save, 4, which, str(tmp_path))
        command = [sys.executable, "-c", _WITHOUT, str(tmp_path / "2.pt")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
        assert (done.returncode == 0) is reads, done.stderr
        assert ("ModuleNotFoundError" in done.stderr and "meshverse" in done.stderr) is not reads


def _saves_what_needs_no_mesh(folder: str) -> None:
    with side("ours") as family:
        tensors = _tensors(_mesh(family))
    local = {name: value.to_local() for name, value in tensors.items()}
    torch.save(local, f"{folder}/{dist.get_rank()}.pt")


@pytest.mark.long
def test_local_shards_need_no_meshverse(crew: Crew, tmp_path: Path) -> None:
    crew.run(_saves_what_needs_no_mesh, 4, str(tmp_path))
    command = [sys.executable, "-c", _WITHOUT, str(tmp_path / "2.pt")]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=SECONDS, env={**os.environ}
    )
    assert done.returncode == 0, done.stderr
