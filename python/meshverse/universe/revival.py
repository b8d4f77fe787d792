"""Revival: a world that has ended, with its universes, goes on with the next default group.

A program that ends its default process group, to give device memory back or to leave a broken job,
and then creates it again with the same ranks, would have to build every mesh and model anew: their
process groups are gone. Reviving creates these groups again, under their names, and gives them to
whatever refers to the old ones. The `World` object that ended replaces the one that was created for
the new default group.
"""

from __future__ import annotations

import gc
import json
import logging
import weakref
from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

from meshverse import _torch_compat as compat
from meshverse.agreement import ComparedCalls, Rendezvous
from meshverse.groups.creation import create_by_all, create_by_members, how
from meshverse.groups.group import Group, GroupUse, Origin, State
from meshverse.groups.references import Referrer, find_references
from meshverse.groups.registry import GroupRegistry
from meshverse.wording import rank_list
from meshverse.world.world import World

from .registry import universes_not_ended
from .universe import Universe

_log = logging.getLogger(__name__)

_SHOWN = 4  # problems of a rank that an error lists


class _Plan(NamedTuple):
    """Everything that one rank is about to revive.

    Attributes:
        universes: universes of the ended world that are alive.
        groups: process groups to create again, and lazy ones that were never created; by name, in
            the order of names.
        old: the ended group objects that something still refers to, by name of the group.
        referrers: the objects that refer to these.
        problems: references that cannot be replaced, in words.
    """

    universes: Sequence[Universe]
    groups: dict[str, Group]
    old: dict[str, list[compat.ProcessGroup]]
    referrers: list[Referrer]
    problems: list[str]


def revive(*, timeout: timedelta | None = None) -> tuple[Universe, ...]:
    """Revive the last world in which meshes were made, with the current default process group.

    Call it on all ranks right after `destroy_process_group()` and `init_process_group()`, with the
    rank and number of ranks as before, and before the first mesh. It creates the process groups of
    that world's universes again, under their old names and with their old options; not of universes
    that were destroyed or aborted. Their meshes, DTensors on them, models, optimizers and compiled
    graphs can then be used as before. Objects that refer to an old process group itself, such as
    FSDP2's or a pipeline's stages, get the new one.

    Args:
        timeout: how long ranks wait for one another; by default the timeout of the default group.

    Returns:
        The universes that were revived. Empty if none was alive.

    Raises:
        RuntimeError: a rank or the number of ranks has changed, a mesh was made already, ranks have
            different universes, or a reference to an old group cannot be replaced. All ranks raise
            it, and nothing has changed. Or a process group could not be created: then end the
            default group, create it again, and call this again.
        ValueError: there is no default process group.

    Example:
        >>> dist.destroy_process_group()  # doctest: +SKIP
        >>> dist.init_process_group("nccl")  # doctest: +SKIP
        >>> meshverse.revive()  # doctest: +SKIP
    """
    current = World.current()
    if current is None:
        raise ValueError(
            "revive() needs a default process group: call init_process_group() before, with the "
            "rank and world_size that the ended one had."
        )
    return _revive(current, World.ended_last(), timeout)


def _revive(current: World, world: World | None, timeout: timedelta | None) -> tuple[Universe, ...]:
    n_frozen = gc.get_freeze_count()
    if n_frozen:
        gc.unfreeze()  # the search for references does not see frozen objects
    try:
        gc.collect()  # a universe that only garbage refers to would be revived on some ranks
        known = universes_not_ended()
        universes = [one for one in known if world is not None and one.world is world]
        plan = _plan(universes)
        held = [(*_key(one), needed) for one in _numbered(universes) if (needed := _n_needed(one))]
        problems = _why_not(current, plan)
        if world is not None and universes:
            problems += _what_changed(current, world)
    finally:
        if n_frozen:
            gc.freeze()
    try:
        _agree(current, held, problems, timeout)
        if world is None or not universes:
            return ()
        world.revive(current)
        _keep_counts(world, universes)
        _create_groups(plan, world)
    except BaseException:
        del plan, universes  # a traceback that somebody keeps would keep them
        raise
    n_groups = sum(group.state is State.LIVE for group in plan.groups.values())
    _log.info("revived %d universes with %d process groups", len(universes), n_groups)
    ended = [
        (plan.groups[name], [weakref.ref(handle) for handle in handles])
        for name, handles in plan.old.items()
        if name in plan.groups
    ]
    del plan
    _warn_of_others(ended)
    return tuple(universes)


