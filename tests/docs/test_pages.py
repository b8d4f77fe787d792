"""Every Python block of README and the documentation runs, and gives what the page says.

`helpers.pages` tells how a block says where it runs: in a fake world, on real gloo processes, under
torchrun. A block that says nothing fails here.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import meshverse
from helpers.crew import Crew
from helpers.forked import SECONDS, Forked
from helpers.pages import ROOT, Program, blocks_of, pages, programs_of
from helpers.turns import wait_until
from helpers.versions import AT_LEAST_2_12
from helpers.worlds import fake_world

_SITE_COLUMNS = 90  # of a code block on the site, in a browser's window of 1280 pixels and more
_FAKE = re.compile(r"fake (\d+)(?:, rank (\d+))?")

_PROGRAMS = [program for page in pages() for program in programs_of(page)]
_BLOCKS = [block for page in pages() for block in blocks_of(page)]
_KINDS = {
    "alone": r"alone|fake \d+(, rank \d+)?",
    "ranks": r"(\d+) ranks",
    "torchrun": r"torchrun (\d+)",
}

Ended = tuple[str, list[str], str]
"""The output of a program; its error and log; the traceback, or "" if it ended well."""

# --- how programs are run ------------------------------------------------------------------------


def run_here(source: str, file: str) -> Ended:
    """Run a program, which is that file to tracebacks, in the world that is there.

    Pages write "cuda" where a job has GPUs: here it is read as "cpu".
    """
    code = compile(source.replace('"cuda"', '"cpu"'), file, "exec")
    said: list[str] = []
    failed = ""
    with _logged(said), contextlib.redirect_stdout(io.StringIO()) as printed:
        try:
            exec(code, _names(source))
        except Exception as error:  # noqa: BLE001  (whatever the page's program raises)
            said.append("".join(traceback.format_exception_only(error)))
            failed = traceback.format_exc()
        finally:
            meshverse.uninstall()
    return printed.getvalue(), said, failed


def run_alone(program: Program) -> Ended:
    """Run a program in this process: in a fake world, or in one that it makes itself."""
    fake = _FAKE.fullmatch(program.how)
    with contextlib.ExitStack() as stack:
        if fake is not None:
            stack.enter_context(fake_world(int(fake[1]), int(fake[2] or 0)))
        else:
            stack.callback(_end_world, sys.excepthook)
        return run_here(program.source, program.file)


def run_under_torchrun(program: Program, processes: int, folder: Path) -> Ended:
    """Run a program under torchrun, as a script of its own; of what it prints, rank 0's."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={processes}", "--local-ranks-filter=0"]
    run = subprocess.run(
        [*command, str(_script_of(program, folder))],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=folder,
        check=False,
    )
    return run.stdout, [run.stderr], run.stderr if run.returncode else ""


def run_as_under_torchrun(program: Program, processes: int, folder: Path) -> Ended:
    """The same in forks of a process that has imported torch, with the variables of torchrun."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    script = str(_script_of(program, folder))
    shared = {
        "WORLD_SIZE": processes,
        "LOCAL_WORLD_SIZE": processes,
        "GROUP_RANK": 0,
        "GROUP_WORLD_SIZE": 1,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": store.port,
        "TORCHELASTIC_USE_AGENT_STORE": True,
        "TORCHELASTIC_RESTART_COUNT": 0,
    }
    ranks = []
    for rank in range(processes):
        own = {"RANK": rank, "LOCAL_RANK": rank, **shared}
        variables = {name: str(value) for name, value in own.items()}
        ranks.append(Forked([script], env={**os.environ, **variables}, cwd=folder))
    ended = [rank.communicate(SECONDS) for rank in ranks]
    said = [err for _, _, err in ended]
    codes = [code for code, _, _ in ended]
    failed = f"exit codes {codes}\n" + "\n".join(said) if any(codes) else ""
    return ended[0][1], said, failed


def _script_of(program: Program, folder: Path) -> Path:
    script = folder / "page.py"
    script.write_text(program.source, encoding="utf-8")
    return script


def _names(source: str) -> dict[str, Any]:
    """Return the names that the pages' short examples use without importing them."""
    init = meshverse.init_device_mesh
    return {
        "__name__": "page",
        "DeviceMesh": meshverse.DeviceMesh,
        "Universe": meshverse.Universe,
        "dist": dist,
        "init_device_mesh": _filled_in(init) if "init_device_mesh(..." in source else init,
        "meshverse": meshverse,
        "rank_0_first": _rank_0_first,
        "timedelta": timedelta,
        "torch": torch,
    }


