"""Every causal language model of the installed transformers that carries a tensor-parallel plan.

Tiny random ones, on which tensor parallelism is compared with one process.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain
from typing import Any

import torch
import transformers
from rounding import largest_error, rounding
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import CONFIG_MAPPING, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import meshverse
from meshverse.parallel.models.modules import layer_lists
from meshverse.parallel.tensor_parallel.apply import apply_tp_plan
from meshverse.parallel.tensor_parallel.hf_plan import get_hf_tp_shard_plan

RANKS = 2
VOCABULARY = 96
_TOKENS = (2, 48)  # sequences, and tokens of each: the whole vocabulary
_SEED = 20
_PADDING = 3  # in the first rank's part of the vocabulary

# A gradient of a weight sums over all tokens. Up to four layers, of about a dozen operations each,
# are gone through forward and backward.
_TERMS, _STEPS_OF_SUMS = _TOKENS[0] * _TOKENS[1], 4 * 12 * 2
BOUND = rounding(torch.float32, terms=_TERMS, steps=_STEPS_OF_SUMS)  # about 1e-3

# From transformers 5.24 on, its own plan splits its embedding only; before, it had none.
_VERSION = tuple(map(int, transformers.__version__.split(".")[:2]))
GPT_OSS_SPLITS_NO_LAYERS = _VERSION >= (5, 24)
_PRECISE_BOUND = rounding(torch.float64, terms=_TERMS, steps=_STEPS_OF_SUMS)  # about 2e-12

# By the names that config classes give to sizes; those that a class does not have are not set.
_TINY = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "sliding_window": 16,
    "pad_token_id": _PADDING,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "q_lora_rank": 12,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "first_k_dense_replace": 1,
    "router_jitter_noise": 0.0,
    "input_jitter_noise": 0.0,
    "n_group": 1,
    "num_expert_group": 1,
    "topk_group": 1,
    "shared_expert_intermediate_size": 16,
    "expert_ffn_hidden_size": 16,
    "ffn_hidden_size": 48,
    "moe_topk": 2,
    "num_layers": 2,
    "n_shared_experts": 1,
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 8,
    "laurel_rank": 8,
    "zero_expert_num": 2,
    "mamba_n_heads": 8,
    "mamba_d_state": 16,
    "mamba_d_head": "auto",
    "mamba_num_heads": 8,
    "mamba_head_dim": 8,
    "ssm_state_size": 16,
    "linear_head_dim": 8,
    "linear_num_heads": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 8,
    "n_positions": 128,
    "n_ctx": 128,
    "rotary_dim": 4,
}

# In one process too, these compute some of their parts in float32 only.
FLOAT32_ONLY = {
    "4": ("deepseek_v3", "dots1", "ernie4_5_moe", "glm4_moe", "longcat_flash"),
    "5": ("bailing_hybrid", "hy_v4", "inkling2_loop_text", "inkling2_text"),
}.get(transformers.__version__.split(".")[0], ())

# What the rest of a config must say for the sizes above to be possible.
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_BOTH_KINDS = ["sliding_attention", "full_attention"]
_DENSE_AND_SPARSE = ["dense", "sparse"]
_SPECIAL: dict[str, dict[str, Any]] = {
    "zaya": {"num_experts_per_tok": 1},
    "cohere_compass_text": {"rope_parameters": dict.fromkeys(_BOTH_KINDS, _ROPE)},
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "layer_types": _BOTH_KINDS * 2,
        "intermediate_size": [48] * 4,
        "activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0],
    },
    "beam": {"mlp_layer_types": _DENSE_AND_SPARSE},
    "bailing_hybrid": {"mlp_layer_types": _DENSE_AND_SPARSE},
    "deepseek_v32": {"mlp_layer_types": _DENSE_AND_SPARSE},
    "glm_moe_dsa": {"mlp_layer_types": _DENSE_AND_SPARSE},
    "flint": {"mlp_only_layers": [0]},
    "gemma4_text": {
        "layer_types": _BOTH_KINDS,
        "per_layer_config": {},
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 16,
    },
    "gemma4_unified_text": {"layer_types": _BOTH_KINDS, "per_layer_config": {}},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "phi4_multimodal": {
        "vision_config": {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
        },
        "audio_config": {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_blocks": 2,
            "num_attention_heads": 4,
        },
    },
}


@dataclass(frozen=True)
class Outcome:
    """Comparison of a family, tied or untied, with one process.

    Attributes:
        refusal: why it cannot be split, or nothing.
        error: the largest relative difference to one process, of logits and all gradients, in
            float32.
        worst: of which tensor.
        precise_error: the same in float64, where no rounding hides a small gradient that is wrong.
        precise_worst: of which tensor.
        precise_bound: of `precise_error`. Many models compute norms and decays in float32 even
            then, so theirs is that of float32.
        was_tied: whether the head's weight was the embedding's, in one process.
        tied: whether it is, after the split.
        split: number of parameters that became DTensors.
        parameters: number of parameters.
        share: of what all parameters hold, in per cent, what is split rather than replicated.
        share_of_layers: the same of the parameters of the layers, without embedding and head.
    """

    refusal: str = ""
    error: float = 0.0
    worst: str = ""
    precise_error: float = 0.0
    precise_worst: str = ""
    precise_bound: float = BOUND
    was_tied: bool = False
    tied: bool = False
    split: int = 0
    parameters: int = 0
    share: float = 0.0
    share_of_layers: float = 0.0

    @property
    def is_equal(self) -> bool:
        """Whether it was split, and gave what one process gives."""
        return (
            not self.refusal
            and self.error < BOUND
            and self.precise_error < self.precise_bound
            and self.tied == self.was_tied
        )


@cache
def families() -> tuple[str, ...]:
    """The model types with a plan, by walking the package."""
    return tuple(sorted(name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if _has_plan(name)))


def _has_plan(family: str) -> bool:
    config_class = CONFIG_MAPPING[family]
    return bool(getattr(config_class, "base_model_tp_plan", None))


def model_class(family: str) -> type[nn.Module]:
    return getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family])


def tiny_config(family: str, *, tied: bool, **changes: Any) -> PretrainedConfig:
    """A family's config with small sizes, whatever sizes it has; of its text model."""
    config_class = type(CONFIG_MAPPING[family]().get_text_config())
    known = config_class().to_dict()
    sizes = {name: size for name, size in _TINY.items() if name in known}
    sizes |= {name: 0.0 for name in known if "dropout" in name or name.endswith("_pdrop")}
    if "qk_rope_head_dim" in known:  # a latent for the keys and values of all heads
        sizes |= {"num_key_value_heads": 4, "head_dim": sizes["qk_rope_head_dim"]}
    sizes |= _SPECIAL.get(family, {}) | changes
    return config_class(**sizes, tie_word_embeddings=tied)


