"""What users give for a mesh, and what derived meshes are: arithmetic, without side effects.

- `rank_tensors`: the global ranks in any kind of tensor, array or list.
- `user_input`: ranks, shapes and names as users give them, checked.
- `derivation`: `MeshDescription`, which says what a mesh is, and those of derived meshes.
- `rank_views`: the tensor and the tuple of all ranks, made if torch asks for them.
- `computed`: attributes that are computed when they are first read.

Nothing here knows process groups or universes.
"""
