"""DTensor, functional collectives and torch.compile on isolated meshes: the groups they use.

Everything is first done on the same mesh without the tag, so that whatever torch remembers by mesh
is there to be taken by mistake.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.utils._python_dispatch import TorchDispatchMode

from helpers.compiling import COMPILES
from helpers.tiers import in_tiers
from helpers.worlds import fake_world
from meshverse import DeviceMesh, init_device_mesh, isolate

pytestmark = COMPILES

_AXES = ("dp", "cp", "tp")


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    _clear_sharding_prop_cache()
    with fake_world(8, 5):
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=_AXES)
        for names in (_AXES, ("dp", "cp"), ("dp", "tp"), ("cp", "tp")):
            mesh[names].flatten()
        yield mesh


class _Groups(TorchDispatchMode):
    """Names of the groups of functional collectives inside the block."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor's own goes first
        if "c10d" in func.namespace or func.namespace == "_dtensor":
            self.names.extend(arg for arg in args if isinstance(arg, str))
        return func(*args, **(kwargs or {}))


def _tags(mesh: DeviceMesh, names: list[str]) -> set[str]:
    tags = {group.name: group.tag for group in mesh.universe.explain().groups}
    return {tags[name] for name in names if name in tags}


def _tags_used(mesh: DeviceMesh, action: Callable[[], object]) -> set[str]:
    with _Groups() as used:
        action()
    return _tags(mesh, used.names)


def _tags_in_graph(mesh: DeviceMesh, program: Callable[[Tensor], object]) -> set[str]:
    names: list[str] = []

    def note_groups(graph: torch.fx.GraphModule, _: object) -> Any:
        for node in graph.graph.nodes:
            names.extend(arg for arg in node.args if isinstance(arg, str))
        return graph

    compiled = torch.compile(program, backend=aot_autograd(fw_compiler=note_groups), fullgraph=True)
    compiled(torch.ones(8, 8))
    return _tags(mesh, names)


def _redistribute(source: Any) -> Callable[[DeviceMesh, Tensor], Tensor]:
    def program(mesh: DeviceMesh, x: Tensor) -> Tensor:
        tensor = DTensor.from_local(x, mesh, [source] * mesh.ndim, run_check=False)
        return tensor.redistribute(mesh, [Replicate()] * mesh.ndim).to_local()

    return program


def _scatter_reduced(mesh: DeviceMesh, x: Tensor) -> Tensor:
    tensor = DTensor.from_local(x, mesh, [Partial()] * mesh.ndim, run_check=False)
    return tensor.redistribute(mesh, [Shard(0)] * mesh.ndim).to_local()


def _sum(mesh: DeviceMesh, x: Tensor) -> Tensor:
    return DTensor.from_local(x, mesh, [Shard(0)] * mesh.ndim, run_check=False).sum(0).full_tensor()


def _product(mesh: DeviceMesh, x: Tensor) -> Tensor:
    tensor = DTensor.from_local(x, mesh, [Shard(1)] * mesh.ndim, run_check=False)
    return (tensor @ tensor.t()).full_tensor()


_PROGRAMS: dict[str, Callable[[DeviceMesh, Tensor], object]] = {
    "all-reduce": _redistribute(Partial()),
    "all-gather": _redistribute(Shard(0)),
    "reduce-scatter": _scatter_reduced,
    "sum": _sum,
    "product": _product,
    "functional": lambda mesh, x: funcol.all_reduce(x, "sum", (mesh, 0)),
    "group of a slice": lambda mesh, x: funcol.all_reduce(
        x, "sum", mesh[mesh.mesh_dim_names[-1]].get_group()
    ),
    "group by name": lambda mesh, x: funcol.all_reduce(
        x, "sum", mesh.get_group(mesh.mesh_dim_names[-1])
    ),
    "flattened": lambda mesh, x: funcol.all_reduce(x, "sum", mesh._flatten().get_group()),
}

_MESHES = {"one axis": ("tp",), "two axes": ("dp", "tp"), "all axes": _AXES}


@pytest.mark.parametrize("flattened", [False, True], ids=["", "flattened"])
@pytest.mark.parametrize("axes", _MESHES)
@pytest.mark.parametrize("program", _PROGRAMS)
def test_collectives_are_on_the_groups_of_the_tag(mesh, program, axes, flattened) -> None:
    run, names = _PROGRAMS[program], _MESHES[axes]
    assert _tags_used(mesh, lambda: run(mesh[names], torch.ones(8, 8))) == {""}
    with isolate("x"):
        own = mesh[names]
        if flattened:
            mesh[names].flatten()
    assert _tags_used(mesh, lambda: run(own, torch.ones(8, 8))) == {"x"}
    assert _tags_used(mesh, lambda: run(mesh[names], torch.ones(8, 8))) == {""}


