"""Reports of a universe's process groups, for people and programs to read.

- `explain`: which groups there are, for which axes, how each was created, how many were avoided.
- `summary`: the same of several universes in a few lines.
- `communicator_memory`: an estimate of the memory that a communicator takes.
"""
