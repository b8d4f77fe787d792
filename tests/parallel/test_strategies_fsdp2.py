"""FSDP2Manager: tiny transformers models train on every shape of mesh as on one process."""

from __future__ import annotations

import gc
import importlib.util
from typing import Any

import pytest
import torch
import torch._inductor.config
import torch.distributed as dist
from rounding import training_error
from tiny_models import (
    BOUND,
    FAMILIES,
    STEPS,
    batch,
    full,
    full_weights,
    loss_of,
    make_model,
    train,
)
from torch import nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.distributed.tensor.parallel import ColwiseParallel

from helpers.tiers import in_tiers
from helpers.worlds import fake_world
from meshverse import init_device_mesh
from meshverse.parallel import (
    FSDP2Config,
    FSDP2Manager,
    ParallelismSizes,
    clip_grad_norm_,
    create_device_meshes,
    get_flat_mesh,
    unshard_fsdp2_model,
)
from meshverse.parallel.models.packed_sequences import (
    patch_is_packed_sequence,
    restore_is_packed_sequence,
)

needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None,
    reason="transformers is not installed: pip install transformers",
)
_FULL_PRECISION = MixedPrecisionPolicy()
_UNUSED = "set_reduce_scatter_unused_params"

_ON_FOUR: dict[str, dict[str, int]] = {
    "shards": {},
    "tp x dp": {"tp_size": 2},
    "hybrid": {"dp_replicate_size": 2},
    "cp x dp": {"cp_size": 2},
    "pp x dp": {"pp_size": 2},
    "pp x tp": {"pp_size": 2, "tp_size": 2},
    "cp x tp": {"tp_size": 2, "cp_size": 2},
}
_ON_EIGHT: dict[str, dict[str, int]] = {
    "hybrid x tp": {"dp_replicate_size": 2, "tp_size": 2},
    "hybrid x cp": {"dp_replicate_size": 2, "cp_size": 2},
    "cp x tp x dp": {"cp_size": 2, "tp_size": 2},
    "pp x tp x dp": {"pp_size": 2, "tp_size": 2},
}


def _manager(sizes: dict[str, int], **changed: Any) -> FSDP2Manager:
    _clear_sharding_prop_cache()  # DTensor's, of worlds that this process was in before
    config = FSDP2Config(**{"mp_policy": _FULL_PRECISION, **changed})
    world_size = dist.get_world_size()
    mesh, moe_mesh = create_device_meshes(config, ParallelismSizes(**sizes), world_size=world_size)
    return FSDP2Manager(config, mesh["dp_replicate", "dp_shard", "cp", "tp"], moe_mesh)


def _train_sharded(family: str, sizes: dict[str, int], changed: dict[str, Any]) -> Any:
    """Losses, whole weights after the last step, and my share of the parameters' elements."""
    manager = _manager(sizes, **changed)
    model = make_model(family).double()
    count = sum(parameter.numel() for parameter in model.parameters())
    assert manager.parallelize(model) is model
    assert manager.maybe_compile(model) is model
    assert manager.device_mesh is not None
    losses = train(model, get_flat_mesh(manager.device_mesh, "dp_cp"))
    mine = sum(parameter.to_local().numel() for parameter in model.parameters())
    roots = {id(parameter.device_mesh._get_root_mesh()) for parameter in model.parameters()}
    assert roots == {id(manager.device_mesh._get_root_mesh())}
    weights = {name: weight.numpy() for name, weight in full_weights(model).items()}
    return losses, weights, mine / count


def _check_equals_one_process(results: list[Any], family: str) -> None:
    model = make_model(family).double()
    before = full_weights(model)
    expected = train(model)
    assert expected[-1] < expected[0]
    weights = full_weights(model)
    for losses, sharded, share in results:
        assert losses == pytest.approx(expected, rel=BOUND)
        assert share < 0.9
        whole = {name: torch.from_numpy(weight) for name, weight in sharded.items()}
        error, worst = training_error(whole, weights, before)
        assert error < BOUND, worst


_CASES = {
    f"{shape}-{family}": (ranks, sizes, family)
    for ranks, shapes in ((4, _ON_FOUR), (8, _ON_EIGHT))
    for shape, sizes in shapes.items()
    for family in FAMILIES
}
_SHORT = ("cp x dp-llama",)


