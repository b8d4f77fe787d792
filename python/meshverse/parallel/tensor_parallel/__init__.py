"""Tensor-parallel plans: chosen for a model, completed, and applied to it."""
