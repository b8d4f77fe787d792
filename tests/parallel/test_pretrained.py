"""`load_pretrained` and `save_pretrained` on real ranks, against transformers' own."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from time import sleep
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from helpers.crew import Crew
from helpers.forked import Forked, printed_by, torchrun
from helpers.tiers import in_tiers
from meshverse.parallel import (
    ParallelismSizes,
    create_fsdp2_device_mesh,
    fsdp2_strategy_parallelize,
    initialize_weights,
    load_pretrained,
    save_pretrained,
)
from meshverse.parallel.pretrained.files import FilePart, FileWriter, read_folder

pytest.importorskip("transformers", minversion="5.0", reason="it has no conversions")

from checkpoint_job import config_of
from checkpoints import (
    ARRANGEMENTS,
    arranged,
    bytes_read,
    on_meta,
    round_trip,
    saved,
    tensors_in,
    values_of,
)
from hf_families import families, tiny_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from wrapped_models import WithValueHead

_JOB = Path(__file__).with_name("checkpoint_job.py")
_SECONDS = 1500  # for a job that reads or writes a gigabyte, on a busy machine
_BESIDES = 1 << 18  # bytes of headers, and of what ranks say to each other
_BUFFERS = 1 << 27  # a buffer of 64 MiB, and what the allocator keeps

_CASES = [
    *(("llama", each, True) for each in ARRANGEMENTS if not each.startswith("ep")),
    *(("mixtral", each, False) for each in ARRANGEMENTS),
    *(("gpt_oss", each, False) for each in ARRANGEMENTS if "tp" not in each),
    ("qwen3_moe", "ep 2 x tp 2", True),
]
_SHORT = [
    ("mixtral", "ep 2 x tp 2", False),
]


def _first_round_trip(family: str, folder: str) -> str:
    """Make a round trip in the first arrangement that splits a family; return what is wrong."""
    refusals = []
    for number, arrangement in enumerate(("ep 2 x tp 2", "tp 2 x fsdp 2", "fsdp 4")):
        wrong = round_trip(family, arrangement, True, f"{folder}/{number}")
        if not wrong.startswith("refused"):
            return wrong
        refusals.append(wrong)
    return " ".join(refusals)


# Each round trip of the others belongs to the sweep.
_LONG_FAMILIES = {"deepseek_v3", "gemma3n_text", "gpt_oss", "gptj", "phimoe"} & {*families()}


@pytest.mark.long
@pytest.mark.parametrize("family", in_tiers(families(), ["phi3"], _LONG_FAMILIES))
def test_every_family_makes_a_round_trip(crew: Crew, tmp_path: Path, family: str) -> None:
    assert crew.run(_first_round_trip, 4, family, str(tmp_path)) == [""] * 4


@pytest.mark.parametrize(("family", "arrangement", "tied"), in_tiers(_CASES, _SHORT, _CASES[::3]))
def test_a_checkpoint_makes_a_round_trip_bit_by_bit(
    crew: Crew, tmp_path: Path, family: str, arrangement: str, tied: bool
) -> None:
    assert crew.run(round_trip, 4, family, arrangement, tied, str(tmp_path)) == [""] * 4


# --- Bytes and memory ----------------------------------------------------------------------------


def _bytes_of_a_load(family: str, arrangement: str, folder: str) -> tuple[int, int, int]:
    """Return the bytes that a rank reads, those of its shards, and those of the checkpoint."""
    saved("llama", f"{folder}/small")
    load_pretrained(on_meta(f"{folder}/small"), f"{folder}/small")  # imports read files, too
    saved(family, f"{folder}/large", hidden_size=256, intermediate_size=512, vocab_size=4096)
    model = arranged(on_meta(f"{folder}/large"), arrangement)
    before = bytes_read()
    load_pretrained(model, f"{folder}/large")
    read = bytes_read() - before
    parameters = [*model.parameters()]
    shards = sum(
        each.to_local().nbytes if isinstance(each, DTensor) else each.nbytes for each in parameters
    )
    return read, shards, sum(each.nbytes for each in tensors_in(f"{folder}/large").values())


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="the kernel does not count bytes")
@pytest.mark.parametrize(
    ("family", "arrangement"),
    in_tiers(
        [
            ("llama", "tp 2 x fsdp 2"),
            ("mixtral", "ep 2 x tp 2"),
            ("gpt_oss", "ep 4"),
            ("llama", "pp 2 x fsdp 2"),
        ],
        [("mixtral", "ep 2 x tp 2")],
    ),
)
def test_a_rank_reads_the_bytes_of_its_shards(
    crew: Crew, tmp_path: Path, family: str, arrangement: str
) -> None:
    for read, shards, checkpoint in crew.run(
        _bytes_of_a_load, 4, family, arrangement, str(tmp_path)
    ):
        assert shards <= read < shards + _BESIDES
        assert shards + 4 * _BESIDES < checkpoint


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}


def _make(folder: Path, layers: int) -> None:
    command = [str(_JOB), "make", str(folder), str(layers), "float32"]
    status, _, errors = Forked(command, env=_environment()).communicate(_SECONDS)
    assert status == 0, errors


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
@pytest.mark.parametrize(
    ("how", "arrangement"),
    in_tiers(
        product(["load", "initialize"], ["fsdp 4", "tp 2 x fsdp 2", "pp 2 x fsdp 2"]),
        [("load", "fsdp 4")],
        [],
    ),
)
def test_memory_is_that_of_the_shards_and_a_tensor(
    tmp_path: Path, how: str, arrangement: str
) -> None:
    given, logs = tmp_path / "given", tmp_path / "logs"
    if how == "load":
        _make(given, 12)
    else:
        config_of(12).save_pretrained(given)
    job = torchrun(
        *(4, _JOB, "memory", how, arrangement, given, tmp_path / "saved"),
        folder=logs,
        env=_environment(),
    )
    status, _, errors = job.communicate(_SECONDS)
    assert status == 0, [errors, *(printed_by(rank, logs, "stderr") for rank in range(4))]
    for folder in ("given", "saved"):
        shutil.rmtree(tmp_path / folder)  # pytest keeps gigabytes otherwise
    for rank in range(4):
        seen = json.loads(printed_by(rank, logs).splitlines()[-1])
        assert seen["model"] * (2 if "pp" in arrangement else 1) > 10**9
        assert seen["filled"] < seen["shards"] + seen["tensor"] + _BUFFERS, seen
        # The shards are there already. One parameter is gathered while another one is written.
        assert seen["save"] < 3 * seen["tensor"] + _BUFFERS, seen


# --- Adapters, and keys that are missing ---------------------------------------------------------


@contextlib.contextmanager
def _random_states_are_kept() -> Iterator[None]:
    """Check that the block leaves the CPU's random state as it was, and seeds no GPU."""
    before, seeded = torch.get_rng_state(), list[int]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "manual_seed_all", seeded.append)
        yield
    assert torch.equal(torch.get_rng_state(), before)
    assert not seeded


