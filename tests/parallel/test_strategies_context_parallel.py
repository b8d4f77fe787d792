"""Context parallelism: equal to one process, what is split, and what is refused on CPUs.

torch has no attention for parts of sequences on CPUs; `cpu_attention` has the kernels that it
lacks. All else is torch's own: the exchange of keys and values, on gloo, and its backward.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo as dynamo
import torch.distributed as dist
from cpu_attention import attention_for_cpus
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig

from helpers.crew import Crew
from helpers.tiers import in_tiers
from helpers.worlds import fake_world
from meshverse import DeviceMesh, init_device_mesh
from meshverse.parallel import (
    LossPerToken,
    ParallelismSizes,
    context_parallel,
    create_fsdp2_device_mesh,
    fsdp2_strategy_parallelize,
)
from meshverse.parallel.models.packed_sequences import without_masks_for_packed_sequences
from meshverse.parallel.strategies import context_parallel as implementation

_LENGTH = 16


def _tokens(rows: int = 2) -> Tensor:
    return torch.arange(float(rows * _LENGTH)).view(rows, _LENGTH)


@contextlib.contextmanager
def _cpu_allowed() -> Iterator[None]:
    """Let the device pass, so that what is done before attention can be seen without a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(implementation, "_DEVICES", ("cpu",))
        yield


