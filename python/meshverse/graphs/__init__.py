"""Meshes in graphs of torch.compile that every rank can run: coordinates by arithmetic."""
