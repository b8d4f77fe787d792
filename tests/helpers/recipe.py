"""The meshes of a trainer: five views of one world, as torchtitan-like programs build them."""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh as StockDeviceMesh

from helpers.observation import Family


@dataclass(frozen=True)
class Degrees:
    """Parallel degrees; the world has the product of all but `ep`."""

    pp: int = 8
    dp_replicate: int = 1
    dp_shard: int = 160
    cp: int = 1
    tp: int = 8
    ep: int = 64

    @property
    def world(self) -> int:
        return self.pp * self.dp_replicate * self.dp_shard * self.cp * self.tp


def five_views(family: Family, degrees: Degrees) -> dict[str, StockDeviceMesh]:
    """The world, three views of it for data, dense and sparse layers, one of all axes, a loss."""
    d = degrees
    batch, fsdp = d.dp_replicate * d.dp_shard, d.dp_shard * d.cp
    efsdp = fsdp * d.tp // d.ep
    world = family.init_device_mesh("cpu", (d.world,), mesh_dim_names=("world",))
    data = world._unflatten(0, (d.pp, batch, d.cp, d.tp), ("pp", "batch", "cp", "tp"))
    return {
        "world": world,
        "data": data,
        "loss": data["batch", "cp"]._flatten("loss"),
        "dense": world._unflatten(
            0, (d.pp, d.dp_replicate, fsdp, d.tp), ("pp", "dp_replicate", "fsdp", "tp")
        ),
        "sparse": world._unflatten(
            0, (d.pp, d.dp_replicate, efsdp, d.ep), ("pp", "dp_replicate", "efsdp", "ep")
        ),
        "full": world._unflatten(
            0,
            (d.pp, d.dp_replicate, d.dp_shard, d.cp, d.tp),
            ("pp", "dp_replicate", "dp_shard", "cp", "tp"),
        ),
    }
