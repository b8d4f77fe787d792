"""Meshes in graphs of torch.compile: numbers of every rank, found by arithmetic."""
