"""`meshverse.connect` on real processes of two worlds, and what moves over a connection."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh as StockMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import meshverse
from helpers.crew import WORLD_TIMEOUT_SECONDS, Crew, RankError
from helpers.forked import SECONDS
from helpers.interrupts import is_interrupted_at
from helpers.ports import held_port
from helpers.tiers import in_tiers
from helpers.turns import wait_until
from helpers.worlds import fake_world
from meshverse import init_device_mesh
from meshverse.connection import _Rounds
from meshverse.parallel import Piece, Reshard
from meshverse.store import StoreKeys

_TRAINERS, _ENGINES = 4, 2
_ALL = _TRAINERS + _ENGINES
_TIMEOUT = timedelta(seconds=30)
_LONG = timedelta(seconds=60)
_SHORT = timedelta(seconds=3)  # short-timeout: it must elapse


@pytest.fixture
def address() -> str:
    return f"127.0.0.1:{held_port()}"


@contextlib.contextmanager
def _own_world(folder: str) -> Iterator[tuple[bool, int]]:
    """Replace the default group of all ranks by one of the trainer, and one of the engine.

    Gives whether this rank is a trainer, and its rank in the connection: the engine comes first.
    """
    rank = dist.get_rank()
    is_trainer = rank < _TRAINERS
    dist.all_reduce(torch.zeros(1))
    dist.destroy_process_group()
    side, size = ("trainer", _TRAINERS) if is_trainer else ("engine", _ENGINES)
    own = rank if is_trainer else rank - _TRAINERS
    store = dist.FileStore(str(Path(folder) / side), size)
    timeout = timedelta(seconds=WORLD_TIMEOUT_SECONDS)
    dist.init_process_group("gloo", store=store, rank=own, world_size=size, timeout=timeout)
    yield is_trainer, own + _ENGINES if is_trainer else own
    dist.barrier()


def _connect(address: str | dist.Store, rank: int, **changed: Any) -> meshverse.Connection:
    given: dict[str, Any] = {"rank": rank, "size": _ALL, "timeout": _TIMEOUT, **changed}
    return meshverse.connect("weights", address, **given)


def _wait_until_they_wait(n_ranks: int, address: str) -> dist.Store:
    """Wait until so many processes, one of them rank 0, wait in the first round.

    Gives the store, in which they do.
    """
    host, port = address.split(":")
    store = dist.TCPStore(host, int(port), None, False, _LONG)
    wait_until(lambda: store.add("meshverse connection weights/rounds/0 count", 0) == n_ranks)
    return store


# --- the group -----------------------------------------------------------------------------------


def _meet(folder: str, address: str) -> dict[str, Any]:
    with _own_world(folder) as (is_trainer, rank):
        default = dist.group.WORLD
        answer: dict[str, Any] = {}
        for time_ in ("first", "second"):
            with _connect(address, rank) as connection:
                with pytest.raises(ValueError, match="'weights' is open in this process"):
                    _connect(address, rank)
                total, sent = torch.ones(1), torch.full((2,), float(rank))
                dist.all_reduce(total, group=connection.group)
                dist.broadcast(sent, src=5, group=connection.group)
                texts: list[Any] = [None] * _ALL
                dist.all_gather_object(texts, rank, group=connection.group)
                answer[time_] = total.item(), sent.tolist(), texts
                own = dist.get_rank()
                answer["ranks"] = connection.rank, connection.rank_of(own), connection.nodes
                with pytest.raises(ValueError, match="Rank 77 of this world is not in the conn"):
                    connection.rank_of(77)
                answer["repr"] = repr(connection)
            assert not connection.is_open
            connection.close()
            with pytest.raises(RuntimeError, match=r"was closed, or ended .* in all of them"):
                _ = connection.group
        assert dist.group.WORLD is default
        own_total = torch.ones(1)
        dist.all_reduce(own_total)
        answer["own"] = own_total.item() == (_TRAINERS if is_trainer else _ENGINES)
        return answer


def test_two_worlds_meet_and_meet_again(crew: Crew, tmp_path: Path, address: str) -> None:
    for rank, answer in enumerate(crew.run(_meet, _ALL, str(tmp_path), address)):
        here = rank + _ENGINES if rank < _TRAINERS else rank - _TRAINERS
        seen = (6.0, [5.0, 5.0], [0, 1, 2, 3, 4, 5])
        assert answer == {
            "first": seen,
            "second": seen,
            "ranks": (here, here, (0,) * _ALL),
            "repr": f"Connection('weights', rank {here} of 6)",
            "own": True,
        }


def _wait_in_vain(folder: str, address: str) -> tuple[str, bool]:
    with _own_world(folder) as (_, rank):
        error = ""
        failed = dist.FileStore(str(Path(folder) / "failed"), _ALL)
        if rank == 2:  # gives up when all but rank 1 wait, and comes again
            store = _wait_until_they_wait(4, address)
            with pytest.raises(RuntimeError) as raised:
                _connect(store, rank, timeout=_SHORT)
            error = str(raised.value)
            failed.set("one", "")
        if rank == 1:  # comes late
            failed.wait(["one"])
        with _connect(address, rank, timeout=_LONG) as connection:
            total = torch.ones(1)
            dist.all_reduce(total, group=connection.group)
            return error, total.item() == _ALL


def test_who_does_not_come_is_named_and_may_come_later(
    crew: Crew, tmp_path: Path, address: str
) -> None:
    answers = crew.run(_wait_in_vain, _ALL, str(tmp_path), address)
    assert all(is_connected for _, is_connected in answers)
    errors = [error for error, _ in answers if error]
    assert len(errors) == 1
    assert "waited 0:00:03 for rank 1 of 6. Start all processes with the same name" in errors[0]


def _disagree(folder: str, address: str, how: str) -> str:
    with _own_world(folder) as (_, rank), pytest.MonkeyPatch.context() as patched:
        odd: dict[str, Any] = {}
        if how == "size":
            odd = {"size": 7}
        elif how == "backend":
            odd = {"backend": "cpu:gloo"}
        else:
            odd = {"rank": 3}
        given = {"rank": rank, **(odd if rank == 4 else {})}
        if how == "containers":  # equal host names, and a process 7 in each
            numbered = SimpleNamespace(getpid=lambda: 7, urandom=os.urandom)
            patched.setattr("meshverse.connection.os", numbered)
        if rank == 4 and "rank" not in odd:  # all learn of the error at once
            _wait_until_they_wait(5, address)
        return _said(lambda: _connect(address, **given).close())


@pytest.mark.parametrize("how", in_tiers(["size", "rank", "containers", "backend"], ["size"]))
def test_processes_that_disagree_get_an_error(
    crew: Crew, tmp_path: Path, address: str, how: str
) -> None:
    answers = crew.run(_disagree, _ALL, str(tmp_path), address, how)
    texts = {
        "size": "processes, backend gloo, and others have",
        "rank": "(as host:pid) both have rank 3. Pass a",
        "containers": "(as host:pid) both have rank 3. Pass a",
        "backend": "backend cpu:gloo",
    }
    assert all(texts[how] in answer for answer in answers), answers


def _lose(folder: str, address: str) -> None:
    with _own_world(folder) as (is_trainer, rank):
        connection = _connect(address, rank, timeout=_LONG)
        moved = dist.FileStore(str(Path(folder) / "moved"), _ALL)
        w = torch.arange(8.0)
        with Reshard(
            *((({"w": w}, None)) if is_trainer else (None, {"w": w})), group=connection
        ) as move:
            move()
            moved.add("count", 1)
            if rank == 1:  # of the engine
                wait_until(lambda: moved.add("count", 0) == _ALL)
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                while True:
                    move()
            except RuntimeError:
                os._exit(7)


def test_a_side_that_dies_is_an_error_on_both(crew: Crew, tmp_path: Path, address: str) -> None:
    with pytest.raises(RankError) as raised:
        crew.run(_lose, _ALL, str(tmp_path), address, grace=60)
    assert str(raised.value).count("died with exit code 7") == _ALL - 1


# --- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"rank": 6}, ValueError, r"connect\(rank=6, size=6\): ranks run from 0"),
        ({"rank": -1}, ValueError, "ranks run from 0"),
        ({"rank": 0.5}, TypeError, "integer"),
        ({"rank": False}, TypeError, r"rank=False, size=6\): pass integers"),
        ({"size": 2**21}, ValueError, "a connection has at most 1,048,576 processes"),
        ({"name": ""}, ValueError, "pass a name"),
        ({"name": "w" * 201}, ValueError, "pass a name of 1 to 200 characters"),
        ({"name": b"w"}, TypeError, r"connect\(b'w' of type bytes\): pass a string"),
        ({"timeout": 3}, TypeError, "timedelta"),
        ({"timeout": timedelta(0)}, ValueError, "at least a millisecond"),
        ({"store": 29500}, TypeError, "host:port"),
        ({"store": "localhost"}, ValueError, "host:port"),
        ({"store": "localhost:x"}, ValueError, "host:port"),
        ({"backend": "nope"}, ValueError, "nope"),
        ({"backend": "cpu:gloo,cpu:mpi"}, ValueError, "'mpi' .*: this torch was built without it"),
        ({"options": object()}, TypeError, "ProcessGroupNCCL.Options"),
    ],
)
def test_bad_input_leaves_nothing(arguments: dict[str, Any], error: Any, text: str) -> None:
    given: dict[str, Any] = {
        "name": "bad input",
        "store": dist.HashStore(),
        "rank": 0,
        "size": 6,
        "timeout": timedelta(seconds=0.1),  # short-timeout: it must elapse
        **arguments,
    }
    with fake_world(8, 5):
        for _ in range(2):  # the second time as the first
            with pytest.raises(error, match=text):
                meshverse.connect(**given)


def test_without_a_store_the_address_is_named(address: str) -> None:
    with pytest.raises(RuntimeError, match=f"no store answered at {address}.*rank 0 starts it"):
        # short-timeout: it must elapse
        meshverse.connect("nobody", address, rank=1, size=2, timeout=timedelta(seconds=1))


def test_rank_0_says_that_it_could_not_start_the_store() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:  # no store
        address = f"127.0.0.1:{other.getsockname()[1]}"  # port: it stays bound
        with pytest.raises(RuntimeError, match=f"could not start a store at {address}: .*in use"):
            # short-timeout: it must elapse
            meshverse.connect("taken", address, rank=0, size=2, timeout=timedelta(seconds=1))


def test_missing_ranks_of_many_are_named() -> None:
    n_ranks = 200_000  # of as many keys at once, torch's store closes the connection
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    rounds = _Rounds("w", store, 0, n_ranks, _LONG)
    keys = StoreKeys(dist.PrefixStore("meshverse connection w", store), "rounds", n_ranks)
    for rank in (0, 1, 3, 4, 5, 6, 7, 8, 9):
        keys.write(f"0 {rank}", "here")
    assert rounds._missing(0) == "ranks 2, 10-16 and more of 200000"


def test_who_arrives_at_the_last_moment_is_not_said_to_be_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = dist.HashStore()
    first = _Rounds("w", store, 0, 2, timedelta(0))

    def arrives() -> int:
        first._keys.count("0 count")
        return 0

    first._keys.count("0 count")
    monkeypatch.setattr(first, "_current", arrives)
    assert first._wait(0, deadline=0.0)


def test_a_process_that_died_as_it_joined_is_not_said_to_be_rank_none() -> None:
    store = dist.HashStore()
    died = _Rounds("w", store, 1, 2, _LONG)
    died._keys.put_first("0 1", "an attempt")  # and has not been counted
    with pytest.raises(RuntimeError, match=r"waited .* for a process that ended as it joined\."):
        _Rounds("w", store, 0, 2, timedelta(0)).join("2 processes")


def test_a_process_without_a_world_connects_alone() -> None:
    with meshverse.connect("alone", dist.HashStore(), rank=0, size=1) as connection:
        assert (connection.size, connection.rank_of(0), connection.nodes) == (1, 0, (0,))
        w, there = torch.arange(4.0), torch.zeros(4)
        with Reshard({"w": w}, {"w": there}, group=connection) as move:
            move()
        assert torch.equal(w, there)
    assert not dist.is_initialized()


class _StoreInPython(dist.Store):
    """A store of a program's own. torch passes bytes to it."""

    def __init__(self) -> None:
        super().__init__()
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: bytes) -> None:
        assert isinstance(value, bytes)
        self._values[key] = value

    def get(self, key: str) -> bytes:
        return self._values[key]

    def add(self, key: str, amount: int) -> int:
        total = int(self._values.get(key, b"0")) + amount
        self._values[key] = str(total).encode()
        return total

    def check(self, keys: list[str]) -> bool:
        return self._values.keys() >= set(keys)

    def wait(self, keys: list[str], *_: timedelta) -> None:
        assert self.check(keys)  # one rank waits for nobody

    def compare_set(self, key: str, expected: bytes, value: bytes) -> bytes:
        assert isinstance(expected, bytes)
        if self._values.get(key, b"") == expected:
            self._values[key] = value
        return self._values.get(key, expected)


