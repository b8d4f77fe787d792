"""Revival: a world that has ended, with its universes, goes on with the next default group.

A program that ends its default process group, to give device memory back or to leave a broken job,
and then creates it again with the same ranks, would have to build every mesh and model anew: their
process groups are gone. Reviving creates these groups again, under their names: meshes, DTensors
and compiled graphs keep names. Objects that keep a group itself, such as FSDP2's, get the new one
if the program gives them to `revive()`. The `World` object that ended replaces the one that was
created for the new default group.
"""

from __future__ import annotations

import gc
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import NamedTuple

from meshverse._torch_compat.held_groups import HeldGroup, group_attributes, groups_held_by, is_live
from meshverse._torch_compat.private_names import ProcessGroup, StockDeviceMesh
from meshverse.agreement import ComparedCalls, Rendezvous
from meshverse.groups.creation import create_by_members, create_with_all_ranks
from meshverse.groups.group import Group, GroupRef, State
from meshverse.groups.registry import GroupRegistry
from meshverse.groups.request import Way, way_to_create
from meshverse.wording import rank_list
from meshverse.world import World

from .universe import Universe
from .world_universes import universes_not_ended

_log = logging.getLogger(__name__)

_SHOWN = 4  # problems of a rank that an error lists


class _Plan(NamedTuple):
    """Everything that one rank is about to revive.

    Attributes:
        universes: universes of the ended world that are alive.
        groups: process groups to create again, and lazy ones that were never created; by name, in
            the order of names.
        old: names of the groups, by the id of an ended group object; it is kept alive by `held`.
        held: attributes of given objects whose values are ended groups.
        problems: why a given object cannot get new groups, in words.
    """

    universes: Sequence[Universe]
    groups: dict[str, Group]
    old: dict[int, str]
    held: list[HeldGroup]
    problems: list[str]


def revive(*holders: object, timeout: timedelta | None = None) -> tuple[Universe, ...]:
    """Revive the last world in which meshes were created, with the current default process group.

    Experimental. Call it on all ranks right after `destroy_process_group()` and
    `init_process_group()`, with the rank and number of ranks as before, and before the first mesh.
    It creates the process groups of that world's universes again, under their old names and with
    their old options; not of universes that were destroyed or aborted. Their meshes, DTensors on
    them and compiled graphs can then be used as before.

    Args:
        holders: objects that keep process groups themselves, in lists and dictionaries or not:
            modules (with FSDP2's groups inside), torch's pipeline stages and schedules,
            `PipelineSchedule`, and a `Snapshot` that was given a group. They get the new groups.
            Optimizers, tensors, meshes and `Reshard` keep none, and may be given.
        timeout: how long ranks wait for one another; by default the timeout of the default group.

    Returns:
        The universes that were revived. Empty if none was alive.

    Raises:
        RuntimeError: a rank or the number of ranks has changed, a mesh was already created, a call
            has failed or was interrupted in the new world, ranks have different universes, or a
            given object is of an unknown kind or holds a group that cannot be replaced. All ranks
            raise it, and nothing has changed. Or a process group could not be created: then end the
            default group, create it again, and call this again.
        ValueError: there is no default process group.

    Example:
        >>> dist.destroy_process_group()  # doctest: +SKIP
        >>> dist.init_process_group("nccl")  # doctest: +SKIP
        >>> meshverse.revive(model, optimizer)  # doctest: +SKIP
    """
    current, world = World.current(), World.ended_last()
    if current is None:
        raise ValueError(
            "revive() needs a default process group: call init_process_group() before, with the "
            "rank and world_size that the ended one had."
        )
    gc.collect()  # a universe that only garbage refers to would be revived on some ranks
    known = universes_not_ended()
    universes = [one for one in known if world is not None and one.world is world]
    plan = _plan(universes, holders)
    needs = [(*_key(one), needed) for one in _numbered(universes) if (needed := _n_needed(one))]
    problems = _why_not(current, plan)
    if world is not None and universes:
        problems += _what_changed(current, world)
    _agree(current, needs, problems, timeout)
    if world is None or not universes:
        return ()
    world.revive(current)
    _keep_counts(world, universes)
    _create_groups(plan, world)
    world.note_revived()
    n_groups = sum(group.state is State.LIVE for group in plan.groups.values())
    _log.info("revived %d universes with %d process groups", len(universes), n_groups)
    groups = list(plan.groups.values())
    del plan  # which refers to the ended groups
    _warn_of_others(groups)
    return tuple(universes)


def _warn_of_others(groups: Sequence[Group]) -> None:
    """Log which ended groups are still referred to."""
    for group in groups:
        # The first default group of a process stays alive in torch.
        if not group.is_external and group.ended_handles():
            _log.warning(
                "revive(): an object that was not given to it still refers to the ended %s. Do not "
                "use that reference. The next time, give revive() the models and pipeline "
                "schedules that keep groups; elsewhere keep the mesh, whose get_group(axis) "
                "returns the new group.",
                group.in_words(),
            )


