"""Moves of all that torch has: kinds of tensors, modes, wrappers, worlds."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rounding import rounding
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import meshverse
from helpers.crew import Crew
from meshverse import DeviceMesh, init_device_mesh
from meshverse.parallel import Reshard
from meshverse.parallel.reshard.exchange import Exchange

pytestmark = pytest.mark.processes


def _bits(tensor: Tensor) -> bytes:
    values = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    return values.view(torch.uint8).numpy().tobytes()


def _spread(whole: Tensor, mesh: Any, *placements: Any) -> DTensor:
    return distribute_tensor(whole, mesh, list(placements), src_data_rank=None)


# --- kinds of tensors -----------------------------------------------------------------------------


def _kinds() -> None:
    rank = dist.get_rank()
    numbers = torch.arange(48)
    base = torch.view_as_complex(torch.randn(24, 2, generator=torch.Generator().manual_seed(0)))
    wholes = {
        "bool": numbers % 3 == 0,
        "float8": (numbers / 7).to(torch.float8_e4m3fn),
        "float8_e5m2": (numbers / 7).to(torch.float8_e5m2),
        "scales": (numbers.to(torch.uint8) + 100).view(torch.float8_e8m0fnu),
        "complex128": base.to(torch.complex128),
        "conj": base.conj(),
        "neg": base.conj().imag,
        "uint16": numbers.to(torch.uint16),
        "uint32": numbers.to(torch.uint32),
        "half": (numbers / 7).half(),
        "five dims": numbers.float().view(2, 3, 1, 4, 2),
        "gaps": torch.arange(200.0).as_strided((5, 6), (37, 3), 4),
        "backwards": torch.arange(24.0).view(2, 3, 4).permute(2, 0, 1),
        "nothing": torch.zeros(0, 3),
        "nothing of five": torch.zeros(2, 0, 3, 1, 0),
        "scalar": torch.tensor(3.5),
        "one": torch.tensor([7]),
        "needs grad": torch.arange(6.0, requires_grad=True),
        "no leaf": torch.arange(6.0, requires_grad=True) * 2,
        "channels": torch.randn(1, 3, 4, 4).fill_(2).to(memory_format=torch.channels_last),
        "expanded": torch.arange(3.0).view(3, 1).expand(3, 4),
        "parameter": nn.Parameter(torch.arange(5.0)),
        "buffer": nn.Buffer(torch.arange(5.0)),
    }

    class Weight(nn.Parameter):
        pass

    wholes["of a subclass"] = Weight(torch.arange(4.0))
    with torch.inference_mode():
        wholes["inference"] = torch.arange(8.0) * 3
    target = {
        name: (torch.empty(t.shape, dtype=t.dtype) if t._is_view() else torch.empty_like(t.data))
        for name, t in wholes.items()
    }
    target["conj"] = torch.zeros(24, dtype=torch.complex64).conj()
    target["neg"] = torch.zeros(24, dtype=torch.complex64).conj().imag
    target["parameter"] = Weight(torch.zeros(5))
    with torch.inference_mode():
        target["inference"] = torch.zeros(8)
    for way in (0, 1):
        for tensor in target.values():
            with torch.inference_mode():
                tensor.copy_(torch.zeros(tensor.shape, dtype=tensor.dtype))
        sides = (wholes, None) if rank == way else (None, target)
        with Reshard(*sides) as move:
            for guard in (contextlib.nullcontext, torch.inference_mode, torch.no_grad):
                with guard():
                    move()
            if way:
                move(async_op=True).wait()
        for name, tensor in target.items() if rank != way else ():
            assert _bits(tensor) == _bits(wholes[name]), name
    # To other dtypes, from views with gaps, on meshes that do not divide it.
    mesh = init_device_mesh("cpu", (2,))
    pairs = [
        (torch.float32, torch.complex64),
        (torch.complex64, torch.complex128),
        (torch.complex128, torch.complex64),
        (torch.bool, torch.float16),
        (torch.bool, torch.uint8),
        (torch.float8_e4m3fn, torch.float32),
        (torch.float32, torch.float8_e5m2),
        (torch.int64, torch.int8),
        (torch.int16, torch.bfloat16),
        (torch.int16, torch.uint16),
        (torch.uint16, torch.int64),
        (torch.int64, torch.uint8),
        (torch.float16, torch.bfloat16),
        (torch.float64, torch.bfloat16),
        (torch.int32, torch.float32),
    ]
    for before, after in pairs:
        whole = torch.arange(35).remainder(2 if before == torch.bool else 99).view(7, 5).to(before)
        for placement in (Shard(0), Shard(1), Replicate()):
            source = {"w": _spread(whole, mesh, placement)}
            empty = torch.zeros(7, 10).to(after)[:, ::2]
            with Reshard(source, {"w": empty}) as move:
                move()
            assert _bits(empty) == _bits(whole.to(after)), (before, after, placement)


@pytest.mark.long
def test_kinds_of_tensors(crew: Crew) -> None:
    crew.run(_kinds, 2)


# --- modes ----------------------------------------------------------------------------------------


class _Functions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class _Dispatched(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _default_device() -> Iterator[None]:
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


@contextlib.contextmanager
def _default_dtype() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@contextlib.contextmanager
def _deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def _sides() -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor]:
    """A source, a target, and what "w" of the target is to be on this rank."""
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(24.0).view(6, 4)
    source = {"w": _spread(whole, mesh, Shard(0)), "s": torch.tensor(2.0), "b": whole > 3}
    target = {"w": _spread(whole * 0, mesh, Shard(1)), "s": torch.tensor(0.0), "b": whole > 99}
    return source, target, _spread(whole, mesh, Shard(1)).to_local()


def _modes() -> None:
    source, target, expected = _sides()
    modes: list[Any] = [
        lambda: torch.device("meta"),
        lambda: torch.device("cpu"),
        _default_device,
        _default_dtype,
        _deterministic,
        torch.autograd.detect_anomaly,
        _Functions,
        _Dispatched,
        torch.inference_mode,
        lambda: torch.autocast("cpu", dtype=torch.bfloat16),
        lambda: torch.utils.checkpoint.set_checkpoint_debug_enabled(True),
    ]
    for number, mode in enumerate(modes):
        with mode(), Reshard(source, target) as move:
            move()
            move(async_op=True).wait()
            str(move.explain())
        assert torch.equal(target["w"].to_local(), expected), number
        assert torch.equal(target["b"], source["b"])
        for tensor in target.values():
            (tensor.to_local() if isinstance(tensor, DTensor) else tensor).zero_()


def test_modes(crew: Crew) -> None:
    crew.run(_modes, 2)


def _compiled() -> None:
    """In what torch.compile compiles, a move runs as it is, once a call."""
    source, target, expected = _sides()
    move = Reshard(source, target)

    def step(x: Tensor) -> Tensor:
        y = x * 2
        move()
        return y + target["s"]

    compiled = torch.compile(step, backend="eager")
    for _ in range(3):
        assert compiled(torch.ones(1)).item() == 4
    assert "4 runs" not in repr(move)
    assert "3 runs" in repr(move)
    assert torch.equal(target["w"].to_local(), expected)


@pytest.mark.long
def test_moves_in_what_is_compiled(crew: Crew) -> None:
    crew.run(_compiled, 2)


def _in_threads() -> None:
    """Each thread runs a move of its own; then all of them run one move."""
    source, target, expected = _sides()
    moves = [Reshard(source, {**target, "s": torch.tensor(0.0)}, name=f"{n}") for n in range(3)]
    threads = [threading.Thread(target=m) for m in moves]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(200)
    assert all("1 runs" in repr(each) for each in moves)
    move = Reshard(source, target)
    threads = [threading.Thread(target=move) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(200)
    assert "3 runs" in repr(move)
    assert torch.equal(target["w"].to_local(), expected)


def test_moves_in_threads(crew: Crew) -> None:
    crew.run(_in_threads, 2)


def _in_the_middle_of_a_run() -> tuple[list[str], int]:
    """A handler that runs the same move, and a fork while a thread runs it."""
    source, target, expected = _sides()
    move, seen, find_change = Reshard(source, target), list[str](), Exchange.find_change

    def run_again(*_: object) -> None:
        try:
            move()
        except RuntimeError as error:
            seen.append(str(error))

    def fork_and_run(statuses: list[int]) -> None:
        child = os.fork()
        if child == 0:
            signal.alarm(60)  # ends a hang
            run_again()
            os._exit(7 if "cannot run in a fork" in str(seen) else 1)
        statuses.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

    usual, statuses = signal.signal(signal.SIGUSR1, run_again), list[int]()
    begun, go_on = threading.Event(), threading.Event()

    def interrupted(exchange: Exchange) -> str:
        signal.raise_signal(signal.SIGUSR1)
        return find_change(exchange)

    def pause(exchange: Exchange) -> str:
        begun.set()
        assert go_on.wait(200)
        return find_change(exchange)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Exchange, "find_change", interrupted)
        move()
        patch.setattr(Exchange, "find_change", pause)
        thread = threading.Thread(target=move)
        thread.start()
        assert begun.wait(200)
        fork_and_run(statuses)
        go_on.set()
        thread.join(200)
    signal.signal(signal.SIGUSR1, usual)
    assert "2 runs" in repr(move)
    assert torch.equal(target["w"].to_local(), expected)
    return seen, statuses[0]


@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
def test_a_handler_or_a_fork_in_the_middle_of_a_move_raises(crew: Crew) -> None:
    for seen, status in crew.run(_in_the_middle_of_a_run, 2):
        assert len(seen) == 1
        assert "still under way" in seen[0]
        assert status == 7


# --- meshes and wrappers --------------------------------------------------------------------------


def _meshes(every: int) -> None:
    """Move between pairs of meshes of all kinds: each `every`th pair."""
    rank, world = dist.get_rank(), dist.get_world_size()
    whole = torch.arange(84.0).view(12, 7)
    stock = dist.device_mesh.DeviceMesh
    os.environ["LOCAL_WORLD_SIZE"] = str(1 + rank)
    with meshverse.installed():
        installed = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    isolated = init_device_mesh("cpu", (4,), isolate="mine")
    permuted = init_device_mesh("cpu", (2, 2), ranks=[3, 1, 0, 2], mesh_dim_names=("x", "y"))
    three = init_device_mesh("cpu", (3,), ranks=[0, 2, 3])
    ours = init_device_mesh("cpu", (2, 2), mesh_dim_names=("r", "s"))
    meshes: list[tuple[Any, list[Any]]] = [
        (stock("cpu", torch.tensor([[0, 2], [1, 3]])), [Shard(1), Shard(0)]),
        (installed, [Shard(0), Shard(0)]),
        (installed["b"], [Shard(1)]),
        (isolated, [Shard(-1)]),
        (permuted, [Shard(0), Replicate()]),
        (permuted["y"], [Shard(1)]),
        (ours["r", "s"]._flatten("rs"), [Shard(0)]),
        (three, [Shard(0)]),
        (DeviceMesh("cpu", [2]), [Replicate()]),
    ]
    everybody = list(range(world))
    for first, second in [*itertools.product(meshes, meshes)][::every]:
        sides = []
        for values, (mesh, placements) in ((whole, first), (whole * 0, second)):
            is_member = mesh.get_coordinate() is not None
            sides.append({"w": _spread(values, mesh, *placements)} if is_member else None)
        with Reshard(*sides, ranks=everybody) as move:
            move()
        if sides[1]:
            expected = _spread(whole, *(second[0], *second[1])).to_local()
            assert torch.equal(sides[1]["w"].to_local(), expected), (first, second)
    os.environ.pop("LOCAL_WORLD_SIZE")


# Of 9 * 9 pairs, each fourth has every mesh as a source and as a target.
@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.long)])
def test_meshes_of_all_kinds(crew: Crew, every: int) -> None:
    crew.run(_meshes, 4, every)


def _in_detail() -> None:
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
    dist.set_debug_level_from_env()
    try:
        _meshes(2)
    finally:
        os.environ.pop("TORCH_DISTRIBUTED_DEBUG")
        dist.set_debug_level_from_env()


@pytest.mark.long
def test_with_torchs_checks_of_collectives(crew: Crew) -> None:
    crew.run(_in_detail, 4)


class _Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.last = nn.Linear(6, 6)
        self.last.weight = self.first.weight
        self.experts = nn.Parameter(torch.randn(4, 6, 6))
        self.counts = nn.Buffer(torch.arange(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x))


def _wrapped() -> None:
    torch.manual_seed(0)
    plain = _Mixture()
    wholes = {name: t.detach().clone() for name, t in plain.state_dict().items()}
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    experts = init_device_mesh("cpu", (4,), mesh_dim_names=("expert",))

    def check(source: dict[str, Tensor]) -> None:
        target = {name: torch.zeros_like(wholes[name]) for name in source}
        with Reshard(source, target) as move:
            move()
            move()
        for name, tensor in target.items():
            assert torch.equal(tensor, wholes[name]), name

    for kwargs in (
        {"mesh": mesh},
        {"mesh": mesh["shard"], "reshard_after_forward": False},
        {"mesh": mesh["shard"], "offload_policy": CPUOffloadPolicy(pin_memory=False)},
    ):
        torch.manual_seed(0)
        model = _Mixture()
        model.experts = nn.Parameter(_spread(model.experts.data, experts, Shard(0)))
        fully_shard(model, ignored_params={model.experts}, **kwargs)
        check(model.state_dict())
        target = dict(model.state_dict())
        move = Reshard({k: v.clone() * 2 for k, v in wholes.items()}, target)
        back = Reshard(wholes, target)
        move()
        check_twice = {k: v.full_tensor() for k, v in target.items() if isinstance(v, DTensor)}
        assert all(torch.equal(v, 2 * wholes[k]) for k, v in check_twice.items())
        before = model(torch.ones(2, 6))
        model.reshard()
        back()
        after = model(torch.ones(2, 6))
        error = (after - plain(torch.ones(2, 6))).norm() / after.norm()
        assert error < rounding(torch.float32, terms=6, steps=2)  # two layers of 6 features
        assert (before - after).norm() > after.norm() / 2
        check(dict(model.named_parameters(remove_duplicate=False)))
        check(model.state_dict())


def test_models_as_fsdp_and_experts_have_them(crew: Crew) -> None:
    crew.run(_wrapped, 4)


# --- worlds ---------------------------------------------------------------------------------------


def _on_one_store(folder: str) -> None:
    """As torchrun's restarts are, with a prefix, because gloo cannot start on one store twice."""
    rank, world = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    store = dist.FileStore(f"{folder}/kept", world)
    for run in range(3):
        own = dist.PrefixStore(f"{run}", store)
        dist.init_process_group("gloo", store=own, rank=rank, world_size=world)
        source = {"w": torch.full((4 + run,), float(run))} if rank == 0 else None
        target = {"w": torch.zeros(4 + run)} if rank else None
        move = Reshard(source, target)  # not closed
        move()
        assert move.explain().received == ({0: 4 * (4 + run)} if rank else {})
        assert target is None or bool((target["w"] == run).all())
        dist.barrier()
        dist.destroy_process_group()
    dist.init_process_group("fake", store=store, rank=rank, world_size=world)
    with pytest.raises(RuntimeError, match="the backend 'fake' exchanges nothing"):
        Reshard(None, None)


