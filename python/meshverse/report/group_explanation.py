"""The report on one process group, as plain data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GroupExplanation:
    """One group, as this rank sees it.

    Attributes:
        name: c10d's name of my group, None if this rank is in none of the axis's groups.
        layout: axis layout over the universe's positions, `sizes:strides`.
        ranks: global ranks of my group, in group-rank order.
        backend: its backend string.
        tag: the isolation tag it is shared under; "" for none.
        options: backend, options and tag, naming what differs from the defaults.
        how: how the group was created.
        created: whether a new group was made for it.
        requests: how often it was requested, by axis name.
        avoided: extra groups that stock would have created for these requests.
        bytes_each: estimated device memory of one such communicator; None if unknown.
        suspended: whether it is suspended now.
        is_planned: whether it is to be made at its first use (lazy).
        nodes: on how many nodes my group is; None without a topology.
        salt: digest of the options, of which the names of these groups on all ranks are made.
        over: in a universe with parts, the ranks of the meshes that requested it, in words: of all
            ranks, of a part, or both.
    """

    name: str | None
    layout: str
    ranks: tuple[int, ...]
    backend: str
    tag: str
    options: str
    how: str
    created: bool
    requests: dict[str, int]
    avoided: int
    bytes_each: int | None
    suspended: bool = False
    is_planned: bool = False
    nodes: int | None = None
    salt: str = ""
    over: tuple[str, ...] = ()
