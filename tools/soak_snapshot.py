"""Kill and stop ranks and hosts of a job that keeps its state in memory, and compare every loss.

Two torchruns are two hosts of 4 ranks each; each restarts the job when a process is lost. The hits
are at any moment, in the middle of saves, and in the middle of loads. All losses must equal those
of a job that nobody disturbed, bit by bit. A torchrun that has ended is started again, as a
scheduler would.

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
from typing import NamedTuple

import psutil

from helpers.forked import CONTEXT, Forked

ROOT = Path(__file__).resolve().parent.parent
JOB = ROOT / "tests" / "parallel" / "snapshot_job.py"
WORKER = ROOT / "tests" / "helpers" / "forked.py"
PER_HOST = 4
ENV = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
LIMIT_S = 900  # in which ranks come back; torchrun ends if others do not join for 600 s

# Not all that tests need: torchrun's rendezvous goes through all loaded modules (`inspect.stack`)
# at each operation. On a busy machine, this has taken longer than the time between two heartbeats,
# and then a rendezvous never ends.
CONTEXT.set_forkserver_preload(
    ["torch.distributed.run", "torch.distributed.fsdp", "meshverse.parallel.snapshot.snapshot"]
)

MOST_ENDS = 100
VICTIMS = ["one rank"] * 3 + ["several ranks"] * 2 + ["all ranks of a host"] * 2
MOMENTS = {"at any moment": {"step", "save"}, "in a save": {"save"}, "in a load": {"load"}}
KINDS = ["kill"] * 8 + ["kill, and the host's memory is lost"] * 4 + ["stop", "stop for a while"]
TORCHRUNS = {  # rarely
    "kill both torchruns": [0, 1],
    "kill the store's torchrun": [0],
    "kill the other torchrun": [1],
}


class Rank(NamedTuple):
    """A living rank, and the file with its notes."""

    process: psutil.Process
    notes: Path

    def does(self) -> str:
        """Return what the rank does: `begin`, `load`, `first step`, `save` or `step`."""
        last = (self.notes.read_text().splitlines() or ["begin"])[-1]
        if last[0].isdigit():
            return "save"
        return {"from": "first step", "saved": "step"}.get(last.split()[0], last)


class Soak:
    """A job on two hosts.

    Args:
        folder: its files.
        steps: when it ends.
        restarts: how often each torchrun restarts it.
    """

    def __init__(self, folder: Path, steps: int = 10**9, restarts: int = 1000) -> None:
        self.folder, self._steps, self._restarts = folder, steps, restarts
        (folder / "losses").mkdir(parents=True)
        with socket.socket() as bound:
            bound.bind(("localhost", 0))
            self._port = int(bound.getsockname()[1])
        self.ended: list[str] = []
        self.agents = [self.agent(host) for host in range(2)]

    def agent(self, host: int) -> Forked:
        """Start one host's torchrun."""
        command = ["-m", "torch.distributed.run", "--nnodes=2", f"--nproc-per-node={PER_HOST}"]
        command += [f"--max-restarts={self._restarts}", "--monitor-interval=0.1"]
        command += ["--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{self._port}"]
        # On two machines, torchrun finds by the endpoint's name that the first one has the store.
        command += [f"--rdzv-conf=is_host={host == 0}", "--rdzv-id=soak", "--local-addr=localhost"]
        command += ["--run-path", "--start-method=forkserver", "--redirects=3"]
        command += [f"--log-dir={self.folder / 'logs' / str(host)}", str(WORKER), str(JOB)]
        memory = self.folder / f"memory{host}"
        arguments = [memory, self.folder / "losses", self._steps, 1, 2, 20]
        return Forked([*command, *map(str, arguments)], env=ENV)

    def tend(self) -> None:
        """Start each torchrun that has ended by itself again, and note its last words."""
        for host, agent in enumerate(self.agents):
            if not agent.is_alive():
                _, _, err = agent.communicate()
                self.ended.append(err.strip().rpartition("\n")[2])
                print(f"torchrun {host} has ended: {err[-3000:]}", flush=True)
                self.agents[host] = self.agent(host)
        if len(self.ended) > MOST_ENDS:
            raise RuntimeError(f"torchruns have ended {len(self.ended)} times by themselves")

    def start_again(self, *hosts: int) -> None:
        """Kill torchruns and start them again."""
        self.end(*hosts)
        for host in hosts:
            self.agents[host] = self.agent(host)

    def end(self, *hosts: int) -> None:
        """Kill torchruns and all that they started."""
        for host in hosts:
            below = _below(self.agents[host])
            self.agents[host].kill()
            for one in below:
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.kill()
            self.agents[host].communicate()

    def hosts(self) -> list[list[Rank]]:
        """Return the living ranks of each host."""
        notes: dict[int, list[Path]] = {}
        for note in sorted((self.folder / "losses").iterdir()):
            notes.setdefault(int(note.name.split(".")[2]), []).append(note)
        return [
            [Rank(one, note) for one in _below(agent) if (note := _of(one, notes.get(one.pid)))]
            for agent in self.agents
        ]

    def wait_for_saves(self) -> None:
        """Wait until all ranks have saved since they started; start both torchruns if they hang."""
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline:
            self.tend()
            everyone = [rank for ranks in self.hosts() for rank in ranks]
            saved = ["saved\n" in rank.notes.read_text() for rank in everyone]
            if len(saved) == 2 * PER_HOST and all(saved):
                return
            time.sleep(0.1)
        words = [agent.printed_so_far()[1][-3000:] for agent in self.agents]
        print(f"no step in {LIMIT_S} s: {words}", flush=True)
        self.ended.append("both hung")
        self.start_again(0, 1)

    def stopped(self, doing: set[str]) -> list[list[Rank]] | None:
        """Stop all ranks once one is seen to do something.

        Args:
            doing: what a rank may do. If one loads, all others may do anything; if not, all are
                past their first step.

        Returns:
            The stopped ranks of each host; None if the moment did not come.
        """
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline:
            self.tend()
            hosts = self.hosts()
            everyone = [rank for ranks in hosts for rank in ranks]
            for _ in range(100 if len(everyone) == 2 * PER_HOST else 0):
                if _is_moment(doing, everyone):
                    _send(signal.SIGSTOP, everyone)
                    time.sleep(0.02)
                    if _is_moment(doing, everyone):
                        return hosts
                    _send(signal.SIGCONT, everyone)
                elif "load" in doing and not {"begin", "load"} & {one.does() for one in everyone}:
                    return None
                time.sleep(0.002)
            time.sleep(0.05)
        return None

    def hit(self, kind: str, whom: str, moment: str, draw: random.Random) -> Counter[str] | None:
        """Disturb the job in one way.

        Returns:
            What the ranks did at that moment; None if there was no such moment.
        """
        doing = MOMENTS[moment]
        if "load" in doing and (hosts := self.stopped({"step", "save"})):  # a restart comes first
            everyone = [rank for ranks in hosts for rank in ranks]
            _send(signal.SIGKILL, [draw.choice(everyone)])
            _send(signal.SIGCONT, everyone)
            psutil.wait_procs([rank.process for rank in everyone], timeout=LIMIT_S)
        hosts = self.stopped(doing)
        if not hosts:
            return None
        host = draw.randrange(2)
        everyone = [rank for ranks in hosts for rank in ranks]
        draw.shuffle(everyone)
        everyone.sort(key=lambda rank: rank.does() not in doing)
        n_victims = {"one rank": 1, "several ranks": draw.randint(2, 6)}.get(whom, 2 * PER_HOST)
        victims = everyone[:n_victims]
        if kind not in TORCHRUNS and (whom == "all ranks of a host" or "memory" in kind):
            victims = hosts[host]
        did = Counter(rank.does() for rank in victims)
        if kind in TORCHRUNS:
            self.start_again(*TORCHRUNS[kind])
        elif "memory" in kind:
            os.kill(self.agents[host].pid, signal.SIGSTOP)
            _send(signal.SIGKILL, victims)
            shutil.rmtree(self.folder / f"memory{host}")
            os.kill(self.agents[host].pid, signal.SIGCONT)
        elif kind == "kill":
            _send(signal.SIGKILL, victims)
        others = [rank for rank in everyone if rank not in victims or kind in TORCHRUNS]
        _send(signal.SIGCONT, others)
        if kind == "stop for a while":
            time.sleep(draw.uniform(0.5, 5))
            _send(signal.SIGCONT, victims)
        return did


