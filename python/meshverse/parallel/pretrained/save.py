"""Save a distributed model as a Hugging Face checkpoint, written by all ranks.

Example:
    >>> save_pretrained(model, "checkpoints/step-1000")  # doctest: +SKIP
    >>> AutoModelForCausalLM.from_pretrained("checkpoints/step-1000")  # doctest: +SKIP
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import os
import re
import secrets
import shutil
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from meshverse.parallel.collectives.steps import (
    check_is_same,
    gathered,
    on_first_rank,
    rank_in,
    sent_from,
    together,
)
from meshverse.parallel.models.modules import stage_of

from .adapters import adapter_of, adapter_places, save_adapter
from .deferred import Box, Deferred, Source, read, source_of
from .files import (
    ADAPTER_WEIGHTS,
    INDEX,
    WEIGHTS,
    FileWriter,
    can_be_written,
    parts_of_files,
)
from .places import (
    Place,
    class_of,
    floating_dtype,
    in_words,
    places_of,
    pretrained_model,
    skeleton_of,
)

_LEAST_FILE, _LARGEST_FILE = 50 * 10**6, 5 * 10**9  # bytes of a file, unless a user gives them
# Files of a checkpoint's folder that a save of a model, or of an adapter, replaces.
_OF_MODEL = re.compile(
    r"(pytorch_)?model(-\d{5}-of-\d{5})?\.(safetensors|bin)(\.index\.json)?"
    r"|(generation_)?config\.json"
)
_OF_ADAPTER = re.compile(r"adapter_model\.(safetensors|bin)|adapter_config\.json")
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


class _Gathered(Source):
    """A parameter or buffer of the model, which all ranks that have it gather together."""

    def __init__(self, name: str, shape: torch.Size, dtype: torch.dtype) -> None:
        self.name, self.shape, self.dtype = name, shape, dtype
        self.value: Tensor | None = None  # while it is written

    def read_into(self, box: Box, out: Tensor) -> None:
        """Copy the elements of a box of the gathered tensor."""
        assert self.value is not None, self.name
        out.copy_(self.value[tuple(slice(*each) for each in box)])


class _Unit(NamedTuple):
    """Tensors of the checkpoint that are made together of some parameters of the model.

    Attributes:
        sources: the parameters.
        outputs: the checkpoint's tensors, by name.
        stage: number of the ranks that have the parameters, in the order of `_stages`.
    """

    sources: list[_Gathered]
    outputs: dict[str, Source]
    stage: int


class _File(NamedTuple):
    """A file of the checkpoint.

    Attributes:
        name: of the file.
        writer: rank in the group that writes it.
        outputs: names of its tensors.
    """

    name: str
    writer: int
    outputs: list[str]


def save_pretrained(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    max_shard_size: int | str | None = None,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Save a model as the files that `from_pretrained` loads: safetensors, index and config.

    The ranks gather one parameter after another, and each rank writes the files that are its own:
    beyond its shards, it needs memory for the parameters of one conversion, mostly one, three
    times. Names are those of the checkpoints on the Hub, by transformers' own conversions.

    Of a model with an adapter of PEFT, only the adapter is saved, as PEFT saves it.

    The files are written to a new folder beside `folder`, which is renamed when all of them are on
    the disk. A job that is killed before leaves an older folder as it was. Other files of an older
    folder, such as a tokenizer's, are kept.

    All ranks that have a part of the model make the call, and see the folder. If one raises, all
    raise the same error, unless a gather failed, such as for lack of memory: that rank raises at
    once, and must end its process, because the others wait for it until their groups' timeout. One
    job at a time saves to a folder: a save deletes unfinished folders of other saves, killed or
    still running.

    Args:
        model: model of transformers, or a wrapper of one, or a pipeline stage.
        folder: the checkpoint's folder, which may exist.
        max_shard_size: largest size of a file, in bytes or as "5GB"; a larger tensor gets a file of
            its own. By default, there are as many files as ranks, of 50 MB to 5 GB.
        group: process group of all ranks that have a part of the model; by default all ranks.

    Raises:
        ImportError: transformers is not installed or too old.
        NotADirectoryError: `folder` is a file.
        OSError: a file cannot be written.
        TypeError: the model is not of transformers.
        ValueError: ranks do not share the folder; it contains a process's working directory; a
            parameter is on the meta device; or `max_shard_size` is no size.
    """
    target = Path(os.path.realpath(folder))
    limit = together(lambda: _in_bytes(max_shard_size), group)
    check_is_same("max_shard_size", str(limit), group, "Give the same size on all ranks.")
    inner, places = together(lambda: _described(model, target), group)
    check_is_same("folder", str(target), group, "Give one folder on a file system that all share.")
    adapter = together(lambda: adapter_of(model), group)
    if adapter is not None:
        _save_adapter(model, adapter, inner, target, group)
        return
    stages = _stages(places, group)
    own = next(number for number, each in enumerate(stages) if rank_in(group) in each.ranks)
    units = together(lambda: _units(inner, stages), group)
    files = _files(units, stages, limit)
    with _new_folder(target, group) as temporary:
        # Not a step of its own: a rank that cannot gather must not wait for those that do.
        failure = _write(places, units, files, own, temporary, group)
        together(lambda: _raise(failure), group)
        on_first_rank(lambda: _write_index(inner, units, files, temporary), group)


