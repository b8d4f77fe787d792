"""A world (the lifetime of one default process group), and what other rooms keep for it.

A room is a subpackage of Meshverse (docs/architecture.md).

- `world`: `World`, which lasts from one `init_process_group` to the end of the default group.
  `World.state` gives each room an object of its own for each world, so that no state carries over
  to the next world by accident, and no room depends on another room's state.
- `run_store`: `RunStore`, the default group's store with keys that belong to one run of the group.

Example: a program calls `destroy_process_group()`, then `init_process_group()` again. So it has two
worlds, one after the other. A mesh of the first world refuses to create groups in the second,
unless `meshverse.revive()` is called: then the first world goes on, with the new default group.
"""
