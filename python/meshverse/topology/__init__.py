"""Topologies: the node, NVLink domain and switch of each rank, and the order that fits a mesh.

- `topology`: `Topology`, which has all of this.
- `levels`: the parts of a cluster at one level, and how levels are nested.
- `slurm`: Slurm's lists of hosts and tasks, and its topology.conf.
- `files`: topologies in files.
- `environment`: variables of torchrun and Slurm.
- `detection`: the ranks exchange where they are; NVIDIA's driver knows the NVLink domain.
- `orders`: the cost of a placement of a mesh, and the search for the one that costs least.
"""

from __future__ import annotations

from .topology import Topology

__all__ = ["Topology"]
