"""Train under torchtitan's own trainer, with torch's meshes and with ours, on CPU processes.

    python tools/train_torchtitan.py
    python tools/train_torchtitan.py --processes 4 --parallelism.spmd_backend full_dtensor

It needs torchtitan and meshverse installed, and fetches nothing: a tokenizer and texts are made in
a temporary folder. torchtitan's `Trainer` trains its debug-size model twice, each time in new gloo
processes: with stock meshes, and after `meshverse.install()`. Losses, gradient norms and weights
must be equal bit for bit; the numbers of process groups are printed. Arguments that this program
does not know go to torchtitan, in both runs.

torchtitan is written for GPUs. `prepare_for_cpu`, `use_plain_attention` and `reduce_by_sums` are
all that is changed of it, in both runs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed

STOCK, OURS = "stock torch", "Meshverse"
_SIDE = "TRAIN_TORCHTITAN_SIDE"  # set in the processes that train

_WORDS, _TEXTS, _WORDS_OF_A_TEXT = 200, 400, 120
_SECONDS = 900  # of one run, on a machine that is busy with other things too


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=8, choices=(4, 8))
    parser.add_argument("--steps", type=int, default=4)
    options, of_torchtitan = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_tokenizer(folder / "tokenizer")
        make_texts(folder / "texts")
        arguments = [*arguments_of(folder, options.processes, options.steps), *of_torchtitan]
        ranks = {
            side: train(side, options.processes, arguments, folder / f"run{number}")
            for number, side in enumerate((STOCK, OURS))
        }
    return report(ranks)


def arguments_of(folder: Path, processes: int, steps: int) -> list[str]:
    """Return torchtitan's command line: HSDP and TP on 8 processes, FSDP and TP on 4."""
    values = {
        "module": "llama3",
        "config": "llama3_debugmodel",
        "hf_assets_path": str(folder / "tokenizer"),
        "dataloader.dataset_path": str(folder / "texts"),
        "training.steps": str(steps),
        "training.local_batch_size": "2",
        "training.seq_len": "128",
        "training.mixed_precision_param": "float32",
        "parallelism.data_parallel_replicate_degree": str(processes // 4),
        "parallelism.tensor_parallel_degree": "2",
        "debug.seed": "7",
        "comm.trace_buf_size": "0",
    }
    if not hasattr(torch.distributed, "set_timeout"):  # torchtitan's own choice needs torch 2.14
        values["parallelism.spmd_backend"] = "partial_dtensor"
    arguments = [word for name, value in values.items() for word in (f"--{name}", value)]
    return [*arguments, "--training.disable_cuda_graphs"]


def make_tokenizer(folder: Path) -> None:
    """Write a tokenizer whose tokens are the words of `make_texts`."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["<bos>", "<eos>", "<unk>", *(f"word{number}" for number in range(_WORDS))]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {"bos_token": "<bos>", "eos_token": "<eos>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(special))


def make_texts(folder: Path) -> None:
    """Write texts of random words, low numbers more often: the loss can fall."""
    chance = random.Random(7)
    folder.mkdir()
    with (folder / "texts.jsonl").open("w") as file:
        for _ in range(_TEXTS):
            numbers = (int(_WORDS * chance.random() ** 3) for _ in range(_WORDS_OF_A_TEXT))
            file.write(json.dumps({"text": " ".join(f"word{number}" for number in numbers)}) + "\n")


def train(
    side: str, processes: int, arguments: Sequence[str], folder: Path
) -> list[dict[str, Any]]:
    """Train in new processes; return what each rank had at the end, by rank."""
    folder.mkdir()
    environment = {
        **os.environ,
        _SIDE: side,
        "OMP_NUM_THREADS": "1",
        "HF_HOME": str(folder / "huggingface"),
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
    }
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command = [sys.executable, *launch, __file__, "--dump_folder", str(folder), *arguments]
    ended = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=_SECONDS, check=False
    )
    if ended.returncode:
        sys.exit(f"torchtitan failed with {side}:\n{ended.stdout}\n{ended.stderr}")
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(processes)]


def report(ranks: dict[str, list[dict[str, Any]]]) -> int:
    """Print both sides; return 1 if a number differs, else 0."""
    print(f"{len(ranks[STOCK])} gloo processes, {ranks[STOCK][0]['about']}")
    if not ranks[STOCK][-1]["losses"]:
        sys.exit("torchtitan logged no loss, so there is nothing to compare.")
    # The last rank is in the last pipeline stage, which alone has the loss.
    for step, value in enumerate(ranks[STOCK][-1]["losses"], start=1):
        ours = ranks[OURS][-1]["losses"][step - 1]
        print(f"  step {step}: loss {float.fromhex(value):.6f}, {float.fromhex(ours):.6f}")
    print("process groups of each rank, without the default one and those of the fake backend:")
    for side, each in ranks.items():
        print(f"  {side:12} {each[0]['groups']}, all ranks {sum(one['groups'] for one in each)}")
    print(f"class of the meshes: {ranks[STOCK][0]['class']}, {ranks[OURS][0]['class']}")
    equal = [
        all(one[what] == other[what] for one, other in zip(ranks[STOCK], ranks[OURS], strict=True))
        for what in ("losses", "norms", "weights")
    ]
    print("losses, gradient norms, weights equal bit for bit on all ranks:", *equal)
    return 0 if all(equal) else 1


# --- in each process that trains -----------------------------------------------------------------


def train_here(side: str, arguments: list[str]) -> None:
    """Be a rank of torchtitan's trainer, and write what it has at the end."""
    if side == OURS:
        import meshverse

        meshverse.install()
    prepare_for_cpu()
    from torchtitan.config import ConfigManager

    config = ConfigManager().parse_args(arguments)
    use_plain_attention(config.model_spec.model)
    trainer = config.build()
    reduce_by_sums(trainer.model_parts)
    losses, norms = keep_metrics(trainer.metrics_processor)
    trainer.train()

    dims = trainer.parallel_dims
    result = {
        "losses": losses,
        "norms": norms,
        "weights": digest_of(trainer.model_parts),
        "groups": groups_here(),
        "class": type(dims.world_mesh).__module__,
        "about": f"torchtitan {version('torchtitan')}, torch {version('torch')}: pp {dims.pp}, "
        f"dp_replicate {dims.dp_replicate}, dp_shard {dims.dp_shard}, cp {dims.cp}, tp {dims.tp}, "
        f"ep {dims.ep}, {dims.spmd_backend}",
    }
    file = Path(config.dump_folder) / f"rank{torch.distributed.get_rank()}.json"
    file.write_text(json.dumps(result))
    trainer.close()
    torch.distributed.destroy_process_group()


def prepare_for_cpu() -> None:
    """Make torchtitan take the CPU as its device. Call it before importing the trainer.

    torchtitan reads its device from two names of `torchtitan.tools.utils`. It asks the device's
    module for memory, for its monitor, and for the number of the device, for a barrier: `torch.cpu`
    has neither. Before torch 2.14, `torch.distributed.set_timeout` has a private name.
    """
    from torch.distributed import distributed_c10d
    from torchtitan.tools import utils

    nothing = SimpleNamespace(total_memory=1)
    of_a_device = {
        "current_device": lambda: 0,
        "get_device_name": lambda _device: "CPU",
        "get_device_properties": lambda _device: nothing,
        "memory_stats": lambda _device: {},
        "reset_peak_memory_stats": lambda: None,
        "empty_cache": lambda: None,
    }
    utils.device_type = "cpu"
    utils.device_module = SimpleNamespace(**{**vars(torch.cpu), **of_a_device})
    if not hasattr(torch.distributed, "set_timeout"):
        torch.distributed.set_timeout = distributed_c10d._set_pg_timeout


def use_plain_attention(model: Any) -> None:
    """Replace FlexAttention, which has no backward on the CPU, by torchtitan's other attention.

    As torchtitan's own `experiments/graph_trainer` does for its tests.
    """
    from torchtitan.models.common.attention import ScaledDotProductAttention

    for layer in model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()


def reduce_by_sums(parts: Sequence[Any]) -> None:
    """Have FSDP2 reduce gradients by sums alone.

    torchtitan sets a factor for gradients, which FSDP2 gives to the reduction of NCCL; gloo has
    none that takes a factor.
    """
    from torch.distributed.fsdp import FSDPModule

    for part in parts:
        for module in part.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)


