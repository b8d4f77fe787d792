"""Meshes of a trainer: created from degrees, found by axis names."""
