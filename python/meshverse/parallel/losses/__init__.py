"""Losses of split logits, and per token over all ranks."""