@needs_transformers
@pytest.mark.parametrize("case", in_tiers(_CASES, short=_SHORT, long=[*_CASES][::7]))
def test_shapes_equal_one_process(crew, case) -> None:
    ranks, sizes, family = _CASES[case]
    results = crew.run(_train_sharded, ranks, family, sizes, {})
    _check_equals_one_process(results, family)


@needs_transformers
def test_tensor_parallelism_alone_equals_one_process(crew) -> None:
    results = crew.run(_train_sharded, 2, "llama", {"tp_size": 2}, {})
    _check_equals_one_process(results, "llama")


_SETTINGS: dict[str, dict[str, Any]] = {
    "full": {"activation_checkpointing": "full"},
    "selective": {"activation_checkpointing": "selective"},
    "other parts": {
        "activation_checkpointing": True,
        "activation_checkpointing_scope": "language,audio",
    },
    "one part": {"activation_checkpointing": "full", "activation_checkpointing_scope": "language"},
    "offload": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    "kept after forward": {"reshard_after_forward": False},
    "prefetch": {"enable_fsdp2_prefetch": True},
}


@needs_transformers
@pytest.mark.parametrize("name", in_tiers(_SETTINGS, ["selective", "other parts", "offload"]))
@pytest.mark.parametrize(
    ("ranks", "sizes"), [(2, {}), pytest.param(4, {"tp_size": 2}, marks=pytest.mark.sweep)]
)
def test_settings_change_no_result(crew, name, ranks, sizes) -> None:
    results = crew.run(_train_sharded, ranks, "llama", sizes, _SETTINGS[name])
    _check_equals_one_process(results, "llama")


@needs_transformers
@pytest.mark.long
def test_sequence_parallelism_changes_no_result(crew) -> None:
    path = "meshverse.parallel.llama_tp_plan"
    changed = {"sequence_parallel": True, "tp_plan": path}
    results = crew.run(_train_sharded, 4, "llama", {"tp_size": 2}, changed)
    _check_equals_one_process(results, "llama")


# --- what is computed how ------------------------------------------------------------------------


@needs_transformers
def test_checkpointed_layers_run_again_in_backward(crew) -> None:
    for mode, runs in ((False, 1), ("full", 2)):
        assert crew.run(_count_runs, 2, mode) == [runs] * 2


def _count_runs(mode: Any) -> int:
    manager = _manager({}, activation_checkpointing=mode)
    model = make_model()
    calls = []
    model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    loss_of(manager.parallelize(model), batch(0)).backward()
    return len(calls)


@needs_transformers
@pytest.mark.long
def test_default_precision_is_bf16_with_fp32_weights(crew) -> None:
    model = make_model()
    expected = train(model)
    exact = model(input_ids=batch(0)).logits.detach()
    for dtypes, losses, logits in crew.run(_train_in_default_precision, 4):
        assert dtypes == ["torch.bfloat16", "torch.float32", "torch.float32"]
        # Logits are sums of 32 numbers in bf16, whose eps is 1/128: see `rounding`. Rounding them
        # alone is off by a tenth of eps and more. Losses are about 4, and logits below 1 in size:
        # a loss changes by no more than logits do.
        error = (logits - exact).norm() / exact.norm()
        assert 1e-4 < error < 32 / 128
        assert losses == pytest.approx(expected, rel=32 / 128 / 4)


def _train_in_default_precision() -> Any:
    manager = _manager({"tp_size": 2}, mp_policy=FSDP2Config().mp_policy)
    mesh = manager.device_mesh
    assert mesh is not None
    model = manager.parallelize(make_model())
    losses = train(model, get_flat_mesh(mesh, "dp_cp"))
    weight = model.model.layers[0].mlp.up_proj.weight
    logits = model(input_ids=batch(0)).logits
    logits.sum().backward()
    assert weight.grad is not None
    dtypes = [str(each.dtype) for each in (logits, weight, weight.grad)]
    return dtypes, losses, full(logits.detach()).float()


