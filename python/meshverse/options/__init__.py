"""The settings of a process group: backend, backend options, timeout and isolation tag.

- `by_axis`: values that a user gives for axes, by index or name.
- `isolation_tags`: the tag of the `isolate` blocks around the running code, and how tags combine.
- `group_options`: `GroupOptions`, a user's settings for an axis or a universe with every default
  filled in; the key that decides which settings are equal; copies of options objects for c10d.

Example: `backend_override={"tp": "nccl"}`. For axis `tp`, `normalize_overrides` returns the pair
`("nccl", None)`: a backend without options. `GroupOptions.resolve` fills in the timeout, and
computes the key.
"""
