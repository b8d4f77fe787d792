"""Fine-tunes a language model of transformers on a mesh: a checkpoint in, a checkpoint out.

    torchrun --nproc-per-node 4 examples/finetune.py --tp 2 --ep 2 --out /tmp/tuned
    torchrun --nproc-per-node 8 examples/finetune.py --model /data/qwen --tp 4 --out /data/tuned

The model learns to count: a document is a run of consecutive tokens. Without --model, it is a small
random one with experts, which rank 0 saves first. docs/huggingface.md walks through it.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor.parallel import loss_parallel
from transformers import AutoConfig, AutoModelForCausalLM

from meshverse import parallel
from meshverse.parallel import FSDP2Config, LossPerToken, ParallelismSizes

SIZES = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 128}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
TOKENS, LONGEST, ACCUMULATE = 128, 24, 2  # of a microbatch, of a document; microbatches of a step
PROMPTS, SHORT, LONG, NEW = 8, 2, 4, 8  # of a rank; tokens of prompts, and those that follow


def read_options():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="folder of a checkpoint; default: a random one")
    parser.add_argument("--out", type=Path, required=True, help="folder of the new checkpoint")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--ep", type=int, default=1)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--dtype", default="float32", choices=["bfloat16", "float32"])
    return parser.parse_args()


def packed(generator, vocabulary, device):
    """Inputs, targets and positions of a microbatch: documents of uneven lengths in one row."""
    documents, room = [], TOKENS
    while room:
        length = min(int(torch.randint(2, LONGEST, (), generator=generator)), room)
        first = torch.randint(vocabulary, (), generator=generator)
        documents.append((first + torch.arange(length)) % vocabulary)
        room -= length
    targets = [each.roll(-1).index_fill(0, torch.tensor([-1]), -100) for each in documents]
    positions = [torch.arange(len(each)) for each in documents]  # each document is seen apart
    return [torch.cat(each)[None].to(device) for each in (documents, targets, positions)]


def accuracy(model, generator, vocabulary, data):
    """Return how many of the tokens that the model generates, on all ranks, go on counting."""
    first = torch.randint(vocabulary, (PROMPTS, 1), generator=generator)
    tokens = (first + torch.arange(LONG + NEW)).to(data.device_type) % vocabulary
    mask = torch.ones_like(tokens[:, :LONG])
    mask[::2, : LONG - SHORT] = 0  # shorter prompts are padded on the left
    settings = {"min_new_tokens": NEW, "max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    model.eval()  # logits are gathered, as generate() needs them
    seen = model.generate(tokens[:, :LONG] * mask, attention_mask=mask, use_cache=True, **settings)
    model.train()
    right = seen[:, LONG:].eq(tokens[:, LONG:]).float().mean()
    dist.all_reduce(right, group=data.get_group())
    return right.item() / data.size()


def main():
    options = read_options()
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    if torch.cuda.is_available():
        torch.cuda.set_device(dist.get_node_local_rank())
    say = print if dist.get_rank() == 0 else lambda *_: None
    source = options.model or options.out.with_name(f"{options.out.name}-before")
    if options.model is None and dist.get_rank() == 0:
        config = transformers.Qwen3MoeConfig(**SIZES, **EXPERTS)
        AutoModelForCausalLM.from_config(config).save_pretrained(source)
    dist.barrier()

    policy = MixedPrecisionPolicy(getattr(torch, options.dtype), reduce_dtype=torch.float32)
    settings = FSDP2Config(mp_policy=policy, split_logits=True)
    sizes = ParallelismSizes(tp_size=options.tp, ep_size=options.ep)
    mesh, moe_mesh = parallel.create_device_meshes(settings, sizes)
    config = AutoConfig.from_pretrained(source)
    with torch.device("meta"):  # no rank has the whole model
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    manager = parallel.FSDP2Manager(settings, mesh, moe_mesh, packed_sequences=True)
    manager.parallelize(model)
    parallel.load_pretrained(model, source)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loss_of = LossPerToken(model, mesh)

    data = parallel.get_flat_mesh(mesh, "dp_cp")  # the ranks that have data of their own
    generator = torch.Generator().manual_seed(data.get_local_rank())
    before = accuracy(model, generator, config.vocab_size, data)
    for step in range(1, options.steps + 1):
        batch = [packed(generator, config.vocab_size, mesh.device_type) for _ in range(ACCUMULATE)]
        loss_of.count(*(targets for _, targets, _ in batch))
        losses = []
        for inputs, targets, positions in batch:
            with loss_parallel():  # a rank of tp has logits of a part of the vocabulary
                output = model(input_ids=inputs, position_ids=positions, use_cache=False)
                losses.append(loss_of(output.logits, targets))
                losses[-1].backward()
        norm = parallel.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss = loss_of.total(*losses)
        say(f"step {step} loss {loss:.6f} norm {norm.item():.4f} tokens {loss_of.tokens.item()}")
    after = accuracy(model, generator, config.vocab_size, data)
    say(f"right tokens of generate(): {before:.0%} before, {after:.0%} after")
    parallel.save_pretrained(model, options.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
