"""Errors of impossible resharding: every rank raises, before anything is sent."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from helpers.crew import Crew
from meshverse import Topology, init_device_mesh
from meshverse.parallel import Reshard

pytestmark = pytest.mark.processes


def _raises(kind: type[Exception], words: str, call: Callable[[], Any]) -> None:
    with pytest.raises(kind, match=words):
        call()


def _one(tensor: Any, name: Any = "w") -> dict[Any, Any]:
    return {name: tensor}


class _Tagged(Tensor):
    pass


# --- inputs of one rank -------------------------------------------------------------------------


def _wrong_inputs() -> list[tuple[type[Exception], str, Any]]:
    """Return sources of rank 0, each with the error's type and its words."""
    eight = torch.ones(8)
    return [
        (TypeError, "of type list must be a dict of tensors by name", [eight]),
        (TypeError, "source name 3 of type int must be a str", {3: eight}),
        (TypeError, "'w' is a float: it must be a DTensor", _one(1.0)),
        (TypeError, "'w' is a meta tensor", _one(torch.ones(8, device="meta"))),
        (TypeError, r"'w' is a torch.sparse_coo tensor", _one(eight.to_sparse())),
        (
            TypeError,
            "'w' is a quantized",
            _one(torch.quantize_per_tensor(eight, 1, 0, torch.qint8)),
        ),
        (TypeError, "'w' is a nested", _one(torch.nested.nested_tensor([eight]))),
        (TypeError, "'w' is a _Tagged, whose data cannot", _one(eight.as_subclass(_Tagged))),
        (TypeError, "'w' is a FakeTensor, whose data", _one(FakeTensorMode().from_tensor(eight))),
    ]


def _of_one_rank() -> None:
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2,))
    target = {"w": torch.zeros(8)}
    cases = _wrong_inputs()
    partial = DTensor.from_local(torch.ones(8), mesh, [Partial()])
    cases.append((ValueError, r"has the placement P.*redistribute it to Replicate", _one(partial)))
    words = r"of shape \(9,\) has a local tensor of shape \(3,\) .* say \(5,\)"
    cases.append((ValueError, words, _one(_lying(mesh))))
    freed = torch.ones(8)
    freed.untyped_storage().resize_(0)
    cases.append((ValueError, "'w' has no memory", _one(freed)))
    for kind, words, source in cases:
        if rank == 0:
            _raises(kind, words, lambda s=source: Reshard(s, target))
        else:
            _raises(RuntimeError, "rank 0 cannot take part", lambda: Reshard(target, None))
    with FakeTensorMode() if rank == 0 else torch.no_grad():
        kind, words = (TypeError, "FakeTensorMode") if rank == 0 else (RuntimeError, "rank 0")
        _raises(kind, words, lambda: Reshard(target, None))
    # Nothing is left of all that: a good move runs.
    Reshard({"w": torch.ones(8)} if rank else None, target)()
    assert torch.equal(target["w"], torch.ones(8))


def _lying(mesh: Any) -> DTensor:
    return DTensor.from_local(
        torch.ones(3), mesh, [Shard(0)], run_check=False, shape=torch.Size([9]), stride=(1,)
    )


def test_tensors_that_cannot_be_moved(crew: Crew) -> None:
    crew.run(_of_one_rank, 2)


def _wrong_settings() -> None:
    """One rank gives what is wrong: it raises, and the others need not wait for it."""
    rank = dist.get_rank()
    ones, zeros = {"w": torch.ones(8)}, {"w": torch.zeros(8)}

    def fails(_: str) -> str:
        raise LookupError("no such name")

    cases: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (TypeError, "buffer_bytes='1' must be an int", {"buffer_bytes": "1"}),
        (TypeError, "buffer_bytes=True must be an int", {"buffer_bytes": True}),
        (ValueError, "buffer_bytes=1023 must be at least 1024", {"buffer_bytes": 1023}),
        (
            ValueError,
            "of 3 ranks must have a level 'node' and all 2 ranks",
            {"topology": Topology({"node": list("aab")})},
        ),
        (ValueError, "must have a level 'node'", {"topology": Topology({"rack": list("ab")})}),
        (TypeError, r"topology='aab' of type str", {"topology": "aab"}),
        (ValueError, "timeout", {"timeout": timedelta(0)}),
        (TypeError, r"rename=\['w'\] of type list", {"rename": ["w"]}),
        (TypeError, "rename gives None for source 'w'", {"rename": lambda name: None}),
        (LookupError, "no such name", {"rename": fails}),
    ]
    for kind, words, given in cases:
        if rank == 0:
            _raises(kind, words, lambda g=given: Reshard(ones, None, **g))
        else:
            _raises(RuntimeError, "rank 0 cannot take part", lambda: Reshard(None, zeros))
    for kind, words, ranks in (
        (ValueError, "rank 7|7.*which is not among", [0, 7]),
        (ValueError, "list every global rank once", [0, 0, 1]),
        (ValueError, r"ranks=\['0', '1'\]", "01"),
    ):  # nobody knows whom to tell of these
        _raises(kind, words, lambda r=ranks: Reshard(ones, zeros, ranks=r))
    two = {"a": torch.ones(1), "b": torch.ones(1)}
    if rank == 0:
        _raises(
            ValueError,
            "rename gives 'c' for source 'b' and for 'a'",
            lambda: Reshard(two, None, rename=lambda name: "c"),
        )
    else:
        _raises(RuntimeError, "rank 0 cannot take part", lambda: Reshard(None, zeros))
    Reshard(ones, zeros)()
    assert torch.equal(zeros["w"], ones["w"])