@pytest.mark.parametrize("axes", in_tiers(["one axis", "two axes"], ["two axes"]))
@pytest.mark.parametrize("program", in_tiers(_PROGRAMS, list(_PROGRAMS)[::4]))
def test_so_they_are_in_a_compiled_graph(mesh, program: str, axes: str) -> None:
    run, names = _PROGRAMS[program], _MESHES[axes]
    shared = mesh[names]
    assert _tags_in_graph(mesh, lambda x: run(shared, x)) == {""}
    with isolate("x"):
        own = mesh[names]
        own.flatten()
    assert _tags_in_graph(mesh, lambda x: run(own, x)) == {"x"}


def test_one_compiled_function_is_compiled_for_each_mesh(mesh) -> None:
    graphs: list[set[str]] = []

    def note_groups(graph: torch.fx.GraphModule, _: object) -> Any:
        args = [arg for node in graph.graph.nodes for arg in node.args if isinstance(arg, str)]
        graphs.append(_tags(mesh, args))
        return graph

    def total(tensor: DTensor) -> Tensor:
        return tensor.sum(0).full_tensor()

    compiled = torch.compile(total, backend=aot_autograd(fw_compiler=note_groups))
    with isolate("x"):
        own = mesh["tp"]
    for each in (mesh["tp"], own, mesh["tp"], own):
        compiled(DTensor.from_local(torch.ones(2, 3), each, [Shard(0)], run_check=False))
    assert graphs == [{""}, {"x"}]


@pytest.mark.parametrize("names", [("dp", "tp"), ("dp", "cp"), ("cp", "tp"), _AXES])
def test_a_flattened_mesh_of_other_tags_is_not_taken(mesh, names: tuple[str, ...]) -> None:
    # Of a mesh with several tags, too. mesh.flatten() etc. exist without any.
    view = init_device_mesh(
        "cpu", (2, 2, 2), mesh_dim_names=_AXES, universe=mesh.universe, isolate={"dp": "x"}
    )
    view["cp", "tp"].flatten("other")
    run = _PROGRAMS["all-reduce"]
    own = {"x" if name == "dp" else "" for name in names}
    assert _tags_used(mesh, lambda: run(view[names], torch.ones(8, 8))) == own
    view[names].flatten("mine")
    expected = {"x"} if "dp" in names else {""}
    assert _tags_used(mesh, lambda: run(view[names], torch.ones(8, 8))) == expected


@pytest.mark.parametrize("source", [Shard(0), Replicate()])
def test_distributing_a_tensor_is_isolated(mesh, source) -> None:
    with isolate("x"):
        own = mesh["tp"]
    for each, tag in ((mesh["tp"], ""), (own, "x"), (mesh["tp"], "")):
        tensor = distribute_tensor(torch.ones(8, 8), each, [source])
        assert tensor.device_mesh is each
        for result in (tensor + 1, tensor.t(), tensor.detach(), torch.empty_like(tensor)):
            assert result.device_mesh is each
        assert _tags_used(mesh, tensor.full_tensor) <= {tag}


def test_tensors_of_two_tags_do_not_mix(mesh) -> None:
    with isolate("x"):
        own = mesh["tp"]
    one, other = (
        DTensor.from_local(torch.ones(2, 3), each, [Shard(0)], run_check=False)
        for each in (mesh["tp"], own)
    )
    with pytest.raises((RuntimeError, NotImplementedError), match="mesh"):
        one + other


def test_pipeline_stages_tell_them_apart(mesh) -> None:
    pipelining = pytest.importorskip("torch.distributed.pipelining._utils")
    if not hasattr(pipelining, "_MeshCache"):
        pytest.skip("stages send no meshes in this torch")
    with isolate("x"):
        own = mesh["tp"]
    cache = pipelining._MeshCache()
    for each in (mesh["tp"], own):
        tensor = DTensor.from_local(torch.ones(2, 3), each, [Shard(0)], run_check=False)
        cache.update_from_tensors((tensor,))
        meta = pipelining._DTensorMeta.from_dtensor(tensor)
        assert cache.get_mesh(meta.mesh_cache_key) is each
    assert len(cache) == 2
