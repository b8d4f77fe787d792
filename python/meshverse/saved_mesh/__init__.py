"""Meshes in files: ours, and those that torch's class saved."""

from __future__ import annotations

from .pickles import load_mesh, load_mesh_as, save_mesh

__all__ = ["load_mesh", "load_mesh_as", "save_mesh"]