def _with_adapter(model: Any) -> Any:
    has_experts = hasattr(model.config, "num_local_experts")
    experts = ["experts.gate_up_proj", "experts.down_proj"] if has_experts else None
    from peft import LoraConfig, get_peft_model

    return get_peft_model(
        model,
        LoraConfig(
            r=4,
            target_modules=["q_proj", "down_proj"],
            target_parameters=experts,
            modules_to_save=["lm_head"],
            task_type="CAUSAL_LM",
        ),
    )


_CONFIG = "adapter_config.json"


def _adapter_round_trip(folder: str, family: str, arrangement: str) -> list[str]:
    """Return differences from what PEFT itself does, in words."""
    found = []
    saved(family, f"{folder}/base")
    model = arranged(_with_adapter(on_meta(f"{folder}/base")), arrangement)
    with _random_states_are_kept():
        assert load_pretrained(model, f"{folder}/base") == ([], [])
    base = AutoModelForCausalLM.from_pretrained(f"{folder}/base", dtype=torch.float32)
    alone = _with_adapter(base)
    expected = values_of(alone)
    seen = values_of(model)
    assert seen.keys() == expected.keys()
    for name, value in seen.items():
        everywhere: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, value)
        if not all(torch.equal(each, value) for each in everywhere):
            found.append(f"{name} differs between ranks")
        if "lora_A" in name:  # random
            limit = value.size(1) ** -0.5
            if not value.abs().max() <= limit < 2 * value.abs().max():
                found.append(f"{name} is not drawn as PEFT draws it")
        elif not torch.equal(value, expected[name]):
            found.append(f"{name} is not what PEFT makes")
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in alone.named_parameters():
            if "default" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
    if dist.get_rank() == 0:
        alone.save_pretrained(f"{folder}/adapter")
    dist.barrier()
    assert load_pretrained(model, f"{folder}/adapter") == ([], [])
    expected, seen = values_of(alone), values_of(model)
    found += [f"{n} is not loaded" for n in seen if not torch.equal(seen[n], expected[n])]
    save_pretrained(model, f"{folder}/again")
    given, again = tensors_in(f"{folder}/adapter"), tensors_in(f"{folder}/again")
    assert given.keys() == again.keys()
    found += [f"{n} is not saved" for n in given if not torch.equal(given[n], again[n])]
    configs = [json.loads(Path(folder, n, _CONFIG).read_text()) for n in ("adapter", "again")]
    for config in configs:
        for name in ("target_modules", "target_parameters"):  # which PEFT has in sets
            config[name] = sorted(config[name] or [])
    found += [f"{n} of the config" for n in configs[0] if configs[0][n] != configs[1][n]]
    if configs[0].keys() != configs[1].keys():
        found.append("other names in the config")
    return found


