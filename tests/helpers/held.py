"""Counts of what this process holds, for tests that nothing is left behind."""

from __future__ import annotations

import contextlib
import gc
import os

from helpers.turns import wait_until
from helpers.worlds import group_names


def held() -> dict[str, int]:
    """Return the numbers of process groups, threads and descriptors, after a garbage collection."""
    gc.collect()
    return {
        "groups": len(group_names()),
        "threads": len(os.listdir("/proc/self/task")),
        "descriptors": len(os.listdir("/proc/self/fd")),
    }


def grown(before: dict[str, int], after: dict[str, int]) -> dict[str, tuple[int, int]]:
    """Return what there is more of, with both numbers; of groups, also if there are fewer."""
    return {
        name: (count, after[name])
        for name, count in before.items()
        if after[name] > count or (name == "groups" and after[name] != count)
    }


def held_after(before: dict[str, int]) -> dict[str, int]:
    """Return `held()` once nothing has grown, or else after a minute.

    gloo's threads and sockets end by themselves, some of them after what has ended the group. What
    was counted `before` may have been about to end, too, so that later there is less: tests assert
    that nothing has `grown`.
    """
    with contextlib.suppress(TimeoutError):
        wait_until(lambda: not grown(before, held()))
    return held()
