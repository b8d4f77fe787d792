"""Random states of torch, Python's `random` and NumPy's global generator.

Example:
    >>> with same_random_state(torch.device("cpu")):
    ...     first = random.random()
    >>> random.random() == first
    True
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch


@contextmanager
def same_random_state(device: torch.device) -> Iterator[None]:
    """Set random states back on leaving: those of torch on the CPU and a device, and the host's."""
    kind = device.type
    with (
        same_host_random_states(),
        torch.random.fork_rng([] if kind == "cpu" else [device], device_type=kind),
    ):
        yield


@contextmanager
def same_host_random_states() -> Iterator[None]:
    """Set the states of `random` and `numpy.random` back on leaving."""
    states = host_random_states()
    try:
        yield
    finally:
        set_host_random_states(states)


def host_random_states() -> bytes:
    """Return the states of `random` and of `numpy.random`, if NumPy is installed."""
    numpy = _numpy_random()
    return pickle.dumps((random.getstate(), numpy and numpy.get_state(legacy=False)))


def set_host_random_states(states: bytes) -> None:
    """Set the states that `host_random_states` returned, in this process or in another one."""
    of_python, of_numpy = pickle.loads(states)
    random.setstate(of_python)
    if of_numpy is not None:
        _numpy_random().set_state(of_numpy)


def _numpy_random() -> Any:
    # Imported, if need be: its import draws a seed, which is another one in each process.
    return import_module("numpy.random") if find_spec("numpy") else None
