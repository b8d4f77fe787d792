"""The least that each mesh operation needs, whoever does it.

Where an operation makes process groups, that is c10d making this rank's own groups by its helper
for the members of a group, and nothing else. For the others it is the least Python that gives the
answer where the answer is known: a method that looks it up, a new object with known attributes, the
pickle of a few numbers.
"""

from __future__ import annotations

import itertools
import pickle
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from harness import Action, Scenario
from suites.mesh_scenario import Axes

__all__ = ["WHAT", "MakesGroups", "floor_of"]

_GROUPS = "c10d making my own groups"
_LOOK_UP = "a Python method that looks the answer up"
_OBJECT = "a new Python object with known attributes"
WHAT = {
    "create 4-D mesh": _GROUPS,
    "create 1-D mesh of the world": _OBJECT,
    "slice first": _OBJECT,
    "slice again": _LOOK_UP,
    "slice two axes first": _OBJECT,
    "slice two axes again": _LOOK_UP,
    "unflatten to new groups": _GROUPS,
    "unflatten to known groups": _OBJECT,
    "flatten to a new group": _GROUPS,
    "flatten to a known group": _OBJECT,
    "concatenate first": _OBJECT,
    "concatenate again": _LOOK_UP,
    "compare equal meshes": "a Python `__eq__` that compares two numbers",
    "compare unequal meshes": "a Python `__eq__` that compares two numbers",
    "hash first in a world": "Python hashing a tuple of all ranks",
    "hash first of a mesh": "a Python `__hash__` that hands out a number",
    "hash again": "a Python `__hash__` that hands out a number",
    "get_group": _LOOK_UP,
    "get_coordinate": _LOOK_UP,
    ".mesh first": "another view of a tensor",
    ".mesh again": _LOOK_UP,
    "pickle a slice": "pickling a tuple of a mesh's numbers and names",
    "unpickle a slice": "unpickling that tuple",
}
"""The floor of each operation, in words."""

_serials = itertools.count()  # of process groups, whose names must differ


class MakesGroups:
    """Makes process groups of given ranks by c10d's helper, as one of their members."""

    def __init__(self) -> None:
        self.backend, self.store = c10d._world.pg_map[c10d._get_default_group()]
        self.timeout = c10d._get_default_timeout(dist.Backend(self.backend))
        self.rank = dist.get_rank()

    def __call__(self, named_ranks: list[tuple[str, list[int]]]) -> list[Any]:
        """One group for each name and ascending list of ranks."""
        groups = []
        for name, ranks in named_ranks:
            group, _ = c10d._new_process_group_helper(
                len(ranks),
                ranks.index(self.rank),
                ranks,
                self.backend,
                self.store,
                name,
                timeout=self.timeout,
                group_desc="mesh",
            )
            c10d._world.pg_group_ranks[group] = {one: index for index, one in enumerate(ranks)}
            groups.append(group)
        return groups


def named(axis_ranks: list[list[int]]) -> list[tuple[str, list[int]]]:
    """Each list of ranks with a name for its group."""
    return [(f"floor-{next(_serials)}", ranks) for ranks in axis_ranks]


class _Known:
    """Has every answer: what a mesh costs if nothing is left to be found out."""

    def __init__(self, parts: dict[Any, Any], number: int) -> None:
        self.parts = parts
        self.number = number
        self.device_type = "cpu"
        self.names = ("pp", "dp", "cp", "tp")
        self.coordinate = (0, 1, 2, 3)
        self.ranks = torch.arange(8)
        self.groups: dict[str, Any] = {"tp": None}

    def __getitem__(self, names: Any) -> Any:
        return self.parts[names]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Known) and self.number == other.number

    def __hash__(self) -> int:
        return self.number

    def get_group(self, name: str) -> Any:
        return self.groups[name]

    def get_coordinate(self) -> tuple[int, ...]:
        return self.coordinate

    @property
    def mesh(self) -> torch.Tensor:
        return self.ranks

    def copied(self) -> _Known:
        copy = object.__new__(_Known)
        copy.__dict__.update(self.__dict__)
        return copy


def floor_of(axes: Axes, mesh_ranks: list[list[int]], flat_ranks: list[int]) -> Scenario:
    """Return the floor of each operation, with the answer of those that make groups.

    Args:
        axes: of the 4-D mesh.
        mesh_ranks: this rank's group along each of them.
        flat_ranks: this rank's group along dp and cp flattened.
    """
    make = MakesGroups()
    group_makers = {
        "create 4-D mesh": mesh_ranks,
        "unflatten to new groups": mesh_ranks,
        "flatten to a new group": [flat_ranks],
    }
    for operation, ranks in group_makers.items():
        yield Action(operation, "make(groups)", {"make": make, "groups": named(ranks)}, _ranks_of)
    parts = {"tp": object(), ("dp", "tp"): object()}
    known, equal, unequal = _Known(parts, 1), _Known(parts, 1), _Known(parts, 2)
    plain = ("cpu", (("tp", ((axes["tp"],), (1,))),), dist.get_world_size(), (0, 1, 2))
    names = {
        "known": known,
        "equal": equal,
        "unequal": unequal,
        "pickle": pickle,
        "plain": plain,
        "pickled": pickle.dumps(plain),
        "tensor": torch.arange(dist.get_world_size()),
        "shape": tuple(axes.values()),
        "ranks": tuple(range(dist.get_world_size())),
    }
    expressions = {
        _OBJECT: "known.copied()",
        "slice again": "known['tp']",
        "slice two axes again": "known['dp', 'tp']",
        "concatenate again": "known['dp', 'tp']",
        "compare equal meshes": "known == equal",
        "compare unequal meshes": "known == unequal",
        "hash first in a world": "hash(ranks)",
        "hash first of a mesh": "hash(known)",
        "hash again": "hash(known)",
        "get_group": "known.get_group('tp')",
        "get_coordinate": "known.get_coordinate()",
        ".mesh first": "tensor.view(shape)",
        ".mesh again": "known.mesh",
        "pickle a slice": "pickle.dumps(plain)",
        "unpickle a slice": "pickle.loads(pickled)",
    }
    for operation, what in WHAT.items():
        if what != _GROUPS:
            expression = expressions.get(operation) or expressions[what]
            yield Action(operation, expression, names, repeatable=True)


def _ranks_of(groups: list[Any]) -> list[list[int]]:
    return [dist.get_process_group_ranks(group) for group in groups]
