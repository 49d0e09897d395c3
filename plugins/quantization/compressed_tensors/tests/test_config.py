"""Configs of compressed-tensors: which modules belong to which group, and what is refused before
any weights load."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from pegboard_quantization_compressed_tensors.method import CompressedTensors

from pegboard.errors import ModelError
from pegboard.interfaces.quantization import EmbeddingLayer, LinearLayer, Part, QuantizationSetup
from pegboard.ops import REFERENCES
from pegboard_weights.asked_rounding import AskedRounding

FOUR = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
EIGHT = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}


def group(weights: Any, *targets: str, **more: Any) -> dict[str, Any]:
    return {"targets": list(targets or ("Linear",)), "weights": weights, **more}


def method(*groups: dict[str, Any], rounding: str = "none", **more: Any) -> CompressedTensors:
    config = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {f"group_{number}": each for number, each in enumerate(groups)},
        **more,
    }
    setup = QuantizationSetup(config, "float32", "cpu", REFERENCES, rounding=rounding)
    return CompressedTensors(None, setup)


def bits_of(found: CompressedTensors, module: str, columns: int = 64) -> int | None:
    weight = found.linear(
        LinearLayer(
            module, columns, 8, (Part(f"{module}.weight", (0, 8)),), is_head=module == "lm_head"
        )
    )
    if weight is None:
        return None
    [reader] = weight.readers.values()
    return int(reader.scheme.bits)


def test_paths_win_over_expressions_and_those_over_classes() -> None:
    found = method(
        group(FOUR, "Linear"),
        group({**EIGHT, "num_bits": 6}, r"re:.*\.down_proj$"),
        group(EIGHT, "model.layers.1.mlp.down_proj"),
        ignore=["lm_head", "re:.*visual"],
    )
    assert bits_of(found, "model.layers.0.mlp.up_proj") == 4
    assert bits_of(found, "model.layers.0.mlp.down_proj") == 6
    assert bits_of(found, "model.layers.1.mlp.down_proj") == 8
    assert bits_of(found, "lm_head") is None
    assert bits_of(found, "model.visual.up_proj") is None
    assert bits_of(method(group(FOUR)), "lm_head") == 4
    assert bits_of(method(group(FOUR), ignore=["Linear"]), "lm_head") is None


def test_groups_that_name_no_module_or_no_weights() -> None:
    assert bits_of(method(group(FOUR, "re:.*up_proj")), "model.down_proj") is None
    assert bits_of(method(group(None), group(FOUR, "re:.*up_proj")), "model.down_proj") is None
    table = EmbeddingLayer("embed", 8, 64, Part("embed.weight", (0, 8)))
    assert method(group(FOUR)).embedding(table) is None
    assert method(group(FOUR, "Embedding")).embedding(table) is not None


def test_a_format_in_each_group() -> None:
    found = method(
        group(FOUR, "re:.*up", format="pack-quantized"),
        group(EIGHT, "Linear", format="int-quantized"),
        format="mixed-precision",
    )
    assert bits_of(found, "a.up") == 4 and bits_of(found, "a.down") == 8
    with pytest.raises(
        ModelError, match="format='mixed-precision'; compressed-tensors supports 'pack-quantized'"
    ):
        method(group(FOUR), format="mixed-precision")


@pytest.mark.parametrize(
    ("weights", "told"),
    [
        (
            {"num_bits": 9},
            "config_groups.group_0.weights.num_bits=9; compressed-tensors supports 2, 3",
        ),
        ({"type": "nf"}, "type='nf'; compressed-tensors supports 'int', 'float'"),
        ({"strategy": "block"}, "strategy='block'; compressed-tensors supports 'channel', 'group'"),
        (
            {"strategy": "tensor"},
            "strategy='tensor'; compressed-tensors supports 'channel', 'group'",
        ),
        ({"group_size": 0}, "group_size=0; compressed-tensors needs a positive number or -1"),
        ({"group_size": None}, "group_size=None; compressed-tensors needs"),
        ({"symmetric": "no"}, "symmetric='no'; compressed-tensors needs true or false"),
        (
            {"type": "float"},
            "format='pack-quantized'; compressed-tensors supports 'float-quantized'",
        ),
        ("int4", "weights='int4'; compressed-tensors needs an object"),
    ],
)
def test_odd_weights_are_refused(weights: Any, told: str) -> None:
    with pytest.raises(ModelError, match=told):
        method(group({**FOUR, **weights} if isinstance(weights, dict) else weights))


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"config_groups": None}, "config_groups=None; compressed-tensors needs an object"),
        ({"config_groups": {"a": 3}}, "config_groups.a=3; compressed-tensors needs an object"),
        (
            {"format": "float-quantized"},
            "format='float-quantized'; compressed-tensors supports 'pack-quantized'",
        ),
        ({"format": None}, "format=None; compressed-tensors supports"),
        ({"ignore": "lm_head"}, "ignore='lm_head'; compressed-tensors needs a list of texts"),
        (
            {"sparsity_config": {"format": "sparse-coo"}},
            "sparsity_config.format='sparse-coo'; compressed-tensors supports 'dense'",
        ),
        ({"kv_cache_scheme": {"num_bits": 4, "type": "float"}}, "kv_cache_scheme.num_bits=4"),
        ({"kv_cache_scheme": {"num_bits": 8, "type": "nf"}}, "kv_cache_scheme.type='nf'"),
        (
            {"kv_cache_scheme": {"num_bits": 8, "type": "float", "symmetric": False}},
            "kv_cache_scheme.symmetric=False",
        ),
        (
            {"kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "channel"}},
            "strategy='channel'.*'attn_head'",
        ),
    ],
)
def test_odd_configs_are_refused(config: dict[str, Any], told: str) -> None:
    with pytest.raises(ModelError, match=told):
        method(group(FOUR), **config)


def test_columns_that_are_not_whole_groups_are_refused() -> None:
    with pytest.raises(
        ModelError, match="model.up has 80 columns, which are not groups of 32 .compressed-tensors"
    ):
        bits_of(method(group(FOUR)), "model.up", columns=80)


def test_the_kv_cache() -> None:
    assert method(group(FOUR)).kv_cache(None) is None
    assert (
        method(group(FOUR), kv_cache_scheme={"num_bits": 8, "type": "int"}).kv_cache(None) == "int8"
    )
    for more in ({}, {"strategy": "tensor", "symmetric": True}, {"strategy": "attn_head"}):
        assert (
            method(group(FOUR), kv_cache_scheme={"num_bits": 8, "type": "float", **more}).kv_cache(
                None
            )
            == "float8_e4m3fn"
        )


def test_quantized_activations_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    method(group(FOUR))
    assert not caplog.records
    both = {"input_activations": {"num_bits": 4, "dynamic": True}}
    method(group(EIGHT, **both), group(FOUR, "re:x", **both))
    [record] = caplog.records
    assert "activations are not quantized" in record.getMessage()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, AskedRounding("int8")),
        ({"actorder": "weight"}, AskedRounding("int8")),
        ({"actorder": "group"}, None),
    ],
)
def test_four_bits_are_multiplied_with_rounded_activations(
    changes: dict[str, Any], expected: AskedRounding | None
) -> None:
    """Not if columns may be stored in another order, which kernels do not round."""
    inputs = {"input_activations": {"num_bits": 8, "dynamic": True, "strategy": "token"}}
    found = method(group({**FOUR, **changes}, **inputs), rounding="checkpoint")
    layer = LinearLayer("x", 64, 8, (Part("model.x.weight", (0, 8)),))
    assert found.rounding("model.x", layer) == expected


@pytest.mark.parametrize("stored", [None, [128], [128, 0], ["128", "128"], "128", "128x", "ax128"])
def test_odd_blocks_are_refused(stored: Any) -> None:
    weights = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": stored}
    with pytest.raises(
        ModelError, match="block_structure=.*; compressed-tensors needs two positive numbers"
    ):
        method(group(weights), format="float-quantized")
