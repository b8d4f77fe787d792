"""Compiled layers that tensor parallelism split: right for batches of several lengths.

With its default settings, torch compiles a function for any length at the second one, which fails
for DTensors (`RecursionError` in torch 2.13).
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch._inductor.config
from rounding import largest_error, rounding
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from helpers.crew import Crew
from meshverse.parallel import FSDP2Config, FSDP2Manager, ParallelismSizes, create_device_meshes

pytestmark = pytest.mark.processes
_WIDTH, _LENGTHS = 16, (6, 10, 7, 6)
_SECONDS = 1000  # compiles kernels of three lengths, on a busy machine
_BOUND = rounding(torch.float32, terms=4 * _WIDTH, steps=12)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(_WIDTH, 4 * _WIDTH)
        self.down = nn.Linear(4 * _WIDTH, _WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(self.up(hidden).sigmoid())


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


def _full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _run(model: nn.Module, length: int) -> dict[str, Tensor]:
    """Return the output and the gradients of a batch."""
    generator = torch.Generator().manual_seed(length)
    model.zero_grad()
    output = model(torch.randn(2, length, _WIDTH, generator=generator))
    output.sin().sum().backward()
    seen = {"output": output.detach()}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        seen[name] = _full(parameter.grad)
    return seen


def _errors(folder: str, checkpointing: Any) -> list[tuple[float, str]]:
    """Return the largest error for each length."""
    torch.compiler.reset()
    torch.manual_seed(0)
    model = Model()
    plain = copy.deepcopy(model)
    config = FSDP2Config(
        tp_plan={"layers.*.up": ColwiseParallel(), "layers.*.down": RowwiseParallel()},
        mp_policy=MixedPrecisionPolicy(),
        activation_checkpointing=checkpointing,
        enable_compile=True,
    )
    mesh, _ = create_device_meshes(config, ParallelismSizes(tp_size=2))
    manager = FSDP2Manager(config, mesh)
    manager.maybe_compile(manager.parallelize(model))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", folder)
        return [largest_error(_run(model, each), _run(plain, each), 1e-2) for each in _LENGTHS]


@pytest.mark.sweep
@pytest.mark.parametrize("checkpointing", [False, "full", "selective"])
def test_batches_of_several_lengths_equal_one_process(
    crew: Crew, tmp_path_factory: pytest.TempPathFactory, checkpointing: Any
) -> None:
    folder = str(tmp_path_factory.mktemp("kernels"))
    for errors in crew.run(_errors, 2, folder, checkpointing, timeout=_SECONDS):
        assert len(errors) == len(_LENGTHS)
        assert max(errors) < (_BOUND,), errors
