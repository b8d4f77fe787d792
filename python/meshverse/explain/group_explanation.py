"""The report on one process group, as plain data."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class GroupExplanation:
    """Report on one group of this rank.

    Attributes:
        name: c10d name of this rank's group; None if this rank is in no group of the axis.
        layout: axis layout over the universe's positions, `sizes:strides`.
        ranks: global ranks of this rank's group, in group-rank order.
        backend: backend string.
        tag: isolation tag under which the group is shared; "" if none.
        options: backend, options and tag; of the options, only those that differ from the defaults.
        how: how the group was created.
        created: whether this universe created it.
        requests: number of requests, by axis name.
        saved: number of extra groups that torch would have created for these requests.
        bytes_each: estimated device memory of one such communicator; None if unknown.
        suspended: whether it is suspended now.
        destroyed: whether the program has destroyed it, by `destroy_process_group(group)`.
        is_planned: whether it is still to be created at its first use (lazy).
        nodes: number of nodes that this rank's group spans; None without a topology.
        salt: digest of the options; the names of these groups on all ranks are derived from it.
        over: in a universe with parts, the ranks of the meshes that requested it, in words: those
            of all ranks, of a part, or both.
        threads: of a group that several axes or universes use: how often each thread of this
            process called in it, by thread name, among the calls that torch's flight recorder
            keeps; empty if it has none.
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
    saved: int
    bytes_each: int | None
    suspended: bool = False
    destroyed: bool = False
    is_planned: bool = False
    nodes: int | None = None
    salt: str = ""
    over: tuple[str, ...] = ()
    threads: dict[str, int] = field(default_factory=dict)

    @property
    def how_and_state(self) -> str:
        """How the group was created, and whether it can still be used, in words."""
        return self.how + ", suspended" * self.suspended + ", destroyed" * self.destroyed