@needs_transformers
@pytest.mark.parametrize(
    ("family", "sizes", "changed"),
    [
        pytest.param("llama", {}, {}, marks=pytest.mark.sweep),
        pytest.param(
            *("llama", {"tp_size": 2}, {"activation_checkpointing": "full"}), marks=pytest.mark.long
        ),
        pytest.param("qwen3", {"tp_size": 2}, {}, marks=pytest.mark.sweep),
    ],
)
def test_compiled_layers_train_alike(crew, kernels, family, sizes, changed) -> None:
    results = crew.run(_train_compiled, 2, kernels, family, sizes, changed)
    _check_equals_one_process(results, family)


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder in which each kernel is compiled once: ranks and models have many of the same."""
    return str(tmp_path_factory.mktemp("kernels"))


def _train_compiled(kernels: str, family: str, sizes: dict[str, int], changed: Any) -> Any:
    torch.compiler.reset()
    headers_once = torch._inductor.config.patch(cpp_cache_precompile_headers=True)
    with pytest.MonkeyPatch.context() as patch, headers_once:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", kernels)
        return _train_sharded(family, sizes, {"enable_compile": True, **changed})


@pytest.mark.long
@needs_transformers
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")  # torch's own use
def test_each_layer_is_compiled_in_place_if_asked() -> None:
    for asked in (False, True):
        model = make_model()
        manager = FSDP2Manager(FSDP2Config(enable_compile=asked), None)
        assert manager.maybe_compile(model) is model
        layers = list(model.model.layers)
        assert [layer._compiled_call_impl is not None for layer in layers] == [asked] * 2
        assert model._compiled_call_impl is None


@needs_transformers
def test_unsharded_for_inference(crew) -> None:
    with torch.no_grad():
        expected = make_model()(input_ids=batch(0)).logits.numpy()
    for during, later, logits, after in crew.run(_infer_unsharded, 4):
        assert during == [False]
        assert later == [True]  # a forward without gradients leaves the model sharded
        assert after == [True]
        assert logits == pytest.approx(expected, abs=BOUND * float(abs(expected).max()))


def _infer_unsharded() -> Any:
    manager = _manager({})
    model = manager.parallelize(make_model())

    def sharded() -> list[bool]:
        parameters = model.parameters()
        return sorted({isinstance(parameter, DTensor) for parameter in parameters})

    with torch.no_grad(), unshard_fsdp2_model(model):
        during = sharded()
        logits = model(input_ids=batch(0)).logits
        later = sharded()
    assert isinstance(model, FSDPModule)
    return during, later, logits.numpy(), sharded()


class _Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, hidden: torch.Tensor, n_layers: int | None = None) -> torch.Tensor:
        hidden = self.first(hidden)
        for layer in self.layers[:n_layers]:
            hidden = hidden + layer(hidden).tanh()
        return self.last(hidden)


_AFTER_EVALUATION: dict[str, tuple[str, dict[str, Any]]] = {
    "an optimizer": ("an optimizer", {}),
    "zero_grad": ("zero_grad", {}),
    "clipping": ("clipping", {}),
    "freezing": ("freezing", {}),
    "layers alone": ("layers alone", {}),
    "kept": ("evaluations", {"reshard_after_forward": False}),
    "layers alone, kept": ("layers alone", {"reshard_after_forward": False}),
    "an early exit": ("an early exit", {"enable_fsdp2_prefetch": True}),
}


@pytest.mark.parametrize("name", _AFTER_EVALUATION)
def test_a_forward_without_gradients_leaves_the_parameters_of_the_optimizer(crew, name) -> None:
    use, settings = _AFTER_EVALUATION[name]
    weights, norms = _train_with_evaluations(use)
    for sharded, sharded_norms in crew.run(_train_with_evaluations_sharded, 2, use, settings):
        assert sharded_norms == pytest.approx(norms)
        for name, weight in weights.items():
            assert torch.allclose(torch.from_numpy(sharded[name]), torch.from_numpy(weight)), name


@pytest.mark.parametrize(("reshard", "is_sharded"), [(None, True), (True, True), (False, False)])
def test_parameters_stay_gathered_after_an_evaluation_only_if_asked(
    crew, reshard, is_sharded
) -> None:
    assert crew.run(_sharded_after_evaluation, 2, reshard) == [{is_sharded}] * 2


def _sharded_after_evaluation(reshard: bool | None) -> set[bool]:
    model = _manager({}, reshard_after_forward=reshard).parallelize(_Tower())
    with torch.no_grad():
        model(torch.ones(2, 4))
    return {isinstance(parameter, DTensor) for parameter in model.parameters()}


def _train_with_evaluations_sharded(use: str, settings: dict[str, Any]) -> Any:
    return _train_with_evaluations(use, _manager({}, **settings).parallelize)


def _train_with_evaluations(use: str, parallelize: Any = lambda model: model) -> Any:
    torch.manual_seed(0)
    model, inputs = _Tower().double(), torch.randn(2, 4, dtype=torch.double)
    model, norms = parallelize(model), []

    def evaluate() -> None:
        with torch.no_grad():
            if use == "layers alone":
                model.layers[1](model.layers[0](inputs))
            else:
                model(inputs, 1 if use == "an early exit" else None)

    if use == "an optimizer":
        evaluate()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model(inputs).square().mean().backward()
        if use != "an optimizer":
            evaluate()
        if use == "clipping":
            norms.append(float(clip_grad_norm_(model.parameters(), 0.01)))
        optimizer.step()
        optimizer.zero_grad()
        evaluate()
        if use == "zero_grad":
            model(inputs).sum().backward()
            evaluate()
            model.zero_grad()
        if use == "freezing":
            model.last.requires_grad_(False)
    for module in model.modules():
        if isinstance(module, FSDPModule):  # with reshard_after_forward=False, some are gathered
            module.reshard()
    return {name: weight.numpy() for name, weight in full_weights(model).items()}, norms


# --- checkpoints ---------------------------------------------------------------------------------


@needs_transformers
@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        pytest.param({"tp_size": 2}, {"dp_replicate_size": 2}, marks=pytest.mark.long),
        pytest.param({"dp_replicate_size": 2}, {"tp_size": 2}, marks=pytest.mark.sweep),
        pytest.param({"cp_size": 2}, {"tp_size": 2, "cp_size": 2}, marks=pytest.mark.long),
    ],
)
def test_saved_on_one_shape_and_loaded_on_another(crew, tmp_path, saved, loaded) -> None:
    model = make_model()
    train(model)
    expected = train(model, steps=range(STEPS, STEPS + 1))
    folder = str(tmp_path / "checkpoint")
    results = crew.run(_save_and_load, 4, folder, saved, loaded)
    for losses in results:
        assert losses == pytest.approx(expected, rel=BOUND)


def _save_and_load(folder: str, saved: dict[str, int], loaded: dict[str, int]) -> list[float]:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

    manager = _manager(saved)
    model = manager.parallelize(make_model())
    assert manager.device_mesh is not None
    train(model, get_flat_mesh(manager.device_mesh, "dp_cp"))
    dcp.save(get_model_state_dict(model), checkpoint_id=folder)

    manager = _manager(loaded)
    other = make_model()
    nn.init.zeros_(other.model.norm.weight)  # what is not loaded shows
    other = manager.parallelize(other)
    state = get_model_state_dict(other)
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(other, state)
    assert manager.device_mesh is not None
    data = get_flat_mesh(manager.device_mesh, "dp_cp")
    return train(other, data, steps=range(STEPS, STEPS + 1))


# --- a process alone, and refusals ---------------------------------------------------------------


class _Toy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4)) for _ in range(2))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


@pytest.mark.parametrize("with_mesh", [False, True])
@pytest.mark.parametrize(("mode", "runs"), [(False, 1), (True, 2), ("full", 2)])
def test_a_world_of_one_is_only_checkpointed(with_mesh, mode, runs) -> None:
    with fake_world(1):
        config = FSDP2Config(activation_checkpointing=mode)
        mesh, _ = create_device_meshes(config, ParallelismSizes(), world_size=1)
        model, calls = _Toy(), []
        model.layers[1][0].register_forward_pre_hook(lambda *_: calls.append(1))
        manager = FSDP2Manager(config, mesh if with_mesh else None)
        assert manager.parallelize(model) is model
        assert not isinstance(model, FSDPModule)
        model(torch.ones(2, 4, requires_grad=True)).sum().backward()
    assert len(calls) == runs


def _scalar(model: _Toy) -> None:
    model.scale = nn.Parameter(torch.tensor(1.0))


def _sparse(model: _Toy) -> None:
    model.layers[1][0].weight = nn.Parameter(torch.eye(4).to_sparse())


def _transposed(model: _Toy) -> None:
    model.layers[1][0].weight = nn.Parameter(torch.arange(16.0).view(4, 4).T)


def _tied(model: _Toy) -> None:
    model.layers[1][0].weight = model.layers[0][0].weight


def _tied_outside(model: _Toy) -> None:
    model.head = nn.Linear(4, 4, bias=False)
    model.head.weight = model.layers[1][0].weight


def _hooked(model: _Toy) -> None:
    model.layers[1][0].weight.register_hook(torch.tanh)


def _hooked_behind(model: _Toy) -> None:
    model.layers[0][0].weight.register_post_accumulate_grad_hook(lambda weight: None)


def _with_gradient(model: _Toy) -> None:
    model(torch.ones(2, 4)).sum().backward()


def _in_two_lists(model: _Toy) -> None:
    model.again = nn.ModuleList([model.layers[1]])


def _part_outside(model: _Toy) -> None:
    model.head = model.layers[1][0]


def _distributed(model: _Toy) -> None:
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("data", "tp"))["tp"]
    whole = model.layers[1][0].weight.detach()
    model.layers[1][0].weight = nn.Parameter(distribute_tensor(whole, mesh, [Replicate()]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_distributed, r"'layers.1.0.weight', which is distributed already, over .*tp=4"),
        (_hooked, "'layers.1.0.weight', which has hooks of its gradient, and would lose them"),
        (_hooked_behind, "'layers.0.0.weight', .* Register them after the model is split and sh"),
        (_with_gradient, "'layers.0.0.weight', which has a gradient, and would lose it"),
        (_in_two_lists, "'layers.1' and 'again.0' of _Toy are one module in two lists"),
        (_part_outside, r"is shared by layer 'layers.1' and 'head.weight' \(in no layer\)"),
        (_scalar, "'scale', which is a scalar"),
        (_sparse, r"'layers.1.0.weight', which has the layout torch.sparse_coo"),
        (_transposed, r"'layers.1.0.weight', which has strides \(1, 4\)"),
        (_tied, r"'layers.1.0.weight' is shared by layer 'layers.0' and layer 'layers.1'"),
        (_tied_outside, r"is shared by layer 'layers.1' and 'head.weight' \(in no layer\)"),
    ],
)
def test_a_model_that_fsdp2_cannot_shard_is_as_it_was(world, change, message) -> None:
    config = FSDP2Config()
    mesh, _ = create_device_meshes(config, ParallelismSizes(), world_size=8)
    model = _Toy()
    change(model)
    before = dict(model.named_parameters())
    with pytest.raises(ValueError, match=message):
        FSDP2Manager(config, mesh).parallelize(model)
    assert not any(isinstance(module, FSDPModule) for module in model.modules())
    assert all(model.get_parameter(name) is each for name, each in before.items())


def test_a_weight_that_the_plan_does_not_split_is_checked_too(world) -> None:
    config = FSDP2Config(tp_plan={"head": ColwiseParallel(output_layouts=Replicate())})
    mesh, _ = create_device_meshes(config, ParallelismSizes(tp_size=2), world_size=8)
    model = _Toy()
    model.head = nn.Linear(4, 4)
    _transposed(model)
    with pytest.raises(ValueError, match=r"'layers.1.0.weight', which has strides"):
        FSDP2Manager(config, mesh).parallelize(model)
    assert all(type(each) is nn.Parameter for each in model.parameters())


def test_a_parameter_of_two_models_is_refused_in_the_second(world) -> None:
    config = FSDP2Config()
    mesh, _ = create_device_meshes(config, ParallelismSizes(), world_size=8)
    actor, critic = _Toy(), _Toy()
    critic.layers[1][0].weight = actor.layers[1][0].weight
    manager = FSDP2Manager(config, mesh)
    manager.parallelize(actor)
    with pytest.raises(
        ValueError, match=r"'layers.1.0.weight', which is shared with another model"
    ):
        manager.parallelize(critic)
    manager.parallelize(_Toy())


@pytest.mark.filterwarnings("ignore:Complex modules are a new feature")
def test_complex_parameters_are_refused_where_they_would_be_converted(world) -> None:
    for precision in (None, MixedPrecisionPolicy(reduce_dtype=torch.float32)):
        config = FSDP2Config(**({} if precision is None else {"mp_policy": precision}))
        mesh, _ = create_device_meshes(config, ParallelismSizes(), world_size=8)
        model = _Toy().to(torch.complex64)
        with pytest.raises(ValueError, match=r"complex64.* Pass mp_policy=MixedPrecisionPolicy"):
            FSDP2Manager(config, mesh).parallelize(model)
        assert not any(isinstance(module, FSDPModule) for module in model.modules())
    FSDP2Manager(FSDP2Config(mp_policy=_FULL_PRECISION), mesh).parallelize(model)


class _Adapted(nn.Module):
    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base, self.adapter = base, nn.Linear(4, 4)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.base(hidden) + self.adapter(hidden)


def test_parameters_that_are_added_after_sharding_are_refused(world) -> None:
    config = FSDP2Config(mp_policy=_FULL_PRECISION)
    mesh, _ = create_device_meshes(config, ParallelismSizes(), world_size=8)
    model = FSDP2Manager(config, mesh).parallelize(_Toy())
    model.layers[1][0] = _Adapted(model.layers[1][0])
    hidden = torch.ones(8, 4)
    with torch.no_grad():
        model(hidden)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"'layers\.1\.0\.adapter\.weight' was added after"):
            model(hidden)
    model.layers[1][0].adapter.requires_grad_(False)
    model.own = nn.Linear(4, 4)  # which the program shards itself
    fully_shard(model.own, mesh=mesh["dp_shard"])
    model(hidden)


def test_a_list_is_no_model(world) -> None:
    config, layers = FSDP2Config(), _Toy().layers
    mesh, _ = create_device_meshes(config, ParallelismSizes(), world_size=8)
    with pytest.raises(ValueError, match="cannot shard a ModuleList, which has no forward"):
        FSDP2Manager(config, mesh).parallelize(layers)
    assert not any(isinstance(module, FSDPModule) for module in layers)


def test_compiling_a_model_without_layers_is_refused(world) -> None:
    config, model = FSDP2Config(enable_compile=True), nn.Sequential(nn.Linear(4, 4))
    mesh, _ = create_device_meshes(config, ParallelismSizes(), world_size=8)
    for manager in (FSDP2Manager(config, None), FSDP2Manager(config, mesh)):
        for call in (manager.parallelize, manager.maybe_compile):
            with pytest.raises(ValueError, match="would do nothing: Sequential has no ModuleList"):
                call(model)
    assert not isinstance(model, FSDPModule)


def test_a_layer_that_is_used_twice_is_sharded(world) -> None:
    config = FSDP2Config()
    mesh, _ = create_device_meshes(config, ParallelismSizes(), world_size=8)
    model = _Toy()
    model.layers[1] = model.layers[0]
    FSDP2Manager(config, mesh).parallelize(model)
    assert isinstance(model.layers[0], FSDPModule)


class _TwoHeads(nn.Module):
    """A layer of which each rank of two uses another head."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList([nn.Identity()])  # without parameters
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, hidden: torch.Tensor, head: int) -> torch.Tensor:
        output: torch.Tensor = (self.second if head else self.first)(hidden)
        return output


