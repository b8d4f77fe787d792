"""Process groups: what is requested, how one is made, the states it is in, and where it is found.

- `request`: `GroupRequest`, the process groups that one axis needs.
- `group`: `Group`, a process group in this process with its states; `GroupUse`, a universe's use.
- `registry`: `GroupRegistry`, which has all groups of a world.
- `creation`: which of torch's ways makes a group, and making it in that way.
- `interrupts`: Ctrl-C in the moment in which the other members have the group already.

Nothing here decides whether a group is needed: that is the universe's.
"""
