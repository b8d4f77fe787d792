"""The settings of one process group: its backend, options, timeout and isolation tag.

- `isolation`: the tag of the `isolate` blocks around this code, and how tags add up.
- `group_options`: what a user gives for single axes and universes, with every default filled in;
  the key that says which groups are the same; copies of options objects for c10d.
- `by_axis`: values of single axes, given by name or index.

Example: `backend_override={"tp": "nccl"}`. `normalize_overrides` makes `("nccl", None)` of that for
axis `tp`, which is a backend and no options. `GroupOptions.resolve` fills in the timeout, and makes
the key.
"""
