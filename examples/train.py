"""Trains a language model of transformers on any mesh, and goes on from its checkpoints on another.

    torchrun --nproc-per-node 4 examples/train.py --tp 2 --steps 20 --folder /tmp/run
    torchrun --nproc-per-node 8 examples/train.py --pp 2 --tp 2 --steps 40 --folder /tmp/run

docs/training.md walks through it.
"""

import argparse
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel
from transformers import AutoConfig, AutoModelForCausalLM

from meshverse.parallel import (
    FSDP2Config,
    FSDP2Manager,
    ParallelismSizes,
    create_device_meshes,
    get_flat_mesh,
    pipeline_schedule,
    pipeline_stages,
)

TINY = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4}


def read_options():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", help="folder with a config.json of transformers; default: tiny")
    for degree in ("dp-replicate", "tp", "ep", "pp"):
        parser.add_argument(f"--{degree}", type=int, default=1)
    parser.add_argument("--dp-shard", type=int, help="default: what the others leave of the ranks")
    parser.add_argument("--batch", type=int, default=16, help="sequences a step, over all ranks")
    parser.add_argument("--sequence", type=int, default=32, help="tokens a sequence")
    parser.add_argument("--accumulate", type=int, default=2, help="parts of each rank's batch")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--folder", type=Path, help="of checkpoints; goes on from the newest")
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--save-in-background", action="store_true")
    return parser.parse_args()


class Training:
    """The state in a checkpoint: torch.distributed.checkpoint reads it, and gives it back."""

    by_name = StateDictOptions(flatten_optimizer_state_dict=True)

    def __init__(self, model, optimizer):
        self.model, self.optimizer, self.step = model, optimizer, 0

    def state_dict(self):
        model, optimizer = get_state_dict(self.model, self.optimizer, options=self.by_name)
        return {"model": model, "optimizer": optimizer, "step": self.step}

    def load_state_dict(self, state):
        parts = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
        set_state_dict(self.model, self.optimizer, **parts, options=self.by_name)
        self.step = state["step"]


def batch_of(step, options, vocabulary):
    """Tokens, shape (batch, sequence + 1): the same whatever the mesh. Put your data here."""
    generator = torch.Generator().manual_seed(step)
    tokens = [torch.randint(vocabulary, (options.batch,), generator=generator)]
    for _ in range(options.sequence):
        tokens.append((tokens[-1] * 5 + 3) % vocabulary)
    return torch.stack(tokens, dim=1)


def loss_of(logits, targets):
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def newest(folder):
    """Return the last checkpoint that was finished: its metadata are written at the very end."""
    finished = [path.parent for path in folder.glob("step-*/.metadata")] if folder else []
    return max(finished, key=lambda path: int(path.name.removeprefix("step-")), default=None)


def main():
    options = read_options()
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    if torch.cuda.is_available():
        torch.cuda.set_device(dist.get_node_local_rank())
    say = print if dist.get_rank() == 0 else lambda *_: None
    shards, replicas = options.dp_shard, options.dp_replicate
    dp = {"dp_size": shards and shards * replicas, "dp_replicate_size": replicas}
    sizes = ParallelismSizes(**dp, tp_size=options.tp, ep_size=options.ep, pp_size=options.pp)
    policy = MixedPrecisionPolicy(getattr(torch, options.dtype), reduce_dtype=torch.float32)
    settings = FSDP2Config(mp_policy=policy, split_logits=True)
    mesh, moe_mesh = create_device_meshes(settings, sizes)
    for group in mesh.universe.warm_up(show_progress=say is print):
        say(f"{', '.join(group.axes)}: {group.size} ranks in {group.seconds:.3f} s")

    tiny = AutoConfig.for_model("llama", **TINY, num_attention_heads=4)
    config = AutoConfig.from_pretrained(options.config) if options.config else tiny
    torch.manual_seed(0)  # the same weights on all ranks, which then keep their part
    model = AutoModelForCausalLM.from_config(config).to(mesh.device_type)
    (stage,) = pipeline_stages(model, mesh["pp"])  # all of the model where pp is 1
    FSDP2Manager(settings, mesh, moe_mesh).parallelize(stage)
    pipeline = pipeline_schedule([stage], mesh["pp"], loss_of, options.accumulate)
    training = Training(stage, torch.optim.AdamW(stage.parameters(), lr=3e-3))

    # A group of their own, so that saving in the background meets nothing that training sends.
    savers, saving = dist.new_group(backend="gloo"), None
    if checkpoint := newest(options.folder):
        dcp.load({"training": training}, checkpoint_id=checkpoint, process_group=savers)
        say(f"going on from {checkpoint}")
    data = get_flat_mesh(mesh, "dp_cp")  # the ranks that have a share of the batch each
    assert not options.batch % (n := data.size() * options.accumulate), f"batch: no multiple of {n}"
    while training.step < options.steps:
        start = time.perf_counter()
        tokens = batch_of(training.step, options, config.vocab_size).to(mesh.device_type)
        share = tokens.chunk(data.size())[data.get_local_rank()]
        with loss_parallel():  # each rank of tp has logits of a part of the vocabulary
            losses = pipeline.step(share[:, :-1], target=share[:, 1:])
        norm = pipeline.clip_grad_norm_(1.0)
        training.optimizer.step()
        training.optimizer.zero_grad()
        training.step += 1
        loss = sum(losses, torch.zeros((), device=mesh.device_type)) / options.accumulate
        loss = loss.full_tensor() if isinstance(loss, DTensor) else loss
        for group in (mesh.get_group("pp"), data.get_group()):  # the last stage has the losses
            dist.all_reduce(loss, group=group)
        mean, seconds = loss.item() / data.size(), time.perf_counter() - start
        say(f"step {training.step} loss {mean:.6f} norm {norm.item():.4f} in {seconds:.2f} s")
        if options.folder and training.step % options.save_every == 0:
            if saving:
                saving.result()  # one at a time
            save = dcp.async_save if options.save_in_background else dcp.save
            place = options.folder / f"step-{training.step}"
            saved = save({"training": training}, checkpoint_id=place, process_group=savers)
            saving = saved if options.save_in_background else None
    if saving:
        saving.result()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