def test_a_store_written_in_python() -> None:
    with meshverse.connect("in Python", _StoreInPython(), rank=0, size=1) as connection:
        assert connection.is_open


def _alone() -> meshverse.Connection:
    return meshverse.connect("again", dist.HashStore(), rank=0, size=1, backend="gloo")


def test_a_name_is_free_once_its_connection_was_dropped() -> None:
    first = _alone()
    assert first.is_open
    del first
    with _alone() as second:
        assert second.is_open


def test_a_name_is_free_once_the_default_group_ended() -> None:
    with fake_world(4):
        first = _alone()
    assert not first.is_open
    with _alone() as second:
        assert second.is_open
        assert not first.is_open


def test_closing_an_old_connection_again_leaves_the_name_to_the_new_one() -> None:
    first = _alone()
    first.close()
    with _alone() as second:
        first.close()
        with pytest.raises(ValueError, match="'again' is open in this process"):
            _alone()
        assert second.is_open


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_wherever_it_was_interrupted_a_second_call_connects_and_nothing_is_left() -> None:
    place, is_interrupted, store = 0, True, dist.HashStore()
    connections: list[meshverse.Connection] = []

    def connect() -> None:
        name = f"interrupted {place}"
        connections.append(meshverse.connect(name, store, rank=0, size=1, backend="gloo"))

    before = len(dist.distributed_c10d._world.pg_names)
    while is_interrupted:
        place += 1
        is_interrupted = is_interrupted_at(place, connect)
        while connections:
            connections.pop().close()
        connect()
        connections.pop().close()
        assert len(dist.distributed_c10d._world.pg_names) == before, place
    assert place > 50


