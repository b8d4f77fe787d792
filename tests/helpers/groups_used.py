"""Process groups that were communicated in, as gloo itself counts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch.distributed import distributed_c10d as c10d


def collectives() -> dict[str, int]:
    """Count the collectives that each gloo group of this rank has begun, by its c10d name."""
    return {
        name: group._get_sequence_number_for_group()
        for group, name in list(c10d._world.pg_names.items())
    }


@contextlib.contextmanager
def groups_used() -> Iterator[set[str]]:
    """The names of the groups in which a collective was begun inside the block, filled at its end.

    By whatever thread, so also in a backward pass.
    """
    used: set[str] = set()
    before = collectives()
    yield used
    used.update(name for name, count in collectives().items() if count > before.get(name, 0))
