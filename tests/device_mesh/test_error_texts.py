"""Errors of common slips say what was asked, the values, the rule and the cure."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from helpers.crew import Crew
from helpers.worlds import fake_world, groups_created
from meshverse import (
    DeviceMesh,
    find_group,
    init_device_mesh,
    init_mesh_partition,
    load_mesh,
    save_mesh,
)

_NAMES = ("dp", "tp")


def _mesh(shape: Any = (2, 4), **extra: Any) -> DeviceMesh:
    return init_device_mesh("cpu", shape, **{"mesh_dim_names": _NAMES, **extra})


# By what was asked: the call, the type of the error, and parts of its text.
_SLIPS: dict[str, tuple[Callable[[DeviceMesh], Any], type[Exception], list[str]]] = {
    "a backend for all axes": (
        lambda m: _mesh(backend_override="gloo"),
        TypeError,
        ["backend_override='gloo' of type str names no axis", "{'dp': 'gloo'}", "dict.fromkeys"],
    ),
    "a backend for all axes of a mesh without names": (
        lambda m: init_device_mesh("cpu", (2, 4), backend_override="gloo"),
        TypeError,
        ["backend_override='gloo'", "{0: 'gloo'}"],
    ),
    "a backend for all new axes": (
        lambda m: m.unflatten("tp", (2, 2), ("a", "b"), backend_override="gloo"),
        TypeError,
        ["backend_override='gloo'", "{'a': 'gloo'}"],
    ),
    "a backend for all axes of ranks": (
        lambda m: DeviceMesh("cpu", [[4, 5], [6, 7]], backend_override="gloo"),
        TypeError,
        ["backend_override='gloo'", "{0: 'gloo'}"],
    ),
    "overrides that are a number": (
        lambda m: _mesh(backend_override=5),
        TypeError,
        ["backend_override=5 of type int names no axis"],
    ),
    "a size of 0": (
        lambda m: _mesh((0, 4)),
        ValueError,
        ["mesh_shape=(0, 4) has the size 0", "at least 1", "size -1, and gets the ranks"],
    ),
    "a size of -2": (lambda m: _mesh((-2, 4)), ValueError, ["mesh_shape=(-2, 4) has the size -2"]),
    "two sizes of -1": (
        lambda m: _mesh((-1, -1)),
        ValueError,
        ["mesh_shape=(-1, -1) has the sizes -1, -1", "One axis may have size -1"],
    ),
    "-1 beside a size that does not divide": (
        lambda m: _mesh((3, -1)),
        ValueError,
        ["mesh_shape=(3, -1) cannot have 8 ranks, the number of the default process group", "is 3"],
    ),
    "-1 beside a size that is too large": (
        lambda m: _mesh((16, -1)),
        ValueError,
        ["mesh_shape=(16, -1) cannot have 8 ranks"],
    ),
    "-1 with ranks that do not divide": (
        lambda m: _mesh((2, -1), ranks=[5, 6, 7]),
        ValueError,
        ["mesh_shape=(2, -1) cannot have 3 ranks, the number in ranks="],
    ),
    "two sizes of -1 to unflatten to": (
        lambda m: m.unflatten("tp", (-1, -1), ("a", "b")),
        ValueError,
        ["mesh_sizes=(-1, -1) has the sizes -1, -1"],
    ),
    "negative sizes to unflatten to": (
        lambda m: m.unflatten("tp", (-2, -2), ("a", "b")),
        ValueError,
        ["mesh_sizes=(-2, -2) has the sizes -2, -2: the size of an axis must be at least 1"],
    ),
    "-1 to unflatten to beside a size that does not divide": (
        lambda m: m.unflatten("tp", (3, -1), ("a", "b")),
        ValueError,
        ["mesh_sizes=(3, -1) cannot have 4 ranks, the number of the split axis 'tp'"],
    ),
    "a shape that is a number": (
        lambda m: _mesh(8),
        TypeError,
        ["mesh_shape=8 of type int: pass a sequence", "(8,) for one axis"],
    ),
    "sizes that are a number": (
        lambda m: m.unflatten("tp", 4, ("a",)),
        TypeError,
        ["mesh_sizes=4 of type int: pass a sequence"],
    ),
    "names that are None": (
        lambda m: m.unflatten("tp", (2, 2), None),  # type: ignore[arg-type]
        TypeError,
        ["mesh_dim_names=None for mesh_sizes=(2, 2)"],
    ),
    "a slice by index": (
        lambda m: m[0],  # type: ignore[index]
        TypeError,
        ["mesh[0] with a key of type int", "such as mesh['dp']", "('dp', 'tp')"],
    ),
    "a slice by a slice": (
        lambda m: m[0:1],  # type: ignore[misc]
        TypeError,
        ["mesh[slice(0, 1, None)] with a key of type slice"],
    ),
    "a part that is a number": (
        lambda m: init_mesh_partition("cpu", {"a": 3}),  # type: ignore[dict-item]
        TypeError,
        ["Part 'a' of a partition is 3 of type int", '"mesh_shape": (2, 4)'],
    ),
    "a part that is a shape": (
        lambda m: init_mesh_partition("cpu", {"a": (2, 4)}),  # type: ignore[dict-item]
        TypeError,
        ["Part 'a' of a partition is (2, 4) of type tuple"],
    ),
    "parts that are a list": (
        lambda m: init_mesh_partition("cpu", ["a"]),  # type: ignore[arg-type]
        TypeError,
        ["parts=['a'] of type list"],
    ),
    "a part whose shape is a number": (
        lambda m: init_mesh_partition("cpu", {"a": {"mesh_shape": 8}}),  # type: ignore[typeddict-item]
        TypeError,
        ["parts['a']['mesh_shape']=8 of type int"],
    ),
    "a part with a size of 0": (
        lambda m: init_mesh_partition("cpu", {"a": {"mesh_shape": (0,)}}),
        ValueError,
        ["parts['a']['mesh_shape']=(0,) has the size 0"],
    ),
    "a size that is a string, beside -1": (
        lambda m: _mesh(("2", -1)),  # type: ignore[arg-type]
        TypeError,
        ["mesh_shape=('2', -1): sizes must be integers, got '2' of type str", "as an int"],
    ),
    "a size that is None, beside -1": (
        lambda m: _mesh((None, -1)),  # type: ignore[arg-type]
        TypeError,
        ["mesh_shape=(None, -1): sizes must be integers, got None of type NoneType"],
    ),
    "a size that is an array, beside -1": (
        lambda m: _mesh((torch.tensor([2, 4]), -1)),  # type: ignore[arg-type]
        TypeError,
        ["sizes must be integers, got tensor([2, 4]) of type Tensor"],
    ),
    "a size with a fraction, beside -1": (
        lambda m: m.unflatten("tp", (-1, 2.5), ("a", "b")),  # type: ignore[arg-type]
        TypeError,
        ["mesh_sizes=(-1, 2.5): sizes must be integers, got 2.5 of type float"],
    ),
    "a part with a size that is a list": (
        lambda m: init_mesh_partition("cpu", {"a": {"mesh_shape": ([2], 2)}}),  # type: ignore[typeddict-item]
        TypeError,
        ["parts['a']['mesh_shape']=([2], 2): sizes must be integers, got [2] of type list"],
    ),
    "two parts with a size of -1": (
        lambda m: init_mesh_partition(
            "cpu", {"a": {"mesh_shape": (-1,)}, "b": {"mesh_shape": (2, -1)}}
        ),
        ValueError,
        ["Parts ['a', 'b'] of a partition have a size of -1: one part may"],
    ),
    "a part that the others leave too few ranks": (
        lambda m: init_mesh_partition(
            "cpu", {"a": {"mesh_shape": (7,)}, "b": {"mesh_shape": (2, -1)}}
        ),
        ValueError,
        ["parts['b']['mesh_shape']=(2, -1) cannot have 1 ranks, the number that the other parts"],
    ),
    "an unknown axis to split": (
        lambda m: m.unflatten("pp", (2, 2), ("a", "b")),
        ValueError,
        ["dim pp specified in `unflatten` is not in ('dp', 'tp')", "name or the index"],
    ),
    "an axis to split that is too far": (
        lambda m: m.unflatten(5, (2, 2), ("a", "b")),
        ValueError,
        ["dim 5 specified in `unflatten` is out of range 2", "('dp', 'tp')", "0 to 1"],
    ),
    "an axis to split that is None": (
        lambda m: m.unflatten(None, (2, 2), ("a", "b")),  # type: ignore[arg-type]
        TypeError,
        ["dim None specified in `unflatten` is neither", "('dp', 'tp')"],
    ),
    "another number of names": (
        lambda m: m.unflatten("tp", (2, 2), ("a",)),
        RuntimeError,
        ["same length as mesh_sizes in unflatten! Got names ('a',) for sizes (2, 2)"],
    ),
    "a timeout for an existing universe": (
        lambda m: _mesh(universe=m.universe, timeout=timedelta(seconds=90)),
        ValueError,
        ["got universe= together with timeout=: this is a setting of the universe", "Leave it out"],
    ),
    "two settings for an existing universe": (
        lambda m: _mesh(universe=m.universe, timeout=timedelta(seconds=90), lazy=True),
        ValueError,
        ["universe= together with timeout= and lazy=: these are settings", "Leave them out"],
    ),
    "the size of an axis by its name": (
        lambda m: m.size("tp"),  # type: ignore[arg-type]
        TypeError,
        ["mesh.size('tp') with an axis of type str", "mesh[name].size()", "('dp', 'tp')"],
    ),
    "the size of an axis that is too far": (
        lambda m: m.size(2),
        IndexError,
        ["no axis 2: its axes are ('dp', 'tp'), with the indices -2 to 1"],
    ),
    "the group of an axis that is too far": (
        lambda m: m.get_group(-3),
        IndexError,
        ["no axis -3: its axes are ('dp', 'tp'), with the indices -2 to 1"],
    ),
    "the local rank along an axis that is too far": (
        lambda m: m["tp"].get_local_rank(1),
        IndexError,
        ["no axis 1: its axes are ('tp',), with the indices -1 to 0"],
    ),
    "a device": (
        lambda m: init_device_mesh(torch.device("cuda", 1), (8,)),  # type: ignore[arg-type]
        TypeError,
        ["device_type=device(type='cuda', index=1) of type device", "such as 'cuda'"],
    ),
    "a group of other ranks": (
        lambda m: DeviceMesh.from_group(dist.GroupMember.NON_GROUP_MEMBER, "cpu"),  # type: ignore[arg-type]
        TypeError,
        ["from_group() got -100 of type int", "call from_group() on its members only"],
    ),
    "the name of a group": (
        lambda m: DeviceMesh.from_group("tp", "cpu"),  # type: ignore[arg-type]
        TypeError,
        ["from_group() got 'tp' of type str: pass a process group"],
    ),
    "ranks for groups": (
        lambda m: DeviceMesh.from_group([0, 1], "cpu", [[4, 5]]),  # type: ignore[list-item]
        TypeError,
        ["from_group() got 0 of type int: pass a process group, or a list with one per axis"],
    ),
    "no meshes to concatenate": (
        lambda m: DeviceMesh.concatenate([]),
        IndexError,
        ["concatenate() got no meshes"],
    ),
    "a group to find": (
        lambda m: find_group(m["tp"]),  # type: ignore[arg-type]
        TypeError,
        ["find_group() got DeviceMesh", "pass c10d's name of the group, which is group.group_name"],
    ),
    "a group to save": (
        lambda m: save_mesh(m.get_group("tp")),  # type: ignore[arg-type]
        TypeError,
        ["save_mesh() got <", "pass a meshverse.DeviceMesh"],
    ),
    "a file to load from": (
        lambda m: load_mesh("nofile"),  # type: ignore[arg-type]
        ValueError,
        ["load_mesh() got 'nofile' of type str, and opens no file", "save_mesh()", "torch.save()"],
    ),
    "a path to load from": (
        lambda m: load_mesh(Path("nofile")),  # type: ignore[arg-type]
        ValueError,
        ["load_mesh() got ", "and opens no file"],
    ),
}


@pytest.mark.usefixtures("world")  # rank 5 of 8
@pytest.mark.parametrize("slip", _SLIPS)
def test_the_error_says_what_to_do_and_nothing_is_created(slip: str) -> None:
    call, error, parts = _SLIPS[slip]
    mesh = _mesh()
    before = mesh.universe.explain().to_dict()
    with groups_created(0), pytest.raises(error) as raised:
        call(mesh)
    assert raised.type is error
    for part in parts:
        assert part in str(raised.value)
    assert mesh.universe.explain().to_dict() == before


# --- "the rest" ----------------------------------------------------------------------------------


@pytest.mark.usefixtures("world")
def test_a_size_of_minus_one_is_the_rest() -> None:
    assert _mesh((-1, 4)).shape == (2, 4)
    assert _mesh((2, -1)) == _mesh((2, 4))
    assert _mesh((8, -1)).shape == (8, 1)
    assert init_device_mesh("cpu", [-1]).shape == (8,)
    assert _mesh((2, -1), ranks=[4, 5, 6, 7]).mesh.tolist() == [[4, 5], [6, 7]]
    mesh = DeviceMesh("cpu", [4, 5, 6, 7], mesh_dim_names=("x",))
    assert _mesh((-1, 2), universe=mesh.universe).mesh.tolist() == [[4, 5], [6, 7]]
    assert _mesh().unflatten("tp", (2, -1), ("a", "b")).shape == (2, 2, 2)
    assert _mesh()._unflatten(1, [-1], ["a"]).shape == (2, 4)


def test_sizes_of_few_bits_beside_minus_one_do_not_overflow() -> None:
    sizes = np.array([64, 4], dtype=np.int8)
    with fake_world(1024):
        assert init_device_mesh("cpu", (*sizes, -1)).shape == (64, 4, 4)


@pytest.mark.usefixtures("world")
def test_a_part_with_a_size_of_minus_one_gets_the_ranks_of_no_other() -> None:
    shapes: dict[str, Any] = {
        "first": {"mesh_shape": (2,)},
        "open": {"mesh_shape": (-1, 2)},
        "last": {"mesh_shape": (2,)},
    }
    meshes = init_mesh_partition("cpu", shapes)
    assert [mesh.shape for mesh in meshes.values()] == [(2,), (2, 2), (2,)]
    assert meshes["open"].mesh.tolist() == [[2, 3], [4, 5]]
    placed = init_mesh_partition(
        "cpu",
        {"a": {"mesh_shape": (-1,), "ranks": [1, 5]}, "b": {"mesh_shape": (-1,), "ranks": [3]}},
    )
    assert [mesh.shape for mesh in placed.values()] == [(2,), (1,)]
    inside = init_mesh_partition(
        "cpu", {"a": {"mesh_shape": (1,)}, "b": {"mesh_shape": (-1,)}}, universe=_mesh().universe
    )
    assert inside["b"].shape == (7,)


def test_minus_one_needs_the_number_of_ranks() -> None:
    with pytest.raises(
        ValueError, match=r"mesh_shape=\(-1, 2\).* Call init_process_group\(\) first"
    ):
        _mesh((-1, 2))
    with pytest.raises(ValueError, match=r"\['mesh_shape'\]=\(-1,\).* Call init_process_group\(\)"):
        init_mesh_partition("cpu", {"a": {"mesh_shape": (-1,)}})
    assert not dist.is_initialized()


# --- tracebacks ----------------------------------------------------------------------------------


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize(
    "ask", [lambda m: m["pp"], lambda m: m["dp", "pp"], lambda m: m.get_group("pp"), lambda m: m[0]]
)
def test_a_traceback_begins_with_the_error_itself(ask: Callable[[DeviceMesh], Any]) -> None:
    with pytest.raises((KeyError, TypeError)) as raised:
        ask(_mesh())
    text = "".join(traceback.format_exception(raised.value))
    assert text.count("Traceback (most recent call last)") == 1
    assert "tuple.index" not in text
    assert "handling of the above exception" not in text


# --- what torch accepts: a warning ---------------------------------------------------------------


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: init_device_mesh("cpu", (2, 4), mesh_dim_names="dp"),
            r"mesh_dim_names='dp' is one string, so its 2 letters name the 2 axes: 'd', 'p'",
        ),
        (
            lambda: DeviceMesh("cpu", [[4, 5], [6, 7]], mesh_dim_names="dp"),
            r"mesh_dim_names='dp' is one string.*write \('d', 'p'\)",
        ),
        (
            lambda: init_device_mesh("gpu", (2, 4)),
            r"device_type='gpu' is no device type of this torch.*Did you mean 'cuda'\?",
        ),
        (lambda: init_device_mesh("CPU", (8,)), r"device_type='CPU'.*Did you mean 'cpu'\?"),
        (lambda: DeviceMesh("gpu", [4, 5]), r"device_type='gpu'.*Did you mean 'cuda'\?"),
        (
            lambda: init_mesh_partition("gpu", {"a": {"mesh_shape": (8,)}})["a"],
            r"device_type='gpu'.*Did you mean 'cuda'\?",
        ),
    ],
)
def test_odd_input_that_torch_accepts_is_warned_of(make: Callable[[], Any], message: str) -> None:
    with pytest.warns(UserWarning, match=message) as caught:
        assert make().mesh is not None
    assert caught[0].filename == __file__
    assert len(caught) == 1


@pytest.mark.usefixtures("world")
def test_usual_input_is_not_warned_of() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for device_type in ("cpu", "cuda", "meta", "xla", "xpu"):
            init_device_mesh(device_type, (8,), mesh_dim_names="t")
        init_device_mesh("cpu", (2, 4), mesh_dim_names=["d", "p"])["d"].flatten("x")


# --- a device that this torch lacks --------------------------------------------------------------


def _of_cuda() -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_RANK", "1")
        with pytest.raises(RuntimeError) as raised:
            init_device_mesh("cuda", (2,))
    return str(raised.value)


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch was built with CUDA")
def test_a_device_that_the_build_lacks_is_named(crew: Crew) -> None:
    for text in crew.run(_of_cuda, 2):
        assert text.startswith(
            f"Device type 'cuda' is not available: this torch, {torch.__version__}"
        )
        assert "device 1 (the LOCAL_RANK of the launcher)" in text
        assert "Install a build of torch with 'cuda', or create the mesh of 'cpu'" in text


# --- what has ended ------------------------------------------------------------------------------


@pytest.mark.usefixtures("world")
def test_a_destroyed_group_makes_no_mesh() -> None:
    group = dist.new_group([4, 5])
    name = group.group_name
    dist.destroy_process_group(group)
    message = (
        rf"from_group\(\) got a destroyed process group, '{name}' of 2 ranks.*Pass a live group"
    )
    with pytest.raises(ValueError, match=message) as raised:
        DeviceMesh.from_group(group, "cpu")
    assert raised.value.__cause__ is None
    with pytest.raises(ValueError, match=message):
        DeviceMesh.from_group([group], "cpu", [4, 5], mesh_dim_names=("x",))


def test_explain_says_that_the_world_has_ended() -> None:
    with fake_world(8, 5):
        mesh = _mesh()
        universe = mesh.universe
        live = universe.explain()
        assert live.ended == live.to_dict()["ended"] == ""
        assert "ended" not in str(live)
        dist.destroy_process_group()
        report = universe.explain()
        assert "is gone (there is none now)" in report.ended
        head, second, *_ = str(report).splitlines()
        assert head == str(live).splitlines()[0]
        assert second == f"These process groups have ended. {report.ended}"
        assert "Create the mesh again after init_process_group()" in second
        assert report.groups == live.groups


@pytest.mark.usefixtures("world")
def test_explain_says_that_the_universe_has_ended() -> None:
    universe = _mesh().universe
    universe.destroy()
    assert "have ended. The universe of ranks 0 to 7 was destroyed" in str(universe.explain())
    saved = save_mesh(_mesh())
    assert load_mesh(saved).universe.explain().ended == ""


# --- the representation --------------------------------------------------------------------------


@pytest.mark.usefixtures("world")
def test_a_tagged_mesh_does_not_print_as_a_plain_one() -> None:
    plain = _mesh()
    own = _mesh(isolate="overlap")
    part = _mesh(isolate={"tp": "overlap"})
    assert repr(plain) == str(plain) == "DeviceMesh((dp=2, tp=4), 'cpu', stride=(4, 1))"
    assert repr(own) == "DeviceMesh((dp=2, tp=4), 'cpu', stride=(4, 1), isolate='overlap')"
    assert "isolate={'tp': 'overlap'}" in repr(part)
    assert repr(part["dp"]) == repr(plain["dp"])
    assert repr(part["tp"]) == "DeviceMesh((tp=4), 'cpu', stride=(1,), isolate='overlap')"
