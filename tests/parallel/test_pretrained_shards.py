"""Where the shards of a load are: each rank, played in one process, beside what FSDP2 gave it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh as StockDeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)

import meshverse
from helpers.worlds import fake_world
from meshverse.parallel.pretrained.places import Place, local_box, places_of


def _place(weight: Tensor) -> Place:
    model = nn.Module()
    model.weight = nn.Parameter(weight)
    (place,) = places_of(model, model)
    return place


def _of_box(whole: Tensor, place: Place) -> Tensor:
    box, local = local_box(place)
    part = whole[tuple(slice(*each) for each in box)]
    assert torch.equal(part, local), box
    return part


@pytest.mark.parametrize(
    ("size", "dp", "tp"), [(7, 3, 2), (25, 4, 2), (5, 2, 4), (3, 4, 2), (24, 4, 2)]
)
def test_fsdp2_splits_what_tensor_parallelism_has_split(size: int, dp: int, tp: int) -> None:
    whole = torch.arange(2.0 * size).view(size, 2)
    parts: dict[tuple[int, int], Tensor] = {}
    for rank in range(dp * tp):
        with fake_world(dp * tp, rank):
            mesh = meshverse.init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
            split = distribute_tensor(whole, mesh["tp"], [Shard(0)], src_data_rank=None)
            model = nn.Module()
            model.weight = nn.Parameter(split)
            fully_shard(model, mesh=mesh["dp"])
            (place,) = places_of(model, model)
            parts[rank % tp, rank // tp] = _of_box(whole, place)
    assert torch.equal(torch.cat([parts[key] for key in sorted(parts)]), whole)


@pytest.mark.parametrize("order", [[0, 1], [1, 0]])
@pytest.mark.parametrize("kind", ["meshverse", "torch"])
def test_shards_are_in_the_order_of_the_group(kind: str, order: list[int]) -> None:
    whole = torch.arange(10.0).view(5, 2)
    for rank in range(2):
        with fake_world(2, rank):
            if kind == "torch":
                mesh: StockDeviceMesh = StockDeviceMesh("cpu", order)
            else:
                mesh = meshverse.init_device_mesh("cpu", (2,), ranks=order)
            model = nn.Module()
            model.weight = nn.Parameter(whole.clone())
            fully_shard(model, mesh=mesh)
            (place,) = places_of(model, model)
            _of_box(whole, place)


@pytest.mark.parametrize(
    ("placements", "rows", "text"),
    [
        ([Shard(0), Replicate()], 3, r"a part of shape \(4, 2\); its local tensor has shape \(3"),
        ([Partial(), Replicate()], 8, r"weight of .* on .*: redistribute it to Replicate"),
    ],
)
def test_a_part_whose_place_is_not_known_is_refused(
    placements: list[Placement], rows: int, text: str
) -> None:
    with fake_world(4):
        mesh = meshverse.init_device_mesh("cpu", (2, 2))
        weight = DTensor.from_local(
            torch.zeros(rows, 2), mesh, placements, run_check=False, shape=(8, 2), stride=(2, 1)
        )
        with pytest.raises(ValueError, match=text):
            local_box(_place(weight))
