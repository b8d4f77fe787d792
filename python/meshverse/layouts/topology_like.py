"""The methods of a topology that meshes call; `meshverse.Topology` has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

import torch

from meshverse._core import RankMap


@runtime_checkable
class TopologyLike(Protocol):
    """The node, and perhaps more, of each rank of a world; see `meshverse.Topology`."""

    def check_has(self, rank_map: RankMap) -> None:
        """Raise ValueError if one of these ranks is not in the topology."""

    def spans(self, name: str, ranks: Sequence[int]) -> int | None:
        """Count the parts of a level, such as "node", that ranks are on; None without the level."""

    def order(
        self,
        mesh_shape: Sequence[int],
        mesh_dim_names: Sequence[str] | None = None,
        traffic: Mapping[str, float] | None = None,
    ) -> torch.Tensor:
        """Return the rank at each position of a mesh, shape (world size,)."""
