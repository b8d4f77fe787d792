"""The lock of this process's shared state, and claims, for which nobody waits.

There is one lock, so no two threads can take two of ours in different orders. docs/architecture.md
has a table of what else a thread can wait for, in which order.

- It is held for a few statements, and never while c10d, the store or Python code of others is
  called: whoever holds it releases it soon.
- A signal handler may run while its thread holds it, and call any function: it is re-entrant.
- `os.fork` waits for it. So the child finds it free, and no change half done.
"""

from __future__ import annotations

import os
import threading

state_lock = threading.RLock()
state_changed = threading.Condition(state_lock)  # a group that was being made is so no more

os.register_at_fork(
    before=state_lock.acquire,
    after_in_parent=state_lock.release,
    after_in_child=state_lock.release,
)


class Claim:
    """The right to do something alone. Of several callers, one has it; the others do not wait."""

    def __init__(self) -> None:
        self._holders: dict[str, object] = {}

    def take(self) -> bool:
        """Return whether the caller has the claim now; False if somebody has it already."""
        mine = object()
        # Atomic, with and without the interpreter's lock.
        return self._holders.setdefault("holder", mine) is mine

    def give_back(self) -> None:
        """Let somebody else have the claim."""
        self._holders.clear()
