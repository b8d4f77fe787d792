"""A world (the lifetime of one default process group), and what other subpackages keep for it.

- `world`: `World`, which lasts from one `init_process_group` to the end of the default group.
  `World.state` gives each subpackage an object of its own for each world, so that no state carries
  over to the next world by accident, and none depends on the state of another subpackage.
- `run_store`: `RunStore`, the default group's store with keys that belong to one run of the group.

Example: a program calls `destroy_process_group()`, then `init_process_group()` again. So it has two
worlds, one after the other. A mesh of the first world refuses to create groups in the second,
unless `meshverse.revive()` is called: then the first world goes on, with the new default group.
"""
