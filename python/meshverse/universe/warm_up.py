"""Warm-up: creates lazy process groups and connects all groups before the first step."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from meshverse._torch_compat.backends import by_device

from .groups_in_order import in_one_order
from .universe_groups import UniverseGroups

_log = logging.getLogger(__name__)


class WarmedUp(NamedTuple):
    """One group that was warmed up.

    Attributes:
        axes: names of the axes that requested the group.
        size: number of ranks in the group.
        seconds: time to create the group, if it was lazy, and to run one all-reduce.
    """

    axes: tuple[str, ...]
    size: int
    seconds: float


def warm_up(
    all_groups: Sequence[UniverseGroups],
    axis_names: Collection[str] | None,
    device_type: str,
    *,
    show_progress: bool,
) -> list[WarmedUp]:
    """Create lazy groups and run one small all-reduce on every group; see `Universe.warm_up`.

    Args:
        all_groups: groups of a universe and of its parts.
        axis_names: names of the axes; None for all groups.
        device_type: type of the device of the all-reduced tensor, if the group has a backend for
            it; else the first that it has one for.
        show_progress: whether to show a progress bar.

    Raises:
        KeyError: no group was requested by one of the names.
    """
    chosen = in_one_order(all_groups, axis_names)
    report = []
    with _progress(len(chosen)) if show_progress else contextlib.nullcontext() as show:
        for one in chosen:
            axes = one.axes
            if show is not None:
                show(f"warming up {', '.join(axes)}")
            start = time.perf_counter()
            one.lister.before_use(one.group.name)
            process_group = one.group.live_handle()
            devices = by_device(one.group.request.options.backend)
            device = device_type if device_type in devices else next(iter(devices))
            dist.all_reduce(torch.zeros(1, device=device), group=process_group)
            seconds = time.perf_counter() - start
            report.append(WarmedUp(axes, process_group.size(), seconds))
            if process_group.rank() == 0:  # one line per group
                _log.info("warmed up %s: %d ranks, %.3f s", axes, process_group.size(), seconds)
    return report


@contextlib.contextmanager
def _progress(total: int) -> Iterator[Callable[[str], object]]:
    try:
        from rich.progress import Progress
    except ImportError as error:
        raise ImportError(
            "warm_up(show_progress=True) needs rich, which is not installed: "
            "pip install 'meshverse[progress]', or leave show_progress out; the log has the same."
        ) from error
    with Progress(transient=True) as progress:
        bar = progress.add_task("", total=total)
        yield lambda text: progress.update(bar, description=text, advance=1)
