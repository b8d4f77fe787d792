"""Expert parallelism: experts split by features or distributed whole, and their tokens."""
