"""The process groups of one universe: each made once, counted, and freed again."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence

import torch.distributed as dist

from meshverse import _torch_compat as compat
from meshverse._core import AxisLayout, GroupCache, Layout, OptionsKey, RankMap
from meshverse.agreement import BoardUse, Call
from meshverse.groups.creation import is_made_by_members, make_group, prepare_group
from meshverse.groups.freed import (
    can_be_made_again,
    is_for_others_too,
    make_again,
    notice,
    why_gone,
)
from meshverse.groups.lazy import LazyGroups
from meshverse.groups.meetings import GroupMeetings
from meshverse.groups.request import Group, GroupRequest, Origin
from meshverse.options.group_options import Defaults, GroupOptions
from meshverse.world.holders import Holders
from meshverse.world.users import Users
from meshverse.world.world import World, WorldState

from .consistency import ConsistencyCheck
from .requests import Requests

__all__ = ["UniverseGroups"]


class _Leftovers(WorldState):
    """What universes of one world that could not be made have left in the store.

    Attributes:
        by_ranks: what removes it, by the ranks of these universes. Late ranks read the texts, so
            they stay until these ranks have made a universe.
    """

    def __init__(self) -> None:
        self.by_ranks: dict[str, list[Callable[[], None]]] = {}

    def end(self) -> None:
        """Let go of those universes."""
        self.by_ranks.clear()


class UniverseGroups:
    """What a universe knows of its process groups.

    Args:
        rank_map: position -> global rank.
        position: this rank's, or None if it is outside.
        world: the life of the default group they are made in.
        defaults: what they inherit where an axis says nothing else.
        lazy: make a group when it is first used.
        check_consistency: compare with the other ranks what is about to be made.
        share_world: use the groups of other such universes of this world too.

    Attributes:
        process_groups: my live process groups by c10d name.
        requests: makes the requests that `get_or_make` takes.
        pending: the lazy groups of this world that are still to be made, by c10d name.
        has_own: whether any was asked for that is neither given nor the default group.
    """

    def __init__(
        self,
        rank_map: RankMap,
        position: int | None,
        world: World,
        *,
        defaults: Defaults,
        lazy: bool,
        check_consistency: bool,
        share_world: bool,
    ) -> None:
        self._world = world
        self._lazy = lazy
        self._share_world = share_world
        self._board_use = BoardUse(world.run)
        self._calls = ConsistencyCheck(
            *(rank_map, position, world, self._board_use), lazy=lazy, compares=check_consistency
        )
        self._meetings = GroupMeetings(world, self._board_use)
        self._holders = world.state(Holders)
        self._users = world.state(Users)
        self._lazy_groups = world.state(LazyGroups)
        self._failed = world.state(_Leftovers)
        self.requests = Requests(rank_map, position, world, defaults)
        self.pending = self._lazy_groups.pending
        self._cache = GroupCache()
        self._given: list[Group] = []
        self.has_own = False
        self._leftovers: list[Callable[[], None]] = []  # of universes of these ranks before
        self._to_end: list[Group] = []  # of no universe any more, and not ended yet
        self.process_groups: dict[str, compat.ProcessGroup] = {}
        self._holders.add(self)

    @property
    def number(self) -> int | None:
        """Which one this is among the universes that its ranks made together; None before that."""
        return self._calls.number

    # --- asking for groups ----------------------------------------------------------------------

    def get_or_make(
        self, requests: Sequence[GroupRequest], call: str, layout: Layout, *, asked: bool = True
    ) -> list[Group]:
        """My group along each axis: the known one, or a new one that its members make together.

        Args:
            requests: one an axis.
            call: what the user called, for messages.
            layout: of the mesh that the call makes: its ranks are compared with each other.
            asked: whether somebody asked for these groups; slices need some, and ask for none.

        Returns:
            One group an axis. On a rank outside the rank map, groups without a name.

        Raises:
            RuntimeError: other ranks are building other meshes.
        """
        known = [self._known(request) for request in requests]
        groups = [group for group in known if group is not None]
        if len(groups) < len(known):
            try:
                with self._calls.compared(call, requests, layout) as compared:
                    pairs = zip(requests, known, strict=True)
                    groups = [there or self._get_or_make_one(one, compared) for one, there in pairs]
            except BaseException:
                if self._calls.number is None:  # nobody will destroy this universe
                    left = self._failed.by_ranks.setdefault(self._calls.ranks, [])
                    left.append(self._remove_from_store)
                raise
            if self._calls.number is not None and self._failed.by_ranks:
                # Its ranks made this universe, so none is in a call that failed before.
                self._leftovers += self._failed.by_ranks.pop(self._calls.ranks, [])
        for request, group in zip(requests, groups, strict=True):
            if asked or not group.requests:
                group.count_request(request.axis_name)
        return groups

    def known_names(self, axes: Layout, axis_names: Sequence[str]) -> list[str] | None:
        """Names of the groups along these axes with the usual options, if all are made and alive.

        Arguments as of `Requests.of_axes`, which is the way where this gives None.
        """
        usual_key = self.requests.usual_key
        if usual_key is None:
            return None
        groups: list[Group] | None = self._cache.find(axes, usual_key)
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
        # A group without a name is that of a rank outside the rank map; one that is not known here
        # is of a mesh concatenated from another universe.
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

    def _get_or_make_one(self, request: GroupRequest, call: Call | None) -> Group:
        group: Group = self._cache.get_or_create(
            request.axis, request.options.key, lambda: self._make(request, call)
        )
        if self._is_gone(group):
            self._make_again(group)
        if not group.borrowed:
            self.has_own = True
        return group

    def _is_gone(self, group: Group) -> bool:
        """Whether a group was made and somebody destroyed it."""
        name = group.name
        if name is None or name in self.process_groups or name in self.pending:
            return False
        return compat.find_group(name) is None

    def _make_again(self, group: Group) -> None:
        assert group.name is not None
        make_again(group, self._world, self._meetings)
        self._hold(group.name)

    def _hold(self, name: str, handle: compat.ProcessGroup | None = None) -> None:
        """Keep a group that was made, until somebody destroys it."""
        handle = handle or compat.resolve_group(name)
        self.process_groups[name] = handle
        notice(name, handle, self._world)

    # --- making them ----------------------------------------------------------------------------

    def _make(self, request: GroupRequest, call: Call | None) -> Group:
        if self._share_world and is_made_by_members(request, self._world):
            return self._share(request, call)
        return self._make_own(request, call)

    def _make_own(self, request: GroupRequest, call: Call | None) -> Group:
        group = prepare_group(request, self._world) if self._lazy else None
        if group is not None:
            self._lazy_groups.postpone(group)
        else:
            group = make_group(request, self._world, self._meetings, call)
            if group.name is not None:
                self._hold(group.name)
        if group.name is not None and not group.borrowed:
            self._users.add(group.name)
        return group

    def _share(self, request: GroupRequest, call: Call | None) -> Group:
        # Positions and layouts mean something within one universe only, ranks everywhere.
        name = None
        while name is None:
            shared: Group = self._users.shared.get_or_create(
                *_shared_key(request), lambda: self._make_own(request, call)
            )
            if shared.request is request:
                return shared
            assert shared.name is not None  # it was made by its members
            if self._users.add_to_shared(shared.name):
                name = shared.name
            # Otherwise another thread has just ended it.
        group = Group(request, name, Origin.SHARED, created=False)
        if not self._lazy:
            group.note_first_use(made_here=self._make_pending(name))
        return group

    def before_use(self, name: str) -> None:
        """Make the group of this name now, if it is lazy and still to be made."""
        if name in self.process_groups:
            return
        group = next((group for group in self if group.name == name), None)
        if group is not None and self._is_gone(group) and is_for_others_too(group, self._world):
            self._make_again(group)
            return
        made_here = self._make_pending(name)
        if group is not None:
            group.note_first_use(made_here)

    def _make_pending(self, name: str) -> bool:
        made_here = self._lazy_groups.make(name, self._world, self._meetings)
        try:
            self._hold(name)
        except RuntimeError:
            group = next((group for group in self if group.name == name), None)
            raise RuntimeError(why_gone(group, name, self._world)) from None
        return made_here

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
        """List groups of another universe too, by their names: of a mesh combined with one here."""
        known = {group.name for group in self}
        self._given.extend(
            Group(group.request, group.name, Origin.OTHER_UNIVERSE, created=False, borrowed=True)
            for group in other
            if group.name in names and group.name not in known
        )
        self.process_groups.update(
            (n, group) for n, group in other.process_groups.items() if n in names
        )

    # --- looking at them ------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Group]:
        """Every group, in the order they were first asked for."""
        yield from (entry for _, _, entry in self._cache.entries())
        yield from self._given

    def __len__(self) -> int:
        return len(self._cache) + len(self._given)

    def along(self, axis: AxisLayout) -> list[Group]:
        """The groups along an axis, whatever their options."""
        either = (axis, axis.sorted())
        return [group for group in self if group.request.axis in either]

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
            self._board_use.end(self._world.store)

    def _shared_as(self, group: Group) -> tuple[AxisLayout, OptionsKey] | None:
        return _shared_key(group.request) if self._share_world else None

    def _end(self, group: Group, *, abort: bool) -> None:
        world, name = self._world, group.name
        assert name is not None
        if self.pending.pop(name, None) is None and not world.is_over:
            self._holders.drop(name)  # of meshes concatenated across universes, too
            compat.end_group(name, abort=abort)
        self._to_end.remove(group)

    def _uses_default_group(self) -> bool:
        return any(group.name == self._world.default_group.group_name for group in self)


def _shared_key(request: GroupRequest) -> tuple[AxisLayout, OptionsKey]:
    """What a group is wherever it is asked for: its ranks in order, and its options."""
    ranks = request.my_ranks()
    key = request.options.key  # whose tag has no "; " of the user's
    tag = f"{key.tag}; ranks {RankMap.from_ranks(ranks).fingerprint}"
    return AxisLayout(len(ranks)), key.with_tag(tag)
