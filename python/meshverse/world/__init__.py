"""A world (the lifetime of one default process group), and what other rooms keep for it.

- `world`: `World`, which lasts from one `init_process_group` to its end. `World.state` gives each
  room an object of its own for each world, so that nothing outlives the world, and no room depends
  on another room's state.
- `run_store`: `RunStore`, the default group's store with keys that belong to one run of the group.
- `weak_registry`: `WeakRegistry`, weakly held objects that threads may add while others list them.

Example: a program calls `destroy_process_group()`, then `init_process_group()` again. So it has two
worlds, one after the other. A mesh of the first world refuses to create groups in the second.
"""
