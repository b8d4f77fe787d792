"""Parts of a model by name: layers and stages; activation checkpointing, compiling, imports."""
