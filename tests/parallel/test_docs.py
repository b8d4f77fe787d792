"""The examples of the documentation, run as they stand there: each page by torchrun."""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from cuda_answers import cuda_that_only_answers

_DOCS = Path(__file__).parents[2] / "docs"
_SECONDS = 240  # torchrun, and imports by four processes on a busy machine

pytestmark = [pytest.mark.processes, pytest.mark.timeout(_SECONDS + 60)]


def _blocks(page: str) -> list[str]:
    """The Python blocks of a page, in order."""
    text = (_DOCS / page).read_text()
    return re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def _expected(program: str) -> list[str]:
    """What a program says in comments that it prints."""
    return re.findall(r"^ *print\(.*\)  # (.*)$", program, re.MULTILINE)


@pytest.mark.parametrize("page", ["parallel.md", "huggingface.md"])
def test_a_page_prints_what_it_says(tmp_path, page) -> None:
    if page == "huggingface.md":
        pytest.importorskip("transformers", reason="transformers is not installed")
    program = "\n".join(_blocks(page))
    script = tmp_path / "page.py"
    script.write_text(program)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node=4", "--local-ranks-filter=0", str(script)]
    run = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=_SECONDS,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.splitlines() == _expected(program)
    assert program.count("print(") == len(_expected(program)) > 2


@pytest.mark.filterwarnings("ignore:Transformer Engine and Apex")  # the package, when imported
def test_the_example_of_megatron_fsdp(four) -> None:
    pytest.importorskip("megatron_fsdp", reason="megatron-fsdp is not installed")
    blocks = _blocks("parallel.md")
    setting = [block for block in blocks if "class Model" in block or "ParallelismSizes," in block]
    block = next(block for block in blocks if "MegatronFSDP" in block)
    # The world is there already, and the meshes of the other examples are not needed.
    imports = [setting[0].replace('dist.init_process_group("gloo")', "..."), setting[1]]
    imports[1] = imports[1].partition("\n\n")[0]
    assert "if find_spec" in block  # here it is run on the CPU, with the calls to CUDA answered
    block = re.sub("if find_spec.*:", "if True:", block)
    program = "\n".join([*imports, block])
    for printed in four.run(_printed, 4, program, timeout=_SECONDS):
        assert printed.splitlines() == _expected(block)


def _printed(program: str) -> str:
    with cuda_that_only_answers(), contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(program, {"__name__": "page"})
    return printed.getvalue()
