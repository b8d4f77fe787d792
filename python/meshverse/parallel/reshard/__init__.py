"""Tensors move between meshes: read, gathered, planned, exchanged."""
