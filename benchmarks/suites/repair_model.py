"""A small training job that loses ranks: its model, its steps, its checkpoints and what it notes.

It imports torch and transformers only, as the job that torchrun restarts has no use for more.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import LlamaConfig, LlamaForCausalLM

__all__ = ["RANKS", "Built", "Plan", "build", "event_file", "load", "note", "save"]

AXES = {"dp_replicate": 2, "dp_shard": 2, "tp": 2}
RANKS = 8
_LAYERS, _WORDS, _LENGTH, _BATCH = 4, 256, 32, 2
_STYLES = {
    **dict.fromkeys(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ColwiseParallel),
    **dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), ColwiseParallel),
    **dict.fromkeys(("self_attn.o_proj", "mlp.down_proj"), RowwiseParallel),
}


class Plan(NamedTuple):
    """A run of the job.

    Attributes:
        folder: for events, losses and checkpoints.
        steps: number of steps.
        losses: the rank that is killed in the middle of a step, by the number of the step.
        compiled: whether each layer is compiled.
    """

    folder: str
    steps: int
    losses: dict[int, int]
    compiled: bool

    @classmethod
    def read(cls, text: str) -> Plan:
        folder, steps, losses, compiled = json.loads(text)
        return cls(folder, steps, {int(step): rank for step, rank in losses.items()}, compiled)

    def text(self) -> str:
        return json.dumps(self)

    def is_next(self, step: int) -> bool:
        """Return whether a rank will be killed in this step."""
        return step in self.losses and not self._killed(step).exists()

    def maybe_die(self, step: int, rank: int) -> None:
        """Kill this process if it is the one to be lost in this step, once."""
        if self.losses.get(step) == rank and self.is_next(step):
            self._killed(step).touch()
            note(self, "killed", step)
            os.kill(os.getpid(), signal.SIGKILL)

    def keep(self, rank: int, step: int, loss: float) -> None:
        """Keep the loss of a step that this rank has finished, with all of its bits."""
        note(self, "finished", step)
        with Path(self.folder, f"losses-{rank}").open("a") as file:
            file.write(f"{step} {loss.hex()}\n")

    def _killed(self, step: int) -> Path:
        return Path(self.folder, f"killed-{step}")


def event_file(folder: str, pid: int) -> Path:
    """Return the file with the events of a process: nanoseconds, name and step in each line."""
    return Path(folder, f"events-{pid}")


def note(plan: Plan, event: str, step: int = -1, at_ns: int | None = None) -> None:
    """Note when something happened, by the clock that all processes of a machine share."""
    with event_file(plan.folder, os.getpid()).open("a") as file:
        file.write(f"{at_ns or time.monotonic_ns()} {step} {event}\n")


class Built(NamedTuple):
    """The model and the optimizer of one rank."""

    model: Any
    optimizer: torch.optim.Optimizer
    batches_of: int  # the data-parallel coordinate, by which ranks have different batches

    def forward_backward(self, step: int, die: Callable[[], None]) -> float:
        """Run a step but for the optimizer; return the loss."""
        generator = torch.Generator().manual_seed(1_000 * step + self.batches_of)
        words = torch.randint(_WORDS, (_BATCH, _LENGTH), generator=generator)
        loss = self.model(input_ids=words, labels=words, use_cache=False).loss
        die()
        loss.backward()
        return float(loss.detach())


def build(init_device_mesh: Callable[..., Any], compiled: bool) -> Built:
    """Build the model, wrapped: tensor-parallel layers, sharded and replicated over the others.

    Args:
        init_device_mesh: torch's or Meshverse's; all else is torch's on both sides.
        compiled: whether to compile each layer.
    """
    mesh = init_device_mesh("cpu", tuple(AXES.values()), mesh_dim_names=tuple(AXES))
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=_WORDS,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=_LENGTH,
        attn_implementation="sdpa",
    )
    model = LlamaForCausalLM(config)
    for layer in model.model.layers:
        parallelize_module(layer, mesh["tp"], {name: style() for name, style in _STYLES.items()})
        if compiled:
            layer.compile(backend="aot_eager")
        fully_shard(layer, mesh=mesh["dp_replicate", "dp_shard"])
    fully_shard(model, mesh=mesh["dp_replicate", "dp_shard"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    replica, shard, _ = mesh.get_coordinate()
    return Built(model, optimizer, AXES["dp_shard"] * replica + shard)


# --- checkpoints ----------------------------------------------------------------------------------


def save(plan: Plan, built: Built, rank: int, step: int) -> None:
    """Save this rank's shards to a file of its own: of all forms the fastest to load."""
    states = [
        {name: _local(value) for name, value in built.optimizer.state[parameter].items()}
        for parameter in built.model.parameters()
    ]
    found = step, [_local(one.detach()) for one in built.model.parameters()], states
    new = Path(plan.folder, f"new-checkpoint-{rank}")
    torch.save(found, new)
    new.rename(_checkpoint(plan, rank))


def load(plan: Plan, built: Built, rank: int) -> int:
    """Load this rank's shards, if a checkpoint exists; return the number of steps."""
    if not _checkpoint(plan, rank).exists():
        return 0
    step, values, states = torch.load(_checkpoint(plan, rank))
    for parameter, value, state in zip(built.model.parameters(), values, states, strict=True):
        with torch.no_grad():
            _local(parameter).copy_(value)
        built.optimizer.state[parameter] = {
            name: one if name == "step" else _like(one, parameter) for name, one in state.items()
        }
    return int(step)


def _checkpoint(plan: Plan, rank: int) -> Path:
    return Path(plan.folder, f"checkpoint-{rank}")


def _local(tensor: Any) -> Any:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _like(local: torch.Tensor, parameter: Any) -> Any:
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
