"""Meshes of a trainer: create them from degrees, and find them by axis names."""