def _is_moment(doing: set[str], ranks: list[Rank]) -> bool:
    does = {rank.does() for rank in ranks}
    return bool(does & doing) and ("load" in doing or not does & {"begin", "load", "first step"})


def _of(process: psutil.Process, notes: list[Path] | None) -> Path | None:
    """Return the newest of the notes under a process's number, if this process made it.

    Numbers are used again, also by processes that are no ranks.
    """
    with contextlib.suppress(psutil.NoSuchProcess):
        since = process.create_time() - 1  # the clock of processes starts at a whole second
        if notes and int(notes[-1].name.split(".")[0]) / 1e9 > since:
            return notes[-1]
    return None


def _below(agent: Forked) -> list[psutil.Process]:
    """Return the living processes that a torchrun started."""
    below = []
    with contextlib.suppress(psutil.NoSuchProcess):
        for one in psutil.Process(agent.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if one.status() != psutil.STATUS_ZOMBIE:
                    below.append(one)
    return below


def _send(what: signal.Signals, ranks: list[Rank]) -> None:
    """Send a signal to ranks, some of which may have ended."""
    for rank in ranks:
        with contextlib.suppress(psutil.NoSuchProcess):
            rank.process.send_signal(what)


def losses_of(folder: Path) -> tuple[dict[int, set[str]], Counter[int], Counter[str]]:
    """Return what ranks noted.

    Returns:
        All losses of each step; how many steps each start of a rank took back; and how many ranks
        began from memory, from nothing, or ended before they had loaded.
    """
    losses: dict[int, set[str]] = {}
    taken_back: Counter[int] = Counter()
    starts: Counter[str] = Counter()
    newest: dict[str, int] = {}
    for note in sorted((folder / "losses").iterdir()):
        rank = note.name.split(".")[1]
        first = None
        for line in note.read_text().splitlines():
            word, _, rest = line.partition(" ")
            if word == "from":
                first = int(rest.split()[0])
                if rank in newest:
                    taken_back[newest[rank] + 1 - first] += 1
            elif word.isdigit():
                losses.setdefault(int(word), set()).add(rest)
                newest[rank] = int(word)
        starts["ended in a load" if first is None else "from memory" if first else "from 0"] += 1
    return losses, taken_back, starts


def undisturbed(folder: Path, steps: int) -> tuple[dict[int, set[str]], list[str]]:
    """Run the job without hits.

    Returns:
        Its losses; and in time, the most that a rank held, once all had saved three times.
    """
    soak, held = Soak(folder, steps, restarts=0), []
    while any(agent.is_alive() for agent in soak.agents):
        ranks = [rank for ranks in soak.hosts() for rank in ranks]
        with contextlib.suppress(psutil.NoSuchProcess):
            mb = max((one.process.memory_info().rss for one in ranks), default=0) >> 20
            n_files = max((one.process.num_fds() for one in ranks), default=0)
            n_threads = max((one.process.num_threads() for one in ranks), default=0)
            n_saved = min((one.notes.read_text().count("saved\n") for one in ranks), default=0)
            if len(ranks) == 2 * PER_HOST and n_saved > 2:  # the first steps load code
                held.append(f"{mb} MB, {n_files} open files, {n_threads} threads")
        time.sleep(5)
    for agent in soak.agents:
        status, _, err = agent.communicate()
        assert status == 0, err
    return losses_of(folder)[0], held


def main() -> None:
    """Disturb a job for a while, run it again undisturbed, and compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--longest", type=float, default=6, help="seconds of steps between hits")
    options = parser.parse_args()
    draw = random.Random(options.seed)
    hits: Counter[str] = Counter()
    did: Counter[str] = Counter()
    folder = Path(tempfile.mkdtemp(prefix="soak-", dir="/dev/shm"))
    soak, files, n_bytes = Soak(folder / "disturbed"), 0, 0
    deadline = time.monotonic() + options.seconds
    try:
        while time.monotonic() < deadline:
            if draw.random() < 0.8:  # else in the first step, or the first save
                soak.wait_for_saves()
                time.sleep(draw.uniform(0, options.longest))
            kind, whom = draw.choice(KINDS), draw.choice(VICTIMS)
            moment = draw.choice(list(MOMENTS))
            if draw.random() < 0.08:
                kind, whom = draw.choice(list(TORCHRUNS)), ""
            where = soak.hit(kind, whom, moment, draw)
            name = " ".join(filter(None, [kind, whom, moment]))
            if where is not None:
                hits[name] += 1
                hits["all"] += 1
                did.update(where)
            memory = [path.stat() for path in soak.folder.glob("memory*/*") if path.exists()]
            files = max(files, len(memory))
            n_bytes = max(n_bytes, sum(one.st_size for one in memory))
            steps = max(losses_of(soak.folder)[0], default=-1) + 1
            what = dict(where) if where else "no such moment"
            spent = options.seconds - (deadline - time.monotonic())
            print(f"{spent:.0f} s, {steps} steps; {name}: {what}; {len(memory)} files", flush=True)
    finally:
        soak.end(0, 1)
    losses, taken_back, starts = losses_of(soak.folder)
    steps = max(losses) + 1
    for name, count in sorted(hits.items()):
        print(f"{count} x {name}")
    print(f"what ranks did when they were hit: {dict(did)}")
    print(f"{len(soak.ended)} torchruns ended by themselves: {dict(Counter(soak.ended))}")
    print(f"at most {files} files, of {n_bytes} bytes")
    print(f"{steps} steps; starts of a rank: {dict(starts)}", flush=True)
    print(f"steps that starts of a rank took back: {dict(sorted(taken_back.items()))}", flush=True)
    expected, held = undisturbed(folder / "undisturbed", steps)
    print(f"ranks of the undisturbed run held at first {held[:1]}, at last {held[-1:]}")
    different = [step for step in range(steps) if losses[step] != expected[step]]
    print(f"{sum(map(len, losses.values()))} losses of {steps} steps compared")
    print(f"steps with a different loss: {different}")
    assert not different
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
