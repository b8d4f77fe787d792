"""The three ways a program gets its meshes, so that one program can be run in each and compared."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch.distributed.tensor.debug import _clear_sharding_prop_cache

import meshverse
from helpers.observation import OURS, STOCK, Family

# From 2.12 on, meshes are opaque types to torch.compile, with a metaclass of torch's.
MESHES_ARE_PLAIN_CLASSES = type(STOCK.DeviceMesh) is type

SIDES = ("stock", "ours", "installed")
"""torch's meshes; ours by our names; ours by torch's names, under `meshverse.installed()`."""


@contextlib.contextmanager
def side(name: str) -> Iterator[Family]:
    """The names to build meshes with, for one of `SIDES`.

    DTensor remembers meshes of earlier worlds and takes them for equal ones of this world. Stock's
    know their groups by names that are of that world only, so what it remembers is cleared: before
    the block for this program, and after it for the programs of other tests in this process.
    """
    _clear_sharding_prop_cache()
    try:
        with meshverse.installed() if name == "installed" else contextlib.nullcontext():
            yield OURS if name == "ours" else STOCK
    finally:
        _clear_sharding_prop_cache()


def mesh_class(name: str) -> type:
    """Return the class that every mesh of one of `SIDES` shall have."""
    return (STOCK if name == "stock" else OURS).DeviceMesh