def _train_heads() -> list[float]:
    """Return the relative error of each gradient, of two ranks that use different heads."""
    torch.manual_seed(0)
    alone, model = _TwoHeads(), _TwoHeads()
    model.load_state_dict(alone.state_dict())
    manager = _manager({}, reduce_unused_parameters=True, mp_policy=_FULL_PRECISION)
    model = manager.parallelize(model)
    given = [torch.full((2, 4), float(rank + 1)) for rank in range(2)]
    for rank in range(2):
        (alone(given[rank], rank).square().mean() / 2).backward()
    model(given[dist.get_rank()], dist.get_rank()).square().mean().backward()
    pairs = zip(model.parameters(), alone.parameters(), strict=True)
    return [
        float((full(own.grad) - other.grad).norm() / other.grad.norm())
        for own, other in pairs
        if other.grad is not None
    ]


@pytest.mark.skipif(not hasattr(FSDPModule, _UNUSED), reason="FSDP2 of this torch cannot")
def test_ranks_may_use_different_parameters_if_asked(crew) -> None:
    for errors in crew.run(_train_heads, 2):
        assert len(errors) == 4
        assert max(errors) < BOUND


def test_what_this_torch_cannot_reduce_is_refused(world, monkeypatch) -> None:
    monkeypatch.delattr(FSDPModule, _UNUSED, raising=False)
    model = _Toy()
    with pytest.raises(ValueError, match="FSDP2 of this torch cannot reduce gradients of unused"):
        _manager({}, reduce_unused_parameters=True).parallelize(model)
    assert not any(isinstance(each, FSDPModule) for each in model.modules())


