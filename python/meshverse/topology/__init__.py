"""Which node, NVLink domain and switch each rank is on, and the order of ranks that fits a mesh.

- `levels`: the parts of a cluster at one level, and how levels are nested.
- `slurm`: Slurm's lists of hosts and tasks, and its topology.conf.
- `files`: topologies in files.
- `environment`: what torchrun and Slurm put into the environment.
- `nvlink`: the NVLink domain that the driver tells.
- `detection`: ranks tell each other where they are, through the store.
- `cost`: what a placement of a mesh costs.
- `orders`: looking for the one that costs least.
- `topology`: `Topology`, which has all of this.
"""

from __future__ import annotations

from .topology import Topology

__all__ = ["Topology"]
