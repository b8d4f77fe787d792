"""Process groups: what is requested, how one is made, the states it is in, and where it is found.

- `request`: `GroupRequest`, the process groups that one axis needs; `RequestBuilder` makes them.
- `group`: `Group`, a process group in this process with its states; `GroupUse`, a universe's use.
- `registry`: `GroupRegistry`, which has all groups of a world.
- `creation`: which of torch's ways makes a group, and making it in that way.

Nothing here decides whether a group is needed: that is the universe's.
"""
