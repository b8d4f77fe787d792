"""A torch that Meshverse does not know: it works, or is refused at import in one clear sentence."""

from __future__ import annotations

import subprocess
import sys

import pytest

from meshverse._torch_compat import private_names

_IMPORT_WITHOUT = """
import importlib, sys
module, owner, name = sys.argv[1:]
import torch.distributed.device_mesh
holder = importlib.import_module(module)
holder = getattr(holder, owner) if owner else holder
delattr(holder, name)
import meshverse
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
@pytest.mark.parametrize(("module", "owner", "name"), [_names()[1], _names()[-1]])
def test_a_torch_that_lacks_a_name_is_refused_at_import(module: str, owner: str, name: str) -> None:
    command = [sys.executable, "-c", _IMPORT_WITHOUT, module, owner, name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: meshverse supports torch 2.11 and newer, but torch ")
    assert f".{name}. Install a supported torch, or a newer meshverse." in last


_PRETEND = """
import torch, torch.distributed as dist
torch.__version__ = "2.99.0"
from torch.testing._internal.distributed.fake_pg import FakeStore
import meshverse
dist.init_process_group("fake", rank=1, world_size=4, store=FakeStore())
mesh = meshverse.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
print(mesh["tp"].mesh.tolist())
"""


def test_a_newer_torch_that_has_all_names_works() -> None:
    command = [sys.executable, "-c", _PRETEND]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout == "[0, 1]\n", done.stderr