def keep_metrics(processor: Any) -> tuple[list[str], list[str]]:
    """Return lists that fill with each step's loss and gradient norm, in hexadecimal."""
    losses: list[str] = []
    norms: list[str] = []
    log = processor.log

    def keep_and_log(step: int, average: float, largest: float, norm: float, **more: Any) -> None:
        losses.append(average.hex())
        norms.append(norm.hex())
        log(step, average, largest, norm, **more)

    processor.log = keep_and_log
    return losses, norms


def digest_of(parts: Sequence[Any]) -> str:
    """Return a digest of this rank's shards of all weights."""
    from torch.distributed.tensor import DTensor

    digest = hashlib.sha256()
    for part in parts:
        for name, weight in part.named_parameters():
            local = weight.to_local() if isinstance(weight, DTensor) else weight
            digest.update(name.encode() + local.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()


def groups_here() -> int:
    """Return how many process groups this process has, without the default and fake ones."""
    from torch.distributed import distributed_c10d

    backends = [backend for backend, _ in distributed_c10d._world.pg_map.values()]
    return sum(backend != "fake" for backend in backends) - 1


if __name__ == "__main__":
    if _SIDE in os.environ:
        train_here(os.environ[_SIDE], sys.argv[1:])
    else:
        sys.exit(main())
