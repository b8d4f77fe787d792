"""What happened to the process groups of a universe, for people and programs to read.

- `explain`: which groups there are, for which axes, how each came to be, what was avoided.
- `communicator_memory`: an estimate of the memory that a communicator takes.
"""
