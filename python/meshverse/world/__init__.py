"""One life of the default process group, and what others keep for it."""