_ADAPTED = [
    ("llama", "tp 2 x fsdp 2"),
    ("llama", "fsdp 4"),
    ("mixtral", "ep 2 x tp 2"),
    ("mixtral", "ep 4"),
    ("gpt_oss", "ep 4"),
]


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "arrangement"),
    in_tiers(_ADAPTED, [("mixtral", "ep 2 x tp 2")]),
)
def test_an_adapter_is_loaded_and_saved_as_peft_does(
    crew: Crew, tmp_path: Path, family: str, arrangement: str
) -> None:
    pytest.importorskip("peft", reason="peft is not installed")
    assert crew.run(_adapter_round_trip, 4, str(tmp_path), family, arrangement) == [[]] * 4


def _injected_round_trip(folder: str) -> list[str]:
    """Return what of an adapter of pipeline stages is not saved and loaded, in words."""
    from peft import LoraConfig, PeftModel, inject_adapter_in_model

    saved("llama", f"{folder}/base")
    config = LoraConfig(r=4, target_modules=["q_proj", "down_proj"])
    model = arranged(inject_adapter_in_model(config, on_meta(f"{folder}/base")), "pp 2 x tp 2")
    assert load_pretrained(model, f"{folder}/base") == ([], [])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.add_(len(name))
    save_pretrained(model, f"{folder}/adapter")
    base = AutoModelForCausalLM.from_pretrained(f"{folder}/base", dtype=torch.float32)
    alone = dict(PeftModel.from_pretrained(base, f"{folder}/adapter").named_parameters())
    found = []
    seen = values_of(model)
    for name, value in seen.items():
        if "lora" in name and not torch.equal(value, alone[f"base_model.model.{name}"]):
            found.append(f"{name} is not saved")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora" in name:
                parameter.zero_()
    load_pretrained(model, f"{folder}/adapter")
    again = values_of(model)
    return found + [
        f"{name} is not loaded" for name in seen if not torch.equal(seen[name], again[name])
    ]


@pytest.mark.long
def test_an_adapter_of_pipeline_stages_is_one_file(crew: Crew, tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="peft is not installed")
    assert crew.run(_injected_round_trip, 4, str(tmp_path)) == [[]] * 4


def _after_a_forward(folder: str, offload: bool) -> tuple[bool, bool]:
    """Load and save after forwards; return whether keys and values are those of the other one."""
    saved("llama", f"{folder}/given", tied=True)
    device_mesh, _ = create_fsdp2_device_mesh(ParallelismSizes(tp_size=2))
    model = fsdp2_strategy_parallelize(
        on_meta(f"{folder}/given"),
        device_mesh,
        mp_policy=MixedPrecisionPolicy(torch.bfloat16),  # of what is gathered
        cpu_offload=offload,
        reshard_after_forward=False,
    )
    load_pretrained(model, f"{folder}/given", device="cpu" if offload else None)
    tokens = torch.arange(12).reshape(2, 6)
    model(tokens, use_cache=False)
    other = saved("llama", f"{folder}/other", tied=True, rms_norm_eps=1e-2)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(1)
    if dist.get_rank() == 0:
        other.save_pretrained(f"{folder}/other")
    dist.barrier()
    load_pretrained(model, f"{folder}/other")
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # what is not in the shards is lost
    model(tokens, use_cache=False)
    save_pretrained(model, f"{folder}/saved")
    seen, wanted = tensors_in(f"{folder}/saved"), tensors_in(f"{folder}/other")
    return seen.keys() == wanted.keys(), all(
        seen[name].dtype == each.dtype and torch.equal(seen[name], each)
        for name, each in wanted.items()
    )


@pytest.mark.long
@pytest.mark.parametrize("offload", [False, pytest.param(True, marks=pytest.mark.long)])
def test_what_fsdp2_has_gathered_for_a_forward_is_not_taken_for_its_shards(
    crew: Crew, tmp_path: Path, offload: bool
) -> None:
    assert crew.run(_after_a_forward, 4, str(tmp_path), offload) == [(True, True)] * 4


def _with_missing(folder: str) -> tuple[Any, Any, bool]:
    saved("llama", f"{folder}/given")
    path = Path(folder, "given", "model.safetensors")
    if dist.get_rank() == 0:
        tensors = tensors_in(f"{folder}/given")
        tensors["extra"] = tensors.pop("model.layers.1.mlp.up_proj.weight")
        del tensors["model.norm.weight"]
        save_file(tensors, path)
    dist.barrier()
    model = arranged(on_meta(f"{folder}/given"), "tp 2 x fsdp 2")
    with _random_states_are_kept():
        keys = load_pretrained(model, path.parent, strict=False)
    values = values_of(model)
    drawn = values["model.layers.1.mlp.up_proj.weight"]
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, drawn)
    assert all(torch.equal(each, drawn) for each in everywhere)
    assert 0.5 < drawn.std() / model.config.initializer_range < 2
    return *keys, bool((values["model.norm.weight"] == 1).all())


def test_missing_keys_get_the_values_of_a_new_model_if_they_are_allowed(
    crew: Crew, tmp_path: Path
) -> None:
    missing = ["model.layers.1.mlp.up_proj.weight", "model.norm.weight"]
    assert crew.run(_with_missing, 4, str(tmp_path)) == [(missing, ["extra"], True)] * 4


