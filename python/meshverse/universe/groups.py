"""The process groups of one universe: asked for, taken in, and freed again."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Sequence
from functools import partial

import torch.distributed as dist

from meshverse import _torch_compat as compat
from meshverse._core import AxisLayout, Layout
from meshverse.agreement import Call
from meshverse.groups.asleep import Asleep
from meshverse.groups.freed import can_be_made_again
from meshverse.groups.request import Group, GroupRequest, Origin
from meshverse.options.group_options import GroupOptions

from .making import GroupMaker

__all__ = ["UniverseGroups"]


class UniverseGroups(GroupMaker):
    """What a universe knows of its process groups. Arguments as of `GroupMaker`."""

    # --- asking for groups ----------------------------------------------------------------------

    def get_or_make(
        self, requests: Sequence[GroupRequest], call: str, layout: Layout, *, asked: bool = True
    ) -> list[Group]:
        """My group along each axis: the known one, or a new one that its members make together.

        Args:
            requests: one per axis.
            call: what the user called, for messages.
            layout: of the mesh that the call makes: its ranks are compared with each other.
            asked: whether `explain()` counts these requests. Slices under a tag need groups too,
                but stock makes none for a slice. So they count only where a group is new.

        Returns:
            One group per axis. On a rank outside the rank map, groups without a name.

        Raises:
            RuntimeError: other ranks are building other meshes.
        """
        known = [self._known(request) for request in requests]
        groups = [group for group in known if group is not None]
        if len(groups) < len(known):
            make = partial(self._make_missing, requests, known)
            try:
                groups = self._calls.run(make, call, requests, layout)
            except BaseException:
                if self._calls.number is None:  # its first call failed: nobody will destroy it
                    left = self._failed.by_ranks.setdefault(self._calls.ranks, [])
                    left.append(self._remove_from_store)
                raise
            if self._calls.number is not None and self._failed.by_ranks:
                # All its ranks have made this universe now, so none of them is still in an earlier
                # call that failed. What those calls left in the store goes with this universe.
                self._leftovers += self._failed.by_ranks.pop(self._calls.ranks, [])
        for request, group in zip(requests, groups, strict=True):
            if asked or not group.requests:
                group.count_request(request.axis_name)
        return groups

    def known_names(
        self, layout: Layout, axis_names: Sequence[str], first: int = 0
    ) -> list[str] | None:
        """Names of the groups along some axes with the usual options, if all are made and alive.

        Args:
            layout: of a mesh.
            axis_names: of these axes of the mesh.
            first: index of the first of them.
        """
        usual_key = self.requests.usual_key
        if usual_key is None:
            return None
        groups: list[Group] | None = self._cache.find(layout, first, len(axis_names), usual_key)
        if groups is None:
            return None
        names = []
        for group in groups:
            if group.name not in self.process_groups:
                return None
            names.append(group.name)
        for group, axis_name in zip(groups, axis_names, strict=True):
            group.requests[axis_name] = group.requests.get(axis_name, 0) + 1
        return names

    def request_tagged(
        self,
        axes: Layout,
        axis_names: Sequence[str],
        group_names: Sequence[str],
        tags: Sequence[str],
    ) -> list[Group]:
        """Groups like those of these names along these axes, under other isolation tags."""
        requests = []
        for index, (axis, axis_name) in enumerate(zip(axes, axis_names, strict=True)):
            like = self._like(axis, axis_name, group_names[index] if group_names else None)
            options = like.options.with_tag(tags[index])
            requests.append(like._replace(axis_name=axis_name, options=options))
        return self.get_or_make(requests, "isolate", axes, asked=False)

    def _like(self, axis: AxisLayout, axis_name: str, group_name: str | None) -> GroupRequest:
        # Without a group's name, this rank is outside the rank map. A name that is not known here
        # belongs to a mesh that was concatenated from another universe.
        along = [group for group in self.along(axis) if group not in self._given]
        named = [group for group in along if group_name is None or group.name == group_name]
        if named:
            return named[0].request
        return self.requests.inherited(axis, axis_name)

    def _known(self, request: GroupRequest) -> Group | None:
        group: Group | None = self._cache.get(request.axis, request.options.key)
        if group is None or not self._is_gone(group):
            return group
        assert group.name is not None
        if can_be_made_again(group, self._world):
            return group if self._lazy else None
        # All ranks make another one.
        self._cache.remove(request.axis, request.options.key)
        shared_as = self._shared_as(group)
        self._users.remove(group.name, shared_as)
        if shared_as is not None:
            self._users.unshare(group.name, shared_as)
        return None

    def _make_missing(
        self, requests: Sequence[GroupRequest], known: Sequence[Group | None], call: Call | None
    ) -> list[Group]:
        pairs = zip(requests, known, strict=True)
        return [there or self._get_or_make_one(one, call) for one, there in pairs]

    def _get_or_make_one(self, request: GroupRequest, call: Call | None) -> Group:
        options = request.options
        self._keys[options.digest] = options.key
        group = self._make_in_cache(request, call)
        if group.name not in self.process_groups and self._is_gone(group):
            self._make_again(group)
        if not group.borrowed:
            self.has_own = True
        return group

    # --- taking in groups that are there --------------------------------------------------------

    def adopt(self, axis: AxisLayout, axis_name: str, group: compat.ProcessGroup) -> str:
        """Take in a process group the user made; it is listed but neither shared nor freed.

        Returns:
            The group's c10d name.
        """
        options = GroupOptions.given(group)
        request = self.requests.given(axis, axis_name, options)
        name = group.group_name
        given = Group(request, name, Origin.GIVEN, created=False, borrowed=True)
        given.count_request(axis_name)
        self._given.append(given)
        self._hold(name, group)
        return name

    def borrow(self, other: UniverseGroups, names: Collection[str]) -> None:
        """List groups of another universe too: a mesh of it was concatenated with one of this.

        Args:
            other: the groups of that universe.
            names: c10d names of those that are used here.
        """
        known = {group.name for group in self}
        self._given.extend(
            Group(group.request, group.name, Origin.OTHER_UNIVERSE, created=False, borrowed=True)
            for group in other
            if group.name in names and group.name not in known
        )
        self.process_groups.update(
            (n, group) for n, group in other.process_groups.items() if n in names
        )

    # --- the end of them ------------------------------------------------------------------------

    def free(self, *, abort: bool) -> None:
        """Free what was made for this universe and no other uses; last made, first freed.

        If a group cannot be freed, the others are freed all the same. A second call tries again
        what is left.

        Args:
            abort: end what is going on in them, where the backend can, instead of waiting for it.

        Raises:
            Whatever c10d raised for the last group that could not be freed.
        """
        world = self._world
        ends_all = abort and not world.is_over and self._uses_default_group()
        mine = [group for group in self if group.name is not None and not group.borrowed]
        self._to_end += [g for g in mine if self._users.remove(str(g.name), self._shared_as(g))]
        self._cache.clear()
        self._given.clear()
        self.process_groups.clear()
        self._holders.discard(self)
        with contextlib.ExitStack() as ending:  # calls all of these, last first, whatever fails
            if not abort:
                ending.callback(self._remove_from_store)
                while self._leftovers:
                    ending.callback(self._leftovers.pop())
            for group in self._to_end:
                ending.callback(self._end, group, abort=abort)
            if ends_all:
                ending.callback(compat.abort_all)

    @property
    def is_freed(self) -> bool:
        """Whether `free` has nothing left to do."""
        return not self._to_end and not len(self)

    def _remove_from_store(self) -> None:
        if self._world.is_over:
            return
        with contextlib.suppress(dist.DistError):  # where the store's host is gone, so is the rest
            self._meetings.remove_from_store()
            self._calls.remove_from_store()
            self._world.run.remove_user(self._board_user, self._world.store)

    def _end(self, group: Group, *, abort: bool) -> None:
        world, name = self._world, group.name
        assert name is not None
        if self.pending.pop(name, None) is None and not world.is_over:
            self._holders.drop(name)  # of meshes concatenated across universes, too
            compat.end_group(name, abort=abort)
            world.state(Asleep).names.discard(name)
        self._to_end.remove(group)

    def _uses_default_group(self) -> bool:
        return any(group.name == self._world.default_group.group_name for group in self)
