"""Changes that `import meshverse` makes to torch, and imports with an unknown torch."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest

from helpers.forked import SECONDS
from helpers.sides import MESHES_ARE_PLAIN_CLASSES
from meshverse._torch_compat import private_names

# Runs each of the files it is given in a fork, and so imports torch once for all of them.
_RUN_IN_FORKS = """
import os, runpy, sys, traceback, torch.distributed.tensor
for path in sys.argv[1:]:
    if (child := os.fork()) == 0:
        os.dup2(os.open(path + ".printed", os.O_WRONLY | os.O_CREAT), 1)
        os.dup2(1, 2)
        try:
            runpy.run_path(path, run_name="__main__")
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        sys.stdout.flush()
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""

_IMPORTING = """
import contextlib, sys, torch, torch.distributed as dist
from torch.distributed import device_mesh
import torch.distributed.tensor, torch._dynamo.variables.distributed as compiler
with contextlib.suppress(ImportError):  # not in 2.11; an import puts a module into its package
    import torch.distributed._ops.device_mesh
def seen():
    places = [device_mesh.DeviceMesh, type(device_mesh.DeviceMesh), device_mesh, dist, compiler]
    places += [dist.tensor, dist.distributed_c10d, torch, torch._tensor]
    places += [place for place in vars(compiler).values() if isinstance(place, type)]
    return {(p.__name__, n): v for p in places for n, v in vars(p).items()}
assert "meshverse" not in sys.modules
before = seen()
import meshverse
after = seen()
changed = [key for key, value in before.items() if after.get(key) is not value]
print(sorted(changed + list(set(after) - set(before))))
"""

_LOADING = """
import sys
costly = ("torch.distributed.fsdp", "torch.distributed.pipelining", "meshverse.parallel")
assert not any(name in sys.modules for name in costly)
import meshverse
print([name for name in costly if name in sys.modules])
ours = [name for name in sys.modules if name.partition(".")[0] == "meshverse"]
extras = [name for name in ours if name.split(".")[1:2] in (["hang"], ["parallel"], ["tools"])]
print(len(ours) <= 45, extras)  # as few as a reader of the core has to know
print(meshverse.tools.planner.plan.__name__, meshverse.tools.doctor.examine.__name__)
print(meshverse.parallel.__name__, hasattr(meshverse, "parallels"))
"""

_IMPORT_WITHOUT = """
import importlib, sys
assert "meshverse" not in sys.modules
owner = importlib.import_module({module!r})
owner = getattr(owner, {owner!r}) if {owner!r} else owner
delattr(owner, {name!r})
import meshverse
"""

_PRETEND = """
import torch, torch.distributed as dist
torch.__version__ = "2.99.0"
from torch.testing._internal.distributed.fake_pg import FakeStore
import meshverse
dist.init_process_group("fake", rank=1, world_size=4, store=FakeStore())
mesh = meshverse.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
print(mesh["tp"].mesh.tolist())
"""


def _names() -> list[tuple[str, str, str]]:
    """Module, class in it or "", and attribute of all that is listed for every version."""
    return [
        (owner.__module__, owner.__name__, name)
        if isinstance(owner, type)
        else (owner.__name__, "", name)
        for owner, name in private_names._PRIVATE_NAMES
    ]


# One of a module, and one of a class.
_LACKING = [_names()[1], _names()[-1]]


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str]]:
    """Exit code and output of each program."""
    programs = {"importing": _IMPORTING, "pretending": _PRETEND, "loading": _LOADING}
    for module, owner, name in _LACKING:
        programs[name] = _IMPORT_WITHOUT.format(module=module, owner=owner, name=name)
    folder = tmp_path_factory.mktemp("programs")
    for name, program in programs.items():
        (folder / name).write_text(program)
    command = [sys.executable, "-c", _RUN_IN_FORKS, *(str(folder / name) for name in programs)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr
    printed = [(folder / f"{name}.printed").read_text() for name in programs]
    codes = map(int, done.stdout.split())
    return dict(zip(programs, zip(codes, printed, strict=True), strict=True))


def test_importing_changes_two_attributes_of_torch(ended: dict[str, tuple[int, str]]) -> None:
    code, printed = ended["importing"]
    assert code == 0, printed
    # The compiler of 2.11 does not take a subclass for a mesh, so a hook says that ours are meshes.
    expected = [("DeviceMesh", name) for name in ("__new__", "_concatenate")]
    if MESHES_ARE_PLAIN_CLASSES:
        expected.append(("DeviceMeshVariable", "is_device_mesh"))
    assert ast.literal_eval(printed) == expected


def test_importing_loads_nothing_costly_and_subpackages_when_they_are_named(
    ended: dict[str, tuple[int, str]],
) -> None:
    # Meshverse imports the compiler of 2.11 (see above), and that imports FSDP.
    costly = ["torch.distributed.fsdp"] * MESHES_ARE_PLAIN_CLASSES
    assert ended["loading"] == (
        0,
        f"{costly}\nTrue []\nplan examine\nmeshverse.parallel False\n",
    )


@pytest.mark.parametrize("name", [name for *_, name in _LACKING])
def test_a_torch_that_lacks_a_name_is_refused_at_import(
    name: str, ended: dict[str, tuple[int, str]]
) -> None:
    code, printed = ended[name]
    assert code == 1
    last = printed.strip().splitlines()[-1]
    assert last.startswith("ImportError: meshverse supports torch 2.11 and newer, but torch ")
    assert f".{name}. Install a supported torch, or a newer meshverse." in last


def test_a_newer_torch_that_has_all_names_works(ended: dict[str, tuple[int, str]]) -> None:
    assert ended["pretending"] == (0, "[0, 1]\n")