# --- A job that is killed ------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("has_older", in_tiers([True, False], [True], []))
def test_a_save_that_is_killed_leaves_the_older_checkpoint_or_none(
    tmp_path: Path, has_older: bool
) -> None:
    target = tmp_path / "saved"
    for name in ("given", "saved") if has_older else ("given",):
        _make(tmp_path / name, 1)
    older = tensors_in(str(target)) if has_older else {}
    logs = tmp_path / "logs"
    job = torchrun(4, _JOB, "save", tmp_path / "given", target, folder=logs, env=_environment())
    while job.is_alive() and not [*tmp_path.glob(".saved.*.tmp/*.safetensors")]:
        sleep(0.01)  # sleep: it looks again
    workers = psutil.Process(job.pid).children(recursive=True)
    for process in workers:
        process.kill()
    job.kill()
    job.communicate()
    psutil.wait_procs(workers)
    assert [*tmp_path.glob(".saved.*.tmp")], "it had ended before it was killed"
    assert target.exists() == has_older
    seen = tensors_in(str(target)) if has_older else {}
    assert seen.keys() == older.keys()
    assert all(torch.equal(seen[name], older[name]) for name in older)


_FAILS_IN_A_GATHER = """
import sys
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from checkpoints import arranged
from hf_families import tiny_model
from meshverse.parallel import save_pretrained

folder, rank = sys.argv[1], int(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=4)
model = arranged(tiny_model("llama", tied=False), "fsdp 4")

def without_memory(tensor, **options):
    raise torch.OutOfMemoryError(f"for {tuple(tensor.shape)}")

if rank == 1:
    DTensor.full_tensor = without_memory
save_pretrained(model, f"{folder}/saved")
"""


@pytest.mark.long
def test_a_rank_that_cannot_gather_says_so_and_waits_for_nobody(tmp_path: Path) -> None:
    (tmp_path / "saved").mkdir()
    commands = [["-c", _FAILS_IN_A_GATHER, str(tmp_path), str(rank)] for rank in range(4)]
    ranks = [Forked(command, env=_environment()) for command in commands]
    ends = [rank.communicate() for rank in ranks]
    assert [status for status, _, _ in ends] == [1] * 4
    assert re.search(r"^torch.OutOfMemoryError: for \(\d+, \d+\)$", ends[1][2], re.MULTILINE)
    assert not [*(tmp_path / "saved").iterdir()]
    assert not [*tmp_path.glob(".saved.*")]


def _fails_in_a_write(folder: str, rank: int) -> str:
    model = arranged(tiny_model("llama", tied=False), "fsdp 4")

    def without_memory(self: FileWriter, name: str, tensor: torch.Tensor) -> None:
        raise RuntimeError("can't allocate memory")

    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == rank:
            patch.setattr(FileWriter, "write", without_memory)
        with pytest.raises(RuntimeError) as caught:
            save_pretrained(model, f"{folder}/saved", max_shard_size="1KB")
    return str(caught.value)


def test_all_ranks_raise_what_one_raises_in_a_write(crew: Crew, tmp_path: Path) -> None:
    said = crew.run(_fails_in_a_write, 4, str(tmp_path), 1)
    assert said == ["can't allocate memory (on ranks [1])"] * 4
    assert not [*tmp_path.iterdir()]


# --- Bad input -----------------------------------------------------------------------------------


def _errors(call: Callable[[Any, str], object], arrangement: str, folder: str) -> tuple[str, str]:
    """Return an error's class and text, after checking that it has changed nothing."""
    saved("llama", f"{folder}/given")
    for number in range(2):  # another order of the same tensors
        changes = {"vocab_size": 96 + 32 * number, "num_hidden_layers": 2}
        saved("llama", f"{folder}/{number}", **changes)
    model = arranged(on_meta(f"{folder}/given"), arrangement)
    before = dict(model.named_parameters())
    there = sorted(Path(folder).iterdir())
    with pytest.raises(Exception) as caught:  # noqa: PT011  (the caller looks at it)
        call(model, folder)
    after = dict(model.named_parameters())
    assert before.keys() == after.keys()
    assert all(each is after[name] and each.is_meta for name, each in before.items())
    dist.barrier()
    assert sorted(Path(folder).iterdir()) == there
    return type(caught.value).__name__, str(caught.value).replace(folder, "FOLDER")


def _load(name: str, **arguments: Any) -> Callable[[Any, str], object]:
    return partial(_load_in, name=name, arguments=arguments)


def _load_in(model: Any, folder: str, name: str, arguments: dict[str, Any]) -> object:
    return load_pretrained(model, f"{folder}/{name}", **arguments)


def _load_own(model: Any, folder: str) -> object:
    return load_pretrained(model, f"{folder}/{dist.get_rank() % 2}")


def _load_changed(model: Any, folder: str, change: Callable[[dict[str, Any]], object]) -> object:
    name = Path(folder, "given", "model.safetensors")
    if dist.get_rank() == 0:  # alone: others would read what it has changed
        tensors = tensors_in(f"{folder}/given")
        change(tensors)
        save_file(tensors, name)
    dist.barrier()
    return load_pretrained(model, name.parent)


