"""The process groups that several axes share, in a few lines."""

from __future__ import annotations

from collections.abc import Iterable

from meshverse.explain.explanation import Explanation, threads_in_words
from meshverse.explain.group_explanation import GroupExplanation
from meshverse.wording import rank_list

_SHOWN = 5  # process groups shared by several axes


def shared_group_conflicts(explanations: Iterable[Explanation]) -> list[str]:
    """Return a line for each process group that several axes share.

    Their collectives run one after the other, because they are on one communicator. Groups that
    several threads called come first: their calls could have overlapped.
    """
    axes: dict[str, dict[str, None]] = {}
    groups: dict[str, GroupExplanation] = {}
    for explanation in explanations:
        for group in explanation.groups:
            if group.name is not None and len(group.ranks) > 1:
                axes.setdefault(group.name, {}).update(dict.fromkeys(group.requests))
                groups[group.name] = group
    shared = [groups[name] for name, names in axes.items() if len(names) > 1]
    shared.sort(key=lambda group: -len(group.threads))
    lines = []
    for group in shared:
        several = len(group.threads) > 1
        by = f", called by {threads_in_words(group.threads)}" if several else ""
        names = " and ".join(axes[group.name or ""])
        lines.append(f"{names} (ranks {rank_list(group.ranks)}){by}")
    left_out = len(lines) - _SHOWN
    return lines if left_out <= 0 else [*lines[:_SHOWN], f"and {left_out} more"]
