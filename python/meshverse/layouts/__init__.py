"""Meshes as users give them, and derived meshes: arithmetic, without side effects.

- `user_input`: ranks, shapes and names as users give them, checked.
- `derivation`: `MeshDescription`, which says what a mesh is, and those of derived meshes.
- `rank_views`: the tensor and the tuple of all ranks, made when torch first reads them.
- `computed`: attributes that are computed when they are first read.

Nothing here knows process groups or universes.
"""