# --- What is saved --------------------------------------------------------------------------------


def _described(model: nn.Module, target: Path) -> tuple[Any, dict[str, Place]]:
    """Return the model of transformers in a model, and what is saved of it by name."""
    inner = pretrained_model(model, "save_pretrained")
    if target.exists() and not target.is_dir():
        raise NotADirectoryError(f"{target} is a file. Give a folder's name.")
    with contextlib.suppress(OSError):  # the working directory is gone
        if Path.cwd().is_relative_to(target):
            raise ValueError(
                f"save_pretrained() replaces {target} by a new folder, but that contains the "
                f"working directory of this process, {Path.cwd()}, which would be gone. Give "
                "another folder, such as a new one in it."
            )
    _reshard(model)
    found = _persistent(model, inner)
    on_meta = [place.name for place in found if place.tensor.is_meta]
    if on_meta:
        raise ValueError(
            f"{in_words(on_meta)} of {type(model).__name__} are on the meta device, and have no "
            "values to save. Load or initialize the model first."
        )
    dtypes = {each.name: each.tensor.dtype for each in found}
    if other := {name: dtype for name, dtype in dtypes.items() if not can_be_written(dtype)}:
        raise ValueError(
            f"{type(model).__name__} has tensors of dtypes that are not written to safetensors "
            f"files: {other}. Cast them, or save them by themselves."
        )
    if adapter_of(model) is not None:
        return inner, {}
    added = [place.name for place in found if place.original is None]
    if added:
        raise ValueError(
            f"{in_words(added)} of {type(model).__name__} are not in {type(inner).__name__}, whose "
            "checkpoints transformers knows. Pass that model, and save the others by themselves."
        )
    return inner, _without_tied(model, inner, {each.original or "": each for each in found})


