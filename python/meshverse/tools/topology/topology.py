"""`Topology`: the node, NVLink domain and switch of each rank, and rank orders that fit a mesh."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path

import torch

from meshverse._core import RankMap
from meshverse._torch_compat.tracing import outside_torch_modes
from meshverse.for_extras import World
from meshverse.wording import counted, rank_list

from .levels import Level, level_of, level_of_blocks, nested

# The other modules are imported at their first use: most programs need none of them.


class Topology:
    """Node, NVLink domain and switch of each rank of a world.

    A level is a kind of hardware that ranks share, such as the node; one node is a part of that
    level. Levels are nested: all ranks of a node are on one switch. A domain may span several
    nodes, or a node have several domains. Levels can have any names; `explain()` counts the parts
    of the level "node" that a group spans.

    Args:
        parts: for each level, innermost first, the name of each rank's part, one per rank:
            `{"node": ["tux0", "tux0", "tux1", "tux1"]}`. If the levels are not nested in this
            order, a level named "domain" is moved to where it fits.

    Attributes:
        levels: levels of the cluster, innermost first.

    Raises:
        ValueError: the levels are not nested or have different numbers of ranks, there is no level,
            or a level or part has an empty name.
        TypeError: a name is not a string, or the parts are no mapping of sequences.

    Example:
        >>> cluster = Topology({"node": ["a", "b", "a", "b"]})
        >>> cluster.order((2, 2), ("dp", "tp")).tolist()
        [0, 2, 1, 3]
    """

    levels: tuple[Level, ...]

    def __init__(self, parts: Mapping[str, Sequence[str]]) -> None:
        if not isinstance(parts, Mapping):
            raise TypeError(
                f"{parts!r} is no topology: give, by level, the part of each rank, such as "
                '{"node": ["a", "a", "b"]}.'
            )
        self.levels = nested([level_of(name, of_rank) for name, of_rank in parts.items()])

    @classmethod
    def _of(cls, levels: Sequence[Level]) -> Topology:
        topology = cls.__new__(cls)
        topology.levels = nested(levels)
        return topology

    # --- constructors ---------------------------------------------------------------------------

    @classmethod
    def uniform(
        cls,
        world_size: int,
        *,
        node_size: int,
        domain_size: int | None = None,
        switch_size: int | None = None,
    ) -> Topology:
        """Return a topology with ranks 0 to n-1 on the first node, the next n on the second, etc.

        Args:
            world_size: number of ranks.
            node_size: number n of ranks on each node. The last node may have fewer, and so may the
                last domain and the last switch.
            domain_size: number of ranks in each NVLink domain.
            switch_size: number of ranks below each switch.

        Raises:
            ValueError: a size is no int from 1 to 2**24, or the levels are not nested because
                neither of two sizes divides the other.
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
        """Read from the environment on which nodes torchrun or srun started the ranks.

        The ranks do not communicate. torchrun's variables (`LOCAL_WORLD_SIZE`, `GROUP_RANK`, ...)
        are used if they are set. They give only the size of this rank's own node, so nodes of
        different sizes raise an error. Otherwise Slurm's are used: the nodes
        (`SLURM_STEP_NODELIST`, `SLURM_NODELIST` or `SLURM_JOB_NODELIST`) and the number of tasks on
        each (`SLURM_STEP_TASKS_PER_NODE` or `SLURM_TASKS_PER_NODE`), assigned in blocks or
        cyclically (`SLURM_DISTRIBUTION`).

        `SLURM_TOPOLOGY_ADDR` names the switches of this process's node only, so it is used only if
        the job has one node. For the switches of several nodes, pass `network_file` or call
        `detect()`.

        Args:
            network_file: path of Slurm's topology.conf, which says how nodes are connected. It
                needs Slurm's variables: torchrun's do not name the nodes.

        Raises:
            ValueError: variables are missing, contradict each other or are not sufficient; the file
                is malformed, or lacks a node of the job.
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
        """Read a JSON file, such as `save` writes, or Slurm's topology.conf.

        The JSON file has, by level, the ranks of each part:

            {"node":   {"tux0": "0-7", "tux1": "8-15", "tux2": "16-23"},
             "switch": {"leaf0": "0-15", "leaf1": "16-23"}}

        Args:
            path: path of the file.
            nodes: for a topology.conf, the nodes of the job in the order of its ranks, as a list or
                as Slurm writes it ("tux[0-3,7]"); by default all nodes of the file.
            node_size: for a topology.conf, the number of ranks on each node; required.

        Raises:
            ValueError: the file has neither form; a rank or node is missing in it, or is on two
                parts of a level; the levels are not nested; `node_size` is missing for a
                topology.conf; `nodes` or `node_size` is given for JSON.
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
        """Detect where the ranks of the default process group are: each reports its location.

        All ranks must call this together, after `init_process_group()`. They have a rendezvous in
        the default group's store: each rank writes one key, and the last one to join writes all
        locations as one compressed string, which the others read. It creates no process group and
        calls no collective.

        A rank reports its node (Slurm's node name or the host name, with the first digits of the
        boot ID if several machines have the same name), the switches in `SLURM_TOPOLOGY_ADDR`, and
        its NVLink domain if NVIDIA's driver reports one that spans several nodes (a clique). If a
        rank reports no domain while others do, the ranks of its node form its domain.

        Args:
            node: name of this rank's node, if the host name is not it, as in several pods on one
                node.
            domain: name of this rank's NVLink domain, instead of the driver's.
            switches: switches of this rank's node by level, instead of Slurm's.
            network_file: path of Slurm's topology.conf, which each rank reads on its own node.
            timeout: how long to wait; by default that of the default process group.

        Raises:
            RuntimeError: there is no default process group, or it has no store; some ranks did not
                join in time (all ranks that wait get this error, which names them); or another rank
                could not report its location.
            ValueError: a rank reports no switch while others do, or gives a node or a domain as one
                of its switches; the network file is malformed, or
                lacks a node of the job.
            TypeError: a name is not a string; the other ranks get a RuntimeError that says so.
            OSError: the network file cannot be read.
        """
        from .detection import levels_detected

        world = World.current()
        if world is None:
            raise RuntimeError(
                "Topology.detect() asks the ranks through the default process group's store: call "
                "init_process_group() first. Topology.from_environment() needs no process group."
            )
        return cls._of(levels_detected(node, domain, switches, network_file, world, timeout))

    # --- look-ups -------------------------------------------------------------------------------

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.levels[0].of_rank)

    def level(self, name: str) -> Level | None:
        """Return the level of this name; None if the topology has no such level."""
        return next((level for level in self.levels if level.name == name), None)

    def check_has(self, rank_map: RankMap) -> None:
        """Raise ValueError if one of these ranks is not in the topology."""
        largest = rank_map.sorted().rank_at(rank_map.size - 1)
        if largest >= self.world_size:
            raise ValueError(
                f"A mesh over {rank_map} includes rank {largest}, but the topology has ranks 0 to "
                f"{self.world_size - 1}: pass a topology of all ranks of the world."
            )

    @outside_torch_modes()
    def spans(self, name: str, ranks: Sequence[int]) -> int | None:
        """Count the parts of a level that these ranks are on; None if there is no such level.

        Args:
            name: name of the level, such as "node".
            ranks: global ranks.

        Raises:
            ValueError: a rank is not in the topology.
        """
        level = self.level(name)
        if level is None:
            return None
        if len(ranks) and not 0 <= min(ranks) <= max(ranks) < self.world_size:
            raise ValueError(
                f"The topology has ranks 0 to {self.world_size - 1}, but got {rank_list(ranks)}."
            )
        return len(set(level.of_rank[torch.tensor(ranks, dtype=torch.int64)].tolist()))

    def to_dict(self) -> dict[str, dict[str, str]]:
        """Return, by level, the ranks of each part as ranges: the data that `save` writes."""
        from .files import levels_to_dict

        return levels_to_dict(self.levels)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a JSON file that `from_file` and `meshverse plan --topology` read."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=1) + "\n", encoding="utf-8")

    @outside_torch_modes()
    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Topology):
            return NotImplemented
        return len(self.levels) == len(other.levels) and all(
            (mine.name, mine.parts) == (theirs.name, theirs.parts)
            and torch.equal(mine.of_rank, theirs.of_rank)
            for mine, theirs in zip(self.levels, other.levels, strict=True)
        )

    __hash__ = None  # type: ignore[assignment]  # O(world size), and nothing needs it

    def __repr__(self) -> str:
        counts = ", ".join(f"{level.name}: {len(level.parts)}" for level in self.levels)
        return f"Topology({counted(self.world_size, 'rank')}; {counts})"

    # --- placement of a mesh --------------------------------------------------------------------

    @outside_torch_modes()
    def order(
        self,
        mesh_shape: Sequence[int],
        mesh_dim_names: Sequence[str] | None = None,
        traffic: Mapping[str, float] | None = None,
        *,
        factors: Mapping[str, float] | None = None,
    ) -> torch.Tensor:
        """Find a rank order that keeps axes with much traffic inside nodes, domains, switches.

        It minimizes the cost that `cost` computes. A ring step is the transfer from one rank of a
        group to the next around a ring. The cost is the sum, over axes and levels, of the ring
        steps of all groups of the axis that leave a part of the level, times the axis's traffic,
        times the level's factor. If a group has ranks on n parts, n of its steps leave a part, or
        none if n is 1. (NCCL's rings enter each node once, whatever the order of the ranks. NCCL
        does not know switches: there, it is a lower bound, which holds if the group lists the
        nodes of a switch one after another.)

        The result never costs more than the order 0, 1, 2, ..., which is returned if nothing
        cheaper is found. If the mesh can be placed in at most 40,000 ways (fewer in worlds of more
        than 300 ranks), all of them are tried. Otherwise a cheaper placement than the result may
        exist: the search cuts the mesh into nested boxes, one per part of the cluster. On uneven
        clusters, it fills the parts in several ways. In worlds of at most 40 ranks, it also tries
        swaps of two ranks. The search depends on neither time nor chance, so all ranks find the
        same order. It takes some tenths of a second for 10,000 ranks, and uses none of torch's
        threads.

        Args:
            mesh_shape: size of each axis.
            mesh_dim_names: names of the axes.
            traffic: traffic of a rank along each axis, relative to the other axes. An axis that is
                not named has weight 1. By default, each axis has 10 times the traffic of the axis
                before it.
            factors: cost of one step that leaves a part of a level; 1 for each level that is not
                named. Levels add up: a step that leaves a switch leaves a node as well.

        Returns:
            Rank at each position of the mesh in row-major order, shape (world size,): pass it to
            `init_device_mesh` as `ranks=`.

        Raises:
            ValueError: the mesh has another number of ranks; `traffic` names an axis or `factors` a
                level that does not exist; or a value is negative or not a finite number.
            RuntimeError: names repeat or do not match the shape.
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
            ranks: rank at each position in row-major order; None for 0, 1, 2, ...
            mesh_shape: size of each axis.
            mesh_dim_names: names of the axes.
            traffic: as for `order`.
            factors: as for `order`.

        Raises:
            ValueError: as for `order`; also if `ranks` does not have each rank of the world once.
            RuntimeError: as for `order`; also if `ranks` is a tensor without values.
        """
        from .orders import cost_of, placements_of

        problem = placements_of(self.levels, mesh_shape, mesh_dim_names, traffic, factors)
        return cost_of(problem, ranks)
