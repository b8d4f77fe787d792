"""Kill, stop and lose ranks of a job that keeps its state in memory, and compare every loss.

Two torchruns are two hosts of 4 ranks each; each restarts the job when a process is lost. All
losses must equal those of a job that nobody disturbed, bit by bit. When both torchruns are killed,
they are started again.

    python tools/soak_snapshot.py --seconds 3600

Needs `tests/` and `python/` on PYTHONPATH.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import signal
import socket
import tempfile
import time
from collections import Counter
from pathlib import Path

import psutil

from helpers.forked import Forked

ROOT = Path(__file__).resolve().parent.parent
JOB = ROOT / "tests" / "parallel" / "snapshot_job.py"
WORKER = ROOT / "tests" / "helpers" / "forked.py"
PER_HOST = 4
ENV = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}


def free_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as bound:
        bound.bind(("localhost", 0))
        return int(bound.getsockname()[1])


def start(
    folder: Path, host: int, port: int, steps: int, hosts: int = 2, restarts: int = 1000
) -> Forked:
    """Start one host's torchrun."""
    command = ["-m", "torch.distributed.run", f"--nnodes={hosts}", f"--nproc-per-node={PER_HOST}"]
    command += [f"--max-restarts={restarts}", "--monitor-interval=0.1", "--rdzv-backend=c10d"]
    command += [f"--rdzv-endpoint=localhost:{port}", "--rdzv-id=soak", "--local-addr=localhost"]
    command += ["--run-path", "--start-method=forkserver", "--redirects=3"]
    command += [f"--log-dir={folder / 'logs' / str(host)}", str(WORKER), str(JOB)]
    arguments = [folder / f"memory{host}", folder / "losses", steps, 1, 2, 20]
    return Forked([*command, *map(str, arguments)], env=ENV)


def losses_of(folder: Path) -> tuple[dict[int, set[str]], int, int]:
    """Return all losses that ranks noted for each step, and how often ranks began, and went on."""
    losses: dict[int, set[str]] = {}
    begun, from_memory = 0, 0
    for note in (folder / "losses").glob("*"):
        for line in note.read_text().splitlines():
            word, _, rest = line.partition(" ")
            if word == "from":
                begun += 1
                from_memory += not rest.startswith("0 ")
            elif word != "end" and rest.endswith(tuple("0123456789")):
                losses.setdefault(int(word), set()).add(rest)
    return losses, begun, from_memory


def alive(folder: Path, agents: list[Forked]) -> list[list[psutil.Process]]:
    """Return the living ranks of each host."""
    noted = {int(note.name.split(".")[1]) for note in (folder / "losses").glob("*")}
    return [[one for one in _below(agent) if one.pid in noted] for agent in agents]


def _below(agent: Forked) -> list[psutil.Process]:
    try:
        return psutil.Process(agent.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def send(what: signal.Signals, processes: list[psutil.Process]) -> None:
    """Send a signal to processes, some of which may have ended."""
    for one in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.send_signal(what)


def end(agents: list[Forked]) -> None:
    """Kill torchruns and all that they started."""
    for agent in agents:
        below = _below(agent)
        agent.kill()
        send(signal.SIGKILL, below)
        agent.communicate()


def hit(kind: str, folder: Path, agents: list[Forked], draw: random.Random) -> bool:
    """Disturb the job in one way, unless it has no ranks now."""
    hosts = alive(folder, agents)
    everyone = [one for host in hosts for one in host]
    if len(everyone) < 2 * PER_HOST:
        return False
    if kind == "kill one":
        send(signal.SIGKILL, draw.sample(everyone, 1))
    elif kind == "kill several":
        send(signal.SIGKILL, draw.sample(everyone, draw.randint(2, 6)))
    elif kind == "stop one":
        send(signal.SIGSTOP, draw.sample(everyone, 1))
    elif kind == "lose a host's ranks and memory":
        host = draw.randrange(2)
        os.kill(agents[host].pid, signal.SIGSTOP)
        send(signal.SIGKILL, hosts[host])
        shutil.rmtree(folder / f"memory{host}")
        os.kill(agents[host].pid, signal.SIGCONT)
    else:
        end(agents)
        port = free_port()
        agents[:] = [start(folder, host, port, 10**9) for host in range(2)]
    return True


KINDS = (
    ["kill one"] * 4
    + ["kill several"] * 3
    + ["lose a host's ranks and memory"] * 3
    + ["stop one", "kill both torchruns"]
)


def main() -> None:
    """Disturb a job for a while, run it again undisturbed, and compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--every", type=float, nargs=2, default=(2, 12), help="seconds between hits"
    )
    options = parser.parse_args()
    draw, hits = random.Random(options.seed), Counter()
    folder = Path(tempfile.mkdtemp(prefix="soak-", dir="/dev/shm"))
    port, unfinished, files = free_port(), 0, 0
    agents = [start(folder, host, port, 10**9) for host in range(2)]
    deadline = time.monotonic() + options.seconds
    try:
        while time.monotonic() < deadline:
            time.sleep(draw.uniform(*options.every))
            kind = draw.choice(KINDS)
            if hit(kind, folder, agents, draw):
                hits[kind] += 1
                memory = list(folder.glob("memory*/*"))
                unfinished += any(path.name.startswith(".") for path in memory)
                files = max(files, len(memory))
                steps = max(losses_of(folder)[0], default=0)
                print(f"{kind}; step {steps}; {len(memory)} files", flush=True)
            if not all(agent.is_alive() for agent in agents):
                print("a torchrun ended by itself: both are started again", flush=True)
                print([agent.printed_so_far()[1][-3000:] for agent in agents], flush=True)
                hits["torchrun ended by itself"] += 1
                end(agents)
                port = free_port()
                agents = [start(folder, host, port, 10**9) for host in range(2)]
    finally:
        end(agents)
    losses, begun, from_memory = losses_of(folder)
    steps = max(losses)
    undisturbed = folder / "undisturbed"
    undisturbed.mkdir()
    port = free_port()
    agents = [start(undisturbed, host, port, steps, restarts=0) for host in range(2)]
    for agent in agents:
        status, _, err = agent.communicate(timeout=3600)
        assert status == 0, err
    expected = losses_of(undisturbed)[0]
    different = [step for step in range(steps) if losses[step] != expected[step]]
    print(f"hits: {dict(hits)}; a save was interrupted in {unfinished}; at most {files} files")
    print(f"{steps} steps; {begun} starts of a rank, {from_memory} of them from memory")
    print(f"steps with a different loss: {different}")
    assert not different
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
