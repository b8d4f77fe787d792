"""Reports on a universe's process groups, as text and as data.

- `explain`: the groups, their axes, how each was created, and the number of groups saved.
- `group_explanation`: the report on one group.
- `pictured`: the picture of a universe.
- `summary`: totals over several universes, in a few lines.
- `communicator_memory`: estimates of the memory that a communicator takes.
- `environment`: versions and environment variables, for bug reports.
"""
