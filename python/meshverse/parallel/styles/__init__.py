"""Parallel styles that work on plain local tensors, and what they check."""
