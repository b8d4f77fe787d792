"""A mesh in a universe, and what torch's own code reads of it, asks of it and compares."""
