"""`python -m meshverse`: the command `meshverse`."""

from __future__ import annotations

import sys

from meshverse.tools.commands.main import main

if __name__ == "__main__":
    sys.exit(main())
