"""Reports on a universe's process groups, as text and as data.

- `explanation`: the groups, their axes, how each was created, and the number of groups saved.
- `group_explanation`: the report on one group.
- `calling_threads`: the threads that called in each group.
- `communicator_memory`: estimates of the memory that a communicator takes.
"""