def test_worlds_one_after_the_other_on_one_store(crew: Crew, tmp_path: Any) -> None:
    """None of them reads what ranks of an earlier one said."""
    crew.run(_on_one_store, 2, str(tmp_path))


def _of_an_earlier_world(folder: str) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    source = {"w": torch.ones(4)} if rank == 0 else None
    target = {"w": torch.zeros(4)} if rank else None
    old = Reshard(source, target)
    old()
    dist.barrier()
    dist.destroy_process_group()
    with pytest.raises(RuntimeError, match="in which it was constructed was destroyed"):
        old()
    store = dist.FileStore(f"{folder}/next", world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    with pytest.raises(RuntimeError, match="in which it was constructed was destroyed"):
        old()
    old.close()
    for tensor in (target or {}).values():
        tensor.zero_()
    Reshard(source, target)()
    assert target is None or torch.equal(target["w"], torch.ones(4))


def test_a_move_of_an_earlier_world(crew: Crew, tmp_path: Any) -> None:
    crew.run(_of_an_earlier_world, 2, str(tmp_path))


@contextlib.contextmanager
def _on_one_cpu() -> Iterator[None]:
    """All ranks share it, so that one of them is often far ahead of the others."""
    if not hasattr(os, "sched_setaffinity"):  # on macOS
        yield
        return
    cpus = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cpus)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cpus)