def test_meshes_of_two_universes_are_refused(world) -> None:
    config = FSDP2Config()
    mesh, moe_mesh = create_device_meshes(config, ParallelismSizes(ep_size=2), world_size=8)
    manager = FSDP2Manager(config, mesh, moe_mesh)
    assert (manager.device_mesh, manager.moe_mesh) == (mesh, moe_mesh)
    other = init_device_mesh("cpu", (4, 2), mesh_dim_names=("ep_shard", "ep"))
    with pytest.raises(ValueError, match=r"ep_shard=4.* is not in the universe of .*dp_shard=8"):
        FSDP2Manager(config, mesh, other)


# --- transformers' check for packed sequences ----------------------------------------------------


@pytest.fixture
def packed_check():
    utils = pytest.importorskip("transformers.modeling_flash_attention_utils")
    yield lambda: utils._is_packed_sequence
    restore_is_packed_sequence()


_PACKED = torch.tensor([[0, 1, 2, 0, 1, 2, 3]])


def test_the_check_is_replaced_once(packed_check) -> None:
    original = packed_check()
    assert bool(original(_PACKED, 1))
    assert patch_is_packed_sequence()
    assert packed_check()(_PACKED, 1) is False
    assert not patch_is_packed_sequence()
    restore_is_packed_sequence()
    restore_is_packed_sequence()
    assert packed_check() is original


