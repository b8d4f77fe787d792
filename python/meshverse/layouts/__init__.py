"""Descriptions of meshes, from user input and by derivation: arithmetic, without side effects.

- `user_input`: reads and checks the ranks, shapes and names that users pass.
- `derivation`: `MeshDescription`, a mesh without process groups; descriptions of derived meshes.
- `rank_views`: the tensor and the tuple of all ranks, created when torch first reads them.

This subpackage creates no process groups, and does not import `groups` and `universe`.
"""
