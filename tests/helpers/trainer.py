"""How a modern trainer lays out its meshes, written against torch's own names only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


@dataclass(frozen=True)
class Degrees:
    """How many ways each kind of parallelism splits the work; expert axes reuse fsdp and tensor."""

    pipeline: int = 1
    replicate: int = 1
    shard: int = 1
    context: int = 1
    tensor: int = 1
    expert: int = 1
    expert_tensor: int = 1

    @property
    def world_size(self) -> int:
        return self.pipeline * self.batch * self.context * self.tensor

    @property
    def batch(self) -> int:
        """Ranks with different samples."""
        return self.replicate * self.shard

    @property
    def fsdp(self) -> int:
        """Ranks that share the dense weights: those with different samples or tokens."""
        return self.shard * self.context

    @property
    def expert_fsdp(self) -> int:
        """Ranks that share the weights of one expert."""
        ranks, left_over = divmod(self.fsdp * self.tensor, self.expert * self.expert_tensor)
        assert not left_over, "the expert axes must divide the ranks of fsdp and tensor"
        return ranks


class TrainerMeshes:
    """Every mesh of a training job: views of one world mesh, and slices of those views.

    An axis of size 1 communicates with nobody, so the views give it the fake backend.

    Args:
        degrees: of parallelism; their `world_size` must be that of the job.
    """

    def __init__(self, degrees: Degrees) -> None:
        pp, replicate, tp = degrees.pipeline, degrees.replicate, degrees.tensor
        self.world = init_device_mesh("cpu", (degrees.world_size,), mesh_dim_names=("world",))
        self.data_loading = self._view(
            ("pp", "batch", "cp", "tp"), (pp, degrees.batch, degrees.context, tp)
        )
        self.loss = self.data_loading["batch", "cp"]._flatten("loss")
        self.dense = self._view(
            ("pp", "dp_replicate", "fsdp", "tp"), (pp, replicate, degrees.fsdp, tp)
        )
        self.sparse = self._view(
            ("pp", "dp_replicate", "efsdp", "ep", "etp"),
            (pp, replicate, degrees.expert_fsdp, degrees.expert, degrees.expert_tensor),
        )

    def _view(self, names: tuple[str, ...], sizes: tuple[int, ...]) -> DeviceMesh:
        unused = {name: "fake" for name, size in zip(names, sizes, strict=True) if size == 1}
        # By index: torch 2.11 refuses the name of the axis to unflatten.
        return self.world._unflatten(0, sizes, names, backend_override=unused)

    def all(self) -> dict[str, DeviceMesh]:
        """Every mesh that the trainer hands out: the views, and the slices its parts ask for."""
        meshes = {
            "world": self.world,
            "data loading": self.data_loading,
            "loss": self.loss,
            "dense": self.dense,
            "sparse": self.sparse,
        }
        for view, axes in _SLICES:
            parent = meshes[view]
            meshes[f"{view}: {' '.join(axes)}"] = parent[axes if len(axes) > 1 else axes[0]]
        return meshes


_SLICES: Sequence[tuple[str, tuple[str, ...]]] = (
    ("data loading", ("batch",)),  # the data loader
    ("data loading", ("batch", "cp")),
    ("data loading", ("cp",)),  # context parallelism
    ("dense", ("pp",)),  # the pipeline's schedule
    ("dense", ("tp",)),  # tensor parallelism
    ("dense", ("fsdp",)),  # FSDP2
    ("dense", ("dp_replicate", "fsdp")),  # hybrid FSDP2
    ("dense", ("dp_replicate", "fsdp", "tp")),  # checkpoints of the dense weights
    ("sparse", ("ep",)),  # expert parallelism
    ("sparse", ("ep", "etp")),
    ("sparse", ("efsdp",)),
    ("sparse", ("dp_replicate", "efsdp")),  # hybrid FSDP2 of the experts
    ("sparse", ("dp_replicate", "efsdp", "ep", "etp")),  # checkpoints of the experts
)
