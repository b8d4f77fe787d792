"""`initialize_weights` on real ranks and in one process, against transformers' new models."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from helpers.crew import Crew
from helpers.tiers import in_tiers
from meshverse.parallel import initialize_weights, save_pretrained
from meshverse.parallel.pretrained.adapters import first_values
from meshverse.parallel.pretrained.places import places_of

pytest.importorskip("transformers", minversion="5.0", reason="it has no conversions")

from checkpoints import ARRANGEMENTS, arranged, values_of
from hf_families import families, full, is_tied, model_class, tiny_config
from transformers import AutoModelForCausalLM

_SEED = 11
_CASES = [
    *(("llama", each, True) for each in ARRANGEMENTS if not each.startswith("ep")),
    *(("mixtral", each, False) for each in ARRANGEMENTS),
    *(("gpt_oss", each, False) for each in ARRANGEMENTS if "tp" not in each),
    ("qwen3_moe", "ep 2 x tp 2", True),
]
_SHORT = [
    ("mixtral", "ep 2 x tp 2", False),
]


def _config(family: str, tied: bool) -> Any:
    heads = {"num_key_value_heads": 4} if family in ("llama", "mixtral") else {}
    config = tiny_config(family, tied=tied, **heads)
    config._attn_implementation = "eager"
    return config


def _without_memory(family: str, tied: bool) -> Any:
    with torch.device("meta"):
        model: Any = model_class(family)(_config(family, tied)).float()
    model.tie_weights()  # transformers 5.0 does not, on the meta device
    return model


def _differences(family: str, arrangement: str, tied: bool, folder: str) -> list[str]:
    """Initialize on all ranks; return in words what differs from one process."""
    model = arranged(_without_memory(family, tied), arrangement)
    torch.manual_seed(_SEED + dist.get_rank())  # that of the first rank counts
    state = torch.get_rng_state()
    initialize_weights(model)
    found = [] if torch.equal(torch.get_rng_state(), state) else ["the state of random numbers"]
    torch.manual_seed(_SEED)
    alone = _without_memory(family, tied)
    one = dist.new_subgroups(1)[0]
    initialize_weights(alone, group=one)
    expected, seen = values_of(alone), values_of(model)
    if "pp" not in arrangement:
        if seen.keys() != expected.keys():
            found.append(f"names {seen.keys() ^ expected.keys()}")
        if is_tied(model) != is_tied(alone):
            found.append("ties")
        tokens = torch.arange(12).reshape(2, 6)
        with torch.no_grad():
            logits = [full(each.eval()(tokens).logits) for each in (model, alone)]
        if not torch.allclose(*logits, rtol=1e-4, atol=1e-5):
            found.append("logits")
    found += [
        name
        for name, value in seen.items()
        if value.dtype != expected[name].dtype or not torch.equal(value, expected[name])
    ]
    save_pretrained(model, folder)  # of all stages
    again = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    loaded = dict(again.named_parameters())
    found += [
        f"{name} of the saved model"
        for name, value in alone.named_parameters()
        if not torch.equal(value, loaded[name])
    ]
    return found


@pytest.mark.long
@pytest.mark.parametrize(("family", "arrangement", "tied"), in_tiers(_CASES, _SHORT, _CASES[::4]))
def test_every_rank_gets_its_shards_of_the_values_of_one_process(
    crew: Crew, tmp_path: Any, family: str, arrangement: str, tied: bool
) -> None:
    folder = str(tmp_path / "saved")
    assert crew.run(_differences, 4, family, arrangement, tied, folder) == [[]] * 4


def _is_constant(tensor: Tensor) -> bool:
    return bool((tensor == tensor.flatten()[0]).all())


# Youtu initializes its embedding in another way than the head that may be tied to it.
_FIRST = [each for each in ("deepseek_v3", "gemma3_text", "gpt_oss", "youtu") if each in families()]


@pytest.mark.parametrize("family", in_tiers(families(), _FIRST, []))
@pytest.mark.parametrize("tied", [False, True])
def test_values_have_the_distribution_of_a_new_model(family: str, tied: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers' own, of tiny sizes
        torch.manual_seed(_SEED)
        expected = model_class(family)(_config(family, tied)).float()
        model = _without_memory(family, tied)
        if family.startswith("apertus"):  # transformers does not initialize its activation
            with pytest.raises(ValueError, match=r"act_fn\.alpha_p.* of Apertus\w+ are on"):
                initialize_weights(model)
            return
        initialize_weights(model)
    seen, wanted = values_of(model), values_of(expected)
    assert seen.keys() == wanted.keys()
    assert is_tied(model) == is_tied(expected)
    for name, value in wanted.items():
        assert seen[name].dtype == value.dtype, name
        if torch.equal(seen[name], value):  # buffers, norms, biases
            continue
        assert not _is_constant(value), name
        assert not _is_constant(seen[name]), name
        if value.numel() < 200:  # too few to compare
            continue
        own, other = seen[name].double(), value.double()
        # Some ten standard errors, and more for distributions with long tails.
        spread = 10 / value.numel() ** 0.5
        assert abs(own.std() / other.std() - 1) < spread, name
        assert abs(own.mean() - other.mean()) < spread * other.std(), name


def test_a_seed_gives_the_same_values_and_another_one_others() -> None:
    models = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        torch.rand(3 if models else 1)  # what was drawn before does not count
        models.append(_without_memory("llama", tied=False))
        initialize_weights(models[-1])
    first, again, other = (each.model.layers[0].mlp.up_proj.weight for each in models)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    later = models[0].model.layers[1].mlp.up_proj.weight
    assert not torch.equal(first, later)


def test_what_is_on_a_real_device_keeps_its_values() -> None:
    model = _without_memory("llama", tied=False)
    model.model.norm.weight = nn.Parameter(torch.full((32,), 7.0))
    there = model.model.norm.weight
    initialize_weights(model)
    assert model.model.norm.weight is there
    assert (there == 7).all()
    initialized = dict(model.named_parameters())
    initialize_weights(model)
    assert all(each is initialized[name] for name, each in model.named_parameters())


def _first_values_of_an_adapter() -> list[str]:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], modules_to_save=["lm_head"])
    torch.manual_seed(_SEED)
    alone = _without_memory("llama", tied=False)
    initialize_weights(alone)
    model = arranged(get_peft_model(_without_memory("llama", tied=False), config), "tp 2 x fsdp 2")
    initialize_weights(model)
    seen, expected = values_of(model), values_of(alone)
    found = []
    for name, value in seen.items():
        if "lora_A" in name and not 0.5 < value.abs().max() * value.size(1) ** 0.5 <= 1:
            found.append(name)
        if "lora_B" in name and value.any():
            found.append(name)
    head = expected["lm_head.weight"]
    copies = [value for name, value in seen.items() if "lm_head" in name]
    if len(copies) != 2 or not all(torch.equal(each, head) for each in copies):
        found.append("lm_head")
    return found


@pytest.mark.long
def test_adapters_get_their_first_values(crew: Crew) -> None:
    pytest.importorskip("peft", reason="peft is not installed")
    assert crew.run(_first_values_of_an_adapter, 4) == [[]] * 4


def _lora(**settings: Any) -> Any:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], **settings)
    return peft.get_peft_model(_without_memory("llama", tied=False), config)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of peft
def test_a_pipeline_stages_adapter_has_the_values_of_the_whole_models() -> None:
    whole, stage = _lora(), _lora()
    del stage.base_model.model.model.layers[0].self_attn  # of another stage
    drawn = []
    for model in (whole, stage):
        (adapter,) = model.peft_config
        places = places_of(model, model.base_model.model)
        drawn.append(first_values(model, adapter, places, _SEED))
    own = {name for name in drawn[0] if ".layers.1." in name}
    assert own
    assert drawn[1].keys() == own
    assert all(torch.equal(drawn[0][name], drawn[1][name]) for name in own)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of peft
def test_an_adapter_whose_values_nobody_draws_is_refused() -> None:
    model = _lora(init_lora_weights=False)
    with pytest.raises(ValueError, match=r"init_lora_weights=False leaves them .* draw nothing"):
        initialize_weights(model)
    assert all(each.is_meta for each in model.parameters())


def _refusals() -> tuple[str, bool]:
    model = arranged(_without_memory("llama", tied=False), "fsdp 4")
    if dist.get_rank() == 2:
        model.model.register_buffer("phase", torch.empty(2, device="meta"))
    with pytest.raises(ValueError, match="on the meta device") as caught:
        initialize_weights(model)
    return str(caught.value), all(each.is_meta for each in model.parameters())


def test_a_value_that_is_not_known_is_refused_on_all_ranks_and_nothing_changes(crew: Crew) -> None:
    results = crew.run(_refusals, 4)
    assert len({*results}) == 1
    text, unchanged = results[0]
    assert text.startswith("model.phase of FSDPLlamaForCausalLM are on the meta device")
    assert text.endswith("(on ranks [2])")
    assert unchanged


def test_what_is_no_model_of_transformers_is_refused() -> None:
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    with pytest.raises(TypeError, match=r"initialize_weights\(\) takes a model of transformers"):
        initialize_weights(model)
    config = _config("llama", tied=False)
    config.quantization_config = {"quant_method": "fp8"}
    with torch.device("meta"):
        quantized = model_class("llama")(config)
    with pytest.raises(ValueError, match="says that it is quantized"):
        initialize_weights(quantized)