def _of_two_jobs_without_rendezvous(folder: str) -> str:
    """Each rank is a job of its own, whose default group's store allows no rendezvous."""
    rank = dist.get_rank()
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    store = dist.FileStore(str(Path(folder) / "store"), 2)
    with meshverse.connect(
        "w", store, rank=rank, size=2, backend="gloo", timeout=_LONG
    ) as connection:
        assert connection.rank_of(1) == rank
        with pytest.raises(ValueError, match="Rank 0 of this world is not in the conn") as refused:
            connection.rank_of(0)
        dist.barrier(connection.group)
    return str(refused.value)


def test_ranks_of_a_world_without_rendezvous_are_not_guessed(crew: Crew, tmp_path: Path) -> None:
    for error in crew.run(_of_two_jobs_without_rendezvous, 2, str(tmp_path)):
        assert "allows no rendezvous, so nothing tells which other" in error


@pytest.mark.long
def test_of_two_threads_that_connect_one_name_one_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store, is_refused = dist.HashStore(), threading.Event()
    wait = _Rounds._wait

    def wait_later(self: _Rounds, number: int, deadline: float) -> bool:
        assert is_refused.wait(60)
        return wait(self, number, deadline)

    monkeypatch.setattr(_Rounds, "_wait", wait_later)

    def connect(timeout: timedelta) -> None:
        meshverse.connect("two threads", store, rank=0, size=2, timeout=timeout)

    with ThreadPoolExecutor() as threads:
        first = threads.submit(connect, timedelta(seconds=3))  # short-timeout: it must elapse
        store.wait(["meshverse connection two threads/rounds/0 0"], timedelta(seconds=60))
        with pytest.raises(ValueError, match=r"Another thread .* is connecting 'two threads'"):
            connect(timedelta(seconds=60))
        is_refused.set()
        with pytest.raises(RuntimeError, match="waited 0:00:03 for rank 1 of 2"):
            first.result()
    with pytest.raises(RuntimeError, match="for rank 1 of 2"):  # the name is free again
        connect(timedelta(seconds=0.1))  # short-timeout: it must elapse


