"""Settings of a trainer's meshes: names of axes, degrees, and descriptions."""

from __future__ import annotations

import pytest

from meshverse.parallel import (
    MeshAxisName,
    MeshSpec,
    ParallelismSizes,
    validate_mesh_spec,
)


def test_axis_names_are_their_strings() -> None:
    assert {name.value for name in MeshAxisName} == {
        *("pp", "dp", "dp_replicate", "dp_shard", "dp_shard_cp", "dp_cp", "cp", "tp"),
        *("ep", "ep_shard"),
    }
    for name in MeshAxisName:
        assert name == name.value
        assert hash(name) == hash(name.value)
        assert f"{name}" == str(name) == name.value


def test_sizes_are_frozen_and_by_keyword() -> None:
    sizes = ParallelismSizes()
    assert (sizes.dp_size, sizes.dp_replicate_size) == (None, None)
    assert (sizes.tp_size, sizes.pp_size, sizes.cp_size, sizes.ep_size) == (1, 1, 1, 1)
    with pytest.raises(AttributeError):
        sizes.tp_size = 2  # type: ignore[misc]
    with pytest.raises(TypeError):
        ParallelismSizes(2)  # type: ignore[misc]


@pytest.mark.parametrize("wrong", [0, -2, "2", 2.0, True, -1])
@pytest.mark.parametrize(
    "name", ["dp_size", "dp_replicate_size", "tp_size", "pp_size", "cp_size", "ep_size"]
)
def test_what_is_no_degree_is_refused(name, wrong) -> None:
    if (name, wrong) == ("dp_size", -1):
        pytest.skip("to be inferred")
    with pytest.raises(ValueError, match=rf"{name}={wrong!r} of type \w+ must be an int above 0"):
        ParallelismSizes(**{name: wrong})


def test_a_good_spec_is_accepted_and_frozen() -> None:
    spec = MeshSpec((2, 4), ("dp", "tp"), {"world": ("dp", "tp"), "copy": ("dp",)})
    validate_mesh_spec(spec)
    assert spec.size == 8
    assert MeshSpec((2,), ("dp",)).flattened_axes == {}
    with pytest.raises(AttributeError):
        spec.shape = (8,)  # type: ignore[misc]


@pytest.mark.parametrize(
    ("shape", "axes", "flattened", "message"),
    [
        ((2, 4), ("dp",), {}, r"\(2, 4\) with axes \('dp',\)"),
        ((2,), ("dp", "tp"), {}, r"\(2,\) with axes \('dp', 'tp'\)"),
        ((), (), {}, r"\(\) with axes \(\): it must have one or more axes"),
        ((2, 0), ("dp", "tp"), {}, r"shape \(2, 0\) .*int above 0"),
        ((-1, 2.0), ("dp", "tp"), {}, r"shape \(-1, 2.0\) .*int above 0"),
        ((2, 2), ("dp", "dp"), {}, r"\('dp', 'dp'\): .* distinct name"),
        ((2, 2), ("dp", "tp"), {"tp": ("dp", "tp")}, "'tp' of .* under a new name"),
        ((2, 2), ("dp", "tp"), {"x": ("dp", "cp")}, r"'x' of \('dp', 'cp'\).*\('dp', 'tp'\)"),
        ((2, 2), ("dp", "tp"), {"x": ("tp", "dp")}, "in this order"),
        ((2, 2), ("dp", "tp"), {"x": ("dp", "dp")}, "each once"),
        ((2, 2), ("dp", "tp"), {"x": ()}, r"'x' of \(\)"),
    ],
)
def test_bad_specs_are_value_errors(shape, axes, flattened, message) -> None:
    with pytest.raises(ValueError, match=message):
        validate_mesh_spec(MeshSpec(shape, axes, flattened))
