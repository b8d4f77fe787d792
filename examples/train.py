"""Trains a language model of transformers on any mesh, and goes on from its checkpoints on another.

    torchrun --nproc-per-node 4 examples/train.py --tp 2 --steps 20 --folder /tmp/run
    torchrun --nproc-per-node 8 examples/train.py --pp 2 --tp 2 --steps 40 --folder /tmp/run

docs/training.md walks through it. To start again by itself when a rank dies, on gloo too:

    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nproc-per-node 4 --max-restarts 3 ...
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from meshverse.parallel import (
    FSDP2Config,
    FSDP2Manager,
    ParallelismSizes,
    create_device_meshes,
    get_flat_mesh,
    pipeline_schedule,
    pipeline_stages,
)

SMALL = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", help="folder with a config.json of transformers; default tiny")
    for degree in ("dp-replicate", "tp", "ep", "pp"):  # what these leave of the ranks is dp_shard
        parser.add_argument(f"--{degree}", type=int, default=1)
    parser.add_argument("--batch", type=int, default=16, help="sequences of a step, over all ranks")
    parser.add_argument("--sequence", type=int, default=32, help="tokens of a sequence")
    parser.add_argument("--accumulate", type=int, default=2, help="parts of a rank's batch")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--max-norm", type=float, default=1.0)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--folder", type=Path, help="of checkpoints; the newest is gone on from")
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--save-in-background", action="store_true")
    return parser.parse_args()


class Training:
    """What a checkpoint holds; torch.distributed.checkpoint asks for it and gives it back."""

    options = StateDictOptions(flatten_optimizer_state_dict=True)  # names, not numbers

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer, self.step = model, optimizer, 0

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer, options=self.options)
        return {"model": model, "optimizer": optimizer, "step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        parts = {f"{name}_state_dict": state[name] for name in ("model", "optimizer")}
        parts["optim_state_dict"] = parts.pop("optimizer_state_dict")
        set_state_dict(self.model, self.optimizer, **parts, options=self.options)
        self.step = state["step"]


def batch_of(step: int, options: argparse.Namespace, vocabulary: int) -> Tensor:
    """Tokens of a step, shape (batch, sequence + 1): the same whatever the mesh. Put yours here."""
    generator = torch.Generator().manual_seed(step)
    first = torch.randint(vocabulary, (options.batch, 1), generator=generator)
    return (first * 5 ** (torch.arange(options.sequence + 1) % 8) + 3) % vocabulary


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def newest(folder: Path) -> Path | None:
    """The last checkpoint that was finished: its metadata are written at the end."""
    done = [each.parent for each in folder.glob("step-*/.metadata")]
    return max(done, key=lambda each: int(each.name.partition("-")[2]), default=None)


def main() -> None:
    options = read_options()
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    sizes = ParallelismSizes(
        dp_replicate_size=options.dp_replicate,
        tp_size=options.tp,
        ep_size=options.ep,
        pp_size=options.pp,
    )
    dtype = getattr(torch, options.dtype)
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    settings = FSDP2Config(mp_policy=policy)
    mesh, moe_mesh = create_device_meshes(settings, sizes)
    data, is_first = get_flat_mesh(mesh, "dp_cp"), dist.get_rank() == 0
    for group in mesh.universe.warm_up(show_progress=is_first):
        is_first and print(f"{group.axes} of {group.size} connected in {group.seconds:.3f} s")

    small = LlamaConfig(**SMALL, **HEADS)
    config = AutoConfig.from_pretrained(options.config) if options.config else small
    torch.manual_seed(0)  # the same weights on all ranks, before they are split
    model = AutoModelForCausalLM.from_config(config).to(mesh.device_type)
    (stage,) = pipeline_stages(model, mesh["pp"])  # all of the model if --pp is 1
    FSDP2Manager(settings, mesh, moe_mesh).parallelize(stage)
    pipeline = pipeline_schedule([stage], mesh["pp"], loss_of, options.accumulate)
    training = Training(stage, torch.optim.AdamW(stage.parameters(), lr=options.learning_rate))

    # Its own group, so that saving in the background does not mix with what training sends.
    savers, saving = dist.new_group(backend="gloo"), None
    if options.folder and (checkpoint := newest(options.folder)):
        dcp.load({"training": training}, checkpoint_id=checkpoint, process_group=savers)
        is_first and print(f"going on from {checkpoint}")

    while training.step < options.steps:
        start = time.perf_counter()
        tokens = batch_of(training.step, options, config.vocab_size).to(mesh.device_type)
        share = tokens.chunk(data.size())[data.get_local_rank()]
        with loss_parallel():  # each rank of tp has the logits of its part of the vocabulary
            losses = pipeline.step(share[:, :-1], target=share[:, 1:].contiguous())
        norm = pipeline.clip_grad_norm_(options.max_norm)
        training.optimizer.step()
        training.optimizer.zero_grad()
        training.step += 1

        loss = sum(losses, torch.zeros((), device=mesh.device_type)) / options.accumulate
        loss = loss.full_tensor() if isinstance(loss, DTensor) else loss
        for axis in ("pp", "dp_cp"):  # only the last stage has losses
            dist.all_reduce(loss, group=get_flat_mesh(mesh, axis).get_group())
        seconds = time.perf_counter() - start
        if is_first:
            mean = loss.item() / data.size()
            print(f"step {training.step} loss {mean:.6f} norm {norm.item():.4f} {seconds:.2f} s")
        if options.folder and training.step % options.save_every == 0:
            place = {"checkpoint_id": options.folder / f"step-{training.step}"}
            saving and saving.result()  # one at a time
            if options.save_in_background:
                saving = dcp.async_save({"training": training}, **place, process_group=savers)
            else:
                dcp.save({"training": training}, **place, process_group=savers)
    saving and saving.result()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
