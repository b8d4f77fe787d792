"""Groups that somebody destroyed while meshes still have them: noticed, made again, explained.

Several axes with the same ranks share one process group here, where torch makes one for each. A
program that destroys the group of one mesh means that mesh only. So the other meshes get the group
again. It is made under its old name, because meshes, tensors and compiled graphs find it by name.

Example: `mesh["dp"]` and `other["data"]` share a group, and the program calls
`destroy_process_group(mesh.get_group("dp"))`. When `other["data"]` is used next, its members make
the group again.
"""

from __future__ import annotations

import logging
import weakref

import torch.distributed as dist

from meshverse import _torch_compat as compat
from meshverse.agreement import shortened
from meshverse.world.holders import Holders
from meshverse.world.users import Users
from meshverse.world.world import World, WorldState

from .creation import is_made, is_made_by_members, make_prepared
from .meetings import GroupMeetings
from .once import make_once
from .request import Group, Origin

__all__ = [
    "can_be_made_again",
    "is_for_others_too",
    "make_again",
    "notice",
    "why_gone",
]

_logger = logging.getLogger(__name__)


class _MadeAgain(WorldState):
    """What was made again in one world.

    Attributes:
        times: how often, by c10d name. Its members all make a group, so they agree on it.
        is_said: whether the log tells of it.
    """

    def __init__(self) -> None:
        self.times: dict[str, int] = {}
        self.is_said = False


def notice(name: str, handle: compat.ProcessGroup, world: World) -> None:
    """Have the universes of a world forget a group when somebody destroys it."""
    compat.when_destroyed(handle, _let_go, name, weakref.ref(world))


def _let_go(name: str, world_reference: weakref.ref[World]) -> None:
    world = world_reference()
    if world is not None:
        world.state(Holders).drop(name)


def is_for_others_too(group: Group, world: World) -> bool:
    """Whether the members of a destroyed group make it again when it is used.

    They do if several axes have it: in torch each axis has a group of its own, and only one of
    these was destroyed. If one axis alone has the group, it is gone, as in torch.
    """
    assert group.name is not None
    is_shared = sum(group.requests.values()) > 1 or world.state(Users).are_several(group.name)
    return is_shared and can_be_made_again(group, world) and _shrunk_to(group.name) is None


def can_be_made_again(group: Group, world: World) -> bool:
    """Whether my members can make a destroyed group again by themselves."""
    return not group.borrowed and is_made_by_members(group.request, world)


def make_again(group: Group, world: World, meetings: GroupMeetings) -> None:
    """Make a group that was destroyed, under its name; its other members do so too.

    Raises:
        RuntimeError: other members did not come to make it, or wait for me to make another one.
    """
    name, again = group.name, world.state(_MadeAgain)
    assert name is not None

    def make() -> bool:
        if is_made(name):  # another thread made it meanwhile
            return False
        times = again.times.get(name, 0) + 1
        try:
            make_prepared(group, world, meetings, times)
        finally:
            if is_made(name):  # also if this rank was interrupted right after that
                again.times[name] = times
        return True

    if not make_once(group, world, make):
        return
    group.origin = Origin.AGAIN
    if not again.is_said and group.request.position == 0:
        _logger.warning(
            "The %s was destroyed by destroy_process_group(), and made again for the other axes "
            "that have it. To end what is a mesh's alone, call mesh.universe.destroy(). (This is "
            "said once.)",
            group.in_words(),
        )
    again.is_said = True


def why_gone(group: Group | None, name: str, world: World) -> str:
    """What to say of a group that was destroyed, and how to have it again."""
    left = _shrunk_to(name)
    if left is not None:
        what = f"process group {name}" if group is None else group.in_words()
        return (
            f"The {what} was shrunk by shrink_group() to ranks {shortened(left)}, in a group of "
            "its own, and no rank has its old place any more. Make a mesh of the ranks that are "
            "left: init_device_mesh(..., ranks=...), or DeviceMesh.from_group() of the new group."
        )
    if group is None or group.borrowed:
        what = f"process group {name}" if group is None else group.in_words()
        return (
            f"The {what} was destroyed, by destroy_process_group(group) or with another universe "
            "that made it. Make the mesh again, on groups that are there."
        )
    for_whom = "this mesh too" if can_be_made_again(group, world) else "the new mesh only"
    return (
        f"The {group.in_words()} was destroyed, by destroy_process_group(group). Make the mesh "
        "again with universe=mesh.universe, on all its ranks: groups that are gone are made "
        f"again, for {for_whom}."
    )


def _shrunk_to(name: str) -> list[int] | None:
    """Global ranks that `shrink_group` has left of a group that it ended, or None."""
    shrunk = compat.shrunk_from(name)
    return None if shrunk is None else dist.get_process_group_ranks(shrunk)
