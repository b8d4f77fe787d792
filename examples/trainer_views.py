"""The meshes of a large trainer: five views of one world.

A trainer that combines pipeline, data, context, tensor and expert parallelism looks at the same
ranks in several ways: the data loader, the dense layers and the experts each split them in their
own way. The demo, the benchmarks and the tests build their meshes from this one recipe.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Degrees", "InitDeviceMesh", "answers", "count_process_groups", "five_views"]

InitDeviceMesh = Callable[..., DeviceMesh]
"""Stock's `init_device_mesh` or Meshverse's."""


@dataclass(frozen=True)
class Degrees:
    """Degrees of parallelism that split the world; by default 10,240 ranks.

    Attributes:
        pp: pipeline stages.
        dp_replicate: replicas of the sharded model.
        dp_shard: ranks that share the parameters of one replica.
        cp: ranks that share a sequence (context parallel).
        tp: ranks that share a layer (tensor parallel).
        ep: ranks that the experts are spread over; taken from dp_shard, cp and tp.
    """

    pp: int = 8
    dp_replicate: int = 1
    dp_shard: int = 160
    cp: int = 1
    tp: int = 8
    ep: int = 64

    @property
    def world_size(self) -> int:
        """Number of ranks."""
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
        ranks, left_over = divmod(self.fsdp * self.tp, self.ep)
        if left_over:
            raise ValueError(
                f"ep={self.ep} does not divide the {self.fsdp * self.tp} ranks of dp_shard="
                f"{self.dp_shard} * cp={self.cp} * tp={self.tp}."
            )
        return ranks


def five_views(init_device_mesh: InitDeviceMesh, degrees: Degrees) -> dict[str, DeviceMesh]:
    """Return the five views of a world, and the flattened axis that losses are averaged over.

    Args:
        init_device_mesh: whose meshes to make.
        degrees: how to split the world; the default process group has `degrees.world_size` ranks.
    """
    d = degrees
    world = init_device_mesh("cpu", (d.world_size,), mesh_dim_names=("world",))

    def view(**axes: int) -> DeviceMesh:
        # By index and in the private spelling, which stock has in every version.
        return world._unflatten(0, tuple(axes.values()), tuple(axes))

    data = view(pp=d.pp, batch=d.batch, cp=d.cp, tp=d.tp)
    return {
        "world": world,
        "data": data,
        "loss": data["batch", "cp"]._flatten("loss"),
        "dense": view(pp=d.pp, dp_replicate=d.dp_replicate, fsdp=d.fsdp, tp=d.tp),
        "experts": view(pp=d.pp, dp_replicate=d.dp_replicate, efsdp=d.efsdp, ep=d.ep),
        "full": view(pp=d.pp, dp_replicate=d.dp_replicate, dp_shard=d.dp_shard, cp=d.cp, tp=d.tp),
    }


def answers(mesh: DeviceMesh) -> dict[str, Any]:
    """Describe a mesh as plain data: equal for two meshes that are the same. O(world)."""
    return {
        "axes": mesh.mesh_dim_names,
        "shape": tuple(mesh.shape),
        "coordinate": tuple(mesh.get_coordinate() or ()),
        "axis ranks": [dist.get_process_group_ranks(group) for group in mesh.get_all_groups()],
        "mesh": mesh.mesh.tolist(),
    }


def count_process_groups() -> int:
    """Process groups this rank is a member of, the default group included, by c10d's own count."""
    return len(c10d._world.pg_map)


if __name__ == "__main__":
    print("A module, not a program: examples/demo.py and the benchmarks import it.")
