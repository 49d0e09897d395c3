"""Reading a checkpoint's config: how overrides meet the two ways to write rotary settings, and
ids."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pegboard.config.schema import check_engine
from pegboard.config.sources import engine_settings
from pegboard.data.checkpoint_file import read_object
from pegboard.errors import ConfigError, ModelError
from pegboard.plan.model_config import (
    eos_token_ids,
    max_model_len,
    overridden,
    rope_parameters,
    stretched,
)
from pegboard_models.rope import scaled_rope
from pegboard_testing.fake_build import fake_build


@pytest.mark.parametrize("value", ["</s>", 1.5, True, [1, "2"], [[1]], {"a": 1}])
def test_ids_that_are_none(value: Any) -> None:
    with pytest.raises(ModelError, match="eos_token_id"):
        eos_token_ids(10, ({"eos_token_id": value},))


def test_ids_outside_the_vocabulary_are_left_out() -> None:
    assert eos_token_ids(
        10, ({"eos_token_id": [3, -1, 10, 3]}, {"eos_token_id": None}, {"eos_token_id": 4})
    ) == (3, 4)


OLD = {
    "max_position_embeddings": 100,
    "rope_theta": 5e3,
    "rope_scaling": {"rope_type": "linear", "factor": 3.0},
}
NEW = {
    "max_position_embeddings": 100,
    "rope_parameters": {"rope_theta": 5e3, "rope_type": "linear", "factor": 3.0},
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 100}


@pytest.mark.parametrize("config", [OLD, NEW])
@pytest.mark.parametrize(
    ("overrides", "base", "kind", "length"),
    [
        ({}, 5e3, "linear", 300),
        ({"rope_theta": 7e3}, 7e3, "linear", 300),
        ({"rope_scaling": YARN}, 5e3, "yarn", 400),
        ({"rope_scaling": None}, 5e3, "default", 100),
        ({"rope_scaling": YARN, "rope_theta": 7e3}, 7e3, "yarn", 400),
        ({"rope_parameters": {**YARN, "rope_theta": 9e3}}, 9e3, "yarn", 400),
    ],
)
def test_overrides_of_rotary_settings_reach_every_reader(
    config: dict[str, Any], overrides: dict[str, Any], base: float, kind: str, length: int
) -> None:
    merged = overridden(config, overrides)
    found, scaling = rope_parameters(merged)
    assert (found, scaling.get("rope_type", "default")) == (base, kind)
    assert max_model_len(merged, None) == length
    assert ("rope_parameters" in merged) != ("rope_scaling" in merged), (
        "readers must not have two to choose from"
    )


def test_rotary_settings_per_type_of_layer_are_overridden_as_a_whole() -> None:
    config = {
        "rope_parameters": {
            "full_attention": {"rope_theta": 1e6},
            "sliding_attention": {"rope_theta": 1e4},
        }
    }
    with pytest.raises(ConfigError, match="rope_parameters per type of layer"):
        overridden(config, {"rope_theta": 1e5})


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "llama3", "factor": 8.0},
        {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]},
        {"rope_type": "longrope"},
        {"rope_type": "yarn", "factor": 4.0, "attention_factor": -1.0},
        {"rope_type": "linear", "factor": 1e-320},
        {"rope_type": "unheard-of"},
    ],
)
def test_rotary_settings_that_cannot_be_computed(scaling: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match="rope|rotary"):
        scaled_rope(fake_build(), 8, max_positions=64, scaling=scaling)


NAMES = (
    "factor",
    "original_max_position_embeddings",
    "partial_rotary_factor",
    "alpha",
    "mixed_b",
    "low_freq_factor",
    "high_freq_factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "attention_factor",
    "long_factor",
    "short_factor",
    "truncate",
    "rope_theta",
    "unknown",
)
KINDS = (
    "linear",
    "dynamic",
    "ntk",
    "llama3",
    "yarn",
    "deepseek_yarn",
    "longrope",
    "su",
    "default",
    "",
    "none",
)
ODD = st.one_of(
    st.integers(-(10**40), 10**40),
    st.floats(),
    st.booleans(),
    st.text(max_size=2),
    st.lists(st.integers(), max_size=4),
    st.none(),
    st.just({"a": 1}),
    st.just([1.0] * 4),
    st.just(10**400),
    st.floats(0.5, 64),
)


@given(
    kind=st.sampled_from(KINDS) | ODD,
    values=st.dictionaries(st.sampled_from(NAMES), ODD, max_size=5),
    outer=st.dictionaries(st.sampled_from(["rope_theta", "original_max_position_embeddings"]), ODD),
    place=st.sampled_from(["rope_parameters", "rope_scaling"]),
)
@settings(deadline=None)
def test_odd_rotary_settings_are_computed_or_refused(
    kind: Any, values: dict[str, Any], outer: dict[str, Any], place: str
) -> None:
    """Never a TypeError or an OverflowError, whatever a config has in these places."""
    try:
        base, scaling = rope_parameters({**outer, place: {"rope_type": kind, **values}})
        stretched(scaling, 64)
        rope = scaled_rope(fake_build(), 8, max_positions=64, base=base, scaling=scaling)
    except ModelError:
        return
    assert rope.frequencies.isfinite().all()


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"rope_theta": [1e4, 1e6]}, "rope_theta=\\[10000.0, 1000000.0\\], expected 0 or a number"),
        ({"rope_parameters": {"rope_theta": "1e4"}}, "rope_theta='1e4'"),
        (
            {"rope_parameters": {"rope_type": ["yarn"]}},
            "rope_type=\\['yarn'\\] in its rotary settings, expected a name",
        ),
        ({"rope_parameters": [1]}, "rope_scaling \\[1\\], expected an object"),
        ({"rope_scaling": {"type": "linear", "factor": True}}, "factor=True"),
    ],
)
def test_rotary_settings_of_another_type_are_named(config: dict[str, Any], told: str) -> None:
    with pytest.raises(ModelError, match=told):
        rope_parameters(config)


def test_an_odd_number_of_rotary_channels() -> None:
    with pytest.raises(ModelError, match="pairs of channels"):
        scaled_rope(fake_build(), 7, max_positions=64)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"\xff{}", "UTF-8"),
        (b"[1]", "an object"),
        (b"{" * 5000, "not JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not JSON"),
        (b" " * 101, "larger than 100"),
    ],
)
def test_files_of_a_checkpoint(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=words):
        read_object(path, 100 if content == b" " * 101 else 10**6)
    with pytest.raises(ModelError, match="cannot read"):
        read_object(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("asked", "meant"),
    [
        ("fp8", "float8_e4m3fn"),
        ("fp8_e4m3", "float8_e4m3fn"),
        ("fp8_inc", "float8_e4m3fn"),
        ("int8_per_token_head", "int8"),
        ("fp8_e5m2", "float8_e5m2"),
        ("int8", "int8"),
    ],
)
def test_vllms_names_of_types_of_the_kv_cache(asked: str, meant: str) -> None:
    assert engine_settings("m", {"kv_cache_dtype": asked}).engine.kv_cache_dtype == meant


@pytest.mark.parametrize(
    ("asked", "meant"),
    [("half", "float16"), ("float", "float32"), ("bfloat16", "bfloat16"), ("auto", "auto")],
)
def test_names_of_compute_types(asked: str, meant: str) -> None:
    engine = engine_settings("model", {"dtype": asked}).engine
    assert engine.dtype == meant
    check_engine(engine)


@pytest.mark.parametrize("asked", ["bf16", "int4", "", "Half"])
def test_unknown_compute_types_are_refused_at_once(asked: str) -> None:
    with pytest.raises(ConfigError, match="dtype .* is unknown.*expected auto, float32, bfloat16"):
        check_engine(engine_settings("model", {"dtype": asked}).engine)
