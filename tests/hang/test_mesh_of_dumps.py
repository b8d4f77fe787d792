"""`--mesh` against what dumps say of their groups' ranks, and ranks in c10d's descriptions."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from helpers.recorded_job import Format, Job, Step
from meshverse.hang.records import record_of
from meshverse.tools.commands.main import main

_GLOO, _NCCL = Format("gloo"), Format("nccl")
_TP, _FSDP = Step("all_reduce", "tp"), Step("all_gather", "fsdp")
_SQUARE = {"fsdp": [(0, 2), (1, 3)], "tp": [(0, 1), (2, 3)]}
# Rank 3 is late: ranks 0 and 2 wait in tp, rank 1 in fsdp.
_LATE = Job([[_FSDP, _TP], [_FSDP, _FSDP], [_FSDP, _TP], [_FSDP, Step("stops")]], _SQUARE)


def _write(folder: Path, of: Format, described: bool, job: Job = _LATE) -> None:
    """Write dumps; with Meshverse's descriptions, which have ranks, or with torch's."""
    for rank, dump in job.dumps(of).items():
        for entry in dump["entries"]:
            name, description = entry["process_group"]
            axis = description.removeprefix("mesh_")
            for ranks in job.groups.get(axis, ()) if described else ():
                if rank in ranks:
                    step = ranks[1] - ranks[0]
                    where = f"[{ranks[0]}-{ranks[-1]}" + (f":{step}]" if step > 1 else "]")
                    entry["process_group"] = (name, description + where)
        (folder / f"trace_rank_{rank}").write_bytes(pickle.dumps(dump))


@pytest.mark.parametrize("described", [True, False])
@pytest.mark.parametrize("of", [_GLOO, _NCCL])
@pytest.mark.parametrize("has_last", [True, False])
@pytest.mark.parametrize("mesh", ["fsdp=2 tp=3", "tp=2 fsdp=2"])
def test_sizes_that_the_groups_contradict_are_refused(
    mesh: str, has_last: bool, of: Format, described: bool, tmp_path: Path, capsys
) -> None:
    _write(tmp_path, of, described)
    if not has_last:
        (tmp_path / "trace_rank_3").unlink()
    assert main(["hang", str(tmp_path), "--mesh", mesh]) == 2
    caught = capsys.readouterr()
    assert not caught.out
    assert f"--mesh '{mesh}' has" in caught.err
    is_larger = of is _NCCL and mesh == "fsdp=2 tp=3"  # whose default group's ranks are recorded
    wanted = (
        "the job of these dumps has 4 ranks"
        if is_larger
        else "; by --mesh, it has ranks "
        if described or of is _NCCL
        else "are in different groups along axis"
    )
    assert wanted in caught.err
    assert "leave --mesh out" in caught.err


@pytest.mark.parametrize("described", [True, False])
@pytest.mark.parametrize("of", [_GLOO, _NCCL])
@pytest.mark.parametrize("mesh", ["fsdp=2 tp=2", "a=2 b=2"])
def test_the_right_sizes_are_taken_whatever_the_axes_are_named(
    mesh: str, of: Format, described: bool, tmp_path: Path, capsys
) -> None:
    _write(tmp_path, of, described)
    assert main(["hang", str(tmp_path), "--mesh", mesh]) == 1
    assert "deadlock" not in capsys.readouterr().out


def test_an_axis_of_another_mesh_may_have_the_same_name(tmp_path: Path, capsys) -> None:
    groups = {"tp": [(0, 1), (2, 3)], "other": [(0, 1, 2, 3)]}
    job = Job([[Step("all_reduce", "other"), _TP]] * 3 + [[Step("all_reduce", "other")]], groups)
    for rank, dump in job.dumps(_NCCL).items():
        for one in [*dump["pg_config"].values()]:
            one["desc"] = one["desc"].replace("mesh_other", "mesh_tp")
        (tmp_path / f"trace_rank_{rank}").write_bytes(pickle.dumps(dump))
    assert main(["hang", str(tmp_path), "--mesh", "dp=2 tp=2"]) == 1
    assert "rank 3 (dp=1, tp=1) has not called it" in capsys.readouterr().out


def test_ranks_in_descriptions_say_who_is_missing_without_a_mesh(tmp_path: Path, capsys) -> None:
    _write(tmp_path, _GLOO, described=True)
    assert main(["hang", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "on axis tp, ranks 2, 3, float32" in out
    assert "on axis fsdp, ranks 1, 3, float32" in out
    assert out.count("Verdict: rank 3 has not called it.") == 2
    assert "is not recorded" not in out
    _write(tmp_path, _GLOO, described=False)
    assert main(["hang", str(tmp_path)]) == 1
    assert "Which other ranks it has is not recorded: pass --mesh" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("description", "label", "ranks"),
    [
        ("mesh_tp[2-3]", "axis tp", [2, 3]),
        ("mesh_fsdp+batch[0-6:2]", "axis fsdp (shared with batch)", [0, 2, 4, 6]),
        ("mesh_tp[2]", "axis tp", [2]),
        ("mesh_tp[0-5, 3 ranks]", "axis tp [0-5, 3 ranks]", None),
        ("mesh_tp[0-1]", "axis tp [0-1]", None),  # without the dump's own rank
        ("mesh_tp", "axis tp", None),
        ("mine[0-3]", "group 'mine[0-3]'", None),
    ],
)
def test_ranks_of_a_description(description: str, label: str, ranks: list[int] | None) -> None:
    dump = Job([[_TP]] * 4, _SQUARE).dumps(_GLOO)[2]
    for entry in dump["entries"]:
        entry["process_group"] = ("5", description)
    seen = record_of(dump, 2, 0.0).groups["5"]
    assert (seen.label, seen.ranks and list(seen.ranks)) == (label, ranks)