def _reshard(model: nn.Module) -> None:
    """Let FSDP2 shard what it has gathered for a forward, in another precision."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _persistent(model: nn.Module, inner: nn.Module) -> list[Place]:
    return [place for place in places_of(model, inner) if place.persistent]


def _without_tied(model: nn.Module, inner: Any, places: dict[str, Place]) -> dict[str, Place]:
    """Return places without those that transformers ties to others, and ignores."""
    stage = stage_of(model)
    of_stages = stage.tied if stage is not None and stage.count > 1 else None
    ignored = {*(getattr(inner, "_keys_to_ignore_on_save", None) or ())}
    for name, first in inner.get_expanded_tied_weights_keys(all_submodels=True).items():
        one, other = places.get(name), places.get(first)
        is_tied = one is not None and other is not None and one.tensor is other.tensor
        if is_tied or name == of_stages:
            ignored.add(name)
    return {name: place for name, place in places.items() if name not in ignored}


class _Stage(NamedTuple):
    """Ranks that have the same parameters: those of a pipeline stage, or all.

    Attributes:
        ranks: in the group.
        tensors: shapes and dtypes by name.
    """

    ranks: list[int]
    tensors: dict[str, tuple[torch.Size, torch.dtype]]


def _stages(places: Mapping[str, Place], group: dist.ProcessGroup | None) -> list[_Stage]:
    """Return the stages, on all ranks."""
    own = {name: (place.tensor.shape, place.tensor.dtype) for name, place in places.items()}
    digests = gathered(hashlib.sha256(repr(own).encode()).hexdigest(), group)
    ranks = defaultdict(list)
    for rank, digest in enumerate(digests):
        ranks[digest].append(rank)
    is_first = any(each[0] == rank_in(group) for each in ranks.values())
    described = gathered(own if is_first else None, group)
    return [_Stage(each, described[each[0]]) for each in ranks.values()]


def _units(inner: Any, stages: Sequence[_Stage]) -> list[_Unit]:
    """Return what the checkpoint has, by transformers' conversions."""
    from transformers.core_model_loading import revert_weight_conversion

    stage_with: dict[str, int] = {}
    state: dict[str, Tensor] = {}
    gathered_by: dict[str, _Gathered] = {}
    for number, stage in enumerate(stages):
        for name, (shape, dtype) in stage.tensors.items():
            if name not in state:
                stage_with[name] = number
                gathered_by[name] = _Gathered(name, shape, dtype)
                state[name] = Deferred(gathered_by[name])
    skeleton = skeleton_of(inner)
    if "_weight_conversions" in vars(inner):  # of the checkpoint that from_pretrained has loaded
        skeleton._weight_conversions = inner._weight_conversions
    order = {name: number for number, name in enumerate(state)}
    outputs = {
        name: source_of(each) for name, each in revert_weight_conversion(skeleton, state).items()
    }
    members: dict[str, set[str]] = {}  # for each parameter, those that are converted with it
    read_by: dict[str, list[str]] = {}
    for name, source in outputs.items():
        read_by[name] = [each.name for each in source.leaves() if isinstance(each, _Gathered)]
        joined = set(read_by[name]).union(*(members.get(each, ()) for each in read_by[name]))
        for each in joined:
            members[each] = joined
    grouped: dict[str, dict[str, Source]] = defaultdict(dict)
    for name, source in outputs.items():
        grouped[min(members[read_by[name][0]], key=order.__getitem__)][name] = source
    units = []
    for first in sorted(grouped, key=order.__getitem__):
        names = sorted(members[first], key=order.__getitem__)
        numbers = {stage_with[name] for name in names}
        if len(numbers) > 1:
            raise ValueError(
                f"{in_words(names)} are converted together by transformers, and are in different "
                "pipeline stages. Choose layers_per_stage so that they are in one stage."
            )
        units.append(_Unit([gathered_by[name] for name in names], grouped[first], numbers.pop()))
    return units