def _drop(tensors: dict[str, Any]) -> None:
    del tensors["model.layers.1.mlp.up_proj.weight"], tensors["model.norm.weight"]
    tensors["extra"] = torch.zeros(2)


def _as_int8(tensors: dict[str, Any]) -> None:
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.int8)


def _reshaped(tensors: dict[str, Any]) -> None:
    tensors["model.norm.weight"] = torch.zeros(7)


def _cut(model: Any, folder: str) -> object:
    name = Path(folder, "given", "model.safetensors")
    if dist.get_rank() == 0:
        name.write_bytes(name.read_bytes()[:-100])
    dist.barrier()
    return load_pretrained(model, name.parent)


def _save_meta(model: Any, folder: str) -> object:
    return save_pretrained(model, f"{folder}/saved")


def _save_of_other_sizes(model: Any, folder: str) -> object:
    return save_pretrained(model, f"{folder}/saved", max_shard_size=1 + dist.get_rank() // 2)


@pytest.mark.parametrize(
    ("call", "kind", "text"),
    [
        (_load("absent"), "FileNotFoundError", "FOLDER/absent is no folder"),
        pytest.param(
            _load(""),
            "FileNotFoundError",
            r"has no model\.safetensors",
            marks=pytest.mark.long,
        ),
        (
            partial(_load_changed, change=_drop),
            "ValueError",
            r"lacks model\.layers\.1\.mlp\.up_proj\.weight, model\.norm\.weight of .* has extra",
        ),
        pytest.param(
            partial(_load_changed, change=_as_int8),
            "ValueError",
            r"model\.norm\.weight is torch\.float32, but torch\.int8 in FOLDER/given",
            marks=pytest.mark.long,
        ),
        pytest.param(
            partial(_load_changed, change=_reshaped),
            "ValueError",
            r"model\.norm\.weight is \(7,\) in FOLDER/given, but \(32,\)",
            marks=pytest.mark.long,
        ),
        (_cut, "ValueError", r"FOLDER/given/model\.safetensors is damaged or cut off"),
        (
            _load_own,
            "ValueError",
            r"is \(128, 32\) in FOLDER/1, but \(96, 32\).* \(on ranks \[1, 3\]\)",
        ),
        pytest.param(
            _save_meta,
            "ValueError",
            "are on the meta device, and have no values to save",
            marks=pytest.mark.long,
        ),
        pytest.param(
            _save_of_other_sizes,
            "ValueError",
            r"max_shard_size differs between ranks: ranks \[2, 3\] have '2', rank 0 has '1'",
            marks=pytest.mark.long,
        ),
    ],
)
def test_bad_input_raises_the_same_on_all_ranks_and_changes_nothing(
    crew: Crew, tmp_path: Path, call: Callable[[Any, str], object], kind: str, text: str
) -> None:
    errors = crew.run(_errors, 4, call, "tp 2 x fsdp 2", str(tmp_path))
    assert len({*errors}) == 1, errors
    assert errors[0][0] == kind, errors[0]
    assert re.search(text, errors[0][1]), errors[0]


# --- One process ---------------------------------------------------------------------------------


def _calls_beside_a_group(folder: str) -> list[str]:
    model = saved("llama", f"{folder}/given")
    group = dist.new_group([0])
    calls: list[Callable[[], object]] = [
        lambda: load_pretrained(model, f"{folder}/given", group=group),
        lambda: initialize_weights(model, group=group),
        lambda: save_pretrained(model, f"{folder}/saved", group=group),
    ]
    return [_refusal(call) for call in calls]


def _refusal(call: Callable[[], object]) -> str:
    try:
        call()
    except ValueError as error:
        return str(error)
    return ""


def test_a_rank_that_is_not_in_the_group_is_refused(crew: Crew, tmp_path: Path) -> None:
    first, second = crew.run(_calls_beside_a_group, 2, str(tmp_path))
    assert first == [""] * 3
    assert all("Rank 1 is not in the process group that was given" in each for each in second)


def _untied(folder: Path) -> Any:
    model = on_meta(str(folder))
    model.lm_head.weight = nn.Parameter(torch.empty_like(model.lm_head.weight))
    return model


def _of_its_own(folder: Path) -> Any:
    return nn.Linear(2, 2)


def _with_a_buffer(folder: Path) -> Any:
    model = on_meta(str(folder))
    model.model.register_buffer("phase", torch.empty(2, device="meta"), persistent=False)
    return model


def _with_an_attribute(folder: Path) -> Any:
    model = on_meta(str(folder))
    model.model.norm.phase = torch.empty(2, device="meta")
    return model


def _resized(folder: Path) -> Any:
    model = on_meta(str(folder))
    model.model.norm.weight = nn.Parameter(torch.empty(7, device="meta"))
    return model


def _with_a_head(folder: Path) -> Any:
    return WithValueHead(on_meta(str(folder)), "pretrained_model")


@pytest.mark.parametrize(
    ("make", "kind", "text"),
    [
        (_untied, ValueError, r"ties lm_head\.weight to model\.embed_tokens\.weight"),
        (_of_its_own, TypeError, "takes a model of transformers, alone or in a wrapper; Linear"),
        (_with_an_attribute, ValueError, r"model\.norm\.phase of \w+ are on the meta device"),
        (_with_a_buffer, ValueError, r"model\.phase of \w+ are on the meta device, and neither"),
        (
            _resized,
            ValueError,
            r"model\.norm\.weight is \(7,\), but the model's config says \(32,\)",
        ),
        (_with_a_head, ValueError, r"lacks v_head\.bias, v_head\.weight of"),
    ],
)
def test_a_model_that_a_checkpoint_does_not_fit_is_refused(
    tmp_path: Path, make: Callable[[Path], Any], kind: type[Exception], text: str
) -> None:
    saved("llama", str(tmp_path), tied=True)
    with pytest.raises(kind, match=text):
        load_pretrained(make(tmp_path), tmp_path)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda index: index["weight_map"].update(extra="model.safetensors"), "are not of one"),
        (lambda index: index.clear(), "must be JSON with a weight_map"),
        (lambda index: index.update(weight_map=None), "must be JSON with a weight_map"),
        (lambda index: index.update(weight_map=["a"]), "must be JSON with a weight_map"),
        (lambda index: index["weight_map"].update(a=3), "must be JSON with a weight_map"),
    ],
)
def test_an_index_that_does_not_fit_its_files_is_refused(
    tmp_path: Path, change: Callable[[dict[str, Any]], object], text: str
) -> None:
    saved("llama", str(tmp_path))
    index = {"weight_map": dict.fromkeys(tensors_in(str(tmp_path)), "model.safetensors")}
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(json.dumps(index))
    assert load_pretrained(on_meta(str(tmp_path)), tmp_path) == ([], [])
    change(index)
    path.write_text(json.dumps(index))
    with pytest.raises(ValueError, match=text):
        load_pretrained(on_meta(str(tmp_path)), tmp_path)


