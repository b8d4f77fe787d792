"""What users give for a mesh, and what derived meshes are: arithmetic, without side effects."""
