"""What torch.compile puts into a graph of a mesh: numbers of every rank, found by arithmetic."""