def test_checkpoints_of_other_steps_have_other_digests(tmp_path: Path) -> None:
    model = saved("llama", str(tmp_path / "step"))
    shutil.copytree(tmp_path / "step", tmp_path / "copy")
    with torch.no_grad():
        for each in model.parameters():
            each.add_(1e-3)
    save_pretrained(model, tmp_path / "next")
    save_pretrained(model, tmp_path / "next again")
    step, copy, later, again = (
        read_folder(tmp_path / name).digest for name in ("step", "copy", "next", "next again")
    )
    assert step == copy != later == again


def test_a_single_file_beside_an_index_of_others_is_refused(tmp_path: Path) -> None:
    saved("llama", str(tmp_path))
    names, other = tensors_in(str(tmp_path)), "model-00001-of-00001.safetensors"
    (tmp_path / other).write_bytes((tmp_path / "model.safetensors").read_bytes())
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": dict.fromkeys(names, other)}))
    with pytest.raises(ValueError, match="two checkpoints, of which transformers reads the first"):
        load_pretrained(on_meta(str(tmp_path)), tmp_path)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda entry: entry.pop("dtype"), "has the dtype None, which cannot be read"),
        (lambda entry: entry.update(dtype=["F32"]), "which cannot be read"),
        (lambda entry: entry.pop("shape"), "is damaged: the header's entry of"),
        (lambda entry: entry.update(shape=[-1, -64]), "is damaged: the header's entry of"),
        (lambda entry: entry.pop("data_offsets"), "is damaged: the header's entry of"),
        (lambda entry: entry.update(data_offsets=[0]), "is damaged: the header's entry of"),
        (
            lambda entry: entry.update(data_offsets=[at - 16 for at in entry["data_offsets"]]),
            "is damaged: ",
        ),
    ],
)
def test_a_header_that_the_format_does_not_allow_is_refused(
    tmp_path: Path, change: Callable[[dict[str, Any]], object], text: str
) -> None:
    saved("llama", str(tmp_path))
    path = tmp_path / "model.safetensors"
    contents = path.read_bytes()
    length = int.from_bytes(contents[:8], "little")
    header = json.loads(contents[8 : 8 + length])
    change(header["model.norm.weight"])
    changed = json.dumps(header).encode()
    path.write_bytes(len(changed).to_bytes(8, "little") + changed + contents[8 + length :])
    model = on_meta(str(tmp_path))
    with pytest.raises(ValueError, match=text):
        load_pretrained(model, tmp_path)
    assert all(parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize("text", ["null", "[" * 100_000, "[1]"])
def test_a_header_of_another_form_is_refused(tmp_path: Path, text: str) -> None:
    saved("llama", str(tmp_path))
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text.encode())
    with pytest.raises(ValueError, match="its header is no JSON object"):
        load_pretrained(on_meta(str(tmp_path)), tmp_path)