def _files(units: Sequence[_Unit], stages: Sequence[_Stage], limit: int | None) -> list[_File]:
    """Return the files: each has tensors of one stage, and a writer among its ranks."""
    found: list[tuple[int, list[str]]] = []
    for number, stage in enumerate(stages):
        sizes = {
            name: source.nbytes
            for unit in units
            if unit.stage == number
            for name, source in unit.outputs.items()
        }
        share = -(-sum(sizes.values()) // len(stage.ranks))
        own_limit = limit or min(max(share, _LEAST_FILE), _LARGEST_FILE)
        parts = parts_of_files([*sizes], [*sizes.values()], own_limit)
        found += [
            (stage.ranks[count % len(stage.ranks)], names) for count, names in enumerate(parts)
        ]
    if len(found) == 1:
        return [_File(WEIGHTS, *found[0])]
    stem, suffix = WEIGHTS.split(".")
    return [
        _File(f"{stem}-{count:05d}-of-{len(found):05d}.{suffix}", *each)
        for count, each in enumerate(found, 1)
    ]


# --- Files ----------------------------------------------------------------------------------------


def _write(
    places: Mapping[str, Place],
    units: Sequence[_Unit],
    files: Sequence[_File],
    own_stage: int,
    folder: Path,
    group: dist.ProcessGroup | None,
) -> Exception | None:
    """Gather this stage's parameters, write this rank's files, and return what failed in that.

    What a gather raises, it raises at once.
    """
    rank = rank_in(group)
    file_of = {name: file for file in files for name in file.outputs}
    writers: dict[str, FileWriter] = {}
    failure: Exception | None = None
    with ThreadPoolExecutor(1) as thread:  # writes while the next parameters are gathered
        written: Future[None] | None = None
        for unit in _in_turns(units, files, own_stage):
            own = {
                name: each for name, each in unit.outputs.items() if file_of[name].writer == rank
            }
            for each in unit.sources:
                each.value = _whole(places[each.name].tensor)
            try:
                for name, source in own.items() if failure is None else ():
                    file = file_of[name]
                    if file.name not in writers:
                        writers[file.name] = FileWriter(
                            folder / file.name, _outputs_of(file, units)
                        )
                    if written is not None:  # one tensor waits in memory
                        written.result()
                    written = thread.submit(writers[file.name].write, name, read(source))
            except Exception as error:  # noqa: BLE001  (others need this rank to gather)
                failure = error
            finally:
                for each in unit.sources:
                    each.value = None
        try:
            if written is not None:
                written.result()
            for writer in writers.values():
                writer.sync()
        except Exception as error:  # noqa: BLE001  (returned, for all ranks to raise)
            failure = failure or error
    return failure


def _raise(error: Exception | None) -> None:
    if error is not None:
        raise error


def _in_turns(units: Sequence[_Unit], files: Sequence[_File], own_stage: int) -> Iterator[_Unit]:
    """Yield the units of a stage: the first of each file, the second of each, and so on."""
    unit_of = {name: unit for unit in units for name in unit.outputs}
    of_files = []
    for file in files:
        found = {id(unit_of[name]): unit_of[name] for name in file.outputs}
        of_files.append([unit for unit in found.values() if unit.stage == own_stage])
    turns = [unit for turn in zip_longest(*of_files) for unit in turn if unit is not None]
    yield from {id(unit): unit for unit in turns}.values()


def _outputs_of(file: _File, units: Sequence[_Unit]) -> dict[str, Source]:
    outputs = {name: source for unit in units for name, source in unit.outputs.items()}
    return {name: outputs[name] for name in file.outputs}


def _whole(tensor: Tensor) -> Tensor:
    """Return a tensor as one process has it. All ranks of its mesh make the call."""
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return tensor
    kind = tensor.device_mesh.device_type
    local = tensor.to_local()
    if local.device.type != kind:  # FSDP2 stores it on the CPU
        tensor = DTensor.from_local(
            local.to(kind),
            tensor.device_mesh,
            tensor.placements,
            run_check=False,
            shape=tensor.shape,
            stride=tensor.stride(),
        )
    return tensor.full_tensor()


@contextlib.contextmanager
def _new_folder(target: Path, group: dist.ProcessGroup | None) -> Iterator[Path]:
    """Make a new folder beside the checkpoint's, and rename it if the context ends well."""

    def make() -> str:
        if rank_in(group) != 0:
            return ""
        target.parent.mkdir(parents=True, exist_ok=True)
        made = target.parent / f".{target.name}.{secrets.token_hex(4)}.tmp"
        made.mkdir()
        return made.name

    temporary = target.parent / gathered(together(make, group), group)[0]
    try:
        seen = gathered(temporary.is_dir(), group)
        if not all(seen):
            blind = [rank for rank, each in enumerate(seen) if not each]
            raise ValueError(
                f"Ranks {blind[:8]} do not see {target.parent} of rank 0, and all ranks write to "
                "it. Give a folder on a file system that all hosts share."
            )
        yield temporary
        on_first_rank(lambda: _replace(temporary, target), group)
    except BaseException:
        if rank_in(group) == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        raise


def _save_adapter(
    model: nn.Module, adapter: str, inner: Any, target: Path, group: dist.ProcessGroup | None
) -> None:
    """Save an adapter's files, which the first rank writes."""
    found = together(lambda: adapter_places(model, adapter, _persistent(model, inner)), group)
    stages = _stages(found, group)
    with _new_folder(target, group) as temporary:
        whole = {name: _whole(place.tensor) for name, place in found.items()}
        own = together(lambda: {name: each.cpu() for name, each in whole.items()}, group)
        tensors = dict(own)
        for stage in stages[1:]:  # the first is the first rank's; one at a time, for the memory
            sent = sent_from(stage.ranks[0], own, group)
            if rank_in(group) == 0:
                tensors |= sent
        on_first_rank(lambda: save_adapter(model, adapter, tensors, temporary), group)


def _write_index(inner: Any, units: Sequence[_Unit], files: Sequence[_File], folder: Path) -> None:
    """Write the index and the configs."""
    if len(files) > 1:
        index = {
            "metadata": {
                "total_size": sum(each.nbytes for unit in units for each in unit.outputs.values()),
            },
            "weight_map": {name: file.name for file in files for name in file.outputs},
        }
        (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    config = copy.deepcopy(inner.config)
    config.dtype = str(floating_dtype(inner)).removeprefix("torch.")
    config.architectures = [class_of(inner).__name__]
    config.save_pretrained(folder)
    if inner.can_generate():
        inner.generation_config.save_pretrained(folder)


def _replace(temporary: Path, target: Path) -> None:
    """Rename a finished folder; other files of an older one are kept."""
    for each in temporary.iterdir():
        _sync(each)
    _sync(temporary)
    older = target.with_name(temporary.name.replace(".tmp", ".old"))
    left = _left_by_saves(target)
    saved = [each for each in left if each.suffix == ".old"]
    if saved and not target.exists():  # a save was killed between the two renames below
        os.rename(max(saved, key=lambda each: each.stat().st_mtime), target)
    if target.exists():
        replaced = _OF_ADAPTER if (temporary / ADAPTER_WEIGHTS).exists() else _OF_MODEL
        for each in target.iterdir():
            if not replaced.fullmatch(each.name) and not (temporary / each.name).exists():
                _link(each, temporary / each.name)
        os.rename(target, older)
    os.rename(temporary, target)
    _sync(target.parent)
    for each in {*left, older} - {temporary}:
        shutil.rmtree(each, ignore_errors=True)


def _left_by_saves(target: Path) -> list[Path]:
    """Return the folders beside a checkpoint that are of saves under way, or that were killed."""
    names = re.compile(rf"\.{re.escape(target.name)}\.[0-9a-f]{{8}}\.(tmp|old)")
    return [each for each in target.parent.iterdir() if names.fullmatch(each.name)]


def _link(path: Path, other: Path) -> None:
    """Give a file a second name, or copy it; folders with all that is in them.

    What another program has opened, such as a log, stays the file that it writes to.
    """
    if path.is_dir() and not path.is_symlink():
        shutil.copytree(path, other, symlinks=True, copy_function=_link_file)
    else:
        _link_file(path, other)


def _link_file(path: os.PathLike[str] | str, other: os.PathLike[str] | str) -> None:
    try:
        os.link(path, other, follow_symlinks=False)
    except OSError:  # a file system without hard links
        shutil.copy2(path, other, follow_symlinks=False)


def _sync(path: Path) -> None:
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def _in_bytes(size: int | str | None) -> int | None:
    if size is None:
        return None
    number: Any = size
    if isinstance(size, str):
        unit = _UNITS.get(size[-2:].upper(), 0)
        number = int(size[:-2]) * unit if size[:-2].strip().isdigit() else 0
    if type(number) is not int or number <= 0:
        raise ValueError(f'max_shard_size={size!r} must be a number of bytes, or such as "5GB".')
    return number
