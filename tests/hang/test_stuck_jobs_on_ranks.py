"""Jobs of 8 real ranks that hang: the verdicts of the watch, and of `meshverse hang`."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from helpers.forked import SECONDS, Forked
from helpers.ports import held_port
from meshverse.tools.commands.main import main

pytestmark = pytest.mark.processes

_PROGRAM = Path(__file__).parent / "stuck_job.py"
_EXAMPLE = Path(__file__).parents[2] / "examples" / "hang.py"
_SIZE = 8
_AGENT = """
import sys, time
import torch.distributed as dist
store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), is_master=True, wait_for_workers=False)
time.sleep(1000)  # sleep: until it is ended
"""


class Running:
    """A job: its processes, and the folder that they write to.

    Args:
        name: how it hangs, as in `stuck_job.py`.
        folder: that folder.
        arguments: further ones of the program.
        has_agent: whether another process than rank 0 has the store, as under torchrun.
    """

    def __init__(self, name: str, folder: Path, *arguments: str, has_agent: bool = False) -> None:
        self.folder = folder
        port = held_port()
        common = {"WORLD_SIZE": str(_SIZE), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        self.agent = Forked(["-c", _AGENT, str(port)]) if has_agent else None
        if has_agent:
            common["TORCHELASTIC_USE_AGENT_STORE"] = "True"
        self.ranks = [
            Forked(
                [str(_PROGRAM), name, str(folder), *arguments],
                env={**os.environ, **common, "RANK": str(rank), "OMP_NUM_THREADS": "1"},
            )
            for rank in range(_SIZE)
        ]

    def wait_for(self, is_there: Callable[[], Any]) -> Any:
        deadline = time.monotonic() + SECONDS
        while not (found := is_there()):
            is_over = time.monotonic() >= deadline  # duration: of a hang, by SECONDS
            are_alive = any(rank.is_alive() for rank in self.ranks)
            assert (are_alive and not is_over) or is_there(), self.end()
            time.sleep(0.1)  # sleep: it looks again
        return found

    def verdicts(self, kind: str = "verdict") -> list[dict[str, Any]]:
        files = sorted(self.folder.glob(f"{kind}_*.json"))
        return [json.loads(file.read_text()) for file in files]

    def causes(self) -> list[dict[str, Any]]:
        """The verdicts on groups that do not follow from others."""
        return [one for one in self.verdicts() if one["groups"][0]["cause"] not in ("follows",)]

    def dump(self, ranks: list[int]) -> None:
        (self.folder / "dump").touch()
        self.wait_for(lambda: all((self.folder / f"dumped{rank}").exists() for rank in ranks))

    def error(self, rank: int) -> str:
        """Standard error of a rank so far."""
        return self.ranks[rank].printed_so_far()[1]

    def is_watching(self, rank: int) -> bool:
        """Whether the watch of a rank has looked once: it has its connection to the store."""
        return (self.folder / f"watching{rank}").exists()

    def end(self) -> list[tuple[int, str, str]]:
        if self.agent is not None:
            self.agent.kill()
            self.agent.communicate()
        for rank in self.ranks:
            rank.kill()
        return [rank.communicate() for rank in self.ranks]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Running]]:
    started: list[Running] = []

    def run(name: str, *arguments: str, **options: bool) -> Running:
        started.append(Running(name, tmp_path, *arguments, **options))
        return started[-1]

    yield run
    for job in started:
        job.end()


class Stuck(NamedTuple):
    """Parts of the report on a job, live and from its dumps."""

    job: str
    cause: str
    live: tuple[str, ...]
    dumped: tuple[str, ...] | None = None  # as live, unless it is said
    dump_cause: str | None = None
    dumping: tuple[int, ...] = tuple(range(_SIZE))


_ALL = "on the default group, ranks 0-7, float32 (4,)"
_TP = "on axis tp, ranks 4, 5 (pp=1, dp=0), float32 (4,)"
_LINES = {
    line.partition("  # ")[2]: number
    for number, line in enumerate(_PROGRAM.read_text().splitlines(), 1)
}
_OUT_OF_STEP = (
    "But ranks 4, 5 were out of step before: number 6 on axis tp was all_reduce at "
    f"hang/stuck_job.py:{_LINES['the first of a step']} in is_out_of_step on rank 4 and all_reduce "
    f"at hang/stuck_job.py:{_LINES['the second of a step']} in is_out_of_step on rank 5. Unless "
    "both lines are branches of one call, one of these ranks skipped a call there, made an extra "
    "one, or called in another order: results since then may be wrong."
)
_CASES = [
    Stuck(
        "sleeps",
        "missing",
        (
            f"Stuck: all_reduce number 1 {_ALL}, for",
            "waiting there: ranks 0-4, 6, 7 at hang/stuck_job.py:",
            "missing:       rank 5 (pp=1, dp=0, tp=1), at hang/stuck_job.py:",
            "Verdict: rank 5 (pp=1, dp=0, tp=1) has not called it: look at hang/stuck_job.py:",
            " in load_data.",
        ),
        (
            f"Stuck: all_reduce number 1 {_ALL}, for",
            "missing:       rank 5 (pp=1, dp=0, tp=1), no call in this group yet",
            "Verdict: rank 5 (pp=1, dp=0, tp=1) has not called it.",
        ),
    ),
    Stuck(
        "orders_two_axes_otherwise",
        "deadlock",
        (
            "rank 5 (pp=1, dp=0, tp=1), waiting in all_reduce number 4 on axis dp, ranks 5, 7",
            "Verdict: a deadlock. Rank",
            "All ranks must use these groups in the same order, and skip none.",
            "Verdict: part of the deadlock above.",
        ),
    ),
    Stuck(
        "is_stopped",
        "missing",
        (
            f"Stuck: all_reduce number 1 {_ALL}, for",
            "missing:       rank 5 (pp=1, dp=0, tp=1), not responding: dead, stopped, ",
            "Verdict: rank 5 (pp=1, dp=0, tp=1) is not responding.",
        ),
        (
            f"Stuck: all_reduce number 1 {_ALL}, for",
            "missing:       rank 5 (pp=1, dp=0, tp=1), no dump",
            "Verdict: there is no dump of rank 5 (pp=1, dp=0, tp=1): the process may have died",
        ),
        dumping=(0, 1, 2, 3, 4, 6, 7),
    ),
    Stuck(
        "is_killed",
        "missing",
        (
            "missing:       rank 5 (pp=1, dp=0, tp=1), not responding: dead, stopped, ",
            "Verdict: rank 5 (pp=1, dp=0, tp=1) is not responding.",
        ),
        ("Verdict: there is no dump of rank 5 (pp=1, dp=0, tp=1): the process may have died",),
        dumping=(0, 1, 2, 3, 4, 6, 7),
    ),
    Stuck(
        "skips",
        "deadlock",
        (
            f"Stuck: all_reduce number 4 {_TP}, for",
            "rank 5 (pp=1, dp=0, tp=1), waiting in barrier number 1 on the default group, ",
            "in the same order, and skip none.",
        ),
    ),
    Stuck(
        "skips_in_the_third_step",
        "mismatch",
        (
            " number 13 on axis dp, ranks 5, 7 (pp=1, tp=1), float32 (",
            "Verdict: Rank 5 (pp=1, dp=0, tp=1) skipped all_reduce number 13 on axis dp, ",
            " in log_loss: look at the condition around that line. In earlier repetitions of ",
            "So the ranks make different calls as number 13: operation all_gather on rank 5; ",
        ),
    ),
    Stuck(
        "skips_a_barrier_in_the_third_step",
        "deadlock",
        (
            "Rank 5 (pp=1, dp=0, tp=1) skipped barrier number 3 on the default group, which ranks ",
            "0-4, 6, 7 called at hang/stuck_job.py:",
            " in skips_a_barrier_in_the_third_step: look at the condition around that line. In ",
        ),
    ),
    Stuck("is_out_of_step", "deadlock", ("Verdict: a deadlock. Rank", _OUT_OF_STEP)),
    Stuck(
        "is_out_of_step_and_sleeps",
        "missing",
        (" in load_data. ", _OUT_OF_STEP),
        (" has not called it. ", _OUT_OF_STEP),
    ),
    Stuck(
        "loops",
        "missing",
        (
            "missing:       rank 5 (pp=1, dp=0, tp=1), at hang/stuck_job.py:",
            "has not called it: look at",
        ),
        ("Verdict: rank 5 (pp=1, dp=0, tp=1) has not called it.",),
    ),
    Stuck(
        "raises_and_goes_on",
        "missing",
        (f"Stuck: all_reduce number 4 {_TP}, for", " in raises_and_goes_on."),
        (
            f"Stuck: all_reduce number 4 {_TP}, for",
            "last call in this group: all_reduce number 3 at hang/stuck_job.py:",
            "Verdict: rank 5 (pp=1, dp=0, tp=1) has not called it.",
        ),
    ),
    Stuck(
        "calls_another_operation",
        "mismatch",
        (
            "number 4 on axis tp, ranks 4, 5 (pp=1, dp=0), float32 (4,), for",
            "as number 4: operation all_reduce on rank 4; broadcast on rank 5.",
        ),
    ),
    Stuck(
        "has_another_shape",
        "mismatch",
        ("as number 1: shape (4,) on ranks 1-4, 6, 7; (5,) on rank 5.",),
    ),
    Stuck(
        "has_another_dtype",
        "mismatch",
        ("as number 1: dtype float32 on ranks 1-4, 6, 7; float64 on rank 5.",),
    ),
    Stuck(
        "has_another_root",
        "mismatch",
        ("as number 1: root 0 on rank 1; root 3 on rank 5.",),
        ("Verdict: all ranks have made the call, ", "Compare roots, split sizes and reduce"),
        dump_cause="unknown",
    ),
    Stuck(
        "calls_from_two_threads",
        "mismatch",
        ("operation all_reduce on rank 4; broadcast on rank 5.",),
    ),
    Stuck(
        "exchanges_without_one",
        "missing",
        (
            "Stuck: all_to_all number 1 on axis ep, ranks 4-7 (pp=1), float32 (4,), for",
            "Verdict: rank 5 (pp=1, dp=0, tp=1) has not called it: look at hang/stuck_job.py:",
        ),
        (
            "Stuck: all_to_all number 1 on axis ep, ranks 4-7 (pp=1), float32 (4,), for",
            "Verdict: rank 5 (pp=1, dp=0, tp=1) has not called it.",
        ),
    ),
]
_SHORT = ("orders_two_axes_otherwise",)
# Of which tests of simulated dumps have the like.
_SWEPT = (
    "loops",
    "calls_another_operation",
    "has_another_shape",
    "has_another_dtype",
    "has_another_root",
    "exchanges_without_one",
    "raises_and_goes_on",
    "is_out_of_step_and_sleeps",
)


def _marks(case: Stuck) -> list[pytest.MarkDecorator]:
    if case.job in _SHORT:
        return []
    return [pytest.mark.sweep if case.job in _SWEPT else pytest.mark.long]


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=case.job, marks=_marks(case)) for case in _CASES]
)
def test_the_cause_is_reported_live_and_from_the_dumps(case: Stuck, start, capsys) -> None:
    job = start(case.job)
    reported = job.wait_for(job.causes)
    texts = "\n".join(one["text"] for one in reported)
    for part in case.live:
        assert part in texts
    assert {one["groups"][0]["cause"] for one in reported} == {case.cause}
    job.dump(list(case.dumping))
    folder = job.folder
    command = ["hang", str(folder / "dumps"), "--mesh", str(folder / "mesh.json")]
    assert main(command) == 1
    out = capsys.readouterr().out
    for part in case.dumped or case.live:
        assert part in out
    assert main([*command, "--json"]) == 1
    first = json.loads(capsys.readouterr().out)[0]
    assert first["cause"] == (case.dump_cause or case.cause)


@pytest.mark.long
def test_a_lost_receive_is_reported_by_where_its_rank_stands(start) -> None:
    # Gloo records no sends and receives: only the live watch sees them.
    job = start("loses_a_receive")
    (reported,) = job.wait_for(job.causes)
    assert "Stuck: recv on axis pp, ranks 1, 5 (dp=0, tp=1), for" in reported["text"]
    assert "waiting there: rank 5 at hang/stuck_job.py:" in reported["text"]
    assert "rank 1 (pp=0, dp=0, tp=1), at hang/stuck_job.py:" in reported["text"]
    assert "Verdict: a recv without its send: rank 1 (pp=0, dp=0, tp=1)" in reported["text"]


@pytest.mark.long
def test_a_receive_from_any_rank_is_reported_with_all_that_may_send(start) -> None:
    job = start("receives_from_any")
    (reported,) = job.wait_for(job.causes)
    assert "Stuck: recv on axis ep, ranks 4-7 (pp=1), for" in reported["text"]
    assert "waiting there: rank 5 at hang/stuck_job.py:" in reported["text"]
    assert "may send:      ranks 4, 6, 7, at hang/stuck_job.py:" in reported["text"]
    assert "Verdict: rank 5 (pp=1, dp=0, tp=1) receives from any rank" in reported["text"]


@pytest.mark.long
def test_ranks_that_wait_in_new_group_are_said_to_wait(start) -> None:
    job = start("skips_a_group")
    (reported,) = job.wait_for(job.causes)
    text = reported["text"]
    assert "in skips_a_group, waiting for other ranks in torch's new_group()" in text
    waiting = re.search(r"waiting there: (.*) at hang/stuck_job.py", text)
    assert waiting is not None
    assert "5" in waiting[1]  # which skipped it: at the barrier, it waits for the others


@pytest.mark.long
def test_a_rank_that_does_not_create_a_mesh_is_named_to_those_that_wait_for_others(start) -> None:
    job = start("skips_a_mesh")
    job.wait_for(lambda: len(job.causes()) >= 2)
    texts = "\n".join(one["text"] for one in job.verdicts())
    group = "creation of the process group of axis"
    verdict = "rank 5 (pp=1, dp=0, tp=1) has not joined it: look at hang/stuck_job.py:"
    for axis, ranks, waiting in (
        ("edp", "1, 3, 5, 7 (tp=1)", "ranks 1, 3, 7"),
        ("ep", "4, 5 (pp=1, dp=0)", "rank 4"),
    ):
        _, there, missing, said = re.findall(
            rf"Stuck: {group} '{axis}', ranks {re.escape(ranks)}, for .*\n.*\n.*\n.*", texts
        )[0].splitlines()
        assert f"waiting there: {waiting} at hang/stuck_job.py:" in there
        assert missing.endswith(" in load_data")
        assert verdict in said
    # Other pairs wait for ranks 1, 3 and 7.
    for one in job.verdicts():
        if one not in job.causes():
            assert (
                f"waits in {group} 'edp', ranks 1, 3, 5, 7 (tp=1). There, {verdict}" in one["text"]
            )


@pytest.mark.long
def test_each_rank_of_the_group_hears_of_it_and_a_slow_rank_is_taken_back(start) -> None:
    job = start("is_slow")
    job.wait_for(lambda: len(job.verdicts() + job.verdicts("heard")) >= _SIZE - 1)
    assert len(job.verdicts()) == 1
    texts = {one["text"] for one in job.verdicts() + job.verdicts("heard")}
    assert len(texts) == 1
    assert "Verdict: rank 5" in texts.pop()
    printed = job.wait_for(
        lambda: [text for text in map(job.error, range(_SIZE)) if "is no longer stuck" in text]
    )
    assert len(printed) == 1
    assert "all_reduce number 1 on the default group, ranks 0-7 is no longer stuck, " in printed[0]
    assert printed[0].count("A collective is stuck.") == 1


@pytest.mark.long
def test_the_other_ranks_hear_a_verdict_that_waits_for_a_stopped_rank(start) -> None:
    # Its reporter gives the stopped rank seconds to answer, many times a look's pause.
    job = start("is_stopped")
    job.wait_for(lambda: len(job.verdicts() + job.verdicts("heard")) >= _SIZE - 1)
    assert len(job.verdicts()) == 1


@pytest.mark.long
def test_a_job_that_goes_on_is_left_alone(start) -> None:
    # Twenty times the limit: of a minute, that would be twenty minutes.
    job = start("trains", "20")
    ended = [rank.communicate() for rank in job.ranks]
    assert [status for status, _, _ in ended] == [0] * _SIZE
    n_long = sum(int((job.folder / f"long{rank}").read_text()) for rank in range(_SIZE))
    assert sum(error.count("A collective is stuck.") for _, _, error in ended) <= n_long, ended
    assert len(job.verdicts()) <= n_long
    if n_long == 0:
        assert not any("stuck" in error for _, _, error in ended), ended
        assert not job.verdicts("heard")


@pytest.mark.long
def test_without_a_store_each_rank_says_what_it_knows(start) -> None:
    job = start("sleeps", has_agent=True)
    job.wait_for(lambda: all(map(job.is_watching, range(_SIZE))))
    job.agent.kill()
    _expect_reports_alone(job, "the store does not answer")


@pytest.mark.long
def test_a_store_that_stops_and_answers_again_gives_both_reports(start) -> None:
    job = start("sleeps", has_agent=True)
    job.wait_for(lambda: all(map(job.is_watching, range(_SIZE))))
    os.kill(job.agent.pid, signal.SIGSTOP)  # as if its host had lost power
    _expect_reports_alone(job, "the store has not answered for ")
    os.kill(job.agent.pid, signal.SIGCONT)
    found = job.wait_for(lambda: [one for one in job.causes() if "load_data" in one["text"]])
    assert found[0]["groups"][0]["cause"] == "missing"


def _expect_reports_alone(job: Running, why: str) -> None:
    text = job.wait_for(lambda: next(iter(job.causes()), None))["text"]
    assert "Stuck: all_reduce number 1" in text
    assert "flight recorder unreadable" in text
    assert "not responding" not in text
    printed = "".join(map(job.error, range(_SIZE)))
    assert f"ranks cannot exchange where they are: {why}" in printed


@pytest.mark.long
def test_a_pipeline_that_waits_names_the_stage_before_or_after(start) -> None:
    job = start("sleeps_in_a_pipeline")
    (reported,) = job.wait_for(job.causes)
    # In torch 2.11 the first stage waits in its send, later in the receive of what comes back.
    pair = r"Stuck: (send|recv) on axis pp, ranks 1, 5 \(dp=0, tp=1\), for"
    assert re.search(pair, reported["text"])
    assert "rank 5 (pp=1, dp=0, tp=1), at hang/stuck_job.py:" in reported["text"]
    assert re.search(r" in load_data,?\n", reported["text"])


@pytest.mark.long
def test_a_job_on_torchs_own_meshes_is_reported_of_too(start) -> None:
    job = start("calls_another_operation", "stock")
    (reported,) = job.wait_for(job.causes)
    assert "number 4 on axis tp, ranks 4, 5, float32 (4,), for" in reported["text"]
    assert "as number 4: operation all_reduce on rank 4; broadcast on rank 5." in reported["text"]


@pytest.mark.long
def test_the_example_says_where_its_rank_is() -> None:
    status, _, error = Forked(
        [str(_EXAMPLE)], env={**os.environ, "OMP_NUM_THREADS": "1"}
    ).communicate()
    assert status == 0, error
    assert "Verdict: rank 3 (dp=1, tp=1) has not called it: look at examples/hang.py:" in error
    assert error.count(" in load_batch.\n") >= 1


@pytest.mark.long
def test_the_example_ends_when_its_ranks_do() -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "no-such-network"}
    status, _, error = Forked([str(_EXAMPLE)], env=environment).communicate()
    assert status == 1
    assert "no-such-network" in error
    assert error.endswith("A rank has ended before the hang was found.\n")
