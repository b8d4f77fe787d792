"""Run the benchmarks: all of them, or the suites named, and write benchmarks/results/.

Processes that a suite starts import this file too: it loads nothing for them.
"""

from __future__ import annotations

import sys
from pathlib import Path

# The trainer's recipe and the fake worlds.
sys.path.append(str(Path(__file__).resolve().parent.parent / "examples"))

if __name__ == "__main__":
    from cli import main

    sys.exit(main())
