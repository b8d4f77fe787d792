"""Making and connecting process groups before the first step, which would pay for it otherwise."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Collection, Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist

from meshverse import _torch_compat as compat
from meshverse.groups.request import Group

from .groups import UniverseGroups

__all__ = ["WarmedUp", "in_one_order", "warm_up"]

_log = logging.getLogger(__name__)


class WarmedUp(NamedTuple):
    """One group that was warmed up.

    Attributes:
        axes: names of the axes it was asked for by.
        size: its number of ranks.
        seconds: for making it, where it was lazy, and for its first collective.
    """

    axes: tuple[str, ...]
    size: int
    seconds: float


def warm_up(
    groups: UniverseGroups,
    axis_names: Collection[str] | None,
    device_type: str,
    *,
    show_progress: bool,
) -> list[WarmedUp]:
    """Make my lazy groups and run one small all-reduce on every group; see `Universe.warm_up`.

    Raises:
        KeyError: no group was asked for by one of the names.
    """
    chosen = in_one_order(groups, axis_names)
    report = []
    with _progress(len(chosen)) if show_progress else contextlib.nullcontext() as tell:
        for group in chosen:
            assert group.name is not None
            axes = tuple(group.requests)
            if tell is not None:
                tell(f"warming up {', '.join(axes)}")
            start = time.perf_counter()
            groups.before_use(group.name)
            process_group = compat.resolve_group(group.name)
            dist.all_reduce(torch.zeros(1, device=device_type), group=process_group)
            seconds = time.perf_counter() - start
            report.append(WarmedUp(axes, process_group.size(), seconds))
            _log.info("warmed up %s: %d ranks, %.3f s", axes, process_group.size(), seconds)
    return report


def in_one_order(groups: UniverseGroups, axis_names: Collection[str] | None) -> list[Group]:
    """My groups of these axes, by default all, in an order that all ranks share.

    Raises:
        KeyError: no group was asked for by one of the names.
    """
    known = {name for group in groups for name in group.requests}
    wanted = known if axis_names is None else set(axis_names)
    if not wanted <= known:
        raise KeyError(
            f"Groups of axes {sorted(wanted - known)}: no mesh of this universe asked for "
            f"groups by these names, but by {sorted(known)}."
        )
    mine = [g for g in groups if g.name is not None and wanted & g.requests.keys()]
    # In an order that all ranks share, whatever order they asked in: so no two wait for each other.
    return sorted(mine, key=lambda g: (str(g.request.axis), g.request.options.name_digest))


@contextlib.contextmanager
def _progress(total: int) -> Iterator[Callable[[str], object]]:
    try:
        from rich.progress import Progress
    except ImportError as error:
        raise ImportError(
            "warm_up(show_progress=True) draws with rich, which is not installed: "
            "pip install 'meshverse[progress]', or leave show_progress out; the log tells too."
        ) from error
    with Progress(transient=True) as progress:
        bar = progress.add_task("", total=total)
        yield lambda text: progress.update(bar, description=text, advance=1)