def _rank_0_first() -> None:
    """Return on rank 0, and on the others once rank 0 has come to its next call."""
    # Its groups are compared: so the ranks have agreed on the number of the run.
    meshverse.init_device_mesh("cpu", (dist.get_world_size(), 1))
    dist.barrier()  # from here on, only what a call tells the other ranks is new in the store
    store = dist.distributed_c10d._get_default_store()
    known = store.num_keys()
    dist.barrier()
    wait_until(lambda: dist.get_rank() == 0 or store.num_keys() != known)


def _filled_in(init: Callable[..., Any]) -> Callable[..., Any]:
    """`init_device_mesh(..., lazy=True)`: the dots are for a mesh of all ranks, 2 x the rest."""

    def init_device_mesh(*given: Any, **keywords: Any) -> Any:
        if given[:1] == (...,):
            shape = (2, dist.get_world_size() // 2)
            return init("cpu", shape, **{"mesh_dim_names": ("dp", "tp"), **keywords})
        return init(*given, **keywords)

    return init_device_mesh


@contextlib.contextmanager
def _logged(said: list[str]) -> Iterator[None]:
    """Collect what Meshverse logs."""
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("meshverse")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def _end_world(hook: Any) -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    sys.excepthook = hook  # torch wraps it once more in every world


# --- what they give ------------------------------------------------------------------------------


def is_shown(text: str, said: str) -> bool:
    """Whether a text is what was said: "..." is for anything, and lines may break anywhere."""
    any_words, any_letters = r"\s(?:.*?\s)?", ".*?"
    pattern = r"\s+".join(re.escape(word) for word in text.split())
    pattern = pattern.replace(r"\s+\.\.\.\s+", any_words).replace(r"\.\.\.", any_letters)
    return re.fullmatch(pattern, said.strip(), re.DOTALL) is not None


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


def test_samples_are_not_cut_on_the_site() -> None:
    """Of a console, the commands: what they print is as wide as it is."""
    written = {"bash", "console", "json", "python"}
    blocks = [one for one in _BLOCKS if one.page.startswith("docs/") and one.language in written]
    assert len(blocks) > 50
    cut = []
    for block in blocks:
        prompts = "\n$ " in f"\n{block.text}"
        for number, line in enumerate(block.text.splitlines(), block.line):
            is_written = not prompts or line.startswith(("$ ", "    "))
            if is_written and len(line) > _SITE_COLUMNS:
                cut.append(f"{block.page}:{number}")
    assert not cut


@_of_kind("alone")
def test_a_program_of_one_process(program: Program, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)  # some write files
    _check(program, [run_alone(program)])


@_of_kind("ranks")
def test_a_program_on_real_ranks(
    program: Program, crew: Crew, endings: dict[tuple[str, ...], list[Ended]]
) -> None:
    if "DefaultStager" in program.source and not AT_LEAST_2_12:
        pytest.skip("the stager of torch 2.11 fails at its second state, as the page says")
    key = program.how, program.source, program.file
    if key not in endings:  # several pages show one error
        ranks, (_, source, file) = _number_of("ranks", program), key
        endings[key] = crew.run(run_here, ranks, source, file)
    _check(program, endings[key])


@pytest.fixture(scope="module")
def endings() -> dict[tuple[str, ...], list[Ended]]:
    """How the programs on real ranks ended that have been run."""
    return {}


@pytest.mark.long
@pytest.mark.processes
@_of_kind("torchrun")
def test_a_script_for_torchrun(program: Program, tmp_path: Path) -> None:
    if "transformers" in program.source:
        pytest.importorskip("transformers", reason="transformers is not installed")
    run = run_under_torchrun if program.page == "docs/start.md" else run_as_under_torchrun
    _check(program, [run(program, _number_of("torchrun", program), tmp_path)])
    if program.printed:
        assert program.source.count("print(") == len(program.printed), "say what each prints"


def test_a_script_that_fails_on_one_rank_fails(tmp_path: Path) -> None:
    source = "import os\nif os.environ['RANK'] == '1':\n    1 / 0\n"
    program = Program("page.md", 1, "torchrun 2", {1: source})
    with pytest.raises(AssertionError, match=r"exit codes[\s\S]*ZeroDivisionError"):
        _check(program, [run_as_under_torchrun(program, 2, tmp_path)])


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
