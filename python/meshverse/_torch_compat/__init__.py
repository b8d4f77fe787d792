"""All uses of torch's private names in Meshverse, with the versions of torch that each is for.

No other file of the package uses a private name of torch; public names are imported from torch
directly. Importing this package checks that the installed torch has the names in `private_names`.
Each other module is one of torch's subsystems, and is imported by those that use it.

In docstrings and comments here, "2.11-2.15" means that the statement was checked on these versions
of torch. A stock mesh is one of torch's own class.
"""

from __future__ import annotations

from . import private_names as private_names
