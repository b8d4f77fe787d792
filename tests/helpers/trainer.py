"""How a modern trainer lays out its meshes, written against torch's own names only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from trainer_views import Degrees


@dataclass(frozen=True)
class TrainerDegrees(Degrees):
    """Degrees with layers of experts that are split too, each over `etp` of the experts' ranks."""

    etp: int = 1

    @property
    def efsdp(self) -> int:
        """Ranks that share the weights of one part of one expert."""
        return super().efsdp // self.etp


class TrainerMeshes:
    """Every mesh of a training job: views of one world mesh, and slices of those views.

    An axis of size 1 communicates with nobody, so the views give it the fake backend.

    Args:
        degrees: of parallelism; their `world_size` must be that of the job.
    """

    def __init__(self, degrees: TrainerDegrees) -> None:
        d = degrees
        self.world = init_device_mesh("cpu", (d.world_size,), mesh_dim_names=("world",))
        self.data_loading = self._view(("pp", "batch", "cp", "tp"), (d.pp, d.batch, d.cp, d.tp))
        self.loss = self.data_loading["batch", "cp"]._flatten("loss")
        self.dense = self._view(
            ("pp", "dp_replicate", "fsdp", "tp"), (d.pp, d.dp_replicate, d.fsdp, d.tp)
        )
        self.experts = self._view(
            ("pp", "dp_replicate", "efsdp", "ep", "etp"),
            (d.pp, d.dp_replicate, d.efsdp, d.ep, d.etp),
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
            "experts": self.experts,
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
    ("experts", ("ep",)),  # expert parallelism
    ("experts", ("ep", "etp")),
    ("experts", ("efsdp",)),
    ("experts", ("dp_replicate", "efsdp")),  # hybrid FSDP2 of the experts
    ("experts", ("dp_replicate", "efsdp", "ep", "etp")),  # checkpoints of the experts
)