def _plan(universes: Sequence[Universe], holders: Sequence[object]) -> _Plan:
    found = {ref.group.name: ref.group for one in universes for ref in one.groups if ref.group}
    creatable = (State.ENDED, State.PLANNED)
    groups = {name: found[name] for name in sorted(found) if found[name].state in creatable}
    old = {id(handle): name for name, handle in _ended_handles(universes, groups)}
    held, problems = _held_by(holders)
    for one in held:
        if one.why_fixed:
            problems.append(f"{one} holds a process group")
        elif id(one.group) not in old:
            problems.append(
                f"{one} is an ended process group that no mesh to revive has. If its mesh was "
                "revived by an earlier call, that call needed this object; now create the group "
                "again, and set it"
            )
    return _Plan(universes, groups, old, held, problems)


def _held_by(holders: Sequence[object]) -> tuple[list[HeldGroup], list[str]]:
    """Return the ended groups that objects hold, and which objects are of an unknown kind."""
    held: list[HeldGroup] = []
    unknown, seen, waiting = [], set[int](), list(holders)
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, Mapping):
            waiting += one.values()
        elif isinstance(one, list | tuple | set | frozenset):
            waiting += one
        elif (parts := getattr(type(one), "parts_to_revive", None)) is not None:
            waiting += parts(one)
            held += group_attributes([one])
        elif (of_torch := groups_held_by(one)) is not None:
            held += of_torch
        elif one is not None and not isinstance(one, StockDeviceMesh | Universe):
            unknown.append(
                f"it cannot tell which process groups an object of type {type(one).__qualname__} "
                "holds: give modules, optimizers, and pipeline stages and schedules"
            )
    ended = {(id(one.owner), one.name): one for one in held if not is_live(one.group)}
    return list(ended.values()), list(dict.fromkeys(unknown))


def _numbered(universes: Sequence[Universe]) -> list[Universe]:
    """Return the universes that have a number, in the same order on all ranks."""
    # The others have created no group for all of their ranks.
    numbered = [one for one in universes if one.groups.calls.number is not None]
    return sorted(numbered, key=lambda universe: (universe.rank_map.fingerprint, universe.serial))


def _keep_counts(world: World, universes: Sequence[Universe]) -> None:
    """Carry over the call counts of the revived universes only.

    All ranks of a universe revive it, so they carry over the same counts.
    """
    for universe in universes:
        universe.groups.calls.on_revive()
    compared = {
        each for universe in universes for each in universe.groups.calls.compared_fingerprints
    }
    world.state(ComparedCalls).keep_counts(compared)


def _ended_handles(
    universes: Sequence[Universe], groups: Mapping[str, Group]
) -> Iterator[tuple[str, ProcessGroup]]:
    """Yield the ended group objects that something still refers to, with the names of groups."""
    for world in {universe.world for universe in universes if universe.world is not None}:
        default_group = world.ended_default_group
        if default_group is not None:
            yield default_group.group_name, default_group
    for name, group in groups.items():
        for handle in group.ended_handles():
            yield name, handle


def _what_changed(current: World, world: World) -> list[str]:
    was, now = (world.rank, world.size), (current.rank, current.size)
    if was != now:
        return [f"this process was rank {was[0]} of {was[1]} and is rank {now[0]} of {now[1]} now"]
    if current.may_change and not world.may_change:  # meshes store their coordinates, for good
        return [
            "the default group can be reconfigured now, and could not when the meshes were created"
        ]
    return []


def _why_not(current: World, plan: _Plan) -> list[str]:
    again = "end the default group, and create it again"
    last = World.ended_last()
    if last is not None and not last.is_over:
        return [f"a revive() failed in this world, or was interrupted: {again}"]
    if not plan.universes:  # this rank stays in the current world
        return list(dict.fromkeys(plan.problems))
    problems = list(plan.problems)
    problems += [
        f"a call that failed has left the {group.in_words()}: {again}"
        for group in current.state(GroupRegistry)
        if group.may_be_elsewhere and not group.refs.alive()
    ]
    for universe in universes_not_ended():
        if universe.world is current and universe not in plan.universes:
            new = f"a mesh over {universe.rank_map} was created in the new world already"
            problems.append(f"{new}: end it with mesh.universe.destroy(), and delete it")
    for ref in (ref for universe in plan.universes for ref in universe.groups):
        if ref.group is not None:
            problems += _why_no_group(current, ref, ref.group)
    return list(dict.fromkeys(problems))


