"""Tensors move between meshes: read, described to other ranks, planned, exchanged."""
