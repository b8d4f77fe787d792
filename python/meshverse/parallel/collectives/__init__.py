"""Collectives over the processes of a mesh, or in a single process."""