@pytest.mark.parametrize("size", [0, -1, "5", "GB", "1.5GB", True])
def test_a_size_of_files_that_is_none_is_refused(tmp_path: Path, size: Any) -> None:
    model = saved("llama", str(tmp_path / "given"))
    with pytest.raises(ValueError, match=f"max_shard_size={size!r} must be a number of bytes"):
        save_pretrained(model, tmp_path / "saved", max_shard_size=size)
    assert [each.name for each in tmp_path.iterdir()] == ["given"]


def test_other_files_of_an_older_folder_are_kept(tmp_path: Path) -> None:
    model = saved("llama", str(tmp_path / "given"))
    folder = tmp_path / "saved"
    save_pretrained(model, folder, max_shard_size=50_000)
    own = ["model_ema.safetensors", "model-best.bin", "model.fp16.safetensors", "tokenizer.json"]
    for name in own:
        (folder / name).write_text("tokens")
    (folder / "more").mkdir()
    (folder / "more" / "file").write_text("more")
    save_pretrained(model, folder)
    assert [(folder / name).read_text() for name in own] == ["tokens"] * 4
    assert (folder / "more" / "file").read_text() == "more"
    written = {each.name for each in folder.iterdir() if each.name not in own}
    assert written == {"config.json", "generation_config.json", "model.safetensors", "more"}
    assert sorted(each.name for each in tmp_path.iterdir()) == ["given", "saved"]


@pytest.mark.parametrize("inside", [".", "runs"])
def test_the_working_directory_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inside: str
) -> None:
    model = saved("llama", str(tmp_path / "given"))
    (tmp_path / "given" / "runs").mkdir()
    monkeypatch.chdir(tmp_path / "given" / inside)
    with pytest.raises(ValueError, match="contains the working directory of this process"):
        save_pretrained(model, tmp_path / "given")
    (Path.cwd() / "log").write_text("still there")
    save_pretrained(model, "new")
    assert (tmp_path / "given" / inside / "new" / "config.json").exists()


