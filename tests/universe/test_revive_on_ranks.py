"""Meshes, models and graphs that go on in the next world, with real process groups."""

from __future__ import annotations

import queue
import re
import threading
import weakref
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as funcol
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import meshverse
from helpers import splitting
from helpers.all_reduce import reached_by
from helpers.crew import Crew
from helpers.held import held
from helpers.sleeping import sleep
from helpers.tiers import in_tiers
from helpers.training import make_model, tensor_parallel
from helpers.turns import gives_up_after, wait_until_they_wait
from helpers.versions import needs_one_split
from meshverse import DeviceMesh, init_device_mesh, isolate
from meshverse.parallel import Reshard, Snapshot
from meshverse.universe import revival

# --- training -------------------------------------------------------------------------------------


def _losses(mesh: DeviceMesh, kind: str, rest: Callable[..., object], n_rests: int) -> list[float]:
    """Train, with rests in between; return the losses."""
    model = make_model()
    for block in model:
        tensor_parallel(block, mesh["tp"])
    axes = mesh["replicate", "shard"] if "replicate" in mesh.mesh_dim_names else mesh["shard"]
    for block in model:
        fully_shard(block, mesh=axes)
    fully_shard(model, mesh=axes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    step = torch.compile(model, backend="aot_eager") if kind == "compiled" else model
    losses: list[float] = []
    for number in range(n_rests + 1):
        if number:
            rest(step, optimizer)
        generator = torch.Generator().manual_seed(number)
        loss = step(torch.randn(8, 4, 12, generator=generator)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


_SHAPES = {
    "fsdp and tp": ((2, 2), ("shard", "tp")),
    "hsdp and tp": ((2, 2, 2), ("replicate", "shard", "tp")),
}


def _no_rest(*_: object) -> None:
    pass


def _trained(kind: str, shape: str, n_rests: int, folder: str) -> list[list[float]]:
    sizes, axes = _SHAPES[shape]
    counts: list[dict[str, int]] = []

    def rest(*holders: object) -> None:
        sleep(folder)
        assert meshverse.revive(*holders)
        counts.append(held())

    undisturbed = _losses(
        init_device_mesh("cpu", sizes, mesh_dim_names=axes), kind, _no_rest, n_rests
    )
    slept = _losses(init_device_mesh("cpu", sizes, mesh_dim_names=axes), kind, rest, n_rests)
    # gloo's threads and sockets end by themselves, so the fewest of the second half count.
    half = len(counts) // 2
    for name, at_first in counts[0].items():
        assert min(each[name] for each in counts[half:]) <= at_first, (name, counts)
    return [undisturbed, slept]


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "shape", "n_rests"),
    in_tiers(
        [
            ("eager", "fsdp and tp", 2),
            ("eager", "hsdp and tp", 2),
            ("compiled", "fsdp and tp", 2),
            ("eager", "hsdp and tp", 20),
            ("compiled", "hsdp and tp", 20),
        ],
        [("eager", "fsdp and tp", 2), ("eager", "hsdp and tp", 2), ("compiled", "fsdp and tp", 2)],
        [],
    ),
)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_training_equals_an_undisturbed_run(crew: Crew, kind, shape, n_rests, tmp_path) -> None:
    n_ranks = 8 if "hsdp" in shape else 4
    for undisturbed, slept in crew.run(_trained, n_ranks, kind, shape, n_rests, str(tmp_path)):
        assert slept == undisturbed
        assert len(set(slept)) == n_rests + 1


class _Batches(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, number: int) -> torch.Tensor:
        return torch.full((12,), float(number))


