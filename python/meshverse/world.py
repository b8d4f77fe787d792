"""One life of the default process group: what all meshes made during it have in common."""

from __future__ import annotations

import threading
import weakref
from functools import cached_property

from . import _torch_compat as compat
from .backend_override import NO_OVERRIDE, GroupOptions

__all__ = ["World"]


class World:
    """The default process group, from `init_process_group` to its end, as this rank sees it.

    Holds the default group weakly: when torch lets go of it, the world is over. Ranks that are
    threads have a default group, and so a world, each.

    Attributes:
        rank: this process's global rank.
        size: number of ranks.
        ordinals: number of the last universe of each rank map, by the map's fingerprint.
        thread_id: of the thread that is this rank, under torch's threaded test backend; else None.
    """

    def __init__(self, default_group: compat.ProcessGroup) -> None:
        self._default_group = weakref.ref(default_group)
        self.rank = default_group.rank()
        self.size = default_group.size()
        self.thread_id = compat.thread_id()
        self.ordinals: dict[str, int] = {}
        self._names_made: dict[str, int] = {}
        self._names_lock = threading.Lock()  # protects _names_made
        self._can_split: dict[str | None, bool] = {}
        self._hazards: dict[str, str | None] = {}
        self._device_types_set_up: set[str] = set()

    @staticmethod
    def current() -> World | None:
        """The world of this thread, or None before `init_process_group`."""
        default_group = compat.current_default_group()
        if default_group is None:
            return None
        with _worlds_lock:
            world = _worlds.get(default_group)
            if world is None:
                world = _worlds[default_group] = World(default_group)
            return world

    @property
    def default_group(self) -> compat.ProcessGroup:
        """The default process group; RuntimeError if it is not this world's any more."""
        group, current = self._default_group(), compat.current_default_group()
        if group is None or group is not current:
            state = "there is none" if current is None else "there is another one"
            raise RuntimeError(
                f"The default process group of {self.size} ranks that this mesh was made with is "
                f"gone ({state} now), and its process groups with it. Make the mesh again after "
                "init_process_group()."
            )
        return group

    @cached_property
    def default_options(self) -> GroupOptions:
        """What a group is when nothing is overridden."""
        return GroupOptions.resolve(NO_OVERRIDE, self.default_group)

    def can_split(self, backend: str | None) -> bool:
        """Whether groups of this backend are split off the default group. Decided once."""
        if backend not in self._can_split:
            self._can_split[backend] = compat.can_split(self.default_group, backend)
        return self._can_split[backend]

    def members_only_hazard(self, backend: str) -> str | None:
        """Why all ranks must make a group of this backend, or None. Decided once."""
        if backend not in self._hazards:
            self._hazards[backend] = compat.members_only_hazard(self.default_group, backend)
        return self._hazards[backend]

    def new_name(self, identity: str) -> str:
        """A group name: what the group is, and how often this very group was made in this world.

        All members of the group, and nobody else, have exactly that in common; so they agree on the
        name, whatever other groups each of them made before.
        """
        with self._names_lock:
            count = self._names_made.get(identity, 0)
            self._names_made[identity] = count + 1
        return f"meshverse-{identity}-{count}"

    def set_up_device(self, mesh: compat.StockDeviceMesh, device_type: str) -> None:
        """Choose this rank's device as stock does, once for each device type."""
        if device_type not in self._device_types_set_up:
            compat.set_up_device(mesh)
            self._device_types_set_up.add(device_type)


_worlds: weakref.WeakKeyDictionary[compat.ProcessGroup, World] = weakref.WeakKeyDictionary()
_worlds_lock = threading.Lock()  # protects _worlds
