"""Reinforcement learning: trains a language model on what a copy on other ranks generates.

    torchrun --nproc-per-node 8 examples/rl.py --tp 2 --steps 5

The first half of the ranks trains, with FSDP2 and tensor parallelism. The other half generates:
replicas of the model, with tensor parallelism. Before every step, the weights are copied from the
one half to the other. docs/reshard.md describes how.
"""

import argparse
import time

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM

from meshverse import init_mesh_partition
from meshverse.parallel import Reshard, apply_tensor_parallelism, clip_grad_norm_

TINY = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4}


def read_options():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tp", type=int, default=2, help="of both halves")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--batch", type=int, default=8, help="sequences a step, over all replicas")
    parser.add_argument("--prompt", type=int, default=4, help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=8, help="tokens that are generated")
    return parser.parse_args()


def make_model(device):
    torch.manual_seed(dist.get_rank())  # other weights on every rank: what is equal was copied
    config = AutoConfig.for_model("llama", **TINY, num_attention_heads=4, tie_word_embeddings=False)
    return AutoModelForCausalLM.from_config(config).to(device)


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def generate(model, prompts, n_new, seed):
    """Sampled sequences, shape (batch, prompt + n_new). The noise is the same on all ranks."""
    noise = torch.Generator().manual_seed(seed)
    tokens = prompts
    for _ in range(n_new):
        logits = whole(model(tokens, use_cache=False).logits)[:, -1].float()
        uniform = torch.rand(logits.shape, generator=noise).to(logits.device)
        chosen = (logits - (-uniform.log()).log()).argmax(-1)  # a sample of softmax(logits)
        tokens = torch.cat([tokens, chosen[:, None]], dim=1)
    return tokens


def reward_of(tokens, n_new):
    """Return the share of even tokens among the new ones, less the mean. Put your reward here."""
    reward = (tokens[:, -n_new:] % 2 == 0).float().mean(1)
    return reward, reward - reward.mean()


def loss_of(model, tokens, advantage, n_new):
    logits = whole(model(tokens[:, :-1], use_cache=False).logits)[:, -n_new:].float()
    chosen = tokens[:, -n_new:, None]
    return -(advantage[:, None] * logits.log_softmax(-1).gather(-1, chosen)[..., 0]).mean()


def main():
    options = read_options()
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    device = (
        torch.device("cuda", dist.get_node_local_rank()) if torch.cuda.is_available() else "cpu"
    )
    half, tp = dist.get_world_size() // 2, options.tp
    part = {"mesh_shape": (half // tp, tp), "mesh_dim_names": ("dp", "tp")}
    device_type = torch.device(device).type
    meshes = init_mesh_partition(device_type, {"trainer": part, "generator": part})
    is_trainer = dist.get_rank() < half
    mesh = meshes["trainer" if is_trainer else "generator"]
    say = print if dist.get_rank() == 0 else lambda *_: None

    model = make_model(device)
    apply_tensor_parallelism(model, mesh["tp"])
    if is_trainer:
        for module in (*model.model.layers, model):
            fully_shard(module, mesh=mesh["dp"])
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    else:
        model.requires_grad_(False)
    weights = dict(model.named_parameters())
    reshard = Reshard(weights if is_trainer else None, None if is_trainer else weights)
    say(reshard.explain())

    n_replicas = half // tp
    for step in range(options.steps):
        start = time.perf_counter()
        reshard()
        seconds = time.perf_counter() - start

        # Every replica generates its share; the first rank of each tells it to all.
        prompts = torch.Generator().manual_seed(step)
        prompts = torch.randint(128, (options.batch, options.prompt), generator=prompts).to(device)
        shares = list(prompts.chunk(n_replicas))
        rollouts = []
        for replica, share in enumerate(shares):
            tokens = share.new_empty(len(share), options.prompt + options.new)
            if not is_trainer and mesh["dp"].get_local_rank() == replica:
                tokens = generate(model, share, options.new, seed=step)
            dist.broadcast(tokens, src=half + replica * tp)
            rollouts.append(tokens)

        if is_trainer:
            own = [generate(model, share, options.new, seed=step) for share in shares]
            assert all(map(torch.equal, own, rollouts)), "the generator has other weights"
            reward, advantage = reward_of(torch.cat(rollouts), options.new)
            loss = loss_of(model, torch.cat(rollouts), advantage, options.new)
            loss.backward()
            clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            reward = reward.mean().item()
            say(f"step {step + 1} reward {reward:.3f} weights copied in {seconds:.3f} s")
    reshard.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