def _beside_other_threads(folder: str) -> list[str]:
    """Revive while a data loader, a thread that prefetches and one that logs are running."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tp"))
    model = make_model()
    for block in model:
        tensor_parallel(block, mesh["tp"])
    fully_shard(model, mesh=mesh["shard"])
    errors: list[str] = []
    ready: queue.Queue[torch.Tensor | None] = queue.Queue(2)
    is_over = threading.Event()

    def prefetch() -> None:
        try:
            loader = torch.utils.data.DataLoader(_Batches(), batch_size=2)
            for batch in loader:
                ready.put(batch)
        except Exception as error:  # noqa: BLE001
            errors.append(repr(error))
        ready.put(None)

    def log() -> None:
        # Makes and drops objects of all kinds, as loggers do, and looks through them.
        try:
            while not is_over.is_set():
                kept = [(number, {"of": [number]}) for number in range(1000)]
                assert sum(len(each["of"]) for _, each in kept) == 1000
                is_over.wait(0.001)  # short-timeout: a pause, as other threads need the cores
        except Exception as error:  # noqa: BLE001
            errors.append(repr(error))

    threads = [threading.Thread(target=prefetch), threading.Thread(target=log)]
    for thread in threads:
        thread.start()
    n_steps = 0
    while (batch := ready.get()) is not None:
        model(batch.expand(4, *batch.shape)).square().mean().backward()
        n_steps += 1
        sleep(folder)
        assert meshverse.revive(model)
    is_over.set()
    for thread in threads:
        thread.join()
    return [*errors, f"{n_steps} steps"]


@pytest.mark.long
def test_threads_that_run_meanwhile_see_no_error(crew: Crew, tmp_path: Path) -> None:
    assert crew.run(_beside_other_threads, 4, str(tmp_path)) == [["3 steps"]] * 4


def _pipeline(folder: str, n_rests: int) -> list[float]:
    """A pipeline's stage holds the group itself, and not its name."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    torch.manual_seed(dist.get_rank())
    layer = nn.Linear(6, 6)
    stage = PipelineStage(
        layer, mesh.get_local_rank(), 2, torch.device("cpu"), group=mesh.get_group()
    )
    schedule = Schedule1F1B(
        stage, n_microbatches=2, loss_fn=lambda out, goal: (out - goal).square().mean()
    )
    losses = []
    for number in range(4):
        if number and n_rests:
            sleep(folder)
            meshverse.revive(schedule)
        given = torch.Generator().manual_seed(number)
        batch, goal = (torch.randn(4, 6, generator=given) for _ in range(2))
        found: list[torch.Tensor] = []
        if mesh.get_local_rank() == 0:
            schedule.step(batch)
        else:
            schedule.step(target=goal, losses=found)
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter -= 0.1 * parameter.grad
                parameter.grad = None
        losses += [loss.item() for loss in found]
    return losses


def _pipelines(folder: str) -> list[list[float]]:
    return [_pipeline(folder, 0), _pipeline(folder, 1)]


@pytest.mark.long
def test_a_pipeline_goes_on(crew: Crew, tmp_path: Path) -> None:
    first, last = crew.run(_pipelines, 2, str(tmp_path))
    assert first == [[], []]
    assert last[0] == last[1]
    assert len(set(last[0])) == 8


def _moved(folder: str) -> bool:
    trainer = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    engine = init_device_mesh(
        "cpu", (2, 2), mesh_dim_names=("copies", "tp"), universe=trainer.universe
    )
    source = {"w": distribute_tensor(torch.arange(24.0).view(8, 3), trainer, [Shard(0)])}
    target = {"w": DTensor.from_local(torch.zeros(4, 3), engine["tp"], [Shard(0)])}
    move = Reshard(source, target)
    move()
    for number in range(2):
        sleep(folder)
        meshverse.revive()
        source["w"].to_local().fill_(number)
        move()
        assert bool((target["w"].to_local() == number).all())
    move.close()
    return True


@pytest.mark.long
def test_a_reshard_goes_on(crew: Crew, tmp_path: Path) -> None:
    assert crew.run(_moved, 4, str(tmp_path)) == [True] * 4


