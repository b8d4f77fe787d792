"""One life of the default process group, and what the other rooms keep for it.

- `world`: `World`, from one `init_process_group` to its end. `World.state` gives each room its own
  object for this world, so that nothing outlives it and no room looks into another's.
- `run_store`: texts in the default group's store, under keys of one run of the group.
- `weak_registry`: objects that are alive, for threads that add some meanwhile.

Example: a program calls `destroy_process_group()`, then `init_process_group()` again. So it has two
worlds, one after the other. A mesh of the first world refuses to make groups in the second.
"""
