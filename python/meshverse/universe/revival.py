"""Revival: the universes of a world that has ended go on in the next one.

A program that ends its default process group, to give device memory back or to leave a broken job,
and then creates it again with the same ranks, would have to build every mesh and model anew: their
process groups are gone. Reviving creates these groups again, under their names, and gives them to
whatever refers to the old ones.
"""

from __future__ import annotations

import gc
import json
import logging
from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

from meshverse import _torch_compat as compat
from meshverse.agreement import Rendezvous
from meshverse.groups.creation import create_by_all, create_by_members
from meshverse.groups.group import Group, GroupUse, Origin, State
from meshverse.groups.references import References, find_references
from meshverse.groups.registry import GroupRegistry
from meshverse.wording import rank_list
from meshverse.world.world import World

from .registry import live_universes
from .universe import Universe

_log = logging.getLogger(__name__)

_SHOWN = 4  # problems of a rank that an error lists


class _Plan(NamedTuple):
    """Everything that one rank is about to revive.

    Attributes:
        world: the one that has ended; None if no universe is left of it here.
        universes: of that world.
        numbered: those of them that all of their ranks number alike, in that order.
        groups: process groups that ended with the world, by name, in the order of names.
        old: the ended group objects that something still refers to, by name of the group.
        references: to these objects.
        problems: why this rank cannot revive them, in words.
    """

    world: World | None
    universes: list[Universe]
    numbered: list[Universe]
    groups: dict[str, Group]
    old: dict[str, compat.ProcessGroup]
    references: References
    problems: list[str]