def _closed_at_once(n_moves: int) -> None:
    """As a program does that only asks what would be sent."""
    rank = dist.get_rank()
    source = {"w": torch.ones(4)} if rank == 0 else None
    target = {"w": torch.zeros(4)} if rank else None
    with _on_one_cpu():
        for _ in range(n_moves):
            with Reshard(source, target) as move:
                pass
    assert move.explain().received == ({0: 16} if rank else {})


@pytest.mark.parametrize("n_moves", [30, pytest.param(100, marks=pytest.mark.long)])
def test_moves_that_are_closed_and_never_run(crew: Crew, n_moves: int) -> None:
    """No rank ends the group of one while others still connect."""
    crew.run(_closed_at_once, 2, n_moves)


def _alone() -> None:
    mesh = init_device_mesh("cpu", (1,))
    whole = torch.arange(12.0).view(3, 4)
    source = {"w": _spread(whole, mesh, Shard(0)), "v": whole}
    target = {"w": torch.zeros(3, 4), "v": _spread(whole * 0, mesh, Replicate())}
    with Reshard(source, target) as move:
        move()
        work = move(async_op=True)
        work.wait()
        assert move.explain().received == {}
    assert torch.equal(target["w"], whole)
    assert torch.equal(target["v"].to_local(), whole)
    dist.barrier()


def test_a_world_of_one_rank(crew: Crew) -> None:
    crew.run(_alone, 1)
