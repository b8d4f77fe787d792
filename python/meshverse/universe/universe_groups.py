"""The process groups of one universe: created or adopted, listed, and freed again."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Collection, Hashable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Literal

import torch.distributed as dist

from meshverse._core import AxisLayout, GroupCache, Layout, OptionsKey, RankMap
from meshverse._torch_compat.backends import backend_for
from meshverse._torch_compat.c10d_groups import abort_all, find_c10d_group
from meshverse._torch_compat.private_names import ProcessGroup
from meshverse.agreement import LeftoverError, Rendezvous
from meshverse.groups.creation import (
    agree_on_leftover,
    create_by_members,
    create_with_all_ranks,
)
from meshverse.groups.group import Group, GroupRef, State
from meshverse.groups.registry import GroupRegistry
from meshverse.groups.request import GroupRequest, RequestBuilder, Way
from meshverse.locks import state_lock
from meshverse.options.group_options import Defaults, Override
from meshverse.wording import rank_list
from meshverse.world import World

from .universe_calls import UniverseCalls
from .world_universes import WorldUniverses

if TYPE_CHECKING:
    from .universe import Universe

_log = logging.getLogger(__name__)

_OF_OTHERS = (Way.USER_PROVIDED, Way.OTHER_UNIVERSE)  # listed, but not shared with other axes


class UniverseGroups:
    """The process groups of one universe, each with the requests of its axes.

    A *reference* (`GroupRef`) is this universe's entry for a group.

    Args:
        rank_map: position -> global rank.
        position: this rank's position; None if this rank is not in the rank map.
        world: world in which the groups are created; None for a universe without process groups.
        universe: universe that has these groups.
        defaults: options of axes without options of their own.
        lazy: whether a group is created when it is first used.
        check_consistency: whether calls that request groups are compared between ranks; by default
            they are, unless the environment turns this off.
        part_of: groups of the universe that this one is a part of, if any. They supply the settings
            that are None here, and `lazy` if it is set there.

    Attributes:
        calls: the calls that request these groups, compared between ranks.
        process_groups: this rank's live process groups by c10d name; torch.compile reads it.
        registry: the groups of its world, of all universes; an empty one without a world.
        had_own_groups: whether it has had groups of its own. Then the world holds a strong
            reference to the universe, as long as both live.
        ended: how the universe ended; None while it is live. The universe sets it.
        scope: key of the universes that share groups: one universe with its parts, or all of them.
    """

    def __init__(
        self,
        rank_map: RankMap,
        position: int | None,
        world: World | None,
        universe: weakref.ref[Universe],
        *,
        defaults: Defaults,
        lazy: bool,
        check_consistency: bool | None,
        part_of: UniverseGroups | None = None,
    ) -> None:
        if part_of is not None:
            if world is not None:
                part_of.check_usable()
            defaults, lazy = defaults.or_else(part_of._defaults), lazy or part_of._lazy
        self._defaults: Defaults = defaults
        self._lazy: bool = lazy
        self._rank_map, self._world_or_none = rank_map, world
        self._universe = universe
        self.calls: UniverseCalls = UniverseCalls(
            rank_map,
            position,
            world,
            lazy=self._lazy,
            check_consistency=check_consistency,
            part_of=None if part_of is None else part_of.calls,
        )
        self._largest_rank = rank_map.sorted().rank_at(rank_map.size - 1)
        self.registry = GroupRegistry() if world is None else world.state(GroupRegistry)
        self.scope: Hashable = object()
        if part_of is not None:
            self.scope = part_of.scope
        elif _shares_world_wide:
            self.scope = "world"
        self._builder = RequestBuilder(rank_map, position, world, defaults)
        self._by_axis = GroupCache()  # `_refs`, by axis layout and options
        self._keys: dict[str, OptionsKey] = {}  # by digest, for `known`: a scan takes 10 us longer
        self._refs: list[GroupRef] = []
        self.had_own_groups = False
        self.ended: Literal["destroyed", "aborted"] | None = None
        self.process_groups: dict[str, ProcessGroup] = {}

    @property
    def _world(self) -> World:
        if self._world_or_none is None:
            raise RuntimeError(
                f"The universe of {self._rank_map} has no process groups: it was created or loaded "
                "before init_process_group(). Call bind() of one of its meshes on all its ranks, "
                "or create the mesh without universe=."
            )
        return self._world_or_none

    def check_usable(self) -> None:
        """Check that groups of this universe can be created and used.

        Raises:
            RuntimeError: the universe or its world has ended, or it was loaded without groups.
            ValueError: a rank is outside the default process group.
        """
        world = self._world
        if self.ended is not None:
            raise RuntimeError(
                f"The universe of {self._rank_map} was {self.ended}, and its process groups with "
                "it. Create the mesh again: init_device_mesh() without universe= creates a new "
                "universe."
            )
        _ = world.default_group  # raises if the world has ended
        if self._largest_rank >= world.size:
            raise ValueError(
                f"A mesh over {self._rank_map} includes rank {self._largest_rank}, but the default "
                f"process group has ranks 0 to {world.size - 1}. Create the mesh over some of "
                "those, or start the job with more ranks."
            )

    def why_ended(self) -> str:
        """Return why the groups of this universe have ended, with the cure; "" if they have not."""
        if self._world_or_none is None:  # it never had any
            return ""
        try:
            self.check_usable()
        except RuntimeError as ended:
            return str(ended)
        except ValueError:
            return ""
        return ""

    def reset_after_fork(self) -> None:
        """Forget, in a forked process, what threads of the parent were creating."""
        self._by_axis.reset_after_fork()

    # --- look-ups -------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[GroupRef]:
        """Iterate over the references to groups, in the order of their first requests."""
        return iter(list(self._refs))

    def __len__(self) -> int:
        return len(self._refs)

    def along(self, axis: AxisLayout) -> list[GroupRef]:
        """Return the references to groups along an axis, whatever their options."""
        either = (axis, axis.sorted())
        return [ref for ref in self if ref.request.axis in either]

    def known(self, axis: AxisLayout, key_digest: str | None) -> GroupRef | None:
        """Return the reference to the group of an axis with this options key, or None."""
        key = self._keys.get(key_digest or "")
        if key is not None:
            cache = self._by_axis
            ref: GroupRef | None = cache.get(axis, key) or cache.get(axis.sorted(), key)
            if ref is not None:
                return ref
        not_shared = (ref for ref in self.along(axis) if ref.request.way in _OF_OTHERS)
        return next(
            (ref for ref in not_shared if ref.request.options.key.digest == key_digest), None
        )

    def ascends(self, axis: AxisLayout) -> bool:
        """Return whether the ranks of all groups of an axis ascend."""
        return self._builder.ascends(axis)

    def best_match(self, axis: AxisLayout, axis_name: str | None) -> GroupRef | None:
        """Choose an axis's reference for a caller that does not know its options, or None.

        Of several, it is the one with the smallest tag ("" first), then one that was requested
        under this axis name, then the one that was requested first. All ranks choose the same.
        """
        return min(
            self.along(axis),
            key=lambda ref: (ref.request.options.tag, axis_name not in ref.requests),
            default=None,
        )

    def has_made(self, name: str) -> bool:
        """Return whether this is the c10d name of a group that this universe owns."""
        return any(ref.name == name and not ref.is_borrowed for ref in self)

    def key_digest(self, axis: AxisLayout, name: str) -> str | None:
        """Return the digest of the options key of the group of this name along an axis, or None."""
        named = (ref for ref in self.along(axis) if ref.name == name)
        return next((ref.request.options.key.digest for ref in named), None)

    def request_known(
        self, layout: Layout, axis_names: Sequence[str], first: int = 0
    ) -> list[str] | None:
        """Return the names of some axes' groups with default options, and count a request for each.

        Return None, and count nothing, if a group is not live, or if this call must first be
        compared between ranks.

        Args:
            layout: layout of a mesh.
            axis_names: names of the axes.
            first: index of the first of these axes in the layout.
        """
        key = self._builder.default_key
        if key is None:
            return None
        refs: list[GroupRef] | None = self._by_axis.find(layout, first, len(axis_names), key)
        if refs is None:
            return None
        calls = self.calls
        if calls.is_compared and (layout, first, *axis_names) not in calls.compared:
            return None
        names = []
        for ref in refs:
            if ref.name not in self.process_groups:
                return None
            names.append(ref.name)
        with state_lock.held:
            if any(ref.is_released for ref in refs):
                return None
            for ref, axis_name in zip(refs, axis_names, strict=True):
                ref.requests[axis_name] = ref.requests.get(axis_name, 0) + 1
        return names

    def find(self, name: str) -> GroupRef | None:
        """Return the reference to the group of this c10d name, or None."""
        return next((ref for ref in self if ref.name == name), None)

    def was_destroyed(self, name: str) -> bool:
        """Return whether the program destroyed this group while the universe was live."""
        if name in self.process_groups or self.ended is not None:
            return False
        group = self.registry.find(name)
        if group is None:
            return find_c10d_group(name) is None
        return group.state is State.DESTROYED

    def can_stand_for(self, name: str, others: Sequence[str], device_type: str) -> bool:
        """Return whether a group can be used, and has the backend that other groups have.

        Args:
            name: c10d name of the group.
            others: c10d names of the other groups; unknown ones are ignored.
            device_type: type of the device of the tensors.
        """
        group = self.registry.find(name)
        if group is None or group.state not in (State.PLANNED, State.BEING_MADE, State.LIVE):
            return False
        known = [self.registry.find(other) for other in others]
        backends = {one.request.options.backend for one in (group, *known) if one is not None}
        return len({backend_for(device_type, backend) for backend in backends}) == 1

    def find_planned(self, name: str | None) -> Group | None:
        """Return the group of this c10d name if it is not created yet, else None."""
        group = None if name is None else self.registry.find(name)
        is_planned = group is not None and group.state in (State.PLANNED, State.BEING_MADE)
        return group if is_planned else None

    # --- requests -------------------------------------------------------------------------------

    def get_or_make(
        self,
        layout: Layout,
        axis_names: Sequence[str],
        overrides: Sequence[Override],
        tags: Sequence[str],
        *,
        preserve_rank_order: bool,
        call: str,
        first: int = 0,
    ) -> list[GroupRef]:
        """Return this rank's group along each axis, which the members create if there is none.

        Args:
            layout: layout of the mesh that the call creates. The ranks of that mesh compare the
                call.
            axis_names: names of the axes.
            overrides: one per axis; empty if no axis has one.
            tags: isolation tags, one per axis, "" for none; empty if no axis has one.
            preserve_rank_order: whether groups keep the axes' order of ranks; by default ranks
                ascend.
            call: name of the function that the user called, for messages.
            first: index of the first of these axes in the layout.

        Returns:
            One reference per axis. On a rank outside the rank map, it has no group.

        Raises:
            RanksDifferError: other ranks are building other meshes.
            RuntimeError: a group cannot be created. Groups that this call has created are left for
                the next call that requests them.
            ValueError: an options key cannot be computed.
        """
        self.check_usable()
        requests = self._builder.of_axes(
            layout, axis_names, overrides, tags, preserve_rank_order, first
        )
        return self._get_or_make(requests, call, layout, first=first)

    def need_all_ranks(self, override: Override) -> bool:
        """Return whether all ranks of the world must create groups with these options together.

        Raises:
            RuntimeError: the universe or its world has ended, or it was loaded without groups.
        """
        self.check_usable()
        creation = self._world.how_created(self._builder.resolve(override).backend)
        return creation.splits or creation.all_ranks_reason is not None

    def over_whole_universe(
        self, name: str, override: Override, timeout: timedelta | None, tag: str, *, call: str
    ) -> ProcessGroup | None:
        """Return one group of all ranks of the universe, created if there is none.

        Args:
            name: name by which the group is requested.
            override: backend and options object of the group.
            timeout: timeout of its operations; None for that of the universe.
            tag: isolation tag; "" for none.
            call: name of the function that the user called, for messages.

        Returns:
            The group; None on a rank outside the universe.

        Raises:
            The errors of `get_or_make`.
        """
        self.check_usable()
        request = self._builder.over_whole_universe(name, override, timeout, tag)
        layout = Layout.from_shape((self._rank_map.size,))
        (ref,) = self._get_or_make([request], call, layout)
        if ref.name is None:
            return None
        self.before_use(ref.name)
        assert ref.group is not None
        return ref.group.live_handle()

    def _get_or_make(
        self,
        requests: Sequence[GroupRequest],
        call: str,
        layout: Layout,
        *,
        first: int = 0,
        counts: bool = True,
    ) -> list[GroupRef]:
        # `counts`: whether `explain()` counts every request. Not for a slice under a tag
        # (`request_tagged`), for which torch creates no group: only a group's first request counts.
        universe, world = self._universe(), self._world
        assert universe is not None
        beyond_default_group = any(request.way is not Way.DEFAULT_GROUP for request in requests)
        if beyond_default_group and universe.rank != world.rank:
            raise ValueError(
                f"The universe of {self._rank_map} was created with rank={universe.rank}, but this "
                f"process is rank {world.rank} of the default process group, and can create the "
                "groups of this rank only. Create the universe without rank=."
            )
        fingerprint = None
        if beyond_default_group and self.calls.is_compared:
            default_key = self._builder.default_key
            are_default = all(request.options.key == default_key for request in requests)
            fingerprint = self.calls.compare(requests, call, layout, first, are_default=are_default)
        new: list[GroupRef] = []
        counted: list[tuple[GroupRef, str]] = []
        try:
            refs = [self._get_or_make_one(one, new, counted, counts=counts) for one in requests]
            if self.ended is not None:  # meanwhile, by a signal handler or another thread
                self.check_usable()
        except BaseException as error:
            self._roll_back(new, counted, error, fingerprint)
            raise
        if beyond_default_group and layout.size == self._rank_map.size:
            self.calls.take_number()
        if not self.had_own_groups and not all(ref.is_borrowed for ref in refs):
            world.state(WorldUniverses).add(universe)
        return refs

    def request_tagged(
        self,
        axes: Layout,
        axis_names: Sequence[str],
        group_names: Sequence[str],
        tags: Sequence[str],
    ) -> list[GroupRef]:
        """Return groups with the options of existing ones, but under other isolation tags.

        Args:
            axes: axis layouts of the groups.
            axis_names: names of the axes.
            group_names: c10d names of the existing groups; empty on a rank outside the rank map.
            tags: isolation tags, one per axis.
        """
        self.check_usable()
        requests = []
        for index, (axis, axis_name) in enumerate(zip(axes, axis_names, strict=True)):
            like = self._like(axis, axis_name, group_names[index] if group_names else None)
            options = like.options.with_tag(tags[index])
            requests.append(self._builder.with_options(like.axis, axis_name, options))
        return self._get_or_make(requests, "isolate", axes, counts=False)

    def _like(self, axis: AxisLayout, axis_name: str, group_name: str | None) -> GroupRequest:
        # `group_name` is None on a rank outside the rank map. If no reference has that name, the
        # group came from another universe by concatenation.
        for ref in self.along(axis):
            is_named = group_name is None or ref.name == group_name
            if is_named and ref.request.way not in _OF_OTHERS:
                return ref.request
        for ref in self:  # a group of another universe, whose layout is that of its own ranks
            is_named = group_name is not None and ref.name == group_name
            if is_named and ref.request.way is Way.OTHER_UNIVERSE:
                return self._builder.with_options(axis, axis_name, ref.request.options)
        return self._builder.inherited(axis, axis_name)

    def _get_or_make_one(
        self,
        request: GroupRequest,
        new: list[GroupRef],
        counted: list[tuple[GroupRef, str]],
        *,
        counts: bool,
    ) -> GroupRef:
        axis, key = request.axis, request.options.key
        known: GroupRef | None = self._by_axis.get(axis, key)
        if known is not None and known.group is not None and known.state is State.DESTROYED:
            if known.request.way.needs_all_ranks:
                raise RuntimeError(
                    f"The {known.group.in_words()} was destroyed, by destroy_process_group(group). "
                    "All ranks must create groups of this kind together, and ranks that still have "
                    "theirs would not take part. Create the mesh without universe=, on all ranks."
                )
            # A new mesh has a new group. Of several threads, one removes the old one.
            if self._by_axis.remove(axis, key, known):
                self._release(known)
        self._keys[request.options.key.digest] = key
        while True:
            # Calls `_new_ref` in this thread, unless another thread does.
            ref: GroupRef = self._by_axis.get_or_create(
                axis, key, partial(self._new_ref, request, new)
            )
            if not counts and ref.requests:
                return ref
            counted.append((ref, request.axis_name))  # first, so that `_roll_back` withdraws it
            if ref.count_request(request.axis_name):
                return ref
            # Another thread created it, in a call that has failed, and may still release it.
            counted.pop()
            self._by_axis.remove(axis, key, ref)

    def _new_ref(self, request: GroupRequest, new: list[GroupRef]) -> GroupRef:
        """Create a reference, and its group unless it exists already or is lazy."""
        world, way = self._world, request.way
        ref = GroupRef(request, self.process_groups, self._universe)
        new.append(ref)  # first, so that it is released whatever interrupts this
        leftover = ranks = None
        if way is not Way.DEFAULT_GROUP and request.position is not None and not self._lazy:
            leftover = self.registry.find_leftover(self.scope, request)
        if way is Way.DEFAULT_GROUP:
            self.registry.add_c10d_group(world.default_group, ref)
            world.axes_of_default_group[request.axis_name] = None
        elif leftover is not None:
            agree_on_leftover(leftover, world)
            self._refer_to_leftover(leftover, ref)
        elif way is not Way.BY_MEMBERS:
            handle = create_with_all_ranks(request, world)
            ref.created = handle is not None
            if handle is not None:
                self.registry.add_c10d_group(handle, ref)
        elif request.position is not None:
            ranks = self.registry.find_or_plan(self.scope, ref, lazy=self._lazy)
        # Before its members create it: `free` ends a group that waits for them, too.
        self._refs.append(ref)
        if self.ended is not None:  # meanwhile, so that `free` may not have seen it
            self.check_usable()
        if ranks is not None and not self._lazy:
            self._create_by_members(ref, ranks)
        if ref.created:
            self._log_creation(ref)
        return ref

    def _create_by_members(self, ref: GroupRef, ranks: list[int]) -> None:
        """Create the group of a reference, unless it exists already."""
        world, group = self._world, ref.group
        assert group is not None
        # Meshes of lazy universes have its name, so that no leftover can take its place.
        key = ref.request.options.key
        has_group = None if group.is_lazy else partial(self.registry.has_live_group, key=key)
        try:
            ref.created = group.make(
                lambda group: create_by_members(group, world, ranks, has_group)
            )
        except LeftoverError as found:
            self.registry.release(ref, has_failed=True)
            leftover = self.registry.find(found.name)
            assert leftover is not None
            self.registry.add_leftover(leftover)
            self._refer_to_leftover(leftover, ref)

    def _refer_to_leftover(self, leftover: Group, ref: GroupRef) -> None:
        """Attach a group that became live in an earlier call, which failed here or elsewhere."""
        ref.created = not leftover.refs.alive()
        self.registry.attach_leftover(leftover, self.scope, ref)

    def give_up(self) -> None:
        """Leave all groups to later calls: the call that creates the universe has failed."""
        if self._world_or_none is None:
            return
        for ref in reversed(self._refs):
            self._by_axis.remove(ref.request.axis, ref.request.options.key, ref)
            with contextlib.suppress(RuntimeError):  # of c10d; the call's own error says more
                self.registry.release(ref, has_failed=True)
        self._refs.clear()
        universe = self._universe()
        assert universe is not None
        self._world_or_none.state(WorldUniverses).drop(universe)
        self.calls.give_up()

    def _roll_back(
        self,
        new: list[GroupRef],
        counted: list[tuple[GroupRef, str]],
        error: BaseException,
        fingerprint: str | None,
    ) -> None:
        """Withdraw a failed call's requests; release the references that it added, newest first."""
        for ref, axis_name in counted:
            ref.withdraw_request(axis_name)
        for ref in reversed(new):
            if not ref.release_unless_requested():
                continue  # another thread has requested it meanwhile
            self._by_axis.remove(ref.request.axis, ref.request.options.key, ref)
            with contextlib.suppress(ValueError):  # not added yet
                self._refs.remove(ref)
            with contextlib.suppress(RuntimeError):  # of c10d; `error` says more
                self.registry.release(ref, has_failed=True)
        self.calls.note_failure(fingerprint, error)

    def before_use(self, name: str) -> None:
        """Create the group of this c10d name now, if it is lazy and not created yet.

        Raises:
            RanksDifferError: ranks of this universe are building different meshes.
            RuntimeError: the group cannot be created, is suspended, or has ended.
        """
        self.check_usable()
        ref = self.find(name)
        group = self.registry.find(name) if ref is None else ref.group
        if group is None:
            if find_c10d_group(name) is not None:  # from torch or the program
                return
            raise RuntimeError(
                f"The process group {self._of_axes(name)} was destroyed, by "
                "destroy_process_group(group) or with another universe that created it. Make the "
                "mesh again; if you pass existing groups or meshes, pass ones that are not "
                "destroyed."
            )
        if group.make(self._create_lazy) and ref is not None:
            ref.created = True
            self._log_creation(ref)

    def _create_lazy(self, group: Group) -> ProcessGroup | None:
        self.calls.raise_known_mismatch()  # the others may have raised, and never come
        return create_by_members(group, self._world)

    def _of_axes(self, name: str) -> str:
        """Return the mesh axes that used an ended group, for messages; or its c10d name."""
        universe = self._universe()
        if universe is None:
            return name
        axes = []
        for mesh in universe.meshes:
            pairs = zip(mesh._description.labels, mesh._dim_group_names, strict=False)
            axes += [f"of axis {label!r} of {mesh}" for label, known in pairs if known == name]
        return " or ".join(axes[:2]) or name

    # --- groups created elsewhere ---------------------------------------------------------------

    def adopt(self, axis: AxisLayout, axis_name: str, group: ProcessGroup) -> str:
        """Adopt a process group that the user created: list it, but do not share or free it.

        Returns:
            The group's c10d name.
        """
        self.check_usable()
        request = self._builder.adopted(axis, axis_name, group)
        ref = GroupRef(request, self.process_groups, self._universe)
        ref.count_request(axis_name)
        self.registry.add_c10d_group(group, ref)
        self._refs.append(ref)
        if group is self._world.default_group:
            self._world.axes_of_default_group[axis_name] = None
        return group.group_name

    def list_groups_of(self, other: UniverseGroups, names: Collection[str]) -> None:
        """List groups of another universe, whose mesh was concatenated with one of this universe.

        Args:
            other: groups of that universe.
            names: c10d names of the groups that the new mesh uses.
        """
        self.check_usable()
        other.check_usable()
        known = {ref.name for ref in self}
        for theirs in other:
            if theirs.group is not None and theirs.name in names and theirs.name not in known:
                request = theirs.request._replace(way=Way.OTHER_UNIVERSE, all_ranks_reason=None)
                ref = GroupRef(request, self.process_groups, self._universe)
                self.registry.attach(theirs.group, ref)
                self._refs.append(ref)

    # --- end ------------------------------------------------------------------------------------

    def free(self, *, abort: bool) -> None:
        """Release all groups, the newest first. Those that another universe shares stay.

        A universe that only borrows a group, after a concatenation, does not keep it from ending.

        If a group cannot be freed, the others are freed, and another call tries that group again.

        Args:
            abort: whether to abort the groups' collectives, if the backend can, instead of waiting
                for them. Then the keys in the store stay.

        Raises:
            Whatever c10d raised for the last group that could not be freed.
        """
        world = self._world
        ends_all = abort and not world.is_over and self._uses_default_group()
        self._by_axis.clear()
        with contextlib.ExitStack() as ending:  # calls all of these, last first, whatever fails
            if not abort:
                ending.callback(self.calls.remove_from_store)
            for ref in self:
                ending.callback(self._release, ref, abort=abort)
            if ends_all:
                ending.callback(abort_all)

    def _release(self, ref: GroupRef, *, abort: bool = False) -> None:
        self.registry.release(ref, abort=abort)
        with contextlib.suppress(ValueError):  # another thread, which ends the universe too
            self._refs.remove(ref)
        if ref.state is not State.ENDED or ref.is_borrowed or abort or self._world.is_over:
            return
        store, name = self._world.run_keys, str(ref.name)
        if store is not None:
            with contextlib.suppress(dist.DistError):  # the store is gone, and the keys with it
                self._world.state(Rendezvous).remove_from_store(store, name)

    @property
    def is_freed(self) -> bool:
        """Whether all groups are released."""
        return not self._refs

    def _uses_default_group(self) -> bool:
        return any(ref.name == self._world.default_group.group_name for ref in self)

    # --- logging --------------------------------------------------------------------------------

    def _log_creation(self, ref: GroupRef) -> None:
        """Log the origin of a group, on its first rank: one line per group."""
        if not _log.isEnabledFor(logging.DEBUG):
            return
        ranks = ref.request.my_ranks()
        if ranks[0] == self._world.rank:
            from meshverse.program_line import program_line

            _log.debug(
                "process group of axis %r with ranks [%s], options %s: %s, requested at %s. %s.",
                ref.request.axis_name,
                rank_list(ranks),
                ref.request.options.in_words(),
                ref.origin,
                program_line(),
                self._why_new(ref.group, ranks),
            )

    def _why_new(self, group: Group | None, ranks: Sequence[int]) -> str:
        """Return why no existing group was shared, for the log."""
        for other in self.registry:
            if other is group or other.is_external or other.request.my_ranks() != ranks:
                continue
            axis, options = f"axis {other.request.axis_name!r}", other.request.options
            if group is None or options.key != group.request.options.key:
                return f"Not shared with {axis}, which has options {options.in_words()}"
            return (
                f"Not shared with {axis} of a mesh in another universe, created without universe="
            )
        if len(ranks) == self._world.size:
            options = self._world.default_options
            return f"Not shared with the default group, which has options {options.in_words()}"
        return "It is the first group of these ranks"


def share_world_wide(share: bool) -> None:
    """Set whether universes created from now on share their groups with one another."""
    global _shares_world_wide
    _shares_world_wide = share


def shares_world_wide() -> bool:
    """Return whether universes created now share their groups with one another."""
    return _shares_world_wide


_shares_world_wide = False  # in all threads
