"""Process groups of lists of ranks, without a mesh."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Collection, Iterable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from meshverse._core import RankMap
from meshverse._torch_compat.backends import explicit_timeout_of, is_backend_options
from meshverse._torch_compat.private_names import BackendOptions, ProcessGroup
from meshverse.layouts.user_input import ArrayLike, read_rank_map
from meshverse.options.group_options import Override, check_timeout, normalize_override
from meshverse.options.isolation_tags import normalize_tags
from meshverse.wording import rank_list

if TYPE_CHECKING:
    from .universe import Universe

# Returned on ranks that are not in a group, as by `torch.distributed.new_group`.
_NOT_A_MEMBER: Any = dist.GroupMember.NON_GROUP_MEMBER


def group_of(
    universe: Universe,
    ranks: RankMap | torch.Tensor | ArrayLike,
    *,
    name: str,
    backend: str | None,
    options: BackendOptions | None,
    timeout: timedelta | None,
    isolate: str | None,
) -> ProcessGroup:
    """Return the process group of these ranks; see `Universe.group`."""
    rank_map = ranks if isinstance(ranks, RankMap) else read_rank_map(ranks, "A process group")
    rank_map = rank_map.sorted()
    override = read_override(backend, options)
    if timeout is not None:
        check_timeout(timeout)
        own = explicit_timeout_of(options)
        if own not in (None, timeout):
            raise ValueError(
                f"universe.group {name!r} got timeout={timeout} and options with _timeout={own}: "
                "pass one of them."
            )
    tag = "".join(normalize_tags(isolate, None, 1))
    universe.groups.check_usable()
    universe.check_has(rank_map)
    group = None
    if rank_map.position_of(universe.rank) is not None or universe.groups.need_all_ranks(override):
        groups = universe.part(rank_map).groups
        group = groups.over_whole_universe(
            name, override, timeout, tag, call=f"universe.group {name!r}"
        )
    return _NOT_A_MEMBER if group is None else group


def group_containing_rank(
    universe: Universe, lists: Iterable[torch.Tensor | ArrayLike], **arguments: Any
) -> ProcessGroup:
    """Return the process group of the list with this rank; see `Universe.groups_of`."""
    if not isinstance(lists, Iterable):
        raise _no_lists(lists, "the lists")
    # Lists and ranges are not copied: there may be as many of them as ranks.
    all_lists = [each if isinstance(each, (list, range)) else _listed(each) for each in lists]
    _check_all_ranks(universe, all_lists)
    mine = [ranks for ranks in all_lists if universe.rank in ranks]
    if len(mine) > 1:
        raise ValueError(
            f"Rank {universe.rank} is in {len(mine)} of these lists, such as "
            f"[{rank_list(sorted(mine[0]))}] and [{rank_list(sorted(mine[1]))}]: groups_of returns "
            "one group. Call universe.group(ranks) for each list."
        )
    backend, options = arguments.get("backend"), arguments.get("options")
    if universe.groups.need_all_ranks(read_override(backend, options)):
        made = [universe.group(ranks, **arguments) for ranks in all_lists]
        return next((one for one in made if one is not _NOT_A_MEMBER), _NOT_A_MEMBER)
    return universe.group(mine[0], **arguments) if mine else _NOT_A_MEMBER


def _check_all_ranks(universe: Universe, lists: Sequence[Sequence[Any]]) -> None:
    """Raise on all ranks what `Universe.group` raises on the members of a list.

    Raises:
        TypeError: lists of lists, or of names.
        ValueError: a list has a rank that is not in the universe.
    """
    known = set(universe.rank_map.ranks().tolist())
    with contextlib.suppress(TypeError):  # of what cannot be hashed
        if known.issuperset(itertools.chain.from_iterable(lists)):
            return
    for each in filter(len, lists):
        if any(isinstance(rank, Collection) and getattr(rank, "ndim", 1) for rank in each):
            raise _no_lists(each, "a list of ranks")
        universe.check_has(read_rank_map(each, "A process group"))


def _listed(ranks: Any) -> list[int]:
    listed: Any = ranks.tolist() if hasattr(ranks, "tolist") else ranks
    if not isinstance(listed, Iterable):
        raise _no_lists(ranks, "a list of ranks")
    return list(listed)


def _no_lists(given: Any, what: str) -> TypeError:
    return TypeError(
        f"groups_of() got {given!r:.80} of type {type(given).__name__} as {what}: pass lists of "
        "global ranks, as [[0, 1], [2, 3]], or a tensor or array with two dimensions. For one "
        "list, call group(ranks)."
    )


def read_override(backend: str | None, options: BackendOptions | None) -> Override:
    """Return a group's backend and options as an override.

    Raises:
        TypeError: `options` is not an options object.
        ValueError: the backend is unknown.
    """
    if options is not None and not is_backend_options(options):
        raise TypeError(
            f"options={options!r} of type {type(options).__name__}: pass an options object of the "
            "group's backend, such as ProcessGroupNCCL.Options()."
        )
    return normalize_override((backend, options))