def _kept_in_memory(folder: str) -> list[tuple[int | None, list[float]]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    own = mesh.flatten("all", isolate="own").get_group()
    snapshots = [Snapshot(f"{folder}/default"), Snapshot(f"{folder}/own", process_group=own)]
    del own
    state = {"w": distribute_tensor(torch.arange(8.0), mesh["dp"], [Shard(0)])}
    for snapshot in snapshots:
        snapshot.save(1, state)
    sleep(folder)
    meshverse.revive(snapshots)
    loaded = []
    for snapshot in snapshots:
        snapshot.save(2, state)
        state["w"].to_local().zero_()
        loaded.append((snapshot.load(state), state["w"].full_tensor().tolist()))
    return loaded


@pytest.mark.long
def test_a_snapshot_goes_on(crew: Crew, tmp_path: Path) -> None:
    expected = (2, list(range(8)))
    assert crew.run(_kept_in_memory, 4, str(tmp_path)) == [[expected, expected]] * 4


def _saved(folder: str) -> list[float]:
    import torch.distributed.checkpoint as dcp

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    state = {"w": distribute_tensor(torch.arange(8.0), mesh["dp"], [Shard(0)])}
    sleep(folder)
    meshverse.revive()
    dcp.save(state, checkpoint_id=f"{folder}/saved")
    state["w"].to_local().zero_()
    sleep(folder)
    meshverse.revive()
    dcp.load(state, checkpoint_id=f"{folder}/saved")
    return state["w"].full_tensor().tolist()


@pytest.mark.long
def test_checkpoints_go_on(crew: Crew, tmp_path: Path) -> None:
    assert crew.run(_saved, 4, str(tmp_path)) == [list(range(8))] * 4


# --- meshes and groups ----------------------------------------------------------------------------


def _meshes(folder: str) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    tp, view = mesh["tp"], mesh.unflatten("dp", (2, 1), ("a", "b"))
    flat = mesh.flatten("all", isolate="own")
    pair = mesh.universe.group([1, 2], name="pair")
    with isolate("x"):
        tagged = mesh["dp"]
    part = init_device_mesh(
        "cpu", (2,), ranks=[0, 1], universe=mesh.universe, mesh_dim_names=("half",)
    )
    other = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    lazy = init_device_mesh("cpu", (2, 2), mesh_dim_names=("p", "q"), lazy=True)
    lazy.get_group("p")
    before = {each: hash(each) for each in (mesh, tp, view, flat, tagged, other)}
    names = [each.group_names for each in before]
    created = mesh.universe.explain().created
    holder = nn.Identity()
    holder.process_group = tp.get_group()
    group = weakref.ref(tp.get_group())
    if dist.get_rank() in (1, 2):
        assert pair.size() == 2
    del pair
    sleep(folder)
    for use in (mesh.get_group, lambda axis: lazy.get_group("q")):
        with pytest.raises(RuntimeError, match="gone"):
            use("tp")
    revived = meshverse.revive({"model": [holder, None]}, mesh)
    assert set(revived) >= {mesh.universe, other.universe, lazy.universe}
    assert {each: hash(each) for each in before} == before
    assert [each.group_names for each in before] == names
    assert mesh["tp"] is tp
    assert type(tp._dim_group_names) is list
    assert holder.process_group is tp.get_group()
    assert group() is None
    assert mesh.universe.explain().created == created
    assert mesh.universe.groups.find(lazy.group_names[1]) is None
    assert lazy.universe.groups.find_planned(lazy.group_names[1]) is not None
    fresh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    assert fresh == mesh
    assert not set(fresh.group_names) & set(mesh.group_names)
    return {
        "reached": [
            reached_by(mesh.get_group("dp")),
            reached_by(tp.get_group()),
            reached_by(view.get_group("a")),
            reached_by(flat.get_group()),
            reached_by(tagged.get_group()),
            reached_by(other.get_group("tp")),
            reached_by(lazy.get_group("q")),
            reached_by(fresh.get_group("dp")),
        ],
        "pair": mesh.universe.group([1, 2], name="pair"),
        "part": reached_by(part.get_group()) if dist.get_rank() < 2 else None,
        "coordinate": (mesh.get_coordinate(), "_coordinate_on_dim" in vars(mesh)),
    } | {"pair": None}


def test_meshes_and_their_groups_are_the_same_again(crew: Crew, tmp_path: Path) -> None:
    for rank, seen in enumerate(crew.run(_meshes, 4, str(tmp_path))):
        dp = [1, 0, 1, 0] if rank % 2 == 0 else [0, 1, 0, 1]
        tp = [1, 1, 0, 0] if rank < 2 else [0, 0, 1, 1]
        assert seen["reached"] == [dp, tp, dp, [1] * 4, dp, tp, tp, dp]
        assert seen["part"] == ([1, 1, 0, 0] if rank < 2 else None)
        assert seen["coordinate"] == ((rank // 2, rank % 2), True)


# --- what is refused, and changes nothing ---------------------------------------------------------


def _refused(folder: str, kind: str) -> tuple[str, list[int]]:
    """Rank 1 cannot revive; all raise. Then the reason is taken away, and all can."""
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    kept: list[Any] = []
    if kind == "wrapped":
        layer = nn.Linear(2, 2)
        kept = [nn.parallel.DistributedDataParallel(layer, process_group=mesh.get_group("dp"))]
    elif kind == "given":
        pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        kept = [DeviceMesh.from_group(pairs[rank // 2], "cpu")]
        del pairs
    elif kind == "other meshes":
        kept = [init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))]
    elif kind == "own group":
        kept = [nn.Identity()]
        kept[0].group = dist.new_group([0, 1, 2, 3])
    elif kind == "unknown":
        kept = [threading.Lock()]
    if (rank == 1) is (kind == "other meshes"):
        kept.clear()
    sleep(folder)
    if kind == "made before" and rank == 1:
        kept.append(DeviceMesh("cpu", range(4)))
    message = _message(kept)
    with pytest.raises(RuntimeError, match="gone"):
        mesh.get_group("tp")
    kept.clear()
    assert mesh.universe in meshverse.revive()
    return message, reached_by(mesh.get_group("tp"))


def _message(holder: object = None) -> str:
    with pytest.raises(RuntimeError, match="nothing has changed") as caught:
        meshverse.revive(holder)
    return str(caught.value)


_REASONS = {
    "unknown": r"it cannot tell which process groups an object of type lock holds: give modules",
    "wrapped": r"DistributedDataParallel.process_group, which its other parts use too: wrap",
    "own group": r"Identity.group is an ended process group that no mesh to revive has",
    "given": r"was created by the program, which must create it again",
    "other meshes": r"only ranks 0, 2, 3 still hold meshes of the universe of ranks 0 to 3, num",
    "made before": r"a mesh over ranks 0 to 3 was created in the new world already",
}


@pytest.mark.parametrize("kind", in_tiers(_REASONS, ["unknown"]))
def test_what_is_refused_is_refused_on_all_ranks(crew: Crew, kind: str, tmp_path: Path) -> None:
    for rank, (message, reached) in enumerate(crew.run(_refused, 4, str(tmp_path), kind)):
        assert re.search(rf"\n  (rank 1: )?.*{_REASONS[kind]}", message), message
        assert reached == ([1, 1, 0, 0] if rank < 2 else [0, 0, 1, 1])


def _late(folder: str) -> str:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    sleep(folder)
    rank, store, limit = dist.get_rank(), dist.distributed_c10d._get_default_store(), None
    if rank == 2:
        store.wait(["rank 0 got an error"])
    elif rank == 0:  # the one that gives up comes when the others wait
        wait_until_they_wait(1, 3)
        limit = timedelta(seconds=2)  # short-timeout: it must elapse
    with pytest.raises(RuntimeError, match=r"^revive\(\) has changed nothing: ") as caught:
        meshverse.revive(timeout=limit)
    if rank == 0:
        store.set("rank 0 got an error", "")
    assert mesh.universe in meshverse.revive()
    assert sum(reached_by(mesh.get_group("dp"))) == 2
    return str(caught.value)


@pytest.mark.long
def test_a_rank_that_does_not_call_it_is_named(crew: Crew, tmp_path: Path) -> None:
    for message in crew.run(_late, 4, str(tmp_path)):
        assert "3 of 4 members joined" in message
        assert re.search(r"ranks? \[?2\b", message), message


def _failed_in_between(folder: str) -> list[list[int]]:
    """A group cannot be created, as if a rank had died; the next world has them all."""
    limit = timedelta(seconds=60)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"), timeout=limit)
    holder = nn.Module()
    holder.dp, holder.tp = mesh.get_group("dp"), mesh.get_group("tp")
    sleep(folder)
    made, create = dist.distributed_c10d._new_process_group_helper, revival._create_groups

    def refuse_second(size: int, rank: int, ranks: list[int], *rest: Any, **named: Any) -> Any:
        if ranks in ([0, 1], [2, 3]):
            raise RuntimeError("this rank is lost")
        return made(size, rank, ranks, *rest, **named)

    def give_up_soon(*arguments: Any) -> None:  # not before: to agree, all ranks must come
        with gives_up_after(5):
            create(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist.distributed_c10d, "_new_process_group_helper", refuse_second)
        patch.setattr(revival, "_create_groups", give_up_soon)
        with pytest.raises(RuntimeError, match=r"this rank is lost|of 2 members joined"):
            meshverse.revive(holder)
    sleep(folder, is_broken=True)
    assert mesh.universe in meshverse.revive(holder)
    assert holder.dp is mesh.get_group("dp")
    assert holder.tp is mesh.get_group("tp")
    return [reached_by(holder.dp), reached_by(holder.tp)]


@pytest.mark.long
def test_it_can_be_called_again_in_the_world_after_one_in_which_it_failed(
    crew: Crew, tmp_path: Path
) -> None:
    for rank, reached in enumerate(crew.run(_failed_in_between, 4, str(tmp_path))):
        dp = [1, 0, 1, 0] if rank % 2 == 0 else [0, 1, 0, 1]
        assert reached == [dp, [1, 1, 0, 0] if rank < 2 else [0, 0, 1, 1]]


# --- ranks that have done different things before -------------------------------------------------


def _some_have_meshes(folder: str) -> list[list[int]]:
    """A trainer is on some ranks only; then all make a mesh."""
    rank = dist.get_rank()
    trainer = None
    if rank < 2:
        trainer = init_device_mesh("cpu", (2,), ranks=[0, 1], mesh_dim_names=("dp",))
    reached = []
    for _ in range(2):
        sleep(folder)
        revived = meshverse.revive()
        assert len(revived) == (rank < 2)
        limit = timedelta(seconds=60)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"), timeout=limit)
        reached.append(reached_by(mesh.get_group("tp")))
        if trainer is not None:
            assert reached_by(trainer.get_group()) == [1, 1, 0, 0]
        mesh.universe.destroy()
        dist.barrier()
        del mesh
    return reached


def test_ranks_without_meshes_take_part(fresh_crew: Crew, tmp_path: Path) -> None:
    # Of an earlier test, torch's caches of DTensor can keep meshes, which ranks without new ones
    # would revive.
    for rank, reached in enumerate(fresh_crew.run(_some_have_meshes, 4, str(tmp_path))):
        assert reached == [[1, 1, 0, 0] if rank < 2 else [0, 0, 1, 1]] * 2


def _some_have_derived(folder: str, fails: bool) -> bool:
    """Some ranks have made a call before that the others make later; then all make one more."""
    rank, limit = dist.get_rank(), timedelta(seconds=60)
    mesh = init_device_mesh(
        "cpu", (2, 2), mesh_dim_names=("dp", "tp"), timeout=limit, lazy=not fails
    )
    if rank < 2 and fails:
        with gives_up_after(5), pytest.raises(RuntimeError, match="members joined"):
            mesh.flatten("all", isolate="own")
    elif rank < 2:
        mesh.flatten("all", isolate="own")
    sleep(folder)
    meshverse.revive()
    mesh.flatten("all", isolate="own")
    last = mesh.flatten("all2", isolate="own2")
    return reached_by(last.get_group()) == [1] * 4


@pytest.mark.parametrize("fails", in_tiers([False, True], [False]))
def test_calls_of_some_ranks_are_no_mismatch(crew: Crew, fails: bool, tmp_path: Path) -> None:
    assert crew.run(_some_have_derived, 4, str(tmp_path), fails) == [True] * 4


def _borrowed(folder: str) -> str:
    rank = dist.get_rank()
    pairs = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3])]
    layout = torch.arange(4).view(2, 2)
    both = [pairs[2 + rank % 2], pairs[rank // 2]]
    given = DeviceMesh.from_group(both, "cpu", mesh=layout, mesh_dim_names=("y", "tp"))
    own = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "x"))
    joined = DeviceMesh.concatenate([own["dp"], given["tp"]])
    del pairs, both, given
    sleep(folder)
    message = _message()
    assert joined.ndim == 2
    return message


@pytest.mark.long
def test_a_group_of_the_programs_own_in_a_joined_mesh_is_refused(
    crew: Crew, tmp_path: Path
) -> None:
    for message in crew.run(_borrowed, 4, str(tmp_path)):
        assert "was created by the program, which must create it again" in message


def _wrapped_over_all(folder: str) -> str:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    wrapped = [nn.parallel.DistributedDataParallel(nn.Linear(2, 2))]
    sleep(folder)
    message = _message(wrapped)
    held = nn.Identity()
    held.group = dist.group.WORLD
    assert mesh.universe in meshverse.revive(held)
    assert held.group is dist.group.WORLD
    return message


@pytest.mark.long
def test_a_model_wrapped_over_the_default_group_is_refused(crew: Crew, tmp_path: Path) -> None:
    for message in crew.run(_wrapped_over_all, 4, str(tmp_path)):
        assert "DistributedDataParallel.process_group, which its other parts use too" in message


def _compiled_with_the_group(folder: str) -> list[list[float]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

    def total(x: torch.Tensor, group: Any) -> torch.Tensor:
        return funcol.all_reduce(x, "sum", group) + 1

    compiled = torch.compile(total, backend="aot_eager")
    sums = [compiled(torch.ones(2), mesh.get_group("dp")).tolist()]
    for _ in range(2):
        sleep(folder)
        meshverse.revive()
        sums.append(compiled(torch.ones(2), mesh.get_group("dp")).tolist())
    return sums


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_code_that_was_compiled_with_a_group_goes_on(crew: Crew, tmp_path: Path) -> None:
    assert crew.run(_compiled_with_the_group, 4, str(tmp_path)) == [[[3.0, 3.0]] * 3] * 4


def _two_worlds(folder: str) -> bool:
    first = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    sleep(folder)
    second = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    if dist.get_rank() == 0:
        del second
    sleep(folder)
    message = _message()
    assert "still hold meshes of the universe of ranks 0 to 3, number 0" in message, message
    second = None
    assert meshverse.revive() == ()
    # The cure of its error names revive() no more, which cannot help.
    with pytest.raises(RuntimeError, match=r"gone .* again after init_process_group\(\)\.$"):
        first.get_group("dp")
    return True


@pytest.mark.long
def test_only_the_world_that_ended_last_is_revived(crew: Crew, tmp_path: Path) -> None:
    assert crew.run(_two_worlds, 4, str(tmp_path)) == [True] * 4


def _with_deleted_meshes(folder: str) -> list[int]:
    """Groups of meshes that nobody has any more are not created again."""
    rank = dist.get_rank()
    large = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    small = init_device_mesh("cpu", (2,), ranks=[0, 1], mesh_dim_names=("a",)) if rank < 2 else None
    del large
    sleep(folder)
    revived = meshverse.revive()
    return [
        len(revived),
        held()["groups"],
        *([] if small is None else reached_by(small.get_group())),
    ]


def test_groups_of_deleted_meshes_are_not_created_again(crew: Crew, tmp_path: Path) -> None:
    for rank, seen in enumerate(crew.run(_with_deleted_meshes, 4, str(tmp_path))):
        assert seen == ([1, 2, 1, 1, 0, 0] if rank < 2 else [0, 1])


def _with_a_mesh_before(folder: str) -> list[int]:
    """A mesh that was made and destroyed before revive() has used up its groups' names."""
    whole = init_device_mesh("cpu", (4,), mesh_dim_names=("all",))
    sleep(folder)
    temporary = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dist.barrier()
    temporary.universe.destroy()
    del temporary
    assert meshverse.revive() == (whole.universe,)
    again = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    return reached_by(again.get_group("tp"))


@pytest.mark.long
def test_names_that_were_used_before_are_not_used_again(crew: Crew, tmp_path: Path) -> None:
    for rank, reached in enumerate(crew.run(_with_a_mesh_before, 4, str(tmp_path))):
        assert reached == ([1, 1, 0, 0] if rank < 2 else [0, 0, 1, 1])


# --- groups that are split off the default group --------------------------------------------------


def _split_groups(library: str, folder: str) -> list[Any]:
    Path(folder, "first").mkdir(exist_ok=True)
    splitting.restart(library, f"{folder}/first")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    half = init_device_mesh("cpu", (2,), ranks=[1, 3], mesh_dim_names=("half",))
    names, held = mesh.group_names, nn.Identity()
    held.group = mesh.get_group("tp")
    Path(folder, "second").mkdir(exist_ok=True)
    splitting.restart(library, f"{folder}/second")
    meshverse.revive(held)
    assert mesh.group_names == names
    assert held.group is mesh.get_group("tp")
    splits = splitting.backend_of(dist.group.WORLD).splits
    in_half = reached_by(half.get_group()) if dist.get_rank() % 2 else None
    return [splits, [reached_by(mesh.get_group(axis)) for axis in ("dp", "tp")], in_half]


def _unbound_afterwards(library: str, folder: str) -> str:
    Path(folder, "first").mkdir(exist_ok=True)
    splitting.restart(library, f"{folder}/first")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    Path(folder, "second").mkdir(exist_ok=True)
    splitting.restart(library, f"{folder}/second", is_bound=False)
    assert mesh.has_groups
    return _message()


@pytest.mark.long
def test_another_kind_of_default_group_is_refused(
    bound_crew: Crew, via_store_library: Path, tmp_path: Path
) -> None:
    for message in bound_crew.run(_unbound_afterwards, 4, str(via_store_library), str(tmp_path)):
        assert "is bound to a device differently" in message


@needs_one_split
def test_groups_are_split_off_the_new_default_group(
    bound_crew: Crew, via_store_library: Path, tmp_path: Path
) -> None:
    answers = bound_crew.run(_split_groups, 4, str(via_store_library), str(tmp_path))
    for rank, seen in enumerate(answers):
        splits, reached, in_half = seen
        dp = [1, 0, 1, 0] if rank % 2 == 0 else [0, 1, 0, 1]
        assert splits == (3 if rank % 2 else 2)
        assert reached == [dp, [1, 1, 0, 0] if rank < 2 else [0, 0, 1, 1]]
        assert in_half == (dp if rank % 2 else None)