@pytest.mark.parametrize("asked", [False, True])
def test_the_check_is_replaced_only_if_asked(packed_check, asked) -> None:
    original = packed_check()
    for _ in range(2):
        FSDP2Manager(FSDP2Config(patch_is_packed_sequence=asked), None).parallelize(_Toy())
    assert (packed_check() is original) == (not asked)


def test_the_check_stays_where_packed_sequences_are_trained(packed_check) -> None:
    original = packed_check()
    config = FSDP2Config(patch_is_packed_sequence=True)
    FSDP2Manager(config, None).parallelize(_Toy())
    FSDP2Manager(config, None, packed_sequences=True).parallelize(_Toy())
    assert packed_check() is original


def test_the_check_is_not_replaced_while_another_model_is_trained_on_packed(packed_check) -> None:
    original = packed_check()
    packed = FSDP2Manager(FSDP2Config(), None, packed_sequences=True).parallelize(_Toy())
    manager = FSDP2Manager(FSDP2Config(patch_is_packed_sequence=True), None)
    for replace in (lambda: manager.parallelize(_Toy()), patch_is_packed_sequence):
        with pytest.raises(ValueError, match=r"and a _Toy is trained with packed_sequences=True"):
            replace()
        assert packed_check() is original
    del packed
    gc.collect()
    manager.parallelize(_Toy())
    assert packed_check() is not original


def test_a_model_that_is_refused_leaves_the_check(packed_check) -> None:
    original = packed_check()
    config = FSDP2Config(patch_is_packed_sequence=True, activation_checkpointing=True)
    with pytest.raises(ValueError, match="would do nothing"):
        FSDP2Manager(config, None).parallelize(nn.Linear(2, 2))
    assert packed_check() is original
    config = FSDP2Config(patch_is_packed_sequence=True, tp_plan={"nowhere": ColwiseParallel()})
    with fake_world(4):
        mesh, _ = create_device_meshes(config, ParallelismSizes(tp_size=2), world_size=4)
        for _ in range(2):
            with pytest.raises(ValueError, match="nowhere"):
                FSDP2Manager(config, mesh).parallelize(_Toy())
            assert packed_check() is original