# --- moves ---------------------------------------------------------------------------------------


def _weights(step: int) -> dict[str, torch.Tensor]:
    base = torch.arange(96.0).view(12, 8) + 1000 * step
    return {"qkv": base, "out": base.T.contiguous() * 2, "plain": base[0]}


def _move(folder: str, address: str, family: str) -> list[str]:
    with _own_world(folder) as (is_trainer, rank):
        wrong: list[str] = []
        with _connect(address, rank) as connection:
            if is_trainer:
                mesh: Any = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
                if family == "listed":
                    mesh = init_device_mesh(
                        "cpu", (2, 2), mesh_dim_names=("dp", "tp"), ranks=[3, 1, 0, 2]
                    )
                elif family == "stock":
                    mesh = StockMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
                first = _weights(0)
                tensors = {
                    "qkv": distribute_tensor(first["qkv"], mesh, [Shard(0), Shard(1)]),
                    "out": distribute_tensor(first["out"], mesh, [Replicate(), Shard(0)]),
                    "plain": first["plain"],
                }
                source: dict[str, Any] = {
                    **{n: Piece(tensors["qkv"], 0, i * 4, 4) for i, n in enumerate("qkv")},
                    "out": tensors["out"],
                    "plain": tensors["plain"],
                }
                target: dict[str, Any] | None = None
            else:
                mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
                fused = distribute_tensor(torch.zeros(12, 8), mesh, [Shard(1)])
                out = distribute_tensor(torch.zeros(8, 12), mesh, [Shard(1)])
                plain = torch.zeros(8)
                source, target = (
                    None,
                    {  # type: ignore[assignment]
                        **{n: Piece(fused, 0, i * 4, 4) for i, n in enumerate("qkv")},
                        "out": out,
                        "plain": plain,
                    },
                )
            with Reshard(source, target, group=connection) as move:
                for step in range(3):
                    wanted = _weights(step)
                    if is_trainer:
                        for name, tensor in tensors.items():
                            now = wanted[name]
                            if isinstance(tensor, DTensor):
                                now = distribute_tensor(now, mesh, tensor.placements).to_local()
                                tensor.to_local().copy_(now)
                            else:
                                tensor.copy_(now)
                    move()
                    if not is_trainer:
                        found = {
                            "qkv": fused.full_tensor(),
                            "out": out.full_tensor(),
                            "plain": plain,
                        }
                        wrong += [
                            f"{name} at step {step}"
                            for name, tensor in found.items()
                            if not torch.equal(tensor, wanted[name])
                        ]
                traffic = move.explain()
                peers = {*traffic.sent, *traffic.received}
                if peers & (set(range(2, 6)) if is_trainer else {0, 1}):
                    wrong.append(f"rank {rank} exchanged with {sorted(peers)}")
                if not is_trainer and traffic.lower_bound != sum(traffic.received.values()):
                    wrong.append(f"received {traffic.received}")
        return wrong