def test_a_log_that_is_open_in_an_older_folder_is_written_on(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    model = saved("llama", str(folder))
    (folder / "runs").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (folder / "latest").symlink_to(tmp_path / "elsewhere")
    with open(folder / "runs" / "events", "w") as log:
        save_pretrained(model, folder)
        log.write("step 2")
    assert (folder / "runs" / "events").read_text() == "step 2"
    assert (folder / "latest").readlink() == tmp_path / "elsewhere"


def test_a_model_that_does_not_take_its_own_names_is_not_taken_for_loaded(tmp_path: Path) -> None:
    saved("llama", str(tmp_path))
    model = on_meta(str(tmp_path))

    def rename(_: object, state: dict[str, Any], prefix: str, *__: object) -> None:
        state[f"{prefix}scale"] = state.pop(f"{prefix}weight")

    model.model.norm._register_load_state_dict_pre_hook(rename, with_module=True)
    with pytest.raises(RuntimeError, match=r"has not taken model\.norm\.weight, which are still"):
        load_pretrained(model, tmp_path)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of peft
def test_an_adapter_that_is_saved_beside_its_model_leaves_the_model(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    model = saved("llama", str(tmp_path))
    before = {each.name: each.read_bytes() for each in tmp_path.iterdir()}
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))
    for _ in range(2):
        save_pretrained(adapted, tmp_path)
        files = {each.name: each.read_bytes() for each in tmp_path.iterdir()}
        assert files.items() >= before.items()
        of_adapter = {"adapter_model.safetensors", "adapter_config.json"}
        assert files.keys() - before.keys() == of_adapter
    with pytest.raises(ValueError, match="'default' of PeftModel would not get the latter"):
        load_pretrained(adapted, tmp_path)
    load_pretrained(on_meta(str(tmp_path)), tmp_path)  # a model without an adapter


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of peft
def test_what_peft_computes_as_it_saves_is_refused_by_name(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    config = peft.PrefixTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(saved("llama", str(tmp_path / "base")), config)
    with pytest.raises(ValueError, match=r"PEFT computes .* of the adapter 'default' .*PREFIX"):
        save_pretrained(adapted, tmp_path / "adapter")
    assert not (tmp_path / "adapter").exists()


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of peft
@pytest.mark.parametrize("kind", ["Vera", "RandLora"])
def test_tensors_that_layers_share_are_saved_as_peft_does(kind: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    config = getattr(peft, f"{kind}Config")(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(saved("llama", str(tmp_path / "base")), config)
    adapted.save_pretrained(tmp_path / "peft")
    save_pretrained(adapted, tmp_path / "ours")
    theirs, ours = (
        load_file(tmp_path / folder / "adapter_model.safetensors") for folder in ("peft", "ours")
    )
    assert any(name.startswith("base_model.") and "proj" not in name for name in theirs)
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[name], ours[name]) for name in theirs)
    load_pretrained(adapted, tmp_path / "peft")


def test_a_save_that_is_killed_between_its_renames_loses_nothing(tmp_path: Path) -> None:
    folder, older = tmp_path / "saved", tmp_path / ".saved.01234567.old"
    model = saved("llama", str(folder))
    (folder / "tokenizer.json").write_text("{}")
    folder.rename(older)
    with pytest.raises(FileNotFoundError, match=r"killed left .*\.saved\.01234567\.old: rename"):
        load_pretrained(model, folder)
    save_pretrained(model, folder)
    assert (folder / "tokenizer.json").read_text() == "{}"
    assert [each.name for each in tmp_path.iterdir()] == ["saved"]


def test_numbers_that_no_file_can_have_are_refused_before_anything_is_written(
    tmp_path: Path,
) -> None:
    model = saved("llama", str(tmp_path / "model"))
    model.model.register_buffer("phases", torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(ValueError, match=r"files: \{'model.phases': torch.complex64\}. Cast them"):
        save_pretrained(model, tmp_path / "other")
    assert [each.name for each in tmp_path.iterdir()] == ["model"]


def test_buffers_that_are_not_on_the_meta_device_are_kept(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    model = saved("llama", str(tmp_path))
    with accelerate.init_empty_weights():
        other = AutoModelForCausalLM.from_config(model.config)
    assert not other.model.rotary_emb.inv_freq.is_meta
    there = other.model.rotary_emb.inv_freq
    load_pretrained(other, tmp_path)
    assert other.model.rotary_emb.inv_freq is there
    seen = values_of(other)
    assert all(torch.equal(seen[name], value) for name, value in values_of(model).items())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, when it imports dynamo
@pytest.mark.parametrize("wrapper", [torch.compile, checkpoint_wrapper])
def test_a_module_in_a_wrapper_that_changes_names_is_refused(
    tmp_path: Path, wrapper: Callable[[nn.Module], nn.Module]
) -> None:
    model: Any = saved("llama", str(tmp_path / "given"))
    model.model.layers[1] = wrapper(model.model.layers[1])
    before = values_of(model)
    for call in (load_pretrained, save_pretrained):
        with pytest.raises(ValueError, match=r"^model.layers.1 is in torch's \w+, so its"):
            call(model, tmp_path / ("given" if call is load_pretrained else "saved"))
    assert not (tmp_path / "saved").exists()
    assert all(torch.equal(each, before[name]) for name, each in values_of(model).items())


def test_weights_in_another_dtype_are_cast(tmp_path: Path) -> None:
    model = saved("llama", str(tmp_path))
    narrow = on_meta(str(tmp_path), torch.bfloat16)
    load_pretrained(narrow, tmp_path)
    for name, value in narrow.named_parameters():
        assert value.dtype == torch.bfloat16
        assert torch.equal(value, model.get_parameter(name).to(torch.bfloat16)), name


def test_parameters_without_memory_keep_their_attributes(tmp_path: Path) -> None:
    saved("llama", str(tmp_path))
    model = on_meta(str(tmp_path), torch.float32)
    for name, parameter in model.named_parameters():
        parameter.own_name = name
    load_pretrained(model, tmp_path)
    for name, parameter in model.named_parameters():
        assert not parameter.is_meta
        assert parameter.own_name == name


def test_weights_are_loaded_in_place_of_others(tmp_path: Path) -> None:
    model = saved("llama", str(tmp_path), tied=True)
    other = AutoModelForCausalLM.from_config(model.config)
    there = dict(other.named_parameters())
    load_pretrained(other, tmp_path)
    for name, value in other.named_parameters():
        assert value is there[name]
        assert torch.equal(value, model.get_parameter(name))


@pytest.mark.parametrize("is_meta", [True, False])
def test_an_untied_checkpoint_is_not_loaded_into_tied_parameters(
    tmp_path: Path, is_meta: bool
) -> None:
    config = saved("llama", str(tmp_path), tied=False).config
    config.tie_word_embeddings = True
    with torch.device("meta" if is_meta else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.tie_weights()  # transformers 5.0 does not, on the meta device
    before = [(each, each.is_meta or each.clone()) for each in model.parameters()]
    with pytest.raises(ValueError, match=r"ties \S+ to \S+, and their values in .* differ\. Build"):
        load_pretrained(model, tmp_path)
    for (old, value), new in zip(before, model.parameters(), strict=True):
        assert new is old
        assert new.is_meta if value is True else torch.equal(new, value)
    tensors = tensors_in(str(tmp_path))
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert load_pretrained(model, tmp_path) == ([], [])
    assert torch.equal(model.lm_head.weight, tensors["lm_head.weight"])


def test_a_load_that_fails_puts_back_what_was_on_the_meta_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = saved("llama", str(tmp_path), tied=True)
    model = on_meta(str(tmp_path))
    model.tie_weights()  # transformers 5.0 does not, on the meta device
    before = [*model.parameters(), *model.buffers()]

    def fails(*_: object) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(FilePart, "read_into", fails)
        with pytest.raises(OSError, match="Input/output error"):
            load_pretrained(model, tmp_path)
    after = [*model.parameters(), *model.buffers()]
    assert all(new is old and new.is_meta for old, new in zip(before, after, strict=True))
    assert load_pretrained(model, tmp_path) == ([], [])
    seen = values_of(model)
    assert all(torch.equal(seen[name], value) for name, value in values_of(alone).items())
