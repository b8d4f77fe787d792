"""What one process group shall be: its backend, options, timeout and isolation tag.

- `isolation`: the tag of the `isolate` blocks around this code, and how tags add up.
- `overrides`: what a user says of single axes, by name or index, as one value per axis.
- `copies`: copies of options objects, so that later changes of the original reach nobody.
- `group_options`: all of that with every default filled in, and the key that says which groups are
  the same.

Example: `backend_override={"tp": "nccl"}`. `overrides` makes `("nccl", None)` of that, which is a
backend and no options. `group_options` fills in the timeout, and makes the key.
"""
