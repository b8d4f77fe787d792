"""One line in the log where groups list their ranks in another order than the mesh does.

torch sorts the ranks of a group. DTensor and FSDP2 hand out shards by the rank in a group, and
`torch.distributed.checkpoint` goes by the coordinate in the mesh: where the two differ, what is
saved is permuted.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

from meshverse._core import RankMap
from meshverse.world.world import World, WorldState

__all__ = ["note_order"]

_logger = logging.getLogger(__name__)


class _Said(WorldState):
    """Whether the line was logged in a world; the lock is acquired once, by who logs it."""

    def __init__(self) -> None:
        self.once = threading.Lock()


def note_order(world: World, mesh: object, rank_map: RankMap, names: Sequence[str]) -> None:
    """Log, once in a world and on the first rank of the mesh, that ranks of groups were sorted.

    Args:
        world: of the mesh.
        mesh: for the message.
        rank_map: of its universe.
        names: of the axes whose groups list their ranks in another order than the mesh.
    """
    if world.state(_Said).once.acquire(blocking=False) and world.rank == rank_map.rank_at(0):
        _logger.warning(
            "%s over %s lists ranks of axis %s in an order that is not ascending, and its process "
            "groups have them sorted, as torch's do. DTensor and FSDP2 hand out shards by the rank "
            "in a group, checkpoints go by the coordinate in the mesh: what is saved is permuted. "
            "Give preserve_rank_order=True (meshverse.DeviceMesh has it for every torch, torch's "
            "own from 2.15 on), or make the mesh with meshverse.init_device_mesh(..., ranks=...). "
            "(This is said once.)",
            mesh,
            rank_map,
            " and ".join(map(repr, names)),
        )
