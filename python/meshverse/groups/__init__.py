"""Process groups: requests for them, ways to create them, their states, and their registry.

- `request`: `GroupRequest`, the request of one mesh axis, with the way to create its groups;
  `RequestBuilder`, which builds requests.
- `group`: `Group`, a process group with its state in this process; `GroupRef`, its use by one
  universe.
- `registry`: `GroupRegistry`, all groups of a world. (A world is the lifetime of one default
  process group, from `init_process_group` to its end; a revived world also has that of the next.)
- `creation`: the creation of a group, by all ranks or by its members.

This subpackage does not decide whether a group is needed: `universe` does.
"""
