"""Making the process groups of one universe: at once, at first use, again, or shared."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from meshverse import _torch_compat as compat
from meshverse._core import AxisLayout, GroupCache, OptionsKey, RankMap
from meshverse.agreement import Call, shortened, users_line
from meshverse.groups.asleep import Asleep, check_awake
from meshverse.groups.creation import is_made_by_members, make_group, prepare_group
from meshverse.groups.freed import is_for_others_too, make_again, notice, why_gone
from meshverse.groups.lazy import LazyGroups
from meshverse.groups.meetings import GroupMeetings
from meshverse.groups.request import Group, GroupRequest, Origin
from meshverse.options.group_options import Defaults
from meshverse.report.explain import how_it_came
from meshverse.world.holders import Holders
from meshverse.world.users import SharedAs, Users
from meshverse.world.world import World, WorldState

from .consistency import ConsistencyCheck
from .requests import Requests

__all__ = ["GroupMaker"]

_log = logging.getLogger(__name__)


class Leftovers(WorldState):
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


class GroupMaker:
    """Makes the process groups of one universe, and lists them.

    Args:
        rank_map: position -> global rank.
        position: this rank's, or None if it is outside.
        world: the life of the default group they are made in.
        defaults: what they inherit where an axis says nothing else.
        lazy: make a group when it is first used.
        check_consistency: compare with the other ranks what is about to be made.
        shared: groups that other universes make and use too, by ranks and options; None if this
            one shares with no other.
        part_of: the groups of the universe that this one is a part of, if it is.

    Attributes:
        process_groups: my live process groups by c10d name.
        requests: makes the requests that `get_or_make` takes.
        pending: the lazy groups of this world that are still to be made, by c10d name.
        has_own: whether any was asked for that is neither given nor the default group.
    """

    _calls: ConsistencyCheck

    def __init__(
        self,
        rank_map: RankMap,
        position: int | None,
        world: World,
        *,
        defaults: Defaults,
        lazy: bool,
        check_consistency: bool,
        shared: GroupCache | None = None,
        part_of: GroupMaker | None = None,
    ) -> None:
        self._world = world
        self._lazy = lazy
        self._shared = shared if part_of is None else part_of.share()
        self._has_shared_all = self._shared is not None
        self._unshared = threading.Condition()
        self._makers: list[int] = []  # threads that are making a group that no part will find
        self._board_user = object()
        self._calls = ConsistencyCheck(
            *(rank_map, position, world, self._board_user),
            lazy=lazy,
            compares=check_consistency,
            part_of=None if part_of is None else part_of._calls,
        )
        self._meetings = GroupMeetings(world, self._board_user)
        self._holders = world.state(Holders)
        self._users = world.state(Users)
        self._lazy_groups = world.state(LazyGroups)
        self._failed = world.state(Leftovers)
        self.requests = Requests(rank_map, position, world, defaults)
        self.pending = self._lazy_groups.pending
        self._cache = GroupCache()
        self._keys: dict[str, OptionsKey] = {}  # of the groups in the cache, by digest
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

    def known(self, axis: AxisLayout, key_digest: str | None) -> Group | None:
        """The group of an axis with this options key, if there is one already."""
        key = self._keys.get(key_digest or "")
        if key is not None:
            group: Group | None = self._cache.get(axis, key) or self._cache.get(axis.sorted(), key)
            if group is not None:
                return group
        given = (one for one in self._given if one.request.axis in (axis, axis.sorted()))
        return next((one for one in given if one.request.options.digest == key_digest), None)

    # --- making them ----------------------------------------------------------------------------

    def _make_in_cache(self, request: GroupRequest, call: Call | None) -> Group:
        """The group of a request: the one in the cache, or a new one, which is put there."""
        thread = threading.get_ident()
        with self._unshared:
            is_shared = self._shared is not None
            if not is_shared:
                self._makers.append(thread)
        make = self._share if is_shared else self._make_own
        try:
            group: Group = self._cache.get_or_create(
                request.axis, request.options.key, partial(make, request, call)
            )
        finally:
            if not is_shared:
                with self._unshared:
                    self._makers.remove(thread)
                    self._unshared.notify_all()
        return group

    def _make_own(self, request: GroupRequest, call: Call | None) -> Group:
        group = prepare_group(request, self._world) if self._lazy else None
        if group is not None:
            self._lazy_groups.postpone(group)
        else:
            group, mine = make_group(request, self._world, self._meetings, call)
            if group.name is not None:
                self._hold(group.name, mine)
        if group.name is not None and not group.borrowed:
            self._users.add(group.name)
            if group.created:  # and not lazy
                self._tell(group)
        return group

    def _tell(self, group: Group) -> None:
        """Log how a group came to be, on the first of its ranks: one line a group."""
        if not _log.isEnabledFor(logging.DEBUG):
            return
        ranks = group.request.my_ranks()
        if ranks[0] == self._world.rank:
            _log.debug(
                "process group of axis %r with ranks %s, options %s: %s, asked for at %s. %s.",
                *(group.request.axis_name, shortened(ranks), group.request.options.in_words()),
                *(how_it_came(group), users_line(), self._why_new(group, ranks)),
            )

    def _why_new(self, group: Group, ranks: Sequence[int]) -> str:
        """Why no group that was there was shared."""
        makers = [one for one in self._holders.alive() if isinstance(one, GroupMaker)]
        for maker in (self, *makers):
            for other in maker:
                if other is group or other.name == group.name or other.request.my_ranks() != ranks:
                    continue
                axis = f"axis {other.request.axis_name!r}"
                if other.request.options.key != group.request.options.key:
                    options = other.request.options.in_words()
                    return f"Not shared with {axis}, which has options {options}"
                return f"Not shared with {axis} of a mesh that was made apart, without universe="
        return "It is the first of these ranks"

    def _share(self, request: GroupRequest, call: Call | None) -> Group:
        if self._shared is None or not is_made_by_members(request, self._world):
            return self._make_own(request, call)
        # A layout means something within one universe only, ranks mean the same everywhere: so the
        # group is looked up by its ranks. The mesh over ranks 4-7 finds what one over 0-7 has made.
        name = None
        while name is None:
            shared: Group = self._shared.get_or_create(
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
            self._note_first_use(group, self._make_pending(name))
        return group

    def before_use(self, name: str) -> None:
        """Make the group of this name now, if it is lazy and still to be made."""
        if name in self.process_groups:
            return
        group = next((group for group in self if group.name == name), None)
        check_awake(name, group, self._world)
        if group is not None and self._is_gone(group) and is_for_others_too(group, self._world):
            self._make_again(group)
            return
        made_here = self._make_pending(name)
        if group is not None:
            self._note_first_use(group, made_here)

    def _note_first_use(self, group: Group, made_here: bool) -> None:
        group.note_first_use(made_here)
        if made_here:
            self._tell(group)

    def _make_pending(self, name: str) -> bool:
        if name in self._world.state(Asleep).names:  # to be kept when it was resumed
            return False
        made_here = self._lazy_groups.make(name, self._world, self._meetings)
        try:
            self._hold(name)
        except RuntimeError:
            group = next((group for group in self if group.name == name), None)
            raise RuntimeError(why_gone(group, name, self._world)) from None
        return made_here

    def share(self) -> GroupCache:
        """The groups that parts of this universe find, by ranks and options; those it has, too."""
        with self._unshared:
            if self._shared is None:
                self._shared = GroupCache()  # from now on, threads share what they make
            shared = self._shared
            # Not for this thread: a signal handler may have interrupted it in the middle of making.
            self._unshared.wait_for(lambda: not set(self._makers) - {threading.get_ident()})
            if self._has_shared_all:
                return shared
            self._has_shared_all = True
            for group in list(self):
                if group.name is None or group.borrowed or self._is_gone(group):
                    continue
                # The others are made by all ranks: none of these may find one, and stay away.
                if is_made_by_members(group.request, self._world):
                    shared.get_or_create(*_shared_key(group.request), partial(_same, group))
            return shared

    # --- keeping them ---------------------------------------------------------------------------

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

    def _shared_as(self, group: Group) -> SharedAs | None:
        if self._shared is None:
            return None
        return SharedAs(self._shared, *_shared_key(group.request))


def _same(group: Group) -> Group:
    return group


def _shared_key(request: GroupRequest) -> tuple[AxisLayout, OptionsKey]:
    """What a group is wherever it is asked for: its ranks in order, and its options."""
    ranks = request.my_ranks()
    key = request.options.key  # whose tag has no "; " of the user's
    tag = f"{key.tag}; ranks {RankMap.from_ranks(ranks).fingerprint}"
    return AxisLayout(len(ranks)), key.with_tag(tag)
