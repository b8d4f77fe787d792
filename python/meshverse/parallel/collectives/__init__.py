"""Collectives of one process alone, and over meshes."""
