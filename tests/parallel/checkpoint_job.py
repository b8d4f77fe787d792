"""A job that fills a model without memory, and saves it; run by torchrun.

Arguments: what it does, and folders.
"""

from __future__ import annotations

import gc
import json
import resource
import sys
import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from checkpoints import arranged, on_meta
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, LlamaConfig

from meshverse.parallel import initialize_weights, load_pretrained, save_pretrained


class Peak:
    """Largest resident memory of this process while the context lasts, above that at its begin."""

    def __enter__(self) -> Peak:  # noqa: PYI034
        gc.collect()
        self._before, self._most = _resident(), 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._record = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._ended.is_set():
            self._most = max(self._most, _resident())
            self._ended.wait(0.001)  # short-timeout: it must elapse, between two looks

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        record = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        if record > self._record:  # the kernel's own, which misses nothing
            self._most = max(self._most, record << 10)
        self.n_bytes = self._most - self._before


def _resident() -> int:
    fields = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["VmRSS"].split()[0]) << 10


def config_of(layers: int) -> LlamaConfig:
    """The config of a Llama with 67 MB for each layer and 262 MB besides, in float32."""
    return LlamaConfig(
        vocab_size=32000,
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=16,
    )


def make(folder: str, layers: int, dtype: str) -> None:
    """Save a Llama with random weights, by transformers."""
    torch.manual_seed(len(folder))
    model = AutoModelForCausalLM.from_config(config_of(layers), dtype=getattr(torch, dtype))
    model.save_pretrained(folder, max_shard_size="300MB")


def memory(how: str, arrangement: str, folder: str, other: str) -> dict[str, int]:
    """Return the peaks of a load or an initialization and of a save, with sizes to compare them to.

    All are in bytes.
    """
    model = arranged(on_meta(folder), arrangement)
    with Peak() as filled:
        if how == "load":
            load_pretrained(model, folder)
        else:
            initialize_weights(model)
    parameters = [*model.parameters()]
    locals_ = [each.to_local() if isinstance(each, DTensor) else each for each in parameters]
    with Peak() as save:
        save_pretrained(model, other)
    return {
        "filled": filled.n_bytes,
        "save": save.n_bytes,
        "shards": sum(each.nbytes for each in locals_),
        "tensor": max(each.numel() * each.element_size() for each in parameters),
        "model": sum(each.numel() * each.element_size() for each in parameters),
    }


def save(given: str, folder: str) -> None:
    """Load a checkpoint and save it."""
    model: Any = arranged(on_meta(given), "fsdp 4")
    load_pretrained(model, given)
    dist.barrier()
    print("saves", flush=True)
    save_pretrained(model, folder, max_shard_size="20MB")


if __name__ == "__main__":
    task, *rest = sys.argv[1:]
    if task == "make":
        make(rest[0], int(rest[1]), rest[2])
        sys.exit()
    dist.init_process_group("gloo")
    if task == "memory":
        print(json.dumps(memory(*rest)))
    else:
        save(*rest)
    dist.destroy_process_group()
