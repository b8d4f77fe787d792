"""Verdicts on catalogued hangs, from dumps in each format that torch writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch.distributed as dist

from helpers.hang_catalogue import CATALOGUE, CataloguedHang, Verdict
from helpers.recorded_job import BEGIN, Format
from meshverse.hang.live import Alarm
from meshverse.hang.records import RankRecord, record_of
from meshverse.hang.report import NoRecord, ReportFormatter
from meshverse.hang.verdicts import Stuck, find_stuck
from meshverse.store import Run
from meshverse.tools.commands.main import main

_FORMATS = [Format("nccl"), Format("nccl", is_timed=True), Format("nccl2"), Format("gloo")]


def _expected(hang: CataloguedHang, of: Format) -> Verdict | None:
    if of.is_gloo:
        return hang.gloo
    return hang.timed or hang.nccl if of.is_timed else hang.nccl


_CASES = [
    pytest.param(hang, of, expected, id=f"{hang.what}-{of.backend}{'-timed' * of.is_timed}")
    for hang in CATALOGUE
    for of in _FORMATS
    if (expected := _expected(hang, of)) is not None
]


@pytest.mark.parametrize(("hang", "of", "expected"), _CASES)
def test_the_root_cause_comes_first(hang, of, expected, tmp_path: Path, capsys) -> None:
    hang.job.write(tmp_path, of)
    # Gloo's dumps do not say how many ranks the job has.
    mesh = hang.mesh or (f"x={len(hang.job.programs)}" if of.is_gloo else "")
    command = ["hang", str(tmp_path), *(["--mesh", mesh] if mesh else [])]
    assert main(command) == (1 if expected.cause else 0)
    text = capsys.readouterr().out
    for part in expected.parts:
        assert part in text
    for part in expected.never:
        assert part not in text
    if expected.cause:
        assert main([*command, "--json"]) == 1
        assert json.loads(capsys.readouterr().out)[0]["cause"] == expected.cause


def _reports(records: dict[int, RankRecord]) -> list[tuple[Stuck, str]]:
    """Return each group's verdict, with its text, as one of its waiting ranks reports it.

    The ranks exchange their records through a store, as those of a running job do.
    """
    store, found = dist.HashStore(), []
    alarms = {rank: Alarm(Run(rank, len(records)).keys(store), 0) for rank in records}
    for rank, record in records.items():
        alarms[rank].answer(record)
    for rank, record in records.items():
        for group in dict.fromkeys(call.group for call in record.pending()):
            if alarms[rank].claim(group, record):
                stuck = find_stuck(alarms[rank].collect(group, record))
                formatter = ReportFormatter(no_record=NoRecord.NO_ANSWER)
                own = [one for one in stuck if one.group == group]
                found += [(one, formatter.text(stuck, [one])) for one in own]
    return found


@pytest.mark.parametrize(
    ("hang", "of", "expected"), [case for case in _CASES if "gloo" not in str(case.id)]
)
def test_the_ranks_of_a_running_job_come_to_the_same_verdicts(
    hang: CataloguedHang, of: Format, expected: Verdict
) -> None:
    dumps = hang.job.dumps(of)
    records = {rank: record_of(dump, rank, BEGIN + 600.0) for rank, dump in dumps.items()}
    causes = {one.name: one.cause for one in find_stuck(records)}
    reports = _reports(records)
    assert {one.name: one.cause for one, _ in reports} == causes
    assert bool(reports) is bool(expected.cause)
    if len(dumps) == len(hang.job.programs):  # all ranks live
        assert not [text for _, text in reports if "not responding" in text]


def test_the_catalogue_has_each_kind() -> None:
    assert len(CATALOGUE) >= 24
    assert len({hang.what for hang in CATALOGUE}) == len(CATALOGUE)
