"""Parts of a model by name: layers, stages, checkpointing, compiling, import paths."""
