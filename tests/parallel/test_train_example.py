"""examples/train.py under torchrun: on several meshes, from checkpoints of others, after a kill."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

_EXAMPLE = Path(__file__).parents[2] / "examples" / "train.py"
_SECONDS = 240  # torchrun, and imports by eight processes on a busy machine
_STEPS = 6
# torchrun keeps one store for all attempts, on which gloo cannot start again.
_ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}

pytestmark = [pytest.mark.processes, pytest.mark.timeout(2 * _SECONDS + 60)]


def test_it_is_short() -> None:
    assert len(_EXAMPLE.read_text().splitlines()) < 150


def command(ranks: int, *arguments: object, restarts: int = 0) -> list[str]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    torchrun += [f"--nproc-per-node={ranks}", "--local-ranks-filter=0"]
    torchrun += [f"--max-restarts={restarts}", str(_EXAMPLE), "--dtype=float32"]
    return [*torchrun, *map(str, arguments)]


def losses_in(output: str) -> dict[int, tuple[float, float]]:
    """By step, the loss and the norm of the gradients."""
    lines = re.findall(r"^step (\d+) loss (\S+) norm (\S+)", output, flags=re.MULTILINE)
    return {int(step): (float(loss), float(norm)) for step, loss, norm in lines}


def train(ranks: int, *arguments: object) -> dict[int, tuple[float, float]]:
    run = subprocess.run(
        command(ranks, *arguments),
        env=_ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=_SECONDS,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return losses_in(run.stdout)


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


def _swept(cases: dict[str, tuple[int, list[object]]]) -> dict[str, tuple[int, list[object]]]:
    """Cases of `make families`, which has the time; others show the same with less."""
    return cases if "MESHVERSE_ALL_FAMILIES" in os.environ else {}


def check_resumed(
    folder: Path, first: list[object], then: dict[str, tuple[int, list[object]]]
) -> None:
    """Train on (dp 2, tp 2) with a checkpoint half-way, and go on from it in other ways."""
    half = _STEPS // 2
    settings = [f"--steps={_STEPS}", f"--save-every={half}"]
    whole = train(4, *first, *settings, f"--folder={folder / 'whole'}")
    assert list(whole) == list(range(1, _STEPS + 1))
    assert whole[_STEPS][0] < whole[1][0]
    for name, (ranks, arguments) in then.items():
        shutil.copytree(folder / "whole" / f"step-{half}", folder / name / f"step-{half}")
        resumed = train(ranks, *arguments, *settings, f"--folder={folder / name}")
        assert list(resumed) == list(range(half + 1, _STEPS + 1)), name
        for step, seen in resumed.items():
            assert seen == pytest.approx(whole[step], rel=1e-4), (name, step)


def test_a_dense_model_goes_on_on_other_meshes(tmp_path: Path) -> None:
    check_resumed(
        tmp_path,
        ["--tp=2", "--save-in-background"],
        {
            "replicas": (4, ["--dp-replicate=2", "--dp-shard=2"]),
            **_swept(
                {
                    "replicas with tp": (8, ["--tp=2", "--dp-replicate=2", "--dp-shard=2"]),
                    "pipeline": (8, ["--pp=2", "--tp=2"]),
                    "one": (1, []),
                }
            ),
        },
    )


@pytest.mark.skipif(transformers.__version__ < "5", reason="its experts are lists of modules")
@pytest.mark.skipif("MESHVERSE_ALL_FAMILIES" not in os.environ, reason="run by make families")
def test_a_model_with_experts_goes_on_on_other_meshes(tmp_path: Path, sparse_config: Path) -> None:
    config = f"--config={sparse_config}"
    check_resumed(
        tmp_path,
        [config, "--tp=2", "--ep=2"],
        {
            **_swept({"experts over more": (8, [config, "--ep=4"])}),
            "pipeline": (8, [config, "--pp=2", "--ep=2", "--tp=2"]),
        },
    )


@pytest.mark.skipif("MESHVERSE_ALL_FAMILIES" not in os.environ, reason="run by make families")
def test_training_goes_on_when_a_rank_is_killed(tmp_path: Path) -> None:
    """torchrun starts all ranks again, and these go on from the last checkpoint."""
    steps = 16
    settings = [f"--steps={steps}", "--save-every=3", "--tp=2", "--save-in-background"]
    expected = train(4, *settings)
    arguments = [*settings, f"--folder={tmp_path}"]
    log = tmp_path / "log"
    with log.open("w") as output:
        torchrun = subprocess.Popen(
            command(4, *arguments, restarts=2),
            env=_ENVIRONMENT,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            deadline = time.monotonic() + _SECONDS
            while len(losses_in(log.read_text())) < 5 and time.monotonic() < deadline:
                time.sleep(0.05)
            os.kill(workers_of(torchrun.pid)[2], signal.SIGKILL)
            assert torchrun.wait(_SECONDS) == 0, log.read_text()
        finally:
            torchrun.kill()
    text = log.read_text()
    assert "going on from" in text
    before, _, after = text.partition("going on from")
    assert 5 <= max(losses_in(before)) < steps
    assert max(losses_in(after)) == steps
    for part in (before, after):
        for step, seen in losses_in(part).items():
            assert seen == pytest.approx(expected[step], rel=1e-4), step


def workers_of(pid: int) -> list[int]:
    """The processes that torchrun started."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
