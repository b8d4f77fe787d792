"""Print what torch's own analyzer says of each catalogued hang, for the table in docs/hangs.md.

Run it as `PYTHONPATH=python:tests python tools/torch_on_hangs.py`.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from helpers.hang_catalogue import CATALOGUE
from helpers.recorded_job import Format

_ANALYZER = "torch.distributed.flight_recorder.fr_trace"
_DROPPED = ("loaded ", "built ", "WARNING:root")


def _main() -> None:
    for of in (Format("nccl", is_timed=True), Format("nccl")):
        for hang in CATALOGUE:
            with tempfile.TemporaryDirectory() as folder:
                hang.job.write(Path(folder), of)
                command = [sys.executable, "-m", _ANALYZER, folder, *sys.argv[1:]]
                done = subprocess.run(command, capture_output=True, text=True, check=False)
            out = (done.stdout + done.stderr).splitlines()[-12:]
            print(f"=== {hang.what} ({of}), exit status {done.returncode}")
            print("\n".join(line[:240] for line in out if not line.startswith(_DROPPED)))


if __name__ == "__main__":
    _main()