def revive(*, timeout: timedelta | None = None) -> tuple[Universe, ...]:
    """Revive the meshes of the world that ended last, in the default process group of now.

    Call it on all ranks right after `destroy_process_group()` and `init_process_group()`, with the
    rank and number of ranks as before, and before the first mesh. It creates the process groups of
    all universes that are alive again, under the names that they had. Their meshes, DTensors on
    them, models, optimizers and compiled graphs can then be used as before. Objects that refer to
    an old process group itself, such as FSDP2's or a pipeline's stages, get the new one.

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
    plan = _plan(current)
    _agree(current, plan, timeout)
    if plan.world is None:
        return ()
    plan.world.revive(current.default_group)
    _create_groups(plan)
    n_groups = sum(group.state is State.LIVE for group in plan.groups.values())
    _log.info("revived %d universes with %d process groups", len(plan.universes), n_groups)
    return tuple(plan.universes)


def _plan(current: World) -> _Plan:
    gc.collect()  # a universe that only garbage refers to would be revived on some ranks
    world, universes = _ended_last(current)
    if world is None:
        return _Plan(None, [], [], {}, {}, References([], []), [])
    groups = {
        group.name: group
        for group in sorted(world.state(GroupRegistry), key=lambda group: group.name)
        if group.state in (State.ENDED, State.PLANNED) and group.uses.alive()
    }
    names, handles = _last_handles(groups)
    references = find_references(handles)
    old = dict(zip(names, handles, strict=True))
    problems = _why_not(current, world, universes)
    problems += [
        f"the {groups[names[index]].in_words()} is held by {what}"
        for index, what in references.problems
    ]
    # Universes without a number made no groups that all of their ranks know.
    numbered = [one for one in universes if one.groups.number is not None]
    numbered.sort(key=lambda universe: (universe.rank_map.fingerprint, universe.serial))
    return _Plan(world, universes, numbered, groups, old, references, problems)


def _last_handles(groups: Mapping[str, Group]) -> tuple[list[str], list[compat.ProcessGroup]]:
    """Return the ended group objects that something still refers to, with the names of groups."""
    names, handles = [], []
    for name, group in groups.items():
        handle = group.last_handle()
        if handle is not None:
            names.append(name)
            handles.append(handle)
    return names, handles


def _ended_last(current: World) -> tuple[World | None, list[Universe]]:
    ended = [
        universe
        for universe in live_universes()
        if universe.world is not None
        and universe.world.is_over
        and not universe.world.is_of_parent
        and universe.world.thread_id == current.thread_id
    ]
    if not ended:
        return None, []
    life = max(universe.world.life for universe in ended if universe.world is not None)
    last = [one for one in ended if one.world is not None and one.world.life == life]
    return last[0].world, last


def _why_not(current: World, world: World, universes: Sequence[Universe]) -> list[str]:
    problems = []
    if (world.rank, world.size) != (current.rank, current.size):
        problems.append(
            f"this process was rank {world.rank} of {world.size} and is rank {current.rank} of "
            f"{current.size} now"
        )
    made = [universe for universe in live_universes() if universe.world is current]
    problems += [f"a mesh over {one.rank_map} was made in the new world already" for one in made]
    name = current.default_group.group_name
    for universe in universes:
        for use in universe.groups:
            what = "" if use.group is None else use.group.in_words()
            if use.how is Origin.BY_ALL:
                problems.append(f"the {what} was created by all ranks together: {use.reason}")
            elif use.how is Origin.GIVEN:
                problems.append(f"the {what} was created by the program, which must do it again")
            elif use.how is Origin.DEFAULT_GROUP and use.name not in (None, name):
                problems.append(f"the default group was named {use.name!r} and is {name!r} now")
    return problems


def _agree(current: World, plan: _Plan, timeout: timedelta | None) -> None:
    """Compare the plans of all ranks.

    Raises:
        RuntimeError: a rank has a problem, or ranks have different universes.
    """
    held = [(_in_words(one), needed) for one in plan.numbered if (needed := _n_needed(one))]
    mine = json.dumps([held, plan.problems[:_SHOWN]])
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
    having: dict[tuple[str, int], list[int]] = {}  # ranks, by universe and how many ranks it needs
    for text, members in by_text.items():
        universes, problems = json.loads(text)
        reasons += [f"{_ranks(members)}: {problem}" for problem in problems]
        for universe in universes:
            having.setdefault(tuple(universe), []).extend(members)
    for (name, n_needed), members in having.items():
        if len(members) != n_needed and len(ranks) > 1:
            reasons.append(f"only {_ranks(sorted(members))} still hold meshes of {name}")
    if reasons:
        listed = "".join(f"\n  {reason}" for reason in reasons[:_SHOWN])
        more = f"\n  and {len(reasons) - _SHOWN} more" if len(reasons) > _SHOWN else ""
        raise RuntimeError(
            f"revive() cannot revive the meshes of the world that ended; nothing has changed:"
            f"{listed}{more}\nAll ranks must keep the same meshes, and call it right after "
            "init_process_group(). Keep a mesh, and not its process groups: mesh.get_group(axis) "
            "gives the group of now."
        )


def _in_words(universe: Universe) -> str:
    return f"the universe of {universe.rank_map}, number {universe.serial}"


def _n_needed(universe: Universe) -> int:
    """Return how many ranks must revive a universe: 0 if this one need not."""
    assert universe.world is not None
    if any(use.how is Origin.SPLIT for use in universe.groups):
        return universe.world.size
    return 0 if universe.position is None else universe.size


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {rank_list(ranks)}"


def _create_groups(plan: _Plan) -> None:
    """Create the groups again, those that all ranks create first. All ranks use one order."""
    world = plan.world
    assert world is not None
    for group in plan.groups.values():
        group.revive()
    try:
        for use in (use for universe in plan.numbered for use in universe.groups):
            if use.how is Origin.SPLIT:
                _split(use, world)
        for group in plan.groups.values():
            if group.borrowed:
                group.take_over(world.default_group)
            elif group.state is State.PLANNED and group.was_live:
                group.make(partial(create_by_members, world=world))
    finally:
        handles = {name: plan.groups[name].handle for name in plan.old}
        new: dict[int, Any] = {
            id(plan.old[name]): handle for name, handle in handles.items() if handle is not None
        }
        for holder in plan.references.holders:
            holder.replace(new)


def _split(use: GroupUse, world: World) -> None:
    group = use.group
    if group is None:  # this rank takes part in the split only
        create_by_all(use.request, world, use.how, "a group of others")
    elif group.state is State.PLANNED:
        group.make(lambda one: create_by_all(use.request, world, use.how, one.name))