def tiny_model(family: str, *, tied: bool, **changes: Any) -> nn.Module:
    """A model of a few thousand random parameters, the same each time."""
    config = tiny_config(family, tied=tied, **changes)
    config._attn_implementation = "eager"
    torch.manual_seed(_SEED)
    model = model_class(family)(config).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):  # decays over so many sizes that rounding shows
                parameter.zero_()
            parameter.add_(torch.randn_like(parameter), alpha=0.05)  # no norm is all ones
    return model


def tokens() -> Tensor:
    """Each token of the vocabulary once; shape `_TOKENS`."""
    generator = torch.Generator().manual_seed(_SEED)
    count = _TOKENS[0] * _TOKENS[1]
    every = torch.arange(count) % VOCABULARY
    return every[torch.randperm(count, generator=generator)].reshape(_TOKENS)


def run(
    model: nn.Module, given: Tensor | None = None, *, scale: float = 1.0, row: int = 0
) -> dict[str, Tensor | None]:
    """Logits, and the gradient of every parameter, as full tensors.

    Args:
        model: to run.
        given: token ids; all of them by default.
        scale: of the gradients.
        row: which sequence of all is the first that is given.
    """
    given = tokens() if given is None else given
    torch.manual_seed(_SEED)  # routers that choose at random choose alike
    logits = full(model(input_ids=given, use_cache=False).logits)
    generator = torch.Generator().manual_seed(_SEED)
    weights = torch.randn(_TOKENS[0] * _TOKENS[1], logits.size(-1), generator=generator)
    weights = weights[row * given.size(1) :][: given.numel()].view_as(logits)
    (logits * weights * scale).sum().backward()
    seen: dict[str, Tensor | None] = {"logits": logits.detach()}
    for name, parameter in model.named_parameters():
        seen[name] = None if parameter.grad is None else full(parameter.grad)
    return seen


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def compare(
    family: str,
    tied: bool,
    shard: Callable[[nn.Module], object] | None = None,
    *,
    is_split: Callable[[Tensor], bool] | None = None,
    error_of: Callable[..., tuple[float, str]] | None = None,
    **changes: Any,
) -> Outcome:
    """Split a family's tiny model over the world, and compare it with one process.

    Args:
        family: the model type.
        tied: whether the head is to have the embedding's weight.
        shard: splits a model in place, or raises; by default by tensor parallelism.
        is_split: whether it counts as one of the parameters that are split.
        error_of: what the split model, the whole one and `floor` give: the largest error, and of
            which tensor.
        changes: to the tiny config.
    """
    shard, error_of, is_split = shard or _split, error_of or _error, is_split or _is_dtensor

    whole = tiny_model(family, tied=tied, **changes)
    split = copy.deepcopy(whole)
    try:
        shard(split)
    except ValueError as error:
        return Outcome(str(error))
    layers = [layer for _, layer in chain.from_iterable(layer_lists(split))]
    outcome = Outcome(
        was_tied=is_tied(whole),
        tied=is_tied(split),
        split=sum(is_split(each) for each in split.parameters()),
        parameters=len(list(split.parameters())),
        share=_share(split.parameters()),
        share_of_layers=_share(chain.from_iterable(layer.parameters() for layer in layers)),
    )
    error, worst = error_of(split, whole, 1e-2)
    outcome = replace(outcome, error=error, worst=worst)
    if family in FLOAT32_ONLY:
        return outcome
    whole = in_float64(tiny_model(family, tied=tied, **changes))
    split = copy.deepcopy(whole)
    shard(split)
    error, worst = error_of(split, whole, 1e-4)
    bound = BOUND if _computes_in_float32(whole) else _PRECISE_BOUND
    return replace(outcome, precise_error=error, precise_worst=worst, precise_bound=bound)