def _warn_of_others(ended: Sequence[tuple[Group, Sequence[weakref.ref[Any]]]]) -> None:
    """Log which groups that have ended are still referred to."""
    for group, handles in ended:
        # The first default group of a process stays alive in torch.
        if not group.borrowed and any(handle() is not None for handle in handles):
            _log.warning(
                "revive(): the ended %s is still referenced by something that Python's garbage "
                "collector does not show, such as a NumPy array of objects or an extension. That "
                "reference cannot be used: there, get the group from mesh.get_group(axis) again.",
                group.in_words(),
            )


def _plan(universes: Sequence[Universe]) -> _Plan:
    found = {use.group.name: use.group for one in universes for use in one.groups if use.group}
    creatable = (State.ENDED, State.PLANNED)
    groups = {name: found[name] for name in sorted(found) if found[name].state in creatable}
    names, handles = _ended_handles(universes, groups)
    references = find_references(handles)
    old: dict[str, list[compat.ProcessGroup]] = {}
    for name, handle in zip(names, handles, strict=True):
        old.setdefault(name, []).append(handle)
    held = []
    for index, what in references.problems:
        group = groups.get(names[index])
        described = "default process group" if group is None else group.in_words()
        held.append(f"the {described} is held by {what}")
    return _Plan(universes, groups, old, references.referrers, held)


def _numbered(universes: Sequence[Universe]) -> list[Universe]:
    """Return the universes that have a number, in the same order on all ranks."""
    # The others made no call that created groups for all their ranks.
    numbered = [one for one in universes if one.groups.number is not None]
    return sorted(numbered, key=lambda universe: (universe.rank_map.fingerprint, universe.serial))


def _keep_counts(world: World, universes: Sequence[Universe]) -> None:
    """Carry over the call counts and universe numbers of the revived universes only.

    All ranks of a universe revive it, so they carry over the same counts.
    """
    numbers: dict[str, int] = {}
    for universe in _numbered(universes):
        ranks = universe.groups.ranks_fingerprint
        numbers[ranks] = max(numbers.get(ranks, 0), universe.serial + 1)
    for universe in universes:
        universe.groups.go_on()
    compared = {ranks for universe in universes for ranks in universe.groups.compared_ranks}
    world.state(ComparedCalls).keep(compared, numbers)


def _ended_handles(
    universes: Sequence[Universe], groups: Mapping[str, Group]
) -> tuple[list[str], list[compat.ProcessGroup]]:
    """Return the ended group objects that something still refers to, with the names of groups."""
    names: list[str] = []
    handles: list[compat.ProcessGroup] = []
    worlds = {universe.world for universe in universes if universe.world is not None}
    for world in worlds:
        default_group = world.ended_default_group
        if default_group is not None and default_group.group_name not in groups:
            names.append(default_group.group_name)
            handles.append(default_group)
    for name, group in groups.items():
        for handle in group.ended_handles():
            names.append(name)
            handles.append(handle)
    return names, handles


def _what_changed(current: World, world: World) -> list[str]:
    was, now = (world.rank, world.size), (current.rank, current.size)
    what = f"this process was rank {was[0]} of {was[1]} and is rank {now[0]} of {now[1]} now"
    return [] if was == now else [what]


