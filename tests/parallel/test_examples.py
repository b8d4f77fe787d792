"""The examples of trainers: on several meshes, from checkpoints of others, after a kill.

In `make test` they run on the processes that tests share, which have imported torch; in the other
tiers under torchrun, too.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import re
import runpy
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from helpers.crew import Crew
from helpers.forked import printed_by, torchrun

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

_EXAMPLES = Path(__file__).parents[2] / "examples"
_TRAIN, _RL, _FINETUNE = (_EXAMPLES / f"{name}.py" for name in ("train", "rl", "finetune"))
_SECONDS = 900  # torchrun, and imports by eight processes on a busy machine
_STEPS = 4
_OLD = pytest.mark.skipif(transformers.__version__.startswith("4."), reason="experts are a list")

# Losses are printed with six decimals, norms with four. Gradients sum over the 512 tokens of a
# batch, and go forward and backward through four layers of about a dozen operations in each step:
# random errors of so many roundings grow as the square root of their number. The factor 10 is for
# sums that cancel.
_ROUNDING = 10 * math.sqrt(512 * 4 * 12 * 2 * _STEPS) * torch.finfo(torch.float32).eps  # 5e-4

pytestmark = [pytest.mark.processes, pytest.mark.timeout(4 * _SECONDS)]

Run = Callable[..., str]  # an example on a number of ranks, with arguments; what rank 0 prints


def test_they_are_short() -> None:
    assert len(_TRAIN.read_text().splitlines()) < 150
    assert len(_FINETUNE.read_text().splitlines()) < 120


# --- two ways to run an example ------------------------------------------------------------------


def environment() -> dict[str, str]:
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        # torchrun keeps one store for all attempts, on which gloo cannot start again.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }


def under_torchrun(ranks: int, example: Path, *arguments: object) -> str:
    with tempfile.TemporaryDirectory() as logs:
        given = (example, *arguments)
        started = torchrun(ranks, *given, folder=Path(logs), env=environment())
        status, out, err = started.communicate(_SECONDS)
        said = printed_by(0, Path(logs))
        assert status == 0, said + out + err[-3000:]
    return said


def run_as_torchrun_does(example: str, arguments: list[str], port: int, store: str) -> str:
    """Run an example on this rank, with the variables that torchrun sets; what it prints."""
    rank, world = dist.get_rank(), dist.get_world_size()
    dist.barrier()
    dist.destroy_process_group()
    variables = {
        "RANK": rank,
        "WORLD_SIZE": world,
        "LOCAL_RANK": rank,
        "LOCAL_WORLD_SIZE": world,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "TORCHELASTIC_USE_AGENT_STORE": True,
    }
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as said:
        for name, value in variables.items():
            patch.setenv(name, str(value))
        patch.setattr(sys, "argv", [example, *arguments])
        runpy.run_path(example, run_name="__main__")
    # The crew ends the world that it started: give it one.
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    return said.getvalue()


@pytest.fixture
def on_crew(crew: Crew, tmp_path: Path) -> Run:
    """Run an example on processes that have imported torch already."""

    def run(ranks: int, example: Path, *arguments: object) -> str:
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        store = tmp_path / f"store-{server.port}"
        given = (str(example), [*map(str, arguments)], server.port, str(store))
        return crew.run(run_as_torchrun_does, ranks, *given, timeout=_SECONDS)[0]

    return run


# --- training ------------------------------------------------------------------------------------


def losses_in(output: str) -> dict[int, tuple[float, float]]:
    """By step, the loss and the norm of the gradients."""
    lines = re.findall(r"^step (\d+) loss (\S+) norm (\S+)", output, flags=re.MULTILINE)
    return {int(step): (float(loss), float(norm)) for step, loss, norm in lines}


def train(run: Run, ranks: int, *arguments: object) -> dict[int, tuple[float, float]]:
    return losses_in(run(ranks, _TRAIN, "--dtype=float32", *arguments))


def check_resumed(
    run: Run,
    folder: Path,
    first: list[object],
    then: dict[str, tuple[int, list[object]]],
) -> None:
    """Train on (dp 2, tp 2) with a checkpoint half-way, and go on from it in other ways."""
    half = _STEPS // 2
    settings = [f"--steps={_STEPS}", f"--save-every={half}"]
    whole = train(run, 4, *first, *settings, f"--folder={folder / 'whole'}")
    assert list(whole) == list(range(1, _STEPS + 1))
    assert whole[_STEPS][0] < whole[1][0]
    for name, (ranks, arguments) in then.items():
        shutil.copytree(folder / "whole" / f"step-{half}", folder / name / f"step-{half}")
        resumed = train(run, ranks, *arguments, *settings, f"--folder={folder / name}")
        assert list(resumed) == list(range(half + 1, _STEPS + 1)), name
        for step, seen in resumed.items():
            assert seen == pytest.approx(whole[step], rel=_ROUNDING), (name, step)


@pytest.mark.long
def test_a_dense_model_goes_on_on_another_mesh(on_crew: Run, tmp_path: Path) -> None:
    then: dict[str, tuple[int, list[object]]] = {
        "replicas": (4, ["--dp-replicate=2", "--dp-shard=2"])
    }
    check_resumed(on_crew, tmp_path, ["--tp=2", "--save-in-background"], then)


@pytest.mark.sweep
def test_a_dense_model_goes_on_on_all_meshes(tmp_path: Path) -> None:
    check_resumed(
        under_torchrun,
        tmp_path,
        ["--tp=2", "--save-in-background"],
        {
            "replicas with tp": (8, ["--tp=2", "--dp-replicate=2", "--dp-shard=2"]),
            "pipeline": (8, ["--pp=2", "--tp=2"]),
            "one": (1, []),
        },
    )


@pytest.fixture(scope="module")
def sparse_config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the config of a tiny model with experts."""
    folder = tmp_path_factory.mktemp("sparse")
    transformers.Qwen3MoeConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
    ).save_pretrained(folder)
    return folder


