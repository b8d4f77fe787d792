"""Trains a language model, and goes on in the same processes when ranks are lost.

    python -m meshverse store --port 29400  # on a host that stays
    python examples/repair.py --store HOST:29400 --ranks 8 --folder /shared/run  # 9 times: 1 spare

Or with a torchrun of its own on each node, which restarts only the workers of that node:

    torchrun --standalone --nproc-per-node 4 --max-restarts 3 \\
        examples/repair.py --store HOST:29400 --ranks 8 --folder /shared/run

docs/repair.md explains it.
"""

import argparse
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM

from meshverse import init_device_mesh, repair
from meshverse.parallel import apply_tensor_parallelism

TINY = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
BATCH, LENGTH = 16, 32  # sequences a step, over all ranks, and tokens of each
SAVE_EVERY = 5  # steps
DEVICE, BACKEND = ("cuda", "nccl") if torch.cuda.is_available() else ("cpu", "gloo")


def read_options():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--store", required=True, help="HOST:PORT of `meshverse store`")
    parser.add_argument("--name", default="job", help="of this job among those of the store")
    parser.add_argument("--ranks", type=int, nargs="+", default=[8], help="such as 8, or 8 4")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--folder", type=Path, required=True, help="of checkpoints")
    return parser.parse_args()


def build():
    shape = (2, dist.get_world_size() // 4, 2)
    mesh = init_device_mesh(DEVICE, shape, mesh_dim_names=("replicate", "shard", "tp"))
    torch.manual_seed(0)  # the same weights on all ranks, which then keep their part
    config = AutoConfig.for_model("llama", **TINY, num_attention_heads=4)
    model = AutoModelForCausalLM.from_config(config).to(DEVICE)
    apply_tensor_parallelism(model, mesh["tp"])
    for module in (*model.model.layers, model):
        fully_shard(module, mesh=mesh["replicate", "shard"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=10)
    return model, optimizer, scheduler


def state_of(model, optimizer, scheduler):
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments, "scheduler": scheduler.state_dict()}


def load(folder, model, optimizer, scheduler):
    """Load the newest checkpoint that was finished; return its step."""
    found = [max((int(path.parent.name) for path in folder.glob("*/.metadata")), default=None)]
    dist.broadcast_object_list(found)  # all ranks load the one that rank 0 has found
    state = state_of(model, optimizer, scheduler)
    if found[0] is None:  # the first weights, which may be needed before the next checkpoint
        dcp.save(state, checkpoint_id=folder / "0")
        return 0
    dcp.load(state, checkpoint_id=folder / f"{found[0]}")
    weights, moments = state["model"], state["optimizer"]
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    scheduler.load_state_dict(state["scheduler"])
    return found[0]


def batch_of(step):
    """Tokens, shape (BATCH, LENGTH + 1), by number of the step. Put your data here."""
    tokens = [torch.randint(128, (BATCH,), generator=torch.Generator().manual_seed(step))]
    for _ in range(LENGTH):
        tokens.append((tokens[-1] * 5 + 3) % 128)
    return torch.stack(tokens, dim=1)


def train_step(job):
    model, optimizer, scheduler = job.state
    # The two ranks of a tensor-parallel group have the same share of the batch.
    share = batch_of(job.step).chunk(job.size // 2)[job.rank // 2].to(DEVICE)
    logits = model(share[:, :-1], use_cache=False).logits.full_tensor()
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), share[:, 1:].flatten())
    loss.backward()
    mean = loss.detach() / job.size
    dist.all_reduce(mean)
    if job.rank == 0:
        print(f"step {job.step + 1} loss {mean.item():.9g}", flush=True)
    job.commit(optimizer.step, scheduler.step)
    optimizer.zero_grad()


def main():
    options = read_options()
    if DEVICE == "cuda":
        torch.cuda.set_device(dist.get_node_local_rank(fallback_rank=0))
    folder, given = options.folder, {"name": options.name, "ranks": options.ranks}
    given |= {"build": build, "load": partial(load, folder), "backend": BACKEND}
    # torchrun needs seconds to start workers again. The job waits for them, unless it has spares.
    with repair.join(options.store, **given, replaced_within=60) as job:
        while job.step < options.steps:
            try:
                train_step(job)
                if job.step % SAVE_EVERY == 0:
                    dcp.save(state_of(*job.state), checkpoint_id=folder / f"{job.step}")
            except job.LOST:
                job.repair()


if __name__ == "__main__":
    main()