@pytest.mark.parametrize("family", in_tiers(["ours", "listed", "stock"], ["listed"]))
def test_weights_move_between_worlds_bit_by_bit(
    crew: Crew, tmp_path: Path, address: str, family: str
) -> None:
    assert crew.run(_move, _ALL, str(tmp_path), address, family) == [[]] * _ALL


def _refuse(folder: str, address: str) -> list[str]:
    with _own_world(folder) as (is_trainer, rank), _connect(address, rank) as connection:
        w = {"w": torch.ones(3)}
        texts = [
            _said(lambda: Reshard(w, None, group=connection.group)),  # type: ignore[arg-type]
            _said(lambda: Reshard(w, None, group=connection, ranks=[0])),
            _said(
                lambda: Reshard(
                    *((w, None) if is_trainer else (None, {"v": w["w"]})), group=connection
                )
            ),
        ]
        move = Reshard(w if is_trainer else None, None if is_trainer else w, group=connection)
        connection.close()
        return [*texts, _said(move)]


def _said(call: Callable[[], object]) -> str:
    try:
        call()
    except (TypeError, ValueError, RuntimeError) as error:
        return str(error)
    return "nothing"


def test_what_cannot_move_is_refused(crew: Crew, tmp_path: Path, address: str) -> None:
    for texts in crew.run(_refuse, _ALL, str(tmp_path), address):
        one, other, names, closed = texts
        assert "give the result of meshverse.connect()" in one
        assert "ranks and timeout are those of the connection" in other
        assert "'w'" in names
        assert "was closed, or ended" in closed