@_OLD
@pytest.mark.long
def test_a_model_with_experts_goes_on_on_another_mesh(
    on_crew: Run, tmp_path: Path, sparse_config: Path
) -> None:
    config = f"--config={sparse_config}"
    then: dict[str, tuple[int, list[object]]] = {
        "pipeline": (8, [config, "--pp=2", "--ep=2", "--tp=2"])
    }
    check_resumed(on_crew, tmp_path, [config, "--tp=2", "--ep=2"], then)


@_OLD
@pytest.mark.sweep
def test_a_model_with_experts_goes_on_on_all_meshes(tmp_path: Path, sparse_config: Path) -> None:
    config = f"--config={sparse_config}"
    check_resumed(
        under_torchrun,
        tmp_path,
        [config, "--tp=2", "--ep=2"],
        {
            "experts over more": (8, [config, "--ep=4"]),
            "pipeline": (8, [config, "--pp=2", "--ep=2", "--tp=2"]),
        },
    )


@pytest.mark.sweep
def test_training_goes_on_when_a_rank_is_killed(on_crew: Run, tmp_path: Path) -> None:
    """torchrun starts all ranks again, and these go on from the last checkpoint."""
    steps = 16
    settings = [f"--steps={steps}", "--save-every=3", "--tp=2", "--save-in-background"]
    expected = train(on_crew, 4, *settings)
    checkpoints, logs = tmp_path / "checkpoints", tmp_path / "logs"
    arguments = ["--dtype=float32", *settings, f"--folder={checkpoints}"]
    job = torchrun(4, _TRAIN, *arguments, folder=logs, restarts=2, env=environment())
    while 5 not in losses_in(printed_by(0, logs)) or not any(checkpoints.glob("*/.metadata")):
        assert job.is_alive(), job.communicate()
        time.sleep(0.05)  # sleep: it looks again
    [process] = writers_of(logs, rank=2)
    os.kill(process, signal.SIGKILL)
    status, out, err = job.communicate(_SECONDS)
    text = printed_by(0, logs)
    assert status == 0, text + out + err
    before, said, after = text.partition("going on from")
    assert said, text
    assert 5 <= max(losses_in(before)) < steps
    assert max(losses_in(after)) == steps
    for part in (before, after):
        for step, seen in losses_in(part).items():
            assert seen == pytest.approx(expected[step], rel=_ROUNDING), step


def writers_of(logs: Path, rank: int) -> list[int]:
    """The processes whose standard output is a log of this rank."""
    return [
        int(stdout.parts[2])
        for stdout in Path("/proc").glob("[0-9]*/fd/1")
        if Path(os.path.realpath(stdout)).match(f"{logs}/*/*/{rank}/stdout.log")
    ]


# --- fine-tuning ---------------------------------------------------------------------------------


@_OLD
@pytest.mark.long
def test_a_checkpoint_is_tuned_alike_on_two_meshes(on_crew: Run, tmp_path: Path) -> None:
    """Losses are equal, and transformers loads the new checkpoint, which counts."""
    said = on_crew(4, _FINETUNE, "--tp=2", "--ep=2", f"--out={tmp_path / 'split'}")
    losses = losses_in(said)
    assert losses[len(losses)][0] < losses[1][0] / 10
    assert "100% after" in said

    given = f"--model={tmp_path / 'split-before'}"
    few = on_crew(2, _FINETUNE, given, f"--steps={_STEPS}", f"--out={tmp_path / 'whole'}")
    for step, seen in losses_in(few).items():
        assert seen == pytest.approx(losses[step], rel=_ROUNDING), step

    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "split")
    tokens = torch.arange(12).expand(2, -1) + torch.tensor([[3], [40]])
    settings = {"min_new_tokens": 8, "max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    assert model.generate(tokens[:, :4], **settings).tolist() == tokens.tolist()


# --- reinforcement learning ----------------------------------------------------------------------


def check_generator(output: str, steps: int) -> None:
    # The example itself asserts that both generate the same, at every step.
    rewards = re.findall(r"^step (\d) reward ([\d.]+) ", output, re.MULTILINE)
    assert [int(step) for step, _ in rewards] == [*range(1, steps + 1)]
    assert "Rank 0 receives 0 B in each run" in output


@pytest.mark.long
def test_the_generator_has_the_trainers_weights(on_crew: Run) -> None:
    check_generator(on_crew(4, _RL, "--tp=2", "--steps=2", "--batch=2", "--new=4"), 2)


@pytest.mark.sweep
def test_generators_have_the_trainers_weights_under_torchrun() -> None:
    check_generator(under_torchrun(8, _RL, "--tp=2", "--steps=3"), 3)
