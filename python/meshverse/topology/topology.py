"""`Topology`: which node, NVLink domain and switch each rank is on, and how a mesh fits that."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from meshverse import _torch_compat as compat
from meshverse._core import RankMap
from meshverse.options.group_options import check_timeout
from meshverse.wording import counted
from meshverse.world.world import World

from .levels import Level, level_of, level_of_blocks, nested

# The other files are imported where they are used: most programs that import Meshverse use none.


class Topology:
    """The node, NVLink domain and switch of each rank of a world.

    The levels are nested: all ranks of a node are on one switch. A domain may have several nodes,
    or a node several domains. Levels can have any names; `explain()` shows the one called "node".

    Args:
        parts: for each level, innermost first, the name of the part that each rank is on, one a
            rank: `{"node": ["tux0", "tux0", "tux1", "tux1"]}`. Where the levels are not nested in
            this order, a "domain" is put where it fits.

    Attributes:
        levels: innermost first.

    Raises:
        ValueError: levels that are not nested, or not of the same number of ranks; no level, or one
            without a name.
        TypeError: names that are no strings.

    Example:
        >>> cluster = Topology({"node": ["a", "b", "a", "b"]})
        >>> cluster.order((2, 2), ("dp", "tp")).tolist()
        [0, 2, 1, 3]
    """

    levels: tuple[Level, ...]

    def __init__(self, parts: Mapping[str, Sequence[str]]) -> None:
        self.levels = nested([level_of(name, of_rank) for name, of_rank in parts.items()])

    @classmethod
    def _of(cls, levels: Sequence[Level]) -> Topology:
        topology = cls.__new__(cls)
        topology.levels = nested(levels)
        return topology

    # --- where it comes from --------------------------------------------------------------------

    @classmethod
    def uniform(
        cls,
        world_size: int,
        *,
        node_size: int,
        domain_size: int | None = None,
        switch_size: int | None = None,
    ) -> Topology:
        """Put ranks 0 to n-1 on the first node, the next n on the second, and so on.

        Args:
            world_size: number of ranks.
            node_size: ranks on each node. The last one may have fewer, as with the others.
            domain_size: ranks in each NVLink domain.
            switch_size: ranks below each switch.

        Raises:
            ValueError: a size below 1, or sizes of which none divides the other.
        """
        sizes = {"node": node_size, "domain": domain_size, "switch": switch_size}
        return cls._of(
            [
                level_of_blocks(name, world_size, size)
                for name, size in sizes.items()
                if size is not None
            ]
        )

    @classmethod
    def from_environment(cls, network_file: str | os.PathLike[str] | None = None) -> Topology:
        """Read on which nodes torchrun or Slurm's srun started the ranks. No rank is asked.

        From torchrun: `LOCAL_WORLD_SIZE`, `GROUP_RANK` and their like; a rank knows how many ranks
        its own node has, so nodes of different sizes are refused. From Slurm, otherwise: the nodes
        (`SLURM_STEP_NODELIST`, `SLURM_NODELIST`, `SLURM_JOB_NODELIST`) with the tasks on each
        (`SLURM_STEP_TASKS_PER_NODE`, `SLURM_TASKS_PER_NODE`), in blocks or cyclic
        (`SLURM_DISTRIBUTION`).

        `SLURM_TOPOLOGY_ADDR` has the switches of this process's node only. So it is used where
        the job has one node. For more, give the network file, or use `detect()`.

        Args:
            network_file: Slurm's topology.conf, which has how nodes are connected.

        Raises:
            ValueError: variables that are missing, contradict each other or say too little; a bad
                file, or one that does not name a node of the job.
            OSError: the file cannot be read.
        """
        from .environment import levels_of_environment

        return cls._of(levels_of_environment(os.environ, network_file))

    @classmethod
    def from_file(
        cls,
        path: str | os.PathLike[str],
        *,
        nodes: str | Sequence[str] | None = None,
        node_size: int | None = None,
    ) -> Topology:
        """Read a file that `save` wrote, or Slurm's topology.conf.

        Ours is JSON with the ranks of each part, by level:

            {"node":   {"tux0": "0-7", "tux1": "8-15", "tux2": "16-23"},
             "switch": {"leaf0": "0-15", "leaf1": "16-23"}}

        Args:
            path: of the file.
            nodes: for a topology.conf, the nodes of the job in the order of its ranks, as a list or
                as Slurm writes it ("tux[0-3,7]"); by default all nodes of the file.
            node_size: for a topology.conf, ranks on each node.

        Raises:
            ValueError: a file that is neither; a rank or a node that is missing in it, or is in two
                parts; levels that are not nested; `node_size` missing for a topology.conf, or
                given for JSON.
            OSError: the file cannot be read.
        """
        from .files import levels_of_file

        return cls._of(levels_of_file(path, nodes, node_size))

    @classmethod
    def detect(
        cls,
        *,
        node: str | None = None,
        domain: str | None = None,
        switches: Mapping[str, str] | None = None,
        network_file: str | os.PathLike[str] | None = None,
        timeout: timedelta | None = None,
    ) -> Topology:
        """Find out where the ranks of the default process group are: each of them says it.

        All ranks call this together, after `init_process_group()`. They have a rendezvous in the
        default group's store: each writes one key, and the last to come writes one compact text,
        which the others read. No process group is made and no collective is called.

        A rank gives its node (Slurm's name or the host name, with the boot where nodes share it),
        the switches in `SLURM_TOPOLOGY_ADDR`, and the NVLink domain where NVIDIA's driver knows one
        over several nodes (its clique). A rank that knows no domain, where others do, has one with
        the ranks of its node.

        Args:
            node: the name of this rank's node, where the host name is not it: pods of one node.
            domain: the name of this rank's NVLink domain.
            switches: the switches of this rank's node by level, instead of those of Slurm.
            network_file: Slurm's topology.conf, which each rank reads on its own node.
            timeout: how long to wait; by default that of the default process group.

        Raises:
            RuntimeError: there is no default process group, or no store; ranks did not come in
                time, who are named. All ranks that wait raise that.
            ValueError: ranks that give no switch, where others do; a bad file.
            TypeError: names that are no strings; the other ranks raise a RuntimeError that says it.
            OSError: the file cannot be read.
        """
        from .detection import levels_detected

        world = World.current()
        if world is None:
            raise RuntimeError(
                "Topology.detect() asks the ranks through the default process group's store: call "
                "init_process_group() first. Topology.from_environment() needs none."
            )
        if timeout is not None:
            check_timeout(timeout)
        limit = timeout or world.default_options.timeout or dist.default_pg_timeout
        return cls._of(levels_detected(node, domain, switches, network_file, world, limit))

    # --- reading it -----------------------------------------------------------------------------

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.levels[0].of_rank)

    def level(self, name: str) -> Level | None:
        """Return the level of this name; None if it is not known here."""
        return next((level for level in self.levels if level.name == name), None)

    def check_has(self, rank_map: RankMap) -> None:
        """Raise ValueError if one of these ranks is not in the topology."""
        largest = rank_map.sorted().rank_at(rank_map.size - 1)
        if largest >= self.world_size:
            raise ValueError(
                f"A mesh over {rank_map} names rank {largest}, but the topology has ranks 0 to "
                f"{self.world_size - 1}: give one of all ranks of the world."
            )

    @compat.untraced()
    def spans(self, name: str, ranks: Sequence[int]) -> int | None:
        """Count the parts of a level that some ranks are on; None if the level is not known.

        Args:
            name: of the level, such as "node".
            ranks: global ranks.
        """
        level = self.level(name)
        if level is None:
            return None
        return len(set(level.of_rank[torch.tensor(ranks, dtype=torch.int64)].tolist()))

    def to_dict(self) -> dict[str, dict[str, str]]:
        """Return the ranks of each part of each level, in ranges, as in a JSON file of ours."""
        from .files import levels_to_dict

        return levels_to_dict(self.levels)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a JSON file that `from_file` and `meshverse plan --topology` read."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=1) + "\n", encoding="utf-8")

    @compat.untraced()
    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Topology):
            return NotImplemented
        return len(self.levels) == len(other.levels) and all(
            (mine.name, mine.parts) == (theirs.name, theirs.parts)
            and torch.equal(mine.of_rank, theirs.of_rank)
            for mine, theirs in zip(self.levels, other.levels, strict=True)
        )

    __hash__ = None  # type: ignore[assignment]  # world-sized, and nothing looks it up

    def __repr__(self) -> str:
        counts = ", ".join(f"{level.name}: {len(level.parts)}" for level in self.levels)
        return f"Topology({counted(self.world_size, 'rank')}; {counts})"

    # --- placing a mesh on it -------------------------------------------------------------------

    @compat.untraced()
    def order(
        self,
        mesh_shape: Sequence[int],
        mesh_dim_names: Sequence[str] | None = None,
        traffic: Mapping[str, float] | None = None,
        *,
        factors: Mapping[str, float] | None = None,
    ) -> torch.Tensor:
        """Find the order that keeps axes with much traffic inside nodes, domains, switches.

        It minimizes the cost of the mesh, as `cost` gives it: for each axis and level,
        the ring steps of all groups of the axis that leave a part of the level, times the axis's
        traffic, times the level's factor. Of a group with ranks on n parts, n steps leave one, or
        none if n is 1 (NCCL builds its rings so, whatever the order of the ranks in the group).

        The cost is never above that of ranks 0, 1, 2, ... in order, which is the answer if nothing
        cheaper is found. Where there are at most 40,000 ways to place the mesh, all are tried, so
        it is the least there is. On larger clusters, it is the least that was found: of boxes of
        the mesh inside each other, one for each part, and on uneven clusters of several ways to
        fill the parts. Nothing depends on time or chance, so all ranks find the same. It takes some
        tenths of a second for 10,000 ranks; meanwhile torch uses one thread in this process.

        Args:
            mesh_shape: size of each axis.
            mesh_dim_names: of the axes.
            traffic: of a rank along each axis, relative to the other axes. An axis that is not
                named counts 1. By default each axis has 10 times that of the axis before it, so the
                last one has most.
            factors: cost of one step that leaves a part of a level: 1 for each that is not named.
                Levels add up: a step that leaves a switch leaves a node as well.

        Returns:
            The rank at each position of the mesh in row-major order, shape (world size,): the
            `ranks=` of `init_device_mesh`.

        Raises:
            ValueError: a mesh of another number of ranks; traffic of an axis or factors of a level
                that there is not, or which are negative or no finite numbers.
            RuntimeError: names that repeat or do not match the shape.
        """
        from .orders import best_order, placements_of

        return best_order(placements_of(self.levels, mesh_shape, mesh_dim_names, traffic, factors))

    def cost(
        self,
        ranks: Sequence[int] | torch.Tensor | None,
        mesh_shape: Sequence[int],
        mesh_dim_names: Sequence[str] | None = None,
        traffic: Mapping[str, float] | None = None,
        *,
        factors: Mapping[str, float] | None = None,
    ) -> float:
        """Compute the cost of a mesh with its ranks in this order; see `order`, which minimizes it.

        Args:
            ranks: the rank at each position in row-major order; None for 0, 1, 2, ...
            mesh_shape: size of each axis.
            mesh_dim_names: of the axes.
            traffic: as for `order`.
            factors: as for `order`.

        Raises:
            ValueError: as `order`, or ranks that are not each rank of the world once.
            RuntimeError: as `order`, or a tensor without values.
        """
        from .orders import cost_of, placements_of

        problem = placements_of(self.levels, mesh_shape, mesh_dim_names, traffic, factors)
        return cost_of(problem, ranks)