def test_settings_that_are_wrong(crew: Crew) -> None:
    crew.run(_wrong_settings, 2)


# --- sides that do not fit ------------------------------------------------------------------------


def _misfits() -> None:
    """All ranks raise the same."""
    rank = dist.get_rank()
    cluster = Topology({"node": list("ab")})
    ones = torch.ones(8)
    cases: list[tuple[type[Exception], str, Any, Any, dict[str, Any]]] = [
        (
            ValueError,
            r"no tensor named 'layer.weight', .*\(the target has 'layers.weight', a similar name\)",
            {"layer.weight": ones},
            {"layers.weight": ones},
            {},
        ),
        (
            ValueError,
            "the source has no tensor named 'b', which the target has",
            {"a": ones},
            {"a": torch.zeros(8), "b": ones},
            {},
        ),
        (
            ValueError,
            r"'w' has the shape \(8,\) in the source and \(4,\) in the target",
            _one(ones),
            _one(torch.ones(4)),
            {},
        ),
        (
            ValueError,
            "'w' is float32 in the source and int64 in the target, which cannot hold",
            _one(ones),
            _one(torch.ones(8, dtype=torch.int64)),
            {},
        ),
        (
            ValueError,
            "'w' is complex64 in the source and float32",
            _one(torch.ones(8, dtype=torch.complex64)),
            _one(torch.ones(8)),
            {},
        ),
        (
            ValueError,
            "'w' is uint4 in the source and uint4 in the target, and torch cannot copy",
            _one(torch.zeros(8, dtype=torch.uint8).view(torch.uint4)),
            _one(torch.zeros(8, dtype=torch.uint8).view(torch.uint4)),
            {},
        ),
        (
            ValueError,
            "'w' is float4_e2m1fn_x2 in the source and float32 in the target, and torch cannot",
            _one(torch.zeros(8, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)),
            _one(ones),
            {},
        ),
        (
            RuntimeError,
            "ranks 0 and 1 pass different buffer_bytes: 2048 on rank 0, 2049 on rank 1. All",
            _one(ones),
            _one(torch.ones(8)),
            {"buffer_bytes": 2048 + rank},
        ),
        (
            RuntimeError,
            r"ranks 0 and 1 pass different topology: None on rank 0, nodes \(0, 1\) on rank 1. All",
            _one(ones),
            _one(torch.ones(8)),
            {"topology": cluster if rank else None},
        ),
    ]
    for kind, words, source, target, given in cases:
        has = (source, None) if rank == 0 else (None, target)
        _raises(kind, words, lambda h=has, g=given: Reshard(*h, **g))
    # A rank that has fewer tensors than the others on its mesh.
    mesh = init_device_mesh("cpu", (2,))
    both = {name: distribute_tensor(torch.ones(8), mesh, [Shard(0)]) for name in "ab"}
    fewer = {"a": both["a"]} if rank else both
    whole = {name: torch.zeros(8) for name in "ab"}
    _raises(ValueError, "source 'b'.*rank 1", lambda: Reshard(fewer, whole))
    other = {**both, "b": distribute_tensor(torch.ones(8), mesh, [Replicate()])}
    _raises(ValueError, "source 'b'.*rank 1", lambda: Reshard(other if rank else both, whole))
    wide = {"w": distribute_tensor(torch.ones(8 + 2 * rank), mesh, [Replicate()])}
    _raises(ValueError, "'w'", lambda: Reshard(wide, {"w": torch.zeros(8)}))
    Reshard(both, whole)()
    assert torch.equal(whole["b"], torch.ones(8))


