"""Process groups that were suspended: who uses one is told so, and the backend is not asked."""

from __future__ import annotations

from meshverse.world.world import World, WorldState

from .request import Group

__all__ = ["Asleep", "check_awake"]


class Asleep(WorldState):
    """The suspended process groups of one world.

    Attributes:
        names: their c10d names.
    """

    def __init__(self) -> None:
        self.names: set[str] = set()


def check_awake(name: str, group: Group | None, world: World) -> None:
    """Raise RuntimeError if the group of this c10d name, described by `group`, was suspended."""
    if name not in world.state(Asleep).names:
        return
    what = f"process group {name}" if group is None else group.in_words()
    raise RuntimeError(
        f"The {what} is suspended, by universe.suspend(). Call mesh.universe.resume() on all its "
        "ranks before it is used."
    )