def _attend(of: Callable[[], Callable[..., Tensor]]) -> Tensor:
    return of()(*torch.ones(3, 1, 2, _LENGTH // 2, 4), is_causal=True)


def _split(on_axis: bool) -> dict[str, Any]:
    mesh, _ = create_fsdp2_device_mesh(ParallelismSizes(cp_size=2))
    tokens, positions, kept = _tokens(), torch.arange(_LENGTH), _tokens()
    with (
        _cpu_allowed(),
        attention_for_cpus(),
        context_parallel(
            mesh["cp"] if on_axis else mesh,
            buffers=[tokens, positions, kept],
            buffer_seq_dims=[1, 0, -1],
            no_restore_buffers=[kept],
        ),
    ):
        _attend(lambda: F.scaled_dot_product_attention)
        inside = [tokens.tolist(), positions.tolist(), kept.tolist()]
    place = mesh["cp"].get_local_rank()
    return {"place": place, "inside": inside, "after": [tokens.tolist(), positions.tolist()]} | {
        "kept": kept.tolist()
    }


@pytest.mark.parametrize("on_axis", [False, True])
def test_each_rank_has_a_part_from_the_front_and_from_the_end(crew: Crew, on_axis: bool) -> None:
    whole = _tokens()
    for answer in crew.run(_split, 4, on_axis):
        front, end = ((0, 12), (4, 8))[answer["place"]]
        chosen = [*range(front, front + 4), *range(end, end + 4)]
        mine = whole[:, chosen].tolist()
        assert answer["inside"] == [mine, chosen, mine]
        assert answer["after"] == [whole.tolist(), list(range(_LENGTH))]
        assert answer["kept"] == mine


_SIZES = {
    "cp 2": (2, {"cp_size": 2}),
    "cp 4": (4, {"cp_size": 4}),
    "cp 2 x 2 shards": (4, {"cp_size": 2}),
    "cp 2, tp 2": (4, {"cp_size": 2, "tp_size": 2}),
}
_BOUND, _EXACT = 1e-5, MixedPrecisionPolicy()


def _llama() -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, attn_implementation="sdpa",
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config)


def _loss(model: nn.Module, inputs: Tensor, labels: Tensor, positions: Tensor) -> Tensor:
    logits = model(inputs, position_ids=positions, use_cache=False).logits
    if isinstance(logits, DTensor):
        logits = logits.full_tensor()
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def _train(sizes: dict[str, int]) -> float:
    """Return the largest relative error of the loss and the gradients, against one process."""
    tokens = torch.randint(64, (2, 33), generator=torch.Generator().manual_seed(1))
    batch = tokens[:, :-1].clone(), tokens[:, 1:].clone(), torch.arange(32)[None].clone()
    alone, model = _llama(), _llama()
    expected = _loss(alone, *batch)
    expected.backward()
    mesh, _ = create_fsdp2_device_mesh(ParallelismSizes(**sizes))
    model = fsdp2_strategy_parallelize(model, mesh, mp_policy=_EXACT)
    split = context_parallel(mesh, buffers=batch, buffer_seq_dims=[1, 1, 1])
    with _cpu_allowed(), attention_for_cpus(), split:
        own = _loss(model, *batch)
        own.backward()
    summed = own.detach().clone()
    dist.all_reduce(summed, group=mesh["cp"].get_group())
    errors = [abs(float(summed / expected) - 1)]
    for theirs, mine in zip(alone.parameters(), model.parameters(), strict=True):
        # FSDP2 averages over all shares, of which those along cp have different tokens.
        gradient = mine.grad.full_tensor() * mesh["cp"].size()
        errors.append(float((gradient - theirs.grad).norm() / theirs.grad.norm()))
    return max(errors)


@pytest.mark.parametrize("name", in_tiers(_SIZES, ["cp 2"]))
def test_training_equals_one_process(crew: Crew, name: str) -> None:
    size, sizes = _SIZES[name]
    assert max(crew.run(_train, size, sizes)) < _BOUND


def _unsplit(is_called: bool) -> tuple[str, bool]:
    """Attention by a name that was imported, or none at all."""
    mesh, _ = create_fsdp2_device_mesh(ParallelismSizes(cp_size=2))
    tokens, own = _tokens(), F.scaled_dot_product_attention
    dynamo.utils.counters.clear()  # of earlier tests in this process
    implementation._has_split.clear()
    split = context_parallel(mesh, buffers=[tokens], buffer_seq_dims=[1])
    with (
        _cpu_allowed(),
        pytest.raises(RuntimeError, match="No attention was split") as raised,
        split,
    ):
        _attend(lambda: own if is_called else lambda *each, **_: each[0])
    assert torch.equal(tokens, _tokens())
    return str(raised.value), F.scaled_dot_product_attention is own


@pytest.mark.parametrize("is_called", [True, False])
def test_a_context_in_which_no_attention_is_split_is_refused(crew: Crew, is_called: bool) -> None:
    for message, is_restored in crew.run(_unsplit, 2, is_called):
        assert 'attn_implementation="sdpa"' in message
        assert is_restored


def _masked(by_name: bool) -> bool:
    mesh, _ = create_fsdp2_device_mesh(ParallelismSizes(cp_size=2))
    tokens, own = _tokens(), F.scaled_dot_product_attention
    implementation._has_split.clear()
    mask = torch.ones(_LENGTH // 2, _LENGTH // 2, dtype=torch.bool)
    given = [*torch.ones(3, 1, 2, _LENGTH // 2, 4), *([] if by_name else [mask])]
    named = {"attn_mask": mask} if by_name else {}
    split = context_parallel(mesh, buffers=[tokens], buffer_seq_dims=[1])
    with _cpu_allowed(), pytest.raises(ValueError, match="has a mask, and torch's"), split:
        F.scaled_dot_product_attention(*given, **named)
    return torch.equal(tokens, _tokens()) and F.scaled_dot_product_attention is own


@pytest.mark.parametrize("by_name", [True, False])
def test_a_mask_is_refused(crew: Crew, by_name: bool) -> None:
    assert crew.run(_masked, 2, by_name) == [True, True]


def _windowed(window: int | None) -> str:
    config = MistralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, attn_implementation="sdpa",
        sliding_window=window,
    )  # fmt: skip
    mesh, _ = create_fsdp2_device_mesh(ParallelismSizes(cp_size=2))
    model = AutoModelForCausalLM.from_config(config)
    model = fsdp2_strategy_parallelize(model, mesh, mp_policy=_EXACT)
    inputs, positions = (
        torch.ones(2, _LENGTH, dtype=torch.long),
        torch.arange(_LENGTH)[None].clone(),
    )
    split = context_parallel(mesh, buffers=[inputs, positions], buffer_seq_dims=[1, 1])
    try:
        with _cpu_allowed(), attention_for_cpus(), split:
            model(inputs, position_ids=positions, use_cache=False).logits.sum().backward()
    except ValueError as error:
        return str(error)
    model(inputs)  # whole sequences
    return ""


def test_a_window_shorter_than_the_sequences_is_refused(crew: Crew) -> None:
    for window in (None, _LENGTH, 2 * _LENGTH):
        assert crew.run(_windowed, 2, window) == ["", ""]
    for message in crew.run(_windowed, 2, _LENGTH * 3 // 4):
        assert (
            f"sliding_window=12, and context parallelism splits sequences of {_LENGTH}" in message
        )


def _fails() -> bool:
    mesh, _ = create_fsdp2_device_mesh(ParallelismSizes(cp_size=2))
    own = F.scaled_dot_product_attention
    with (
        _cpu_allowed(),
        pytest.raises(KeyError, match="mine"),
        context_parallel(mesh, buffers=[_tokens()], buffer_seq_dims=[1]),
    ):
        raise KeyError("mine")
    return F.scaled_dot_product_attention is own


def test_an_error_inside_is_the_one_that_is_raised(crew: Crew) -> None:
    assert all(crew.run(_fails, 2))


def _compiled(fullgraph: bool) -> None:
    """Calls in compiled code are not seen, so nothing is refused then."""
    torch.compiler.reset()
    dynamo.utils.counters.clear()
    implementation._has_split.clear()
    mesh, _ = create_fsdp2_device_mesh(ParallelismSizes(cp_size=2))
    add = torch.compile(lambda each: each + 1, backend="eager", fullgraph=fullgraph)
    add(torch.ones(1))
    with _cpu_allowed(), context_parallel(mesh, buffers=[_tokens()], buffer_seq_dims=[1]):
        pass


@pytest.mark.parametrize("fullgraph", [False, True])
def test_nothing_is_refused_where_compiled_code_may_have_called_attention(
    crew: Crew, fullgraph: bool
) -> None:
    crew.run(_compiled, 2, fullgraph)


def _loss_per_token(is_counted_inside: bool) -> float | str:
    """Return the largest relative error of two microbatches' gradients, or the error."""
    tokens = torch.randint(64, (2, 33), generator=torch.Generator().manual_seed(1))
    rows = [(row[None, :-1].clone(), row[None, 1:].clone()) for row in tokens]
    positions = torch.arange(32)[None].clone()
    alone, model = _llama(), _llama()
    for inputs, targets in rows:
        (_loss(alone, inputs, targets, positions) / 64).backward()
    mesh, _ = create_fsdp2_device_mesh(ParallelismSizes(cp_size=2))
    model = fsdp2_strategy_parallelize(model, mesh, mp_policy=_EXACT)
    loss_of = LossPerToken(model, mesh)
    if not is_counted_inside:
        loss_of.count(*(targets for _, targets in rows))
    buffers = [positions, *(each for row in rows for each in row)]
    with (
        _cpu_allowed(),
        attention_for_cpus(),
        context_parallel(mesh, buffers=buffers, buffer_seq_dims=[1] * len(buffers)),
    ):
        if is_counted_inside:
            loss_of.count(*(targets for _, targets in rows))
        for inputs, targets in rows:
            logits = model(inputs, position_ids=positions, use_cache=False).logits
            if not is_counted_inside:
                with pytest.raises(RuntimeError, match="LossPerToken") as raised:
                    loss_of(logits, targets)
                return str(raised.value)
            loss_of(logits, targets).backward()
    assert loss_of.count(rows[0][1]) == 64
    return max(
        float((mine.grad.full_tensor() - theirs.grad).norm() / theirs.grad.norm())
        for theirs, mine in zip(alone.parameters(), model.parameters(), strict=True)
    )


def test_a_loss_per_token_counts_each_token_once(crew: Crew) -> None:
    assert max(crew.run(_loss_per_token, 2, True)) < _BOUND
    for message in crew.run(_loss_per_token, 2, False):
        assert "targets of shape (1, 32), and this rank's part of them has shape (1, 16)" in message
        assert "inside context_parallel()" in message


def _refused() -> tuple[str, bool]:
    mesh, _ = create_fsdp2_device_mesh(ParallelismSizes(cp_size=2))
    tokens, entered = _tokens(), False
    split = context_parallel(mesh, buffers=[tokens], buffer_seq_dims=[1])
    with pytest.raises(NotImplementedError) as raised, split:
        entered = True
    assert torch.equal(tokens, _tokens())
    return str(raised.value), entered


def test_it_is_refused_on_cpu_when_it_is_entered(crew: Crew) -> None:
    for message, entered in crew.run(_refused, 2):
        assert message.startswith("Context parallelism over 2 ranks on 'cpu': torch has no")
        assert "cp_size=1" in message
        assert not entered


def test_one_rank_does_without() -> None:
    with fake_world(8):
        mesh, _ = create_fsdp2_device_mesh(ParallelismSizes())
        tokens = _tokens()
        with context_parallel(mesh, buffers=[tokens], buffer_seq_dims=[1]):
            assert torch.equal(tokens, _tokens())


# --- buffers -------------------------------------------------------------------------------------


@pytest.fixture
def mesh(monkeypatch: pytest.MonkeyPatch) -> Iterator[DeviceMesh]:
    monkeypatch.setattr(implementation, "_DEVICES", ("cpu",))
    with fake_world(8):
        yield create_fsdp2_device_mesh(ParallelismSizes(cp_size=4))[0]


_BATCH = torch.arange(2.0 * (_LENGTH + 1)).view(2, _LENGTH + 1)
_FLAT = torch.arange(_LENGTH + 1)


@pytest.mark.parametrize(
    ("buffers", "dims", "message"),
    [
        ([], [], "0 buffers and 0 buffer_seq_dims: give one or more"),
        ([_tokens()], [], "1 buffers and 0 buffer_seq_dims"),
        ([_tokens()], [2], r"Buffer 0 of shape \(2, 16\) has no dim 2"),
        (
            [_tokens(), torch.ones(1, 2 * _LENGTH)],
            [1, 1],
            r"lengths \[16, 32\] must have one length",
        ),
        ([torch.ones(1, 6)], [1], r"lengths \[6\] must .* divisible by the 4 ranks"),
        ([torch.ones(1, 4)], [1], "4 tokens over 4 ranks .* causal attention for one token"),
        ([nn.Parameter(torch.ones(1, _LENGTH))], [1], "Buffer 0 .* not require a gradient"),
        ([_tokens(), _BATCH[:, :-1]], [1, 1], r"Buffer 1 .* must be contiguous.*clone\(\)"),
        ([_FLAT[:-1], _FLAT[1:]], [0, 0], "Buffers 0 and 1 share memory"),
        ([_FLAT[1:], _FLAT[:-1]], [0, 0], "Buffers 1 and 0 share memory"),
        ([_BATCH[:, :-1].clone()] * 2, [1, 1], "Buffers 0 and 1 share memory"),
    ],
)
def test_what_cannot_be_split_is_refused_and_stays(
    mesh: DeviceMesh, buffers: list[Tensor], dims: list[int], message: str
) -> None:
    before = [each.detach().clone() for each in buffers]
    split = context_parallel(mesh, buffers=buffers, buffer_seq_dims=dims)
    with pytest.raises(ValueError, match=message), split:
        raise AssertionError("it was entered")
    assert all(torch.equal(now, then) for now, then in zip(buffers, before, strict=True))


def test_a_mesh_without_the_axis_is_refused() -> None:
    with fake_world(8):
        mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
        split = context_parallel(mesh, buffers=[_tokens()], buffer_seq_dims=[1])
        message = r"No axis 'cp': the mesh has the axes \('dp', 'tp'\)"
        with pytest.raises(KeyError, match=message), split:
            raise AssertionError("it was entered")


@pytest.mark.parametrize("use_cache", [True, False])
def test_transformers_masks_no_parts_from_each_other(use_cache: bool, monkeypatch) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=2, attn_implementation="sdpa",
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    masks = []
    attention = torch.nn.functional.scaled_dot_product_attention

    def spy(*args: Any, attn_mask: Any = None, is_causal: bool = False, **rest: Any) -> Any:
        masks.append((attn_mask is None, is_causal))
        return attention(*args, attn_mask=attn_mask, is_causal=is_causal, **rest)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    inputs = {"input_ids": torch.zeros(1, 4, dtype=torch.int64), "use_cache": use_cache}
    positions = torch.tensor([[0, 1, 6, 7]])  # of rank 0 of 2, as the context splits them
    with without_masks_for_packed_sequences():
        model(**inputs, position_ids=positions)
    assert masks == [(True, True)]
    model(**inputs, position_ids=positions)
    assert masks[1] == ((True, True) if use_cache else (False, False))  # transformers' own again
