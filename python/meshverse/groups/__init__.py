"""One process group: what is asked for, how it is made, and how it is made again.

- `request`: `GroupRequest`, what one axis asks for; `Group`, what came of it.
- `creation`: which of torch's ways makes a group, and making it in that way.
- `meetings`: members wait for each other before they make a group, if torch would let them hang.
- `interrupts`: Ctrl-C in the moment in which the other members have the group already.
- `lazy`: groups that have a name, and are made when they are first used.
- `freed`: groups that somebody destroyed while meshes still have them.
- `once`: what the two above share: of several threads, one makes the group.

Nothing here decides whether a group is needed: that is the universe's, which knows the groups there
are.
"""
