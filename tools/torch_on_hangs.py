"""Print what torch's own analyzer says of each catalogued hang, for the table in docs/hangs.md.

Run it as `PYTHONPATH=python:tests python tools/torch_on_hangs.py`.
"""

from __future__ import annotations

import contextlib
import io
import logging
import tempfile
from pathlib import Path

from torch.distributed.flight_recorder import fr_trace

from helpers.hang_catalogue import CATALOGUE
from helpers.recorded_job import Format

_TELLING = ("missing ranks", "Culprit", "Error", "group info", "undecided")


def said_by_torch(folder: str) -> str:
    """Return what torch's analyzer prints and logs about the dumps in a folder."""
    said = io.StringIO()
    for name in logging.root.manager.loggerDict:
        if "Flight" in name:
            logging.getLogger(name).handlers = [logging.StreamHandler(said)]
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            fr_trace.main([folder])
        except Exception as error:  # noqa: BLE001  # whatever it raises is what is asked
            said.write(f"Error: {type(error).__name__}: {error}")
    return said.getvalue()


def _main() -> None:
    for of in (Format("nccl", is_timed=True), Format("nccl")):
        for hang in CATALOGUE:
            with tempfile.TemporaryDirectory() as folder:
                hang.job.write(Path(folder), of)
                lines = said_by_torch(folder).splitlines()
            print(f"=== {hang.what} ({'with' if of.is_timed else 'without'} timing)")
            print("\n".join(line for line in lines if any(word in line for word in _TELLING)))


if __name__ == "__main__":
    _main()
