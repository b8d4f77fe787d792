"""Registry of the process groups of one world."""

from __future__ import annotations

import itertools
import weakref
from collections import Counter
from collections.abc import Hashable, Iterator, MutableMapping
from weakref import WeakValueDictionary

from meshverse._core import OptionsKey
from meshverse._torch_compat.backends import creation_blocks
from meshverse._torch_compat.c10d_groups import current_default_group
from meshverse._torch_compat.private_names import ProcessGroup
from meshverse.locks import state_lock
from meshverse.world import World, WorldState

from .group import Group, GroupRef, State
from .request import GroupRequest


class GroupRegistry(WorldState):
    """The process groups of one world that universes use, found by content or by name.

    The content of a group is its scope, its ranks in order, and its options. The scope says which
    universes share groups: a universe with its parts (universes over some of its ranks), or all
    universes of the world. The content has ranks, not a layout, because ranks mean the same in
    every universe: so a mesh over ranks 4 to 7 finds a group that a mesh over ranks 0 to 7 has
    created.

    A name consists of a digest of ranks and options, and the number of earlier groups with the same
    digest. All members of a group compute the same number, whatever other groups each of them has
    created. (torch's names count all groups of a process instead. Ranks that had created other
    groups before would give the next group different names, and wait until their timeout.)

    A group that became live in a call that failed is a *leftover*: the other members may have it
    too, and need not call again. The next calls that request a group of these ranks and options use
    it, in whichever scope, as long as it is live; if the members have no rendezvous in which to
    learn of it, only the next one does. From then on it is a group of that scope, too.

    Two kinds of calls do not use a leftover, so that all members do the same whether the call
    failed on them or not: those of a lazy universe, unless it is a group of their scope; and those
    of a scope that has another group of this content, such as one that a lazy universe has planned.
    """

    def __init__(self) -> None:
        self.n_destroyed = 0  # number of groups that the program has destroyed
        self._counter = itertools.count(1)  # atomic, as `note_destroyed` takes no lock
        self._by_name: MutableMapping[str, Group] = {}
        # By scope, digest of ranks and options, and options key. The digest does not distinguish
        # handles in options, such as two network devices.
        self._by_content: MutableMapping[tuple[Hashable, str, OptionsKey], Group] = {}
        # By digest, the number of the next name. It falls when the highest numbers are freed.
        self._times_named: Counter[str] = Counter()
        self._freed: dict[str, set[int]] = {}  # by digest, lower numbers that can be given again
        self._leftovers: dict[tuple[str, OptionsKey], Group] = {}  # by ranks and options
        self.world_is_over = False  # whether the world has ended
        self.reference = weakref.ref(self)  # the one that all its groups keep

    def __iter__(self) -> Iterator[Group]:
        """Iterate over the groups, in the order in which they were added."""
        return iter(list(self._by_name.values()))

    def find(self, name: str) -> Group | None:
        """Return the group of this c10d name, or None."""
        return self._by_name.get(name)

    @staticmethod
    def find_current(name: str) -> Group | None:
        """Return the group of this c10d name in the current world, or None."""
        world = World.current()
        return None if world is None else world.state(GroupRegistry).find(name)

    def duplicates(self, *, beyond_first: bool = False) -> set[str]:
        """Return the names of groups that exist several times: equal, but in different scopes.

        Args:
            beyond_first: whether to leave out the first of each set of equal groups: the others are
                what sharing would save.
        """
        with state_lock.held:
            found = [(content, group.name) for content, group in self._by_content.items()]
        names: dict[Hashable, dict[str, None]] = {}
        for content, name in found:
            names.setdefault(content[1:], {})[name] = None
        first = 1 if beyond_first else 0
        return {name for equal in names.values() if len(equal) > 1 for name in [*equal][first:]}

    def find_or_plan(self, scope: Hashable, ref: GroupRef, *, lazy: bool) -> list[int]:
        """Attach the group that a reference requests, planned if it is new; return its ranks.

        Args:
            scope: scope of the group; see the class.
            ref: reference to attach the group to. This rank must be a member of the group.
            lazy: whether the group is created at its first use, if it is not live.
        """
        request = ref.request
        ranks, digest = request.ranks_and_digest()
        content = scope, digest, request.options.key
        with state_lock.held:
            group = self._by_content.get(content)
            if group is None or group.is_gone:
                group = Group(self._next_name(digest), request, self, content=content)
                # First, so that `release` undoes the rest, wherever it is interrupted. The
                # counter rises last: members whose counters differ compute different names, and
                # never meet.
                ref.group, ref.name = group, group.name
                self._by_content[content] = self._by_name[group.name] = group
                self._times_named[digest] += 1
            group.is_lazy |= lazy and group.state is State.PLANNED and not group.was_live
            self.attach(group, ref)
        return ranks

    def take_name(self, request: GroupRequest) -> str:
        """Return a name for a group that all ranks create together.

        `find_or_plan` does not find that group.
        """
        with state_lock.held:
            digest = request.ranks_and_digest()[1]
            name = self._next_name(digest)
            self._times_named[digest] += 1
        return name

    def peek_name(self, request: GroupRequest) -> str:
        """Return the name that the next new group of these ranks and options would get."""
        return self._next_name(request.ranks_and_digest()[1])

    def _next_name(self, digest: str) -> str:
        return f"meshverse-{digest}-{self._times_named[digest]}"

    def find_leftover(self, scope: Hashable, request: GroupRequest) -> Group | None:
        """Return the leftover that a call of this scope uses, or None; see the class."""
        if not self._leftovers:
            return None
        key = _content_in_all_scopes(request)
        group = self._leftovers.get(key)
        if group is None:
            return None
        if group.state is not State.LIVE:
            self._leftovers.pop(key, None)
            return None
        known = self._by_content.get((scope, *key), group)
        return group if known is group or known.is_gone else None

    def add_leftover(self, group: Group) -> None:
        """Have later calls use a live group; see the class."""
        self._leftovers[_content_in_all_scopes(group.request)] = group

    def drop_leftover(self, group: Group) -> None:
        """Have later calls not use a leftover."""
        self._leftovers.pop(_content_in_all_scopes(group.request), None)

    def attach_leftover(self, group: Group, scope: Hashable, ref: GroupRef) -> None:
        """Attach a leftover to a reference of a scope, which has this group from now on."""
        content = (scope, *_content_in_all_scopes(group.request))
        with state_lock.held:
            if group.contents:  # or else it is found by its name only
                group.contents.add(content)
                self._by_content[content] = group
            self.attach(group, ref)

    def has_live_group(self, name: str, key: OptionsKey) -> bool | None:
        """Return whether the group of this c10d name is live; None if it has other options."""
        group = self._by_name.get(name)
        if group is None or group.state is not State.LIVE:
            return False
        return True if group.request.options.key == key else None

    def add_c10d_group(self, handle: ProcessGroup, ref: GroupRef) -> None:
        """Attach a group of c10d to a reference. The registry then finds it by its name only."""
        with state_lock.held:
            group = self._by_name.get(handle.group_name)
            if group is None or group.is_gone:
                name = handle.group_name
                group = Group(name, ref.request, self, handle)
                self._by_name[group.name] = group
            self.attach(group, ref)

    def note_destroyed(self, name: str) -> None:
        """Mark the group of this c10d name as destroyed by somebody. May run in any thread."""
        group = self._by_name.get(name)
        if current_default_group() is None:
            return  # they all end with the world: see `end`
        if group is not None:
            group.note_destroyed()
            self.n_destroyed = next(self._counter)
            if group.is_external:
                self._by_name.pop(name, None)

    @staticmethod
    def attach(group: Group, ref: GroupRef) -> None:
        """Attach a group to a reference, of whichever universe."""
        with state_lock.held:
            ref.group, ref.name = group, group.name
            group.refs.add(ref)
            if group.state is State.LIVE:
                ref.process_groups[group.name] = group.live_handle()

    def release(self, ref: GroupRef, *, abort: bool = False, has_failed: bool = False) -> None:
        """Detach a group from a reference; end it if none is left that owns it, see `Group.refs`.

        If the call that requested it has failed, a live group stays as a leftover; see the class.

        Args:
            ref: reference to which `find_or_plan`, `add_c10d_group` or `attach` attached a group.
            abort: as for `Group.end`.
            has_failed: whether the call that requested it failed on this rank.

        Raises:
            Whatever c10d raises when it ends the group; then a second call tries again.
        """
        group = ref.group
        if group is None:
            return
        with state_lock.held:
            group.refs.discard(ref)
            ref.process_groups.pop(group.name, None)
            # An external group has no owner, and goes with its last reference; any other one goes
            # with its last owner.
            if ref.is_borrowed != group.is_external:
                return
            if any(one.is_borrowed == group.is_external for one in group.refs.alive()):
                return
            if group.state is State.PLANNED:
                self.free_name_of(group, has_failed=has_failed)
            if has_failed and group.may_be_elsewhere:
                self.add_leftover(group)
                return
            for content in group.contents:
                if self._by_content.get(content) is group:
                    del self._by_content[content]
            if self._by_name.get(group.name) is group:
                del self._by_name[group.name]
        group.end(abort=abort)

    def free_name_of(self, group: Group, *, has_failed: bool = False) -> None:
        """Free the name of a group that no member has created, so that the next one gets it.

        All members must give the next group the same name. With a backend that waits for all
        members, another member has created this group only if all have joined its rendezvous. With
        one that does not wait, another member may have created it at any time, so the name stays
        used, except after a failed call, which may be repeated.

        Members may release groups in different orders: a name below others is given again once
        those are free, too.

        Args:
            group: group that is released, and not created here.
            has_failed: whether the call that requested it failed on this rank.
        """
        waits = creation_blocks(group.request.options.backend)
        if group.have_all_joined or not (has_failed or waits):
            return
        digest, _, times = group.name.removeprefix("meshverse-").rpartition("-")
        with state_lock.held:
            is_another = self._by_name.get(group.name, group) is not group
            if is_another or int(times) >= self._times_named[digest]:
                return  # it was freed before, or never counted
            freed = self._freed.setdefault(digest, set())
            freed.add(int(times))
            while self._times_named[digest] - 1 in freed:
                self._times_named[digest] -= 1
                freed.remove(self._times_named[digest])

    # --- the end of the world -------------------------------------------------------------------

    def end(self) -> None:
        """Mark all groups as ended, but for destroyed ones, which must not be revived.

        From now on, they live as long as their references, which universes keep.
        """
        self.world_is_over = True
        for group in self:
            if group.state is not State.DESTROYED:
                group.note_ended()
        self._leftovers.clear()
        self._by_name = WeakValueDictionary(self._by_name)
        self._by_content = WeakValueDictionary(self._by_content)

    def on_revive(self, current: World) -> None:
        """Drop groups without live references; number new ones after the others and `current`'s.

        A group that stays does so on all its members, so they all compute the same name for the
        next group with the same digest.
        """
        with state_lock.held:
            self.world_is_over = False
            kept = [group for group in self if group.refs.alive()]
            self._by_name = {group.name: group for group in kept}
            self._by_content = {content: group for group in kept for content in group.contents}
            self._times_named = Counter(current.state(GroupRegistry)._times_named)
            self._freed.clear()
            for name in self._by_name:
                digest, _, times = name.removeprefix("meshverse-").rpartition("-")
                if times.isdecimal():
                    number = max(self._times_named[digest], int(times) + 1)
                    self._times_named[digest] = number

    def reset_after_fork(self) -> None:
        """Drop the parent's groups without destroying them, in a forked process."""
        for group in self:
            group.reset_after_fork()


def _content_in_all_scopes(request: GroupRequest) -> tuple[str, OptionsKey]:
    return request.ranks_and_digest()[1], request.options.key
