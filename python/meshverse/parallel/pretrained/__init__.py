"""Checkpoints of Hugging Face models: read into the shards of a model, and written from them."""
