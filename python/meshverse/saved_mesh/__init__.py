"""Meshes in files: saved by Meshverse's class or by torch's.

- `state`: a saved mesh as plain data. It comes from a file, so every field is checked.
- `pickles`: `save_mesh`, `load_mesh`, and their registration with pickle and `torch.load`.
- `stock_pickles`: meshes that torch's class saved, turned into ours on this process's groups.
"""

from __future__ import annotations

from .pickles import load_mesh, load_mesh_as, save_mesh

__all__ = ["load_mesh", "load_mesh_as", "save_mesh"]