def _why_not(current: World, plan: _Plan) -> list[str]:
    here = current.state(GroupRegistry)
    if any(group.state is State.PLANNED and group.was_live for group in here):
        return ["a revive() failed in this world: end the default group, and create it again"]
    if not plan.universes:
        return []  # this rank stays in the current world
    problems = list(plan.problems)
    for universe in universes_not_ended():
        if universe.world is current and universe not in plan.universes:
            new = f"a mesh over {universe.rank_map} was made in the new world already"
            problems.append(f"{new}: end it with mesh.universe.destroy(), and delete it")
    for use in (use for universe in plan.universes for use in universe.groups):
        if use.group is not None:
            problems += _why_no_group(current, use, use.group)
    return list(dict.fromkeys(problems))


def _why_no_group(current: World, use: GroupUse, group: Group) -> list[str]:
    if group.borrowed:
        if use.how is not Origin.DEFAULT_GROUP:
            return [
                f"the {group.in_words()} was created by the program, which must create it again"
            ]
        now = current.default_group.group_name
        return [f"the default group was named {group.name!r} and is {now!r} now"] * (
            group.name != now
        )
    if use.how is Origin.BY_ALL:
        return [f"the {group.in_words()} was created by all ranks together: {use.reason}"]
    if use.how is Origin.SPLIT and group.state is State.DESTROYED:
        return [f"the {group.in_words()} was destroyed: all ranks would have to split it off again"]
    if use.how is Origin.OTHER_UNIVERSE and group.content is None:
        return [f"the {group.in_words()} is of another universe, and was created by all ranks"]
    is_split = how(use.request, current)[0] is Origin.SPLIT
    if use.how is not Origin.OTHER_UNIVERSE and is_split != (use.how is Origin.SPLIT):
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
            texts = rendezvous.join(current, "revive", "revive()", ranks, limit, text=mine).texts
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
    for (_, name, n_needed), members in having.items():
        if len(members) != n_needed and len(ranks) > 1:
            verb = "hold" if len(members) > 1 else "holds"
            reasons.append(f"only {_ranks(sorted(members))} still {verb} meshes of {name}")
    if reasons:
        listed = "".join(f"\n  {reason}" for reason in reasons[:_SHOWN])
        more = f"\n  and {len(reasons) - _SHOWN} more" if len(reasons) > _SHOWN else ""
        raise RuntimeError(
            f"revive() cannot revive the meshes of the world that ended; nothing has changed:"
            f"{listed}{more}\nAll ranks must keep the same meshes, and call it right after "
            "init_process_group(). Keep a mesh, and not its process groups: mesh.get_group(axis) "
            "returns the current group."
        )


def _key(universe: Universe) -> tuple[str, str]:
    """Return a key of a universe, the same on all of its ranks, and a name for messages."""
    rank_map, number = universe.rank_map, universe.serial
    return f"{rank_map.fingerprint} {number}", f"the universe of {rank_map}, number {number}"


def _n_needed(universe: Universe) -> int:
    """Return how many ranks must revive a universe; 0 if this rank need not."""
    assert universe.world is not None
    if any(use.how is Origin.SPLIT for use in universe.groups):
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
        for use in (use for one in _numbered(plan.universes) for use in one.groups):
            if use.how is Origin.SPLIT:
                _split(use, world)
        for group in plan.groups.values():
            if group.borrowed:
                group.take_over(world.default_group)
            elif group.state is State.PLANNED and group.was_live:
                group.make(partial(create_by_members, world=world))
    finally:
        new: dict[int, Any] = {}
        for name, handles in plan.old.items():
            known = plan.groups.get(name)
            handle = world.default_group if known is None else known.handle
            if handle is not None:
                new |= {id(old): handle for old in handles}
        for referrer in plan.referrers:
            referrer.replace(new)


def _split(use: GroupUse, world: World) -> None:
    group = use.group
    if group is None:  # this rank takes part in the split only
        create_by_all(use.request, world, use.how)
    elif group.state is State.PLANNED:
        group.make(lambda one: create_by_all(use.request, world, use.how, one.name))