def compare_both(family: str) -> tuple[Outcome, Outcome]:
    """Compare a family untied, and tied."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers' own, of tiny sizes
        return compare(family, False), compare(family, True)


def _error(split: nn.Module, whole: nn.Module, floor: float) -> tuple[float, str]:
    return largest_error(run(split), run(whole), floor)


def _share(parameters: Iterable[Tensor]) -> float:
    """Return how much of the elements of parameters is sharded, in per cent."""
    sizes = [
        (each.numel(), isinstance(each, DTensor) and any(map(Placement.is_shard, each.placements)))
        for each in {id(parameter): parameter for parameter in parameters}.values()
    ]
    return 100 * sum(size for size, is_split in sizes if is_split) / sum(size for size, _ in sizes)


def _is_dtensor(parameter: Tensor) -> bool:
    return isinstance(parameter, DTensor)


class _DtypesSeen(TorchDispatchMode):
    """Notes the dtypes of all results."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[torch.dtype] = set()

    def __torch_dispatch__(
        self, operator: Any, types: Any, arguments: Any = (), keywords: Any = None
    ) -> Any:
        result = operator(*arguments, **(keywords or {}))
        self.seen |= {each.dtype for each in tree_leaves(result) if isinstance(each, Tensor)}
        return result


def _computes_in_float32(model: nn.Module) -> bool:
    """Whether a model in float64 computes a part in float32."""
    with _DtypesSeen() as dtypes, torch.no_grad():
        model(input_ids=tokens(), use_cache=False)
    return torch.float32 in dtypes.seen


def in_float64(model: nn.Module) -> nn.Module:
    """The model in float64, with experts that can compute in it."""
    model.double()
    if hasattr(model, "set_experts_implementation"):  # the default one knows no float64
        model.set_experts_implementation("eager")
    return model


def _split(model: nn.Module) -> None:
    mesh = meshverse.init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",))
    apply_tp_plan(model, mesh, get_hf_tp_shard_plan(model))


def is_tied(model: nn.Module) -> bool:
    """Whether a model's head has the weight of its embedding."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    return head is not None and head.weight is embedding.weight