# --- the example ---------------------------------------------------------------------------------


@pytest.mark.long
def test_two_jobs_of_two_commands_have_the_same_weights() -> None:
    # The example itself compares them, bit by bit, at every step.
    example = Path(__file__).parents[2] / "examples" / "two_jobs.py"
    done = subprocess.run(
        [sys.executable, example], capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(": bit by bit the trainer's weights; copied in ") == 3
    assert "trainer, Rank 0 receives 0 B in each run" in done.stdout


def test_a_rank_whose_wait_was_interrupted_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(StoreKeys, "pause_between_looks", interrupt)
        with pytest.raises(KeyboardInterrupt):
            _Rounds("w", store, 1, 2, _LONG).join("2 processes")
    with ThreadPoolExecutor(2) as threads:
        joins = [
            threads.submit(_Rounds("w", store, n, 2, _LONG).join, "2 processes") for n in (0, 1)
        ]
        first, second = [each.result() for each in joins]
    assert first == second > 0


def _connect_in_threads(address: str) -> list[float]:
    """Connect several names at once, in another order on each rank, by one client of a store."""
    rank, names = dist.get_rank(), [f"name {n}" for n in range(6)]
    host, port = address.split(":")
    store = dist.TCPStore(host, int(port), is_master=rank == 0, wait_for_workers=False)

    def connect(name: str) -> float:
        with meshverse.connect(name, store, rank=rank, size=2, timeout=_LONG) as made:
            total = torch.tensor([float(rank + 1)])
            dist.all_reduce(total, group=made.group)
            return total.item()

    with ThreadPoolExecutor(len(names)) as threads:
        return list(threads.map(connect, names if rank else reversed(names)))


def test_threads_that_share_a_store_connect_at_once(crew: Crew, address: str) -> None:
    assert crew.run(_connect_in_threads, 2, address) == [[3.0] * 6] * 2


@pytest.mark.parametrize("backend", ["GLOO", "cpu:Gloo"])
def test_the_case_of_a_backends_name_does_not_matter(backend: str) -> None:
    with meshverse.connect("w", dist.HashStore(), rank=0, size=1, backend=backend) as made:
        assert made.size == 1


def test_a_backend_that_is_no_name_is_refused() -> None:
    with pytest.raises(TypeError, match=r"backend=3 of type int: pass the name of a backend"):
        meshverse.connect("w", dist.HashStore(), rank=0, size=1, backend=3)  # type: ignore[arg-type]
