"""Which meshes are equal, to `==`, to hashes and to the guards of torch.compile."""

from __future__ import annotations

import hashlib
from typing import cast

from torch.distributed.device_mesh import DeviceMesh as StockDeviceMesh

from meshverse import _torch_compat as compat
from meshverse.layouts.computed import computed
from meshverse.world.world import World

from .base import MeshBase

__all__ = ["ComparedMesh"]


class ComparedMesh(MeshBase):
    """A mesh that equals all meshes of its world with its ranks, axes, names and tags."""

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if type(other) is not type(self):  # isinstance runs Python code of torch's metaclass
            if not isinstance(other, StockDeviceMesh):
                return False
            other = cast("StockDeviceMesh", compat.real_mesh(other))
            if not isinstance(other, MeshBase):
                return self._equals_stock(other)
        if self._identity != other._identity:
            return False
        mine, theirs = self._universe, other._universe
        if mine is theirs:
            return True
        # torch's caches are keyed by meshes. What they hold for a mesh whose groups have ended must
        # not be found for a new mesh.
        if mine.is_over or theirs.is_over:
            return False
        return mine.world is theirs.world or self._may_be_of(theirs.world)

    def _equals_stock(self, stock: StockDeviceMesh) -> bool:
        # A stock mesh does not know its world, so it is taken for one of this world.
        is_apart = (
            self._universe.token is not None
            or bool(self._description.tags)
            or self._universe.is_over
            or not self._may_be_of(World.current())
        )
        return not is_apart and compat.equals_stock(self, stock)

    def _may_be_of(self, world: World | None) -> bool:
        # What torch's caches hold for a mesh of an earlier world must not be found for one of this
        # world: the earlier groups are gone. A mesh that was loaded without a world may be of any.
        # Under torch's threaded test backend, each thread is a rank and has a world of its own.
        mine = self._universe.world
        return mine is world or mine is None or world is None

    def __hash__(self) -> int:
        # Stock's: it hashes the tuple of ranks, which remembers its hash. So equal meshes of either
        # class have equal hashes.
        return self._hash or StockDeviceMesh.__hash__(self)  # type: ignore[no-untyped-call]

    def _stable_hash(self) -> str:
        # torch finds compiled graphs on disk by this hash, and the ranks of a host share the disk.
        # A graph contains its rank's coordinate and the names of its groups. Stock's hash leaves
        # both out, so one rank can get the graph of another. A graph that one rank compiles for
        # all ranks contains neither.
        key = self._stable_key()
        if not compat.compiles_one_graph():
            # These names do not count as use of the groups, so lazy groups stay lazy.
            key = *key, self._universe.rank, self.group_names
        return hashlib.blake2b(repr(key).encode(), digest_size=16).hexdigest()

    @computed
    def compile_guard(self) -> tuple[object, ...]:
        """What must stay equal for a compiled graph to be used: all that makes meshes equal.

        Short strings, where stock's guard compares the tuple of all ranks at every call. The world
        counts, and which universes of it had ended, because a graph knows its process groups by
        names.
        """
        world, generation = self._universe.world, self._universe.generation
        return *self._stable_key(), generation, None if world is None else world.label

    def _stable_key(self) -> tuple[object, ...]:
        # What makes meshes equal in one world, the same in every process.
        description = self._description
        return (
            self._universe.rank_map.fingerprint,
            str(description.layout),
            description.device_type,
            description.axis_names,
            description.preserve_rank_order,
            description.flattened,
            description.tags,
            self._universe.token is None,  # a decoupled mesh equals no other
        )
