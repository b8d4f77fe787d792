"""The meshes of a trainer: five views of one world, as torchtitan-like programs build them."""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh as StockDeviceMesh

from helpers.observation import Family


@dataclass(frozen=True)
class Degrees:
    """How often each kind of parallelism splits the world; by default 10,240 ranks.

    Experts take their `ep` and `etp` from the ranks of dp_shard, cp and tp.
    """

    pp: int = 8
    dp_replicate: int = 1
    dp_shard: int = 160
    cp: int = 1
    tp: int = 8
    ep: int = 64
    etp: int = 1

    @property
    def world(self) -> int:
        return self.pp * self.batch * self.cp * self.tp

    @property
    def batch(self) -> int:
        """Ranks with different samples."""
        return self.dp_replicate * self.dp_shard

    @property
    def fsdp(self) -> int:
        """Ranks that share the dense weights: those with different samples or tokens."""
        return self.dp_shard * self.cp

    @property
    def efsdp(self) -> int:
        """Ranks that share the weights of one expert."""
        ranks, left_over = divmod(self.fsdp * self.tp, self.ep * self.etp)
        assert not left_over, "the expert axes must divide the ranks of dp_shard, cp and tp"
        return ranks


def five_views(family: Family, degrees: Degrees) -> dict[str, StockDeviceMesh]:
    """The world, three views of it for data, dense and sparse layers, one of all axes, a loss."""
    d = degrees
    world = family.init_device_mesh("cpu", (d.world,), mesh_dim_names=("world",))
    data = world._unflatten(0, (d.pp, d.batch, d.cp, d.tp), ("pp", "batch", "cp", "tp"))
    return {
        "world": world,
        "data": data,
        "loss": data["batch", "cp"]._flatten("loss"),
        "dense": world._unflatten(
            0, (d.pp, d.dp_replicate, d.fsdp, d.tp), ("pp", "dp_replicate", "fsdp", "tp")
        ),
        "sparse": world._unflatten(
            0, (d.pp, d.dp_replicate, d.efsdp, d.ep), ("pp", "dp_replicate", "efsdp", "ep")
        ),
        "full": world._unflatten(
            0,
            (d.pp, d.dp_replicate, d.dp_shard, d.cp, d.tp),
            ("pp", "dp_replicate", "dp_shard", "cp", "tp"),
        ),
    }
