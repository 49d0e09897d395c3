"""Values of quantization configs: what is allowed passes, and everything else is an error that
names it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pegboard.errors import ModelError
from pegboard_weights.config import QuantConfig, matches


def test_values_defaults_and_other_names() -> None:
    config = QuantConfig(
        {"w_bit": 4, "q_group_size": 64, "lm_head": True, "skip": ["a"], "none": None}, "Odd"
    )
    assert config.one_of(("bits", "w_bit"), (4, 8)) == 4
    assert config.one_of("none", ("x", "y"), "x") == "x"
    assert config.size(("group_size", "q_group_size")) == 64 and config.size("missing", -1) == -1
    assert config.flag("lm_head") and not config.flag("missing")
    assert config.names("skip") == ("a",) and config.names("none") == () == config.names("missing")


@pytest.mark.parametrize("value", [5, 4.0, "4", True, [4], {}, None])
def test_values_that_are_not_allowed(value: Any) -> None:
    with pytest.raises(ModelError, match=r"quantization_config has bits=.*; Odd supports 4, 8"):
        QuantConfig({"bits": value}, "Odd").one_of("bits", (4, 8))


@pytest.mark.parametrize("value", [0, -2, 1.5, "64", True, [64], {}])
def test_odd_sizes_flags_and_lists(value: Any) -> None:
    config = QuantConfig({"x": value}, "Odd")
    with pytest.raises(ModelError, match="x=.*; Odd needs a positive number or -1"):
        config.size("x")
    if value is not True:
        with pytest.raises(ModelError, match="x=.*; Odd needs true or false"):
            config.flag("x")
    if value:
        with pytest.raises(ModelError, match="x=.*; Odd needs a list of texts"):
            config.names("x")


@pytest.mark.parametrize(
    ("module", "pattern", "is_meant"),
    [
        ("model.layers.0.mlp.gate", "mlp.gate", True),
        ("model.layers.0.mlp.gate", "gate", True),
        ("model.layers.0.mlp.gate_proj", "mlp.gate", False),
        ("model.layers.10.mlp", "layers.1", False),
        ("lm_head", "lm_head", True),
        ("visual.blocks.0.attn", "visual", True),
        ("model.layers.0.mlp.up_proj", r"re:model\.layers\.\d+\.mlp", True),
        ("a.model.layers.0.mlp", "re:model", False),
        ("model.layers.0.mlp.up_proj", "model.layers.0.*", True),
        ("model.layers.0.mlp.up_proj", "*.up_proj", True),
        ("model.layers.0.mlp.up_proj", "*.up", False),
        ("model.layers.10.mlp", "model.layers.1.*", False),
    ],
)
def test_which_modules_a_pattern_means(module: str, pattern: str, is_meant: bool) -> None:
    assert matches(module, ["other", pattern]) == is_meant


def test_a_pattern_that_is_not_a_regular_expression() -> None:
    with pytest.raises(ModelError, match=r"has the pattern '\('"):
        matches("x", ["re:("])


def test_values_of_a_part_are_named_with_their_place() -> None:
    config = QuantConfig({"group": {"weights": {"bits": 5}}, "list": [1], "none": None}, "Odd")
    group = config.part("group")
    weights = group.part("weights") if group is not None else None
    assert weights is not None and config.part("none") is None and config.part("missing") is None
    with pytest.raises(ModelError, match=r"has group\.weights\.bits=5; Odd supports 4"):
        weights.one_of("bits", (4,))
    with pytest.raises(ModelError, match=r"has list=\[1\]; Odd needs an object"):
        config.part("list")


NAMES = st.lists(
    st.sampled_from(["q", "q_proj", "proj", "0", "10", "layers", "mlp", "gate", "gate_proj"]),
    min_size=1,
    max_size=4,
)


@given(NAMES, NAMES)
def test_a_name_means_whole_parts_of_a_path(path: list[str], wanted: list[str]) -> None:
    """As "q" is not "q_proj", and layer 1 is not layer 10. The name may be the beginning, the
    middle or the end of the path."""
    is_inside = any(path[start : start + len(wanted)] == wanted for start in range(len(path)))
    assert matches(".".join(path), [".".join(wanted)]) == is_inside
    assert matches(".".join(path), ["absent", ".".join(wanted)]) == is_inside