def _why_no_group(current: World, ref: GroupRef, group: Group) -> list[str]:
    request = ref.request
    if group.is_external:
        if request.way is not Way.DEFAULT_GROUP:
            return [
                f"the {group.in_words()} was created by the program, which must create it again"
            ]
        now = current.default_group.group_name
        return [f"the default group was named {group.name!r} and is {now!r} now"] * (
            group.name != now
        )
    if request.way is Way.BY_ALL:
        why = request.all_ranks_reason
        return [f"the {group.in_words()} was created by all ranks together: {why}"]
    if request.way is Way.SPLIT and group.state is State.DESTROYED:
        return [f"the {group.in_words()} was destroyed: all ranks would have to split it off again"]
    if request.way is Way.OTHER_UNIVERSE:
        if not group.contents:
            return [f"the {group.in_words()} is of another universe, and was created by all ranks"]
        return []
    way, reason = way_to_create(request.axis, request.options, current)
    if way is Way.BY_ALL:
        return [f"all ranks would have to create the {group.in_words()} together now: {reason}"]
    if (way is Way.SPLIT) != (request.way is Way.SPLIT):
        return ["the new default group is of another backend, or is bound to a device differently"]
    return []


def _agree(
    current: World,
    held: Sequence[tuple[str, str, int]],
    problems: Sequence[str],
    timeout: timedelta | None,
) -> None:
    """Compare what the ranks are about to revive.

    Args:
        current: the world of the current default group.
        held: the universes, each with a key, a name, and the number of ranks that must revive it.
        problems: reasons why this rank cannot.
        timeout: as of `revive`.

    Raises:
        RuntimeError: a rank has a problem, or ranks have different universes.
    """
    mine = json.dumps([held, problems[:_SHOWN]])
    ranks, texts = range(current.rank, current.rank + 1), [mine]
    if current.store is not None:
        ranks = range(current.size)
        limit = timeout or current.default_options.timeout
        rendezvous = current.state(Rendezvous)
        try:
            texts = rendezvous.join(
                current, "revive", "the revived process groups", ranks, limit, text=mine
            ).texts
        except RuntimeError as error:
            raise RuntimeError(f"revive() has changed nothing: {error}") from None
    by_text: dict[str, list[int]] = {}
    for rank, text in zip(ranks, texts, strict=True):
        by_text.setdefault(text, []).append(rank)
    reasons = []
    having: dict[tuple[str, str, int], list[int]] = {}  # the ranks that hold a universe
    for text, members in by_text.items():
        universes, problems = json.loads(text)
        reasons += [f"{_ranks(members)}: {problem}" for problem in problems]
        for universe in universes:
            having.setdefault(tuple(universe), []).extend(members)
    lacking = []
    for (_, name, n_needed), members in having.items():
        if len(members) != n_needed and len(ranks) > 1:
            verb = "hold" if len(members) > 1 else "holds"
            lacking.append(f"only {_ranks(sorted(members))} still {verb} meshes of {name}")
    reasons = reasons or lacking  # which may follow from those, as in a smaller world
    if reasons:
        listed = "".join(f"\n  {reason}" for reason in reasons[:_SHOWN])
        more = f"\n  and {len(reasons) - _SHOWN} more" if len(reasons) > _SHOWN else ""
        raise RuntimeError(
            f"revive() cannot revive the meshes of the world that ended; nothing has changed:"
            f"{listed}{more}\nAll ranks must keep the same meshes, and call it right after "
            "init_process_group(). Keep a mesh, and not its process groups: mesh.get_group(axis) "
            "returns the current group. Call mesh.universe.destroy() on meshes that are to end: "
            "torch's caches can keep those that are only deleted."
        )


def _key(universe: Universe) -> tuple[str, str]:
    """Return a key of a universe, the same on all of its ranks, and a name for messages."""
    rank_map, number = universe.rank_map, universe.serial
    return f"{rank_map.fingerprint} {number}", f"the universe of {rank_map}, number {number}"


def _n_needed(universe: Universe) -> int:
    """Return how many ranks must revive a universe; 0 if this rank need not."""
    assert universe.world is not None
    if any(ref.request.way is Way.SPLIT for ref in universe.groups):
        return universe.world.size
    return 0 if universe.position is None else universe.size


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {rank_list(ranks)}"


def _create_groups(plan: _Plan, world: World) -> None:
    """Create the groups again; groups that all ranks create together come first.

    All ranks use the same order.

    Args:
        plan: everything that this rank revives.
        world: world that goes on.
    """
    for group in plan.groups.values():
        group.revive()
    try:
        for ref in (ref for one in _numbered(plan.universes) for ref in one.groups):
            if ref.request.way is Way.SPLIT:
                _split(ref, world)
        for group in plan.groups.values():
            if group.is_external:
                group.become_live(world.default_group)
            elif group.state is State.PLANNED and group.was_live:
                group.make(partial(create_by_members, world=world))
    finally:
        for held in plan.held:
            known = plan.groups.get(plan.old[id(held.group)])
            handle = world.default_group if known is None else known.handle
            if handle is not None:
                held.replace(handle)


def _split(ref: GroupRef, world: World) -> None:
    group = ref.group
    if group is None:  # this rank takes part in the split only
        create_with_all_ranks(ref.request, world)
    elif group.state is State.PLANNED:
        group.make(lambda one: create_with_all_ranks(ref.request, world, one.name))
