"""Topologies: the node, NVLink domain and switch of each rank, and rank orders that fit a mesh.

- `topology`: `Topology`, the class that programs use; it calls all other modules.
- `levels`: the parts of a cluster at one level, and the check that levels are nested.
- `slurm`: Slurm's lists of hosts and tasks, and its topology.conf.
- `files`: topologies in JSON files and in topology.conf.
- `environment`: variables of torchrun and Slurm.
- `detection`: ranks exchange their locations; NVIDIA's driver names the NVLink domain.
- `orders`: the cost of a placement of a mesh, and the search for a cheap one.
"""

from __future__ import annotations

from .topology import Topology

__all__ = ["Topology"]
