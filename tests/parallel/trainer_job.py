"""Trainer's evaluation of a split model on four ranks, and of the whole model.

It runs under torchrun, for whose variables Trainer asks. Prints, as JSON: both losses, and the
largest difference of logits.
"""

from __future__ import annotations

import copy
import json
import tempfile

import torch
import torch.distributed as dist
import transformers
from tiny_models import batch, make_model
from torch.distributed.fsdp import MixedPrecisionPolicy

from meshverse.parallel import (
    ParallelismSizes,
    create_fsdp2_device_mesh,
    fsdp2_strategy_parallelize,
    get_flat_mesh,
)

_ROWS = 4  # of a rank's batch


def main() -> None:
    dist.init_process_group("gloo")
    whole = make_model("llama").eval()
    model = copy.deepcopy(whole)
    mesh, _ = create_fsdp2_device_mesh(ParallelismSizes(tp_size=2))
    fsdp2_strategy_parallelize(model, mesh, mp_policy=MixedPrecisionPolicy())
    tokens = torch.cat([batch(0), batch(1)])
    rows = [{"input_ids": each, "labels": each} for each in tokens]
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            folder, per_device_eval_batch_size=_ROWS, use_cpu=True, report_to=[], disable_tqdm=True
        )
        trainer = transformers.Trainer(model=model, args=arguments, eval_dataset=rows)
        trainer.accelerator.state.device_mesh = mesh  # ranks of tp get the same rows
        loss = trainer.evaluate()["eval_loss"]
        logits = torch.tensor(trainer.predict(rows).predictions)
    copies = dist.get_world_size() // get_flat_mesh(mesh, "dp_cp").size()
    logits = logits.unflatten(0, (-1, copies, _ROWS))  # each batch is there once per rank of tp
    with torch.no_grad():
        expected = whole(input_ids=tokens, labels=tokens)
    difference = (logits - expected.logits.unflatten(0, (-1, 1, _ROWS))).abs().max()
    print(json.dumps([loss, expected.loss.item(), difference.item()]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
