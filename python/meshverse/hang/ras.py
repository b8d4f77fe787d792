"""A running job as NCCL itself sees it: `ncclras`, and the stacks of the processes that it names.

The output is that documented in NCCL's guide, "RAS" (2.24 to 2.28). RAS counts the operations that
each rank has launched, so it sees a rank that is behind, also without a dump.
"""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
from collections.abc import Iterator, Sequence
from typing import NamedTuple

_SECONDS_TO_ANSWER = 30.0  # RAS itself waits up to 5 s for other hosts' processes, or -t
_MOST_STACKS = 8
_TITLE = re.compile(r"(?:(#\d+-\d+) \((\w+)\) )?([A-Z]+)$")
# "Rank 0 -- GPU 0 managed by process 483072 on node 172.16.64.210", and also
# "Process 3487984 on node 172.16.64.213 managing GPU 5"
_PROCESS = re.compile(r"[Pp]rocess (\d+) on node (\S+)")


class Process(NamedTuple):
    """A process that RAS names: its id, and its node's address or name."""

    id: int
    node: str


class Finding(NamedTuple):
    """An error or warning of RAS.

    Attributes:
        communicator: NCCL's hash of the communicator, as in its logs; "" if it is about processes.
        kind: RAS's word, such as "MISMATCH", "INCOMPLETE" or "DEAD".
        lines: what RAS says.
        processes: the processes that it names: those that differ from most.
    """

    communicator: str
    kind: str
    lines: tuple[str, ...]
    processes: tuple[Process, ...]


def findings_in(output: str) -> list[Finding]:
    """Return the errors and warnings in the output of `ncclras`.

    Raises:
        ValueError: this is not such output.
    """
    lines = [line.strip() for line in output.splitlines()]
    if "Job summary" not in lines:
        raise ValueError(f"ncclras printed no job summary: {output.strip()[:200]!r}")
    found: list[Finding] = []
    is_inside = False
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        if following and not following.strip("="):
            is_inside = line in ("Errors", "Warnings")
        elif is_inside and (title := _TITLE.match(line)):
            found.append(Finding(title[2] or "", title[3], (), ()))
        elif is_inside and found and line.strip("="):
            last = found[-1]
            named = tuple(Process(int(one[1]), one[2]) for one in _PROCESS.finditer(line))
            found[-1] = last._replace(
                lines=(*last.lines, line), processes=(*last.processes, *named)
            )
    return found


def query(host: str) -> str:
    """Return what `ncclras` prints of the job that has a process on a host.

    Raises:
        OSError: it is not installed, or gets no answer.
    """
    if shutil.which("ncclras") is None:
        raise FileNotFoundError(
            "ncclras is not installed here. It comes with NCCL 2.24 or newer: install NCCL's "
            "package, or run this on a host of the job."
        )
    try:
        done = subprocess.run(
            ["ncclras", "-v", "-h", host],
            capture_output=True,
            text=True,
            timeout=_SECONDS_TO_ANSWER,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"ncclras -h {host} has not answered in 30 s.") from None
    if done.returncode:
        raise ConnectionError(
            f"ncclras -h {host} failed: {done.stderr.strip() or done.stdout.strip()}. RAS listens "
            "on localhost unless NCCL_RAS_ADDR says otherwise: run this on a host of the job."
        )
    return done.stdout


def report(before: Sequence[Finding], now: Sequence[Finding], seconds: float) -> Iterator[str]:
    """Yield lines on what RAS finds, and whether it was the same some seconds before.

    Healthy ranks are apart for a moment, too: only findings that stay are signs of a hang.
    """
    if not now:
        yield "NCCL's RAS reports no error and no rank that differs."
    for one in now:
        of = f" in communicator {one.communicator}" if one.communicator else ""
        state = (
            f"unchanged for {seconds:.0f} s"
            if one in before
            else f"changed within {seconds:.0f} s, so perhaps not stuck"
        )
        yield f"NCCL's RAS: {one.kind}{of}, {state}"
        yield from (f"  {line}" for line in one.lines)


def stacks(findings: Sequence[Finding]) -> Iterator[str]:
    """Yield lines with the stacks of the processes that are named, or how to get them."""
    processes = list(dict.fromkeys(each for one in findings for each in one.processes))
    for process in processes[:_MOST_STACKS]:
        command = ["py-spy", "dump", "--native", "--pid", str(process.id)]
        if not _is_here(process.node) or shutil.which("py-spy") is None:
            yield f"For its stack, run on {process.node}: {' '.join(command)}"
            continue
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        yield f"Stack of process {process.id} on {process.node}:"
        yield from (f"  {line}" for line in (done.stdout or done.stderr).splitlines())


def _is_here(node: str) -> bool:
    """Return whether a node is this host: only then can a socket be bound to its address."""
    try:
        address = socket.getaddrinfo(node, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(address[0], socket.SOCK_STREAM) as probe:
            probe.bind(address[4])
    except OSError:
        return False
    return True
