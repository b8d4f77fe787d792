"""One graph for all ranks where it is exported, where ranks are simulated, and random numbers."""

from __future__ import annotations

import io

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh as StockDeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from helpers.compiling import COMPILES
from helpers.one_graph import compiled_on_one_rank, needs_one_graph, trace
from helpers.sides import SIDES, side
from helpers.worlds import fake_world, in_worlds
from meshverse import init_device_mesh

pytestmark = [*COMPILES, needs_one_graph]


class _Piece(nn.Module):
    """Two numbers for each rank."""

    def __init__(self, mesh: StockDeviceMesh) -> None:
        super().__init__()
        self.mesh = mesh

    def forward(self, x: Tensor) -> Tensor:
        place = self.mesh._sym_get_coordinate(0)
        return x.narrow(0, place * 2, 2) * 10 + place


def test_what_one_rank_exported_is_loaded_by_the_others() -> None:
    file, x = io.BytesIO(), torch.arange(8.0)
    with fake_world(8, 1), compiled_on_one_rank():
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))["tp"]
        torch.export.save(torch.export.export(_Piece(mesh), (x,), strict=False), file)
    pieces = []
    for rank in (4, 5, 6, 7):
        file.seek(0)
        with fake_world(8, rank):
            pieces.append(torch.export.load(file).module()(x))
    expected = [[0, 10], [21, 31], [42, 52], [63, 73]]
    assert [piece.tolist() for piece in pieces] == expected


def _cut(x: Tensor, mesh: StockDeviceMesh) -> Tensor:
    whole = DTensor.from_local(x, mesh, [Replicate()], run_check=False)
    return whole.redistribute(placements=[Shard(1)]).to_local()


# Not stock's, whose graphs give all simulated ranks this rank's shard before 2.13.
@in_worlds((4, 2))
@pytest.mark.parametrize("which", ["ours", "installed"])
def test_a_graph_runs_on_simulated_ranks(world, which: str) -> None:
    module = pytest.importorskip("torch.distributed._local_tensor", reason="is in later torch")
    x = torch.arange(24.0).reshape(3, 8)
    with side(which) as family:
        mesh = family.init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
        graph = trace(_cut, x, mesh).graph
        with module.LocalTensorMode(4):
            each = graph(module.LocalTensor(dict.fromkeys(range(4), x)), mesh)[0]
    shards = [each._local_tensors[rank] for rank in range(4)]
    assert torch.cat(shards, 1).equal(x)


@in_worlds((8, 5))
def test_random_numbers_of_a_shard_are_drawn_from_its_place(world) -> None:
    random = pytest.importorskip("torch.distributed.tensor._random")
    seen = []
    for which in SIDES:
        with side(which) as family:
            mesh = family.init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
            x = DTensor.from_local(torch.ones(4, 4), mesh, [Shard(0), Shard(1)], run_check=False)
            # Not made in the usual way, which needs a GPU.
            tracker = object.__new__(random.OffsetBasedRNGTracker)
            numbers = tracker._compute_rng_offsets(x._spec)
            with compiled_on_one_rank(), FakeTensorMode(shape_env=ShapeEnv()):
                start, end = tracker._compute_rng_offsets(x._spec)
            seen.append((numbers, str(start), end))
    assert seen[0][0] == (16 * 5, 128)
    assert "u1" in seen[0][1]
    assert seen[1] == seen[0]
    assert seen[2] == seen[0]
