"""Every Python block of README and the documentation runs, and gives what the page says.

`helpers.pages` tells how a block says where it runs: in a fake world, on real gloo processes, under
torchrun. A block that says nothing fails here.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from helpers.page_programs import (
    TORCHRUN_SECONDS,
    Ended,
    is_shown,
    run_alone,
    run_here,
    run_script,
)
from helpers.pages import ROOT, Program, blocks_of, pages, programs_of

_PROGRAMS = [program for page in pages() for program in programs_of(page)]
_BLOCKS = [block for page in pages() for block in blocks_of(page)]
_KINDS = {
    "alone": r"alone|fake \d+(, rank \d+)?",
    "ranks": r"(\d+) ranks",
    "torchrun": r"torchrun (\d+)",
}


def _of_kind(kind: str) -> pytest.MarkDecorator:
    programs = [one for one in _PROGRAMS if re.fullmatch(_KINDS[kind], one.how)]
    return pytest.mark.parametrize("program", programs, ids=str)


def _number_of(kind: str, program: Program) -> int:
    match = re.fullmatch(_KINDS[kind], program.how)
    assert match is not None
    return int(match[1])


def test_every_block_says_how_it_is_run() -> None:
    assert len(_PROGRAMS) > 20
    unknown = [one for one in _PROGRAMS if not re.fullmatch("|".join(_KINDS.values()), one.how)]
    assert not unknown, [str(one) for one in unknown]
    for block in _BLOCKS:
        if block.marker is not None and block.marker.word == "not run":
            assert len(block.marker.how.split()) > 2, f"{block.where}: give the reason"
    in_programs = sum(code.count("\n") for one in _PROGRAMS for code in one.pieces.values())
    assert in_programs > 300, "the blocks of many pages are no longer found"


@_of_kind("alone")
def test_a_program_of_one_process(program: Program, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)  # some write files
    _check(program, [run_alone(program)])


@pytest.mark.processes
@pytest.mark.timeout(120)
@_of_kind("ranks")
def test_a_program_on_real_ranks(program: Program, request: pytest.FixtureRequest) -> None:
    ranks = _number_of("ranks", program)
    crew = request.getfixturevalue("four" if ranks <= 4 else "eight" if ranks <= 8 else "crew")
    _check(program, crew.run(run_here, ranks, program.source, program.file, timeout=100))


@pytest.mark.processes
@pytest.mark.timeout(TORCHRUN_SECONDS + 60)
@_of_kind("torchrun")
def test_a_program_under_torchrun(program: Program, tmp_path: Path) -> None:
    if "transformers" in program.source:
        pytest.importorskip("transformers", reason="transformers is not installed")
    _check(program, [run_script(program, _number_of("torchrun", program), tmp_path)])
    if program.printed:
        assert program.source.count("print(") == len(program.printed), "say what each prints"


def _check(program: Program, endings: list[Ended]) -> None:
    """Compare what a program printed, raised and logged, on all its ranks, with the page."""
    if program.error is not None:
        said = [one for _, said, _ in endings for one in said]
        assert any(is_shown(program.error, one) for one in said), (
            f"{program} shows\n{program.error}\nbut this was said:\n" + "\n\n".join(said)
        )
        return
    printed, _, _ = endings[0]
    for rank, (_, _, failed) in enumerate(endings):
        assert not failed, f"{program}, rank {rank}:\n{printed}\n{failed}"
    if program.prints is not None:
        assert printed.rstrip() == program.prints.rstrip(), program
    elif program.printed:
        assert printed.splitlines() == program.printed, program


@pytest.mark.parametrize(
    "block",
    [one for one in _BLOCKS if one.marker is not None and one.marker.word == "quotes"],
    ids=lambda block: block.where,
)
def test_a_quoted_block_is_in_its_file(block) -> None:
    assert block.text in (ROOT / block.marker.how).read_text(encoding="utf-8")


def test_a_block_that_says_nothing_is_found(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("helpers.pages.ROOT", tmp_path)
    (tmp_path / "page.md").write_text("```python\n1 / 0\n```\n")
    with pytest.raises(ValueError, match=r"page\.md:2: nothing says how this block is run"):
        programs_of("page.md")
    (tmp_path / "page.md").write_text("<!-- run: alone\nx = 0\n-->\n```python\n1 / x\n```\n")
    (program,) = programs_of("page.md")
    assert program.source == "\nx = 0\n\n\n1 / x\n"
    with pytest.raises(AssertionError, match=r'page\.md", line 5[\s\S]*ZeroDivisionError'):
        _check(program, [run_alone(program)])


def test_dots_stand_for_anything_and_nothing_else_does() -> None:
    assert is_shown("no ranks: ... are 8...", "no ranks:\nhere are 8, not 7\n")
    assert is_shown("axis ... of 8", "axis of 8")
    assert not is_shown("axis of 8", "axis dp of 8")
    assert not is_shown("axis of 8", "axis of 8, not 7")
    assert not is_shown("ranks ... 8", "the ranks 8")


def test_what_is_printed_is_compared() -> None:
    program = Program("page.md", 1, "alone", {1: "print(1)  # 1\nprint(2)  # 3\n"})
    with pytest.raises(AssertionError, match=r"page\.md"):
        _check(program, [run_alone(program)])
    program = Program("page.md", 1, "alone", {1: "print(1)\n"}, prints="2\n")
    with pytest.raises(AssertionError, match=r"page\.md"):
        _check(program, [run_alone(program)])
    program = Program("page.md", 1, "alone", {1: "1 / 0\n"}, error="ValueError: ...\n")
    with pytest.raises(AssertionError, match="ZeroDivisionError"):
        _check(program, [run_alone(program)])
