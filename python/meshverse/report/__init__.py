"""Reports of a universe's process groups, for people and programs to read.

- `explain`: which groups there are, for which axes, how each was created, how many were avoided.
- `communicator_memory`: an estimate of the memory that a communicator takes.
"""
