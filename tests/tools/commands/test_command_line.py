"""`meshverse` on the command line: what it prints, and how it ends."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import subprocess
import sys

import pytest

import meshverse
from helpers.forked import SECONDS
from meshverse.tools.commands.main import main


def test_a_plan_is_printed(capsys) -> None:
    assert main(["plan", "dp=4,tp=8", "--view", "a=2,b=2,tp=8", "--node-size", "8"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(
        "World of 32 ranks, backend nccl, 2 views:\n  dp=4,tp=8\n  a=2,b=2,tp=8\n"
    )


def test_a_plan_as_data(capsys) -> None:
    degrees = "dp_replicate=4,dp_shard=40,cp=1,tp=8,pp=8,ep=8"
    assert main(["plan", "--degrees", degrees, "--json", "--rank", "777"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["world"], data["mine"]["rank"], len(data["views"])) == (10_240, 777, 2)


def test_an_axis_of_size_minus_1_has_the_rest(capsys) -> None:
    assert main(["plan", "dp=-1,tp=8", "--world-size", "64", "--view", "a=-1"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("World of 64 ranks, backend nccl, 2 views:\n  dp=8,tp=8\n  a=64\n")
    assert main(["plan", "dp=4,tp=8", "--view", "pp=2,dp=-1,tp=4"]) == 0  # of the first view's
    assert "\n  pp=2,dp=4,tp=4\n" in capsys.readouterr().out
    assert main(["plan", "world=1"]) == 0
    assert capsys.readouterr().out.startswith("World of 1 rank, backend nccl, 1 view:\n")


def test_degrees_of_minus_1_have_the_rest(capsys) -> None:
    degrees = ["tp=8,dp=-1", "tp=8,dp_shard=-1", "tp=8"]
    for given in degrees:
        assert main(["plan", "--degrees", given, "--world-size", "64", "--json"]) == 0
    shown = capsys.readouterr().out.replace("}\n{", "}\0{").split("\0")
    assert [json.loads(each)["views"] for each in shown] == [json.loads(shown[0])["views"]] * 3


def test_degrees_fill_the_world_that_is_given(capsys) -> None:
    assert main(["plan", "--degrees", "tp=8", "--world-size", "64", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["views"][0].startswith(
        "pp=1,dp_replicate=1,dp_shard=8,cp=1,tp=8"
    )


def test_pictures_are_written_beside_the_data(tmp_path, capsys) -> None:
    page, picture = tmp_path / "plan.html", tmp_path / "plan.svg"
    command = ["plan", "dp=4,tp=8", "--node-size", "8", "--json", "--rank", "9"]
    assert main([*command, "--html", str(page), "--svg", str(picture)]) == 0
    caught = capsys.readouterr()
    assert json.loads(caught.out)["node_size"] == 8
    assert caught.err == f"Wrote {page}\nWrote {picture}\n"
    assert "<h1>Planned process groups of 32 ranks</h1>" in page.read_text(encoding="utf-8")
    assert "the group of rank 9" in picture.read_text(encoding="utf-8")


def test_a_plan_is_printed_also_where_nobody_reads_the_errors(tmp_path, capsys) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with contextlib.redirect_stderr(os.fdopen(writer, "w", buffering=1)) as closed:
        assert main(["plan", "dp=4", "--svg", str(tmp_path / "plan.svg")]) == 0
        with contextlib.suppress(BrokenPipeError):
            closed.close()
    assert capsys.readouterr().out.startswith("World of 4 ranks")
    assert (tmp_path / "plan.svg").stat().st_size > 0


@pytest.mark.parametrize("view", ["dp=4", "bad"])
def test_without_an_error_stream_the_output_has_the_data_only(view, monkeypatch, capsys) -> None:
    monkeypatch.setattr("sys.stderr", None)  # as after 2>&-
    assert main(["plan", view, "--json", "--svg", os.devnull]) == (0 if view == "dp=4" else 2)
    out = capsys.readouterr().out
    assert json.loads(out)["world"] == 4 if view == "dp=4" else not out


def test_a_picture_that_cannot_be_written_ends_with_2(tmp_path, capsys) -> None:
    picture = tmp_path / "nowhere" / "plan.svg"
    assert main(["plan", "dp=4", "--svg", str(picture)]) == 2
    assert capsys.readouterr().err == f"meshverse: {picture}: No such file or directory\n"


def test_a_misspelt_backend_is_pointed_out(capsys) -> None:
    assert main(["plan", "dp=4", "--backend", "ncll"]) == 0
    assert "for backend ncll. Did you mean 'nccl'?" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["plan"], "There is no view to plan"),
        (["plan", "dp=4", "--view", "dp=5"], "The nearest sizes that fit: dp=4"),
        (["plan", "pp=8", "dp=160", "tp=8"], "without spaces, as pp=8,dp=160,tp=8"),
        (["plan", "pp=8,", "dp=160"], "without spaces, as pp=8,dp=160"),
        (["plan", "dp=-1,tp=8"], "dp=-1 in the view 'dp=-1,tp=8' needs the number of ranks"),
        (["plan", "dp=-1,tp=-1", "--world-size", "8"], "At most one axis can have size -1"),
        (["plan", "dp=-1,tp=3", "--world-size", "8"], "The nearest sizes that fit: dp=2,tp=4"),
        (["plan", "--degrees", "tp=8,sp=2"], "'sp=2' in --degrees"),
        (["plan", "--degrees", "tp=x"], "'tp=x' in --degrees"),
        (["plan", "--degrees", "tp=2,tp=2"], "write each degree once"),
        (["plan", "--degrees", "tp=-1", "--world-size", "8"], "dp or dp_shard may be -1"),
        (["plan", "--degrees", "tp=2,dp=-1"], "has a size of -1: pass --world-size"),
        (["plna"], "There is no command 'plna'. Did you mean 'plan'? The commands are run, "),
        (["plan", "--degrees", "dp=2,dp_shard=2"], "leave one of them out"),
        (["plan", "--degrees", "dp=3,dp_replicate=2"], "dp_replicate"),
        (["plan", "dp=99999999999999999999,tp=99999"], "a plan can have at most 16,777,216"),
        (["plan", "--degrees", "tp=99999999999999999999"], "a plan can have at most 16,777,216"),
        (["plan", "dp=2", "--world-size", "0"], "A world of 0 ranks: give an int above 0"),
        (["plan", "dp=2", "--rank", "9" * 30], "is outside the world: give one from 0 to 1"),
        (["plan", "dp=2", "--node-size", "-" + "9" * 30], "ranks on each node: give an int"),
        (["plan", "dp=2", "--isolate", ","], "isolate='' names no axis of these views"),
        (["plan", "dp=2", "--isolate", "dp,"], "isolate='' names no axis of these views"),
        (["plan", "dp=2", "--html", "x", "--svg", "./x"], "--html and --svg are one file"),
        (["plan", "dp=2", "--topology", "x", "--svg", "x"], "--svg and --topology are one file"),
        (["hang", "--live", "h", "--json"], "as text: leave --json out"),
        (["hang", "dumps", "--live", "h", "--mesh", "dp=2"], "as text: leave --mesh out"),
    ],
)
def test_what_cannot_be_done_ends_with_2(arguments, said: str, capsys) -> None:
    assert main(arguments) == 2
    caught = capsys.readouterr()
    assert said in caught.err
    assert caught.out == ""


def test_what_is_wrong_does_not_change_the_terminal(capsys) -> None:
    assert main(["plan", "a\x1b[31m=2.0"]) == 2
    err = capsys.readouterr().err
    assert "=2.0 in the view" in err
    assert "\x1b" not in err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("plan dp=4 --wrold-size 8", "arguments: --wrold-size 8. Did you mean '--world-size'?\n"),
        ("plan dp=4 --world 8", "arguments: --world 8. Did you mean '--world-size'?\n"),
        ("hang x --jsn", "arguments: --jsn. Did you mean '--json'?\n"),
        ("doctor --timeuot=3", "arguments: --timeuot=3. Did you mean '--timeout'?\n"),
        ("run --shaer world x.py", "arguments: --shaer. Did you mean '--share'?\n"),
        ("plan dp=4 --nothing-like-it", "arguments: --nothing-like-it.\n"),
        ("--versio", "arguments: --versio. Did you mean '--version'?\n"),
    ],
)
def test_options_are_written_in_full_and_the_nearest_is_named(arguments, said, capsys) -> None:
    with pytest.raises(SystemExit, match=r"^2$"):
        main(arguments.split())
    caught = capsys.readouterr()
    assert caught.err.endswith(said)
    assert caught.out == ""


def test_a_shell_completes_commands_options_and_files(tmp_path) -> None:
    pytest.importorskip("shtab")
    command = [sys.executable, "-m", "meshverse", "completion", "bash"]
    script = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=True)
    (tmp_path / "dumps").mkdir()
    (tmp_path / "completed").write_text(script.stdout)

    def completed(*words: str) -> list[str]:
        """Words that bash offers for the last of these words."""
        line = (
            f"source ./completed; COMP_WORDS=({shlex.join(words)}); COMP_CWORD={len(words) - 1}; "
            "_shtab_meshverse; printf '%s\\n' \"${COMPREPLY[@]}\""
        )
        done = subprocess.run(
            ["bash", "-c", line], cwd=tmp_path, capture_output=True, text=True, check=True
        )
        return done.stdout.split()

    assert completed("meshverse", "pl") == ["plan"]
    assert completed("meshverse", "plan", "--wor") == ["--world-size"]
    assert completed("meshverse", "hang", "du") == ["dumps"]


@pytest.mark.parametrize(
    "arguments",
    [
        ("plan", "dp=2", "--json"),
        pytest.param(("plan", "--help"), marks=pytest.mark.long),
        pytest.param((), marks=pytest.mark.long),
    ],
)
def test_a_pipe_that_is_closed_is_no_error(arguments: tuple[str, ...]) -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "meshverse", *arguments]
    with os.fdopen(write) as pipe:
        done = subprocess.run(
            command, stdout=pipe, stderr=subprocess.PIPE, text=True, timeout=SECONDS
        )
    assert (done.returncode, done.stderr) == (0 if arguments else 2, "")


@pytest.mark.long
@pytest.mark.parametrize("arguments", ["plan dp=4", "versions", "plan dp=x"])
def test_a_standard_output_that_the_shell_has_closed_is_no_error(arguments: str) -> None:
    command = f"{shlex.quote(sys.executable)} -m meshverse {arguments} >&-"
    done = subprocess.run(
        ["sh", "-c", command], stderr=subprocess.PIPE, text=True, timeout=SECONDS, check=False
    )
    assert done.returncode == (2 if "=x" in arguments else 0)
    assert "Traceback" not in done.stderr


@pytest.mark.long
def test_files_are_written_where_nobody_reads_the_table(tmp_path) -> None:
    read, write = os.pipe()
    os.close(read)
    sizes = ",".join(f"a{'x' * 300}{index}=1" for index in range(20))  # more than a buffer
    picture = tmp_path / "plan.svg"
    command = [sys.executable, "-m", "meshverse", "plan", sizes, "--svg", str(picture)]
    with os.fdopen(write) as pipe:
        done = subprocess.run(
            command, stdout=pipe, stderr=subprocess.PIPE, text=True, timeout=SECONDS
        )
    assert (done.returncode, done.stderr) == (0, f"Wrote {picture}\n")
    assert picture.exists()


def test_python_m_meshverse_is_the_same_command() -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "meshverse", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)

    result = run("plan", "dp=2")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith("World of 2 ranks")
    assert run("plan", "dp=x*y").returncode == 2


def test_a_missing_torch_is_one_sentence_that_says_what_to_install() -> None:
    program = "import sys; sys.modules['torch'] = None; import meshverse"
    done = subprocess.run(
        [sys.executable, "-c", program], stderr=subprocess.PIPE, text=True, timeout=SECONDS
    )
    assert done.stderr.splitlines()[-1] == (
        "ModuleNotFoundError: Meshverse needs PyTorch 2.11 or newer: install it with `pip install "
        "torch`."
    )
    assert "During handling" not in done.stderr


def test_its_version_and_those_of_others(capsys) -> None:
    assert main(["--version", "plna", "dp=3"]) == 0  # what follows is not read
    version = capsys.readouterr().out.strip()
    pattern = (
        rf"meshverse {re.escape(meshverse.__version__)} \(commit ([0-9a-f]+(-dirty)?|unknown)\)"
    )
    assert re.fullmatch(pattern, version)
    assert main(["versions"]) == 0
    report = capsys.readouterr().out
    assert version.removeprefix("meshverse ") in report
    assert "torch " in report
    assert "gloo" in report
    assert main([]) == 2
