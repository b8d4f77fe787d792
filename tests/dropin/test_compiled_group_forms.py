"""Forms in which a compiled function names a group by a mesh: as with torch's own meshes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from helpers.observation import OURS, STOCK, Family
from helpers.tiers import in_tiers
from helpers.versions import AT_LEAST_2_12
from helpers.worlds import in_worlds

_Form = Callable[[Any, Tensor], Tensor]
_FORMS: dict[str, _Form] = {
    "mesh and number": lambda mesh, x: funcol.all_reduce(x, "sum", (mesh, 1)),
    "slice": lambda mesh, x: funcol.all_reduce(x, "sum", mesh["tp"]),
    "slice and number": lambda mesh, x: funcol.all_reduce(x, "sum", (mesh["tp"], 0)),
    "slice of two": lambda mesh, x: funcol.all_reduce(x, "sum", (mesh["dp", "tp"], 1)),
    "flattened": lambda mesh, x: funcol.all_reduce(x, "sum", mesh["all"]),
    "flattened and number": lambda mesh, x: funcol.all_reduce(x, "sum", (mesh["all"], 0)),
    "group": lambda mesh, x: funcol.all_reduce(x, "sum", mesh.get_group("tp")),
    "group of a slice": lambda mesh, x: funcol.all_reduce(x, "sum", mesh["tp"].get_group()),
    "all_gather_tensor": lambda mesh, x: funcol.all_gather_tensor(x, 0, (mesh["tp"], 0)),
    "reduce_scatter_tensor": lambda mesh, x: funcol.reduce_scatter_tensor(
        x, "sum", 0, (mesh["tp"], 0)
    ),
    "mesh of a tensor": lambda mesh, x: funcol.all_reduce(
        x, "sum", (_sharded(mesh, x).device_mesh["tp"], 0)
    ),
    "redistribute": lambda mesh, x: (
        _sharded(mesh, x).redistribute(placements=[Replicate(), Replicate()]).to_local()
    ),
}


def _sharded(mesh: Any, x: Tensor) -> DTensor:
    return DTensor.from_local(x, mesh, [Replicate(), Shard(0)], run_check=False)


def _meshes(family: Family, lazy: bool) -> Any:
    extra = {"lazy": True} if lazy else {}
    mesh = family.init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"), **extra)
    mesh._flatten("all")
    for axis in ("dp", "tp", "all"):  # a lazy group cannot be made in the middle of a graph
        mesh.get_group(axis)
    return mesh


_CASES = [
    (form, backend, how, given)
    for form in _FORMS
    for backend in ("eager", "aot_eager", "inductor")
    for how in ("made at once", "lazy")
    for given in ("closure", "argument")
]
# Each form once: as a closure, or as an argument and lazy.
_SHORT = [
    case
    for case in _CASES
    if case[1] == "aot_eager" and case[2:] in (("made at once", "closure"), ("lazy", "argument"))
][::2]


@in_worlds((8, 5))
@pytest.mark.usefixtures("world")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("form", "backend", "how", "given"), in_tiers(_CASES, _SHORT, _CASES[::5]))
def test_a_compiled_function_may_name_a_group_as_with_torch(
    form: str, backend: str, how: str, given: str
) -> None:
    def result_of(family: Family) -> Tensor:
        mesh, call = _meshes(family, how == "lazy" and family is OURS), _FORMS[form]
        torch._dynamo.reset()
        x = torch.arange(8.0)
        if given == "closure":
            return torch.compile(lambda x: call(mesh, x), backend=backend, fullgraph=True)(x)
        return torch.compile(call, backend=backend, fullgraph=True)(mesh, x)

    ours, stock = result_of(OURS), result_of(STOCK)
    if form == "reduce_scatter_tensor" and not AT_LEAST_2_12:  # the fake backend writes no output
        assert ours.shape == stock.shape
    else:
        assert torch.equal(ours, stock)


@in_worlds((8, 5))
@pytest.mark.usefixtures("world")
def test_lists_of_names_are_plain_while_all_groups_are_live() -> None:
    mesh = _meshes(OURS, lazy=False)
    lazy = OURS.init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"), lazy=True)
    assert type(mesh._dim_group_names) is type(mesh["tp"]._dim_group_names) is list
    assert type(lazy._dim_group_names) is not list
    part = lazy["dp"]
    part.get_group()
    assert type(part._dim_group_names) is list  # whether or not other groups are made
    assert type(lazy._dim_group_names) is not list
    lazy.get_group("tp")
    assert type(part._dim_group_names) is type(lazy._dim_group_names) is list
    dist.destroy_process_group(lazy.get_group("tp"))
    with pytest.raises(RuntimeError, match="was destroyed"):
        funcol.all_reduce(torch.ones(2), "sum", (lazy, 1))
    with pytest.raises(RuntimeError, match="was destroyed"):
        lazy["tp"]._dim_group_names[0]
    assert type(part._dim_group_names) is list
    assert lazy["dp"].get_group().size() == 2
