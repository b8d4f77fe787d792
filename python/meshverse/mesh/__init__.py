"""A mesh in a universe: torch's class, with its costly parts replaced, one part a file.

Each file has one class, which derives from that of the file before it:

- `base`: what the mesh is, which process groups it has, and which mesh is its root.
- `comparison`: `==`, hashes and the guards of torch.compile.
- `torch_view`: the attributes that torch's own code reads.
- `requests`: asking the universe for process groups.
- `membership`: how meshes come into a universe: derived, under other tags, bound.
- `placed`: `get_group`, and this rank's place in a group.
- `drawn`: the mesh as a picture.
- `copies`: copies and pickles.

`group_names` is no class of meshes: it is the list of names by which torch uses a mesh's groups.
"""
