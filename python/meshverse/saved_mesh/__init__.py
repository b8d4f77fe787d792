"""Meshes in files: those of this class, and those that torch's class saved.

- `state`: a saved mesh as plain data. It comes from a file, so every field is checked.
- `pickles`: `save_mesh`, `load_mesh`, and how pickle and `torch.save` come to use them.
- `stock_pickles`: a mesh that torch's class saved becomes one of ours, on groups that exist here.
"""

from __future__ import annotations

from .pickles import load_mesh, load_mesh_as, save_mesh

__all__ = ["load_mesh", "load_mesh_as", "save_mesh"]