def test_sides_that_do_not_fit(crew: Crew) -> None:
    crew.run(_misfits, 2)


def _memory_shared() -> None:
    """Refused where a write would change what is read, or what is written by another name."""
    held = torch.arange(12.0)
    grid = torch.arange(24.0).view(4, 6)

    def overlap(source: Tensor, target: Tensor) -> None:
        _raises(
            ValueError,
            "source 'w' and target 'w' overlap in memory on this rank",
            lambda: Reshard(_one(source), _one(target)),
        )

    overlap(held[:8], held[4:])
    overlap(grid[:2], grid[1:3])
    overlap(grid[:, :3], grid[:, 2:5])
    overlap(grid[:3, :3], grid[:3, :3].T)
    numbers = torch.ones(4, dtype=torch.complex64)
    overlap(numbers, numbers.conj())
    for what, target in (
        ("'w'", torch.zeros(1).expand(8)),
        ("'w'", torch.zeros(2, 1).expand(2, 4)),
        ("'w'", torch.zeros(8).unfold(0, 3, 1)),
        ("'w'", torch.zeros(16).as_strided((3, 3), (2, 4))),
        ("'w'", torch.zeros(16).as_strided((2, 3), (3, 2))),  # 0, 2, 4 and 3, 5, 7: refused too
    ):
        _raises(
            ValueError,
            f"target {what} is expanded",
            lambda t=target: Reshard(_one(torch.ones(t.shape)), _one(t)),
        )
    _raises(
        ValueError,
        "target 'a' and target 'b' overlap in memory",
        lambda: Reshard({"a": torch.ones(8), "b": torch.ones(8)}, {"a": held[:8], "b": held[4:]}),
    )
    # What only lies between is no overlap; nor is the same tensor under two names, or itself.
    assert torch.equal(held, torch.arange(12.0))
    Reshard(_one(grid[:, :3]), _one(grid[:, 3:]))()
    assert torch.equal(grid[:, 3:], torch.arange(24.0).view(4, 6)[:, :3])
    halves = torch.zeros(4, 6)
    Reshard(
        {"a": torch.ones(4, 3), "b": torch.full((4, 3), 2.0)},
        {"a": halves[:, ::2], "b": halves[:, 1::2]},
    )()
    assert torch.equal(halves, torch.tensor([1.0, 2.0]).repeat(4, 3))
    tied = torch.zeros(8)
    Reshard({"a": torch.ones(8), "b": torch.ones(8)}, {"a": tied, "b": tied})()
    assert torch.equal(tied, torch.ones(8))
    Reshard({"a": tied, "b": held}, {"b": torch.zeros(12), "a": tied})()
    Reshard(_one(torch.ones(1).expand(8)), _one(tied))()


def test_tensors_that_share_memory(crew: Crew) -> None:
    crew.run(_memory_shared, 1)


def _changed_in_place() -> None:
    """Between runs: other strides and bits are followed; other elements and overlaps refused."""
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2,))
    grid = torch.arange(4.0).view(2, 2) * (1 + 2j)
    sources = {"w": distribute_tensor(grid.clone(), mesh, [Shard(0)]), "own": torch.ones(4)}
    target, own = torch.zeros_like(grid), torch.zeros(4)
    move = Reshard(sources, {"w": target, "own": own})
    move()
    target.t_()
    target.zero_()
    move()
    assert torch.equal(target, grid)
    target.data = target.data.contiguous().conj()
    target.zero_()
    move()
    assert target.is_conj()
    assert torch.equal(target, grid)
    sources["own"].data = torch.stack([torch.arange(4.0), torch.zeros(4)], dim=1)[:, 0]
    move()
    assert own.tolist() == [0, 1, 2, 3]
    memory, words = own.data, "source 'own' and target 'own' overlap in memory on this rank"
    if rank == 0:
        own.data = torch.cat([sources["own"], torch.zeros(1)])[1:]
        sources["own"].data = own.data.as_strided((4,), (1,), 0)
    _raises(RuntimeError, f"rank 0 cannot run: .*{words}", move)
    own.data = memory.view(torch.int32) if rank else memory
    _raises(RuntimeError, "rank 1 cannot run: target 'own' .* is .*torch.int32", move)
    own.data = memory.zero_()
    move()
    assert own.tolist() == ([0, 1, 2, 3])


def test_tensors_that_change_between_runs(crew: Crew) -> None:
    crew.run(_changed_in_place, 2)
