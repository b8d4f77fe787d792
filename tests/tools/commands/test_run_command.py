"""`meshverse run`: a program runs as Python runs it, with every mesh ours, in all its processes."""

from __future__ import annotations

import os
import py_compile
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from helpers.forked import SECONDS
from helpers.tiers import in_tiers
from helpers.worlds import FakeWorld
from meshverse import init_device_mesh
from meshverse.tools.commands.main import main
from meshverse.tools.commands.process_setup import Setup, _Report
from meshverse.world import World

_PRINTS_ITSELF = """
import __main__, pickle, sys
class Own: pass
assert __main__.Own is Own and pickle.loads(pickle.dumps(Own)) is Own
print(__name__, __file__, __package__, None if __spec__ is None else __spec__.name, __doc__)
print(sys.argv, sys.path[0], sorted(name for name in globals() if not name.startswith("__")))
print(type(__builtins__))
"""

_TRAINS = r"""
import sys
import threading
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

dist.init_process_group("gloo")
actor = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
critic = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
dist.barrier()  # a rank that ends its groups breaks those to which others are still connecting
total = torch.ones(1)
dist.all_reduce(total, group=critic.get_group("tensor"))
assert total.item() == 2
begun, done = threading.Event(), threading.Event()
def reduce():
    dist.all_reduce(total, group=actor.get_group("tp"))
    begun.set()
    done.wait()
threading.Thread(target=reduce, name="reducer", daemon=True).start()
begun.wait()
print(f"{type(actor).__module__} {sys.argv[1:]}\n", end="", flush=True)  # in one piece
if "raise" in sys.argv and dist.get_rank() == 3:
    raise ValueError("of the program")
if "keep" not in sys.argv or dist.get_rank() > 0:
    dist.destroy_process_group()
"""

_STARTS_PROCESSES = r"""
import os, sys
import torch.distributed as dist
import torch.multiprocessing
from torch.distributed.device_mesh import init_device_mesh

def work(rank, folder, depth):
    if depth:
        return start(folder, depth - 1)
    method = f"file://{folder}/{os.getppid()}"
    dist.init_process_group("gloo", init_method=method, rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    print(f"{type(mesh).__module__}\n", end="", flush=True)  # in one piece
    dist.barrier()
    dist.destroy_process_group()

def start(folder, depth):
    context = torch.multiprocessing.get_context(sys.argv[1])
    ranks = range(2 - depth)
    workers = [context.Process(target=work, args=(rank, folder, depth)) for rank in ranks]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0

if __name__ == "__main__":
    start(sys.argv[2], 1)
"""


def _run(*command: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )


def _torchrun(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4")
    return _run(*torchrun, "-m", "meshverse", "run", *arguments, cwd=folder)


@pytest.mark.processes
@pytest.mark.long
@pytest.mark.parametrize("share", in_tiers(["mesh", "world"], ["world"], []))
def test_every_rank_of_torchrun_has_our_meshes(share: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_TRAINS)
    done = _torchrun(tmp_path, "--share", share, "train.py", "--share", "none", "--", "-m")
    assert done.returncode == 0, done.stderr
    line = "meshverse.device_mesh ['--share', 'none', '--', '-m']"
    assert done.stdout.splitlines() == [line] * 4
    created = {"mesh": "4 created, 0 reused. Saved: 0.", "world": "2 created, 2 reused. Saved: 2."}
    said = f"meshverse run: rank 0 of 4. Requested 4 process groups: {created[share]}\n"
    assert done.stderr.count("meshverse run:") == 1
    assert said in done.stderr
    # The group that two threads called comes first.
    queues = (
        "  tp and tensor (ranks 0, 1), called by MainThread (1 call), reducer (1 call)\n"
        "  dp and data (ranks 0, 2)\n"
        'To let two of them overlap, create one in `with meshverse.isolate("own"):`. Calls: of '
        "the last 2,000\n  on this rank.\n"
    )
    assert (queues in done.stderr) == (share == "world")
    # Sharing saves two, as `created` says: of each two equal groups, one is needed.
    surplus = (
        "2 of these process groups have the same ranks and options as groups that another root"
    )
    assert (surplus in " ".join(done.stderr.split())) == (share == "mesh")
    assert "Universe of" not in done.stderr


@pytest.mark.long
@pytest.mark.processes
def test_a_program_that_ends_no_world_is_reported_too_with_tables(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_TRAINS)
    done = _torchrun(tmp_path, "--explain", "-m", "train", "keep")
    # Without a look at the exit status: torch's own threads now and then abort such a process. Only
    # rank 0 is one, as torchrun would end it before its report if another was aborted.
    assert done.stderr.count("Requested 4 process groups: 4 created") == 1
    assert done.stderr.count("\nUniverse of ranks 0 to 3, seen by rank 0.") == 2


@pytest.mark.parametrize("rank", ["0", pytest.param("1", marks=pytest.mark.long)])
def test_a_job_without_meshes_gets_a_line_that_says_so(rank: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('done')")
    done = _run("-m", "meshverse", "run", "train.py", cwd=tmp_path, RANK=rank)  # as a launcher
    assert done.stdout == "done\n"
    assert ("meshverse run: rank 0 created no mesh" in done.stderr) == (rank == "0")


@pytest.mark.long
def test_its_own_processes_are_no_such_jobs(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import multiprocessing\n"
        "if __name__ == '__main__':\n"
        "    worker = multiprocessing.get_context('spawn').Process(target=print, args=('done',))\n"
        "    worker.start()\n"
        "    worker.join()\n"
    )
    done = _run("-m", "meshverse", "run", "train.py", cwd=tmp_path, RANK="0")
    assert done.stdout == "done\n"
    assert done.stderr.count("meshverse run:") == 1


@pytest.mark.long
@pytest.mark.processes
def test_a_rank_that_raises_shows_the_programs_frames_alone(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_TRAINS)
    done = _torchrun(tmp_path, "train.py", "raise")
    assert done.returncode == 1
    trace = done.stderr[done.stderr.index("Traceback") : done.stderr.index("of the program")]
    assert trace.count("File ") == 1
    assert "train.py" in trace


@pytest.mark.processes
@pytest.mark.long
@pytest.mark.parametrize("method", ["spawn", "forkserver", "fork"])
def test_processes_of_multiprocessing_have_our_meshes(method: str, tmp_path: Path) -> None:
    (tmp_path / "start.py").write_text(_STARTS_PROCESSES)
    done = _run("-m", "meshverse", "run", "start.py", method, str(tmp_path), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["meshverse.device_mesh"] * 2
    assert done.stderr.count("meshverse run: rank 0 of 2.") == 1


_SENDS_BACK = r"""
import multiprocessing, sys

class Result:
    pass

def work(queue):
    queue.put(Result())

if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[1])
    queue = context.Queue()
    worker = context.Process(target=work, args=(queue,))
    worker.start()
    print(type(queue.get()) is Result)
    worker.join()
"""


@pytest.mark.long
@pytest.mark.parametrize("method", ["spawn", "forkserver", "fork"])
@pytest.mark.parametrize("is_module", [False, True])
def test_processes_may_send_back_classes_of_the_program(
    method: str, is_module: bool, tmp_path: Path
) -> None:
    (tmp_path / "send.py").write_text(_SENDS_BACK)
    program = ["-m", "send"] if is_module else ["send.py"]
    done = _run("-m", "meshverse", "run", *program, method, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr


_ENDINGS = {
    "an error": "def fail(x):\n    raise ValueError(x)\nfail('of the program')",
    "an error of the system": "open('/nowhere')",
    "a pipe": "raise BrokenPipeError",
    "a chain": "try:\n    1 / 0\nexcept ZeroDivisionError as error:\n    raise OSError from error",
    "a status": "import sys; sys.exit(7)",
    "a message": "raise SystemExit('of the program')",
    "an interrupt": "raise KeyboardInterrupt",
    "no program": "x = (",
    "a thread": "import threading; threading.Thread(target=lambda: 1 / 0).start()",
    "a hook of its own": (
        "import sys, traceback\n"
        "sys.excepthook = lambda *error: print(len(traceback.extract_tb(error[2])))\n"
        "raise ValueError"
    ),
}


@pytest.mark.parametrize("ending", in_tiers(_ENDINGS, ["an error"]))
def test_a_program_ends_as_without(ending: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(_ENDINGS[ending])
    alone = _run("program.py", cwd=tmp_path)
    done = _run("-m", "meshverse", "run", "program.py", cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (
        *(alone.returncode, alone.stdout),
        alone.stderr,
    )
    assert ending != "an interrupt" or done.returncode == -signal.SIGINT


_PACKAGES = {
    "an error": "from . import settings",
    "a missing import": "import no_such_package",
    "a missing file": "open('nowhere')",
}


@pytest.mark.long
@pytest.mark.parametrize("module", ["mine", "mine.train"])
@pytest.mark.parametrize("code", _PACKAGES)
def test_a_package_that_cannot_be_imported_shows_its_own_error(
    code: str, module: str, tmp_path: Path
) -> None:
    package = tmp_path / "mine"
    package.mkdir()
    (package / "__init__.py").write_text(_PACKAGES[code])
    (package / "settings.py").write_text("int('x')")
    (package / "__main__.py").touch()
    (package / "train.py").touch()
    alone = _run("-m", module, cwd=tmp_path)
    done = _run("-m", "meshverse", "run", "-m", module, cwd=tmp_path)
    assert done.returncode == alone.returncode == 1
    of_package = alone.stderr[alone.stderr.index(f'  File "{package}') :]
    assert done.stderr == f"Traceback (most recent call last):\n{of_package}"


@pytest.mark.long
@pytest.mark.parametrize(
    "kind",
    in_tiers(["script", "module", "package", "folder", "archive", "link", "compiled"], ["script"]),
)
@pytest.mark.parametrize("safe", in_tiers(["", "1"], [""], []))
def test_a_program_sees_itself_as_without(kind: str, safe: str, tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    for name in ("script.py", "package/__main__.py", "package/module.py"):
        (tmp_path / name).write_text(f'"""Mine."""\n{_PRINTS_ITSELF}')
    with zipfile.ZipFile(tmp_path / "archive.zip", "w") as archive:
        archive.writestr("__main__.py", _PRINTS_ITSELF)
    (tmp_path / "package" / "link.py").symlink_to(tmp_path / "script.py")
    program = {
        "script": ["script.py"],
        "module": ["-m", "package.module"],
        "package": ["-m", "package"],
        "folder": ["package"],
        "archive": ["archive.zip"],
        "link": ["package/link.py"],
        "compiled": [py_compile.compile(str(tmp_path / "script.py"), str(tmp_path / "script.pyc"))],
    }[kind]
    given = {"PYTHONSAFEPATH": safe, "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    given["PYTHONPATH"] += f"{os.pathsep}{tmp_path}" * bool(safe)
    alone = _run(*program, "a", "--b", cwd=tmp_path, **given)
    done = _run("-m", "meshverse", "run", *program, "a", "--b", cwd=tmp_path, **given)
    assert alone.returncode == 0, alone.stderr
    assert (done.stdout, done.stderr) == (alone.stdout, alone.stderr)


_MAKES_A_MESH = """
import sys
from datetime import timedelta
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
method, rank = f"file://{sys.argv[1]}", int(sys.argv[2])
dist.init_process_group("gloo", init_method=method, rank=rank, world_size=4)
# Of the groups of meshes. short-timeout: it must elapse
dist.distributed_c10d._set_pg_timeout(timedelta(seconds=3))
init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
"""


@pytest.mark.long
@pytest.mark.processes
def test_ranks_that_run_without_it_are_pointed_out_to_those_with_it(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(_MAKES_A_MESH)
    ranks = []
    for rank in range(4):
        command = [str(program), str(tmp_path / "store"), str(rank)]
        if rank < 2:
            command = ["-m", "meshverse", "run", *command]
        ranks.append(
            subprocess.Popen([sys.executable, *command], stderr=subprocess.PIPE, text=True)
        )
    try:
        errors = [rank.communicate(timeout=SECONDS)[1] for rank in ranks[:2]]
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    for error in errors:
        assert "could not create the process group of axis 'dp'" in error
        assert "If one rank calls meshverse.install(), all must." in " ".join(error.split())
    report = "rank 0 of 4. No process group was created for its meshes, so none was shared."
    assert [report in " ".join(error.split()) for error in errors] == [True, False]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere.py"], "meshverse: nowhere.py: No such file or directory"),
        (["-m", "nowhere.at_all"], "No module named 'nowhere.at_all' was found to run"),
        ([str(Path(__file__).parent)], "commands is a folder without a __main__.py: name a script"),
        (["-m", "meshverse.nowhere"], "No module named 'meshverse.nowhere' with Python code"),
        (["-m", "json.nowhere.at_all"], "No module named 'json.nowhere.at_all' was found to run"),
        (["-m", "meshverse.tools.planner"], "No module named 'meshverse.tools.planner.__main__'"),
        (["-m", "torch.distributed.run", "x.py"], "torchrun ... -m meshverse run train.py"),
        (["/usr/bin/torchrun", "x.py"], "torchrun ... -m meshverse run train.py"),
        (["accelerate", "launch"], "accelerate launch ... -m meshverse run train.py"),
        (["/opt/deepspeed", "x.py"], "deepspeed --module meshverse run train.py"),
    ],
)
def test_what_cannot_run_is_refused(arguments, said, capsys, monkeypatch) -> None:
    for name in ("argv", "path"):
        monkeypatch.setattr(sys, name, list(getattr(sys, name)))
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    monkeypatch.setattr("meshverse.tools.commands.process_setup.Setup.begin", lambda self: None)
    assert main(["run", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_universes_that_ended_before_the_report_are_counted(world: FakeWorld, capsys) -> None:
    current = World.current()
    assert current is not None
    report = _Report()
    report.begin(current, Setup("mesh", explains=False))
    init_device_mesh("cpu", (2, 4)).universe.destroy()
    report.end()
    assert "\nNot counted: 1 universe that ended before.\n" in capsys.readouterr().err
