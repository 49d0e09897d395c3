"""AutoRound checkpoints: which modules are packed how. The layouts themselves are tested with GPTQ
and AWQ."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pegboard_quantization_gptq.auto_round import AutoRound
from pegboard_quantization_gptq.format import GPTQ
from pegboard_quantization_gptq.plugin import WNA16
from pegboard_quantization_gptq.wna16 import wna16

from pegboard.errors import ModelError
from pegboard.interfaces.quantization import EmbeddingLayer, LinearLayer, Part, QuantizationSetup
from pegboard.ops import REFERENCES
from pegboard_testing.contract_quantization import load_pieces, stored_pieces
from pegboard_weights.awq_layout import AWQ, AWQReader


def method(**config: Any) -> AutoRound:
    values = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": True, **config}
    return AutoRound(None, QuantizationSetup(values, "float32", "cpu", REFERENCES))


def layer(module: str, columns: int = 64) -> LinearLayer:
    return LinearLayer(
        module, columns, 32, (Part(f"{module}.weight", (0, 32)),), is_head=module == "lm_head"
    )


def bits_of(found: AutoRound, module: str) -> tuple[int, int] | None:
    weight = found.linear(layer(module))
    if weight is None:
        return None
    [reader] = weight.readers.values()
    return reader.bits, reader.group_size  # type: ignore[attr-defined]


def test_bits_of_each_module() -> None:
    extra = {
        "model.layers.1.up": {"bits": 8},
        "model.layers.2.up": {"bits": 16, "data_type": "float"},
        r".*\.3\..*": {"group_size": 64, "bits": 2},
        "lm_head": {"bits": 8, "group_size": -1},
    }
    found = method(extra_config=extra)
    assert bits_of(found, "model.layers.0.up") == (4, 32)
    assert bits_of(found, "model.layers.1.up") == (8, 32)
    assert bits_of(found, "model.layers.2.up") is None
    assert bits_of(found, "model.layers.3.up") == (2, 64)
    assert bits_of(found, "lm_head") == (8, -1)
    assert bits_of(method(), "lm_head") is None
    assert found.embedding(EmbeddingLayer("embed", 8, 64, Part("embed.weight", (0, 8)))) is None


@pytest.mark.parametrize(
    ("quant_method", "kind"), [("awq", AWQ), ("gptq", GPTQ), ("moe_wna16", GPTQ)]
)
def test_names_of_kernels_read_both_formats(quant_method: str, kind: type) -> None:
    config = {"quant_method": quant_method, "bits": 4, "group_size": 32}
    assert WNA16.reads == {"awq", "gptq"}
    assert type(wna16(None, QuantizationSetup(config, "float32", "cpu", REFERENCES))) is kind


@pytest.mark.parametrize(
    "blocks",
    ["model.layers,model.more", ["model.layers", "model.more"], [["model.layers"], ["model.more"]]],
)
@pytest.mark.parametrize("name", ["block_name_to_quantize", "to_quant_block_names"])
def test_parts_of_the_model_that_are_quantized(name: str, blocks: object) -> None:
    found = method(**{name: blocks}, extra_config={"visual.1.up": {"bits": 8}})
    assert bits_of(found, "model.layers.0.up") == (4, 32) == bits_of(found, "model.more.0.up")
    assert bits_of(found, "visual.0.up") is None
    assert bits_of(found, "visual.1.up") == (8, 32)


@pytest.mark.parametrize(
    "config", [{"packing_format": "auto_round:auto_awq"}, {"backend": "auto_round:awq"}]
)
def test_the_layout_of_awq(config: dict[str, Any]) -> None:
    weight = method(**config).linear(layer("up"))
    assert weight is not None
    [reader] = weight.readers.values()
    assert isinstance(reader, AWQReader) and reader.group_size == 32
    with pytest.raises(ModelError, match="up has 80 columns, which are not groups of 32"):
        method(**config).linear(layer("up", 80))


def test_zero_points_are_stored_less_one() -> None:
    """As in the first version of GPTQ."""
    weight = method().linear(layer("up", 32))
    assert weight is not None
    eights = 0x88888888 - (1 << 32)
    sevens = 0x77777777
    tensors = {
        "qweight": torch.full((4, 32), eights, dtype=torch.int32),
        "qzeros": torch.full((1, 4), sevens, dtype=torch.int32),
        "scales": torch.ones(1, 32).half(),
    }
    load_pieces(weight, stored_pieces("up", tensors))
    assert not weight.dequantize().any()


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"bits": 5}, "bits=5; auto-round supports 2, 3, 4, 8"),
        ({"bits": 8, "packing_format": "auto_round:auto_awq"}, "bits=8; auto-round supports 4"),
        (
            {"packing_format": "auto_round"},
            "packing_format='auto_round'; auto-round supports 'auto_round:auto_gptq'",
        ),
        ({"data_type": "gguf"}, "data_type='gguf'; auto-round supports 'int'"),
        ({"data_type": "nvfp4_v2"}, "nvfp4_v2', which has scales of 5 bits of exponent"),
        ({"data_type": "mx_fp", "bits": 6}, "bits=6; auto-round supports 4, 8"),
        ({"data_type": "nv_fp"}, "group_size=32; auto-round supports 16"),
        ({"data_type": "fp"}, "bits=4; auto-round supports 8"),
        ({"data_type": "fp", "bits": 8}, "group_size=32; auto-round supports 0, -1"),
        ({"data_type": "mx_fp", "packing_format": "auto_round:mlx"}, "packing_format='auto_round:"),
        ({"rotation_config": {"a": 1}}, "does not support rotations of activations"),
        ({"group_size": 0}, "group_size=0; auto-round needs a positive number or -1"),
        ({"extra_config": ["x"]}, r"extra_config=\['x'\]; auto-round needs an object"),
        ({"extra_config": {"a": 4}}, "extra_config.a=4; auto-round needs an object"),
        ({"extra_config": {"a": {"bits": 7}}}, "extra_config.a.bits=7; auto-round supports"),
        ({"block_name_to_quantize": 3}, "block_name_to_quantize=3; auto-round needs texts"),
    ],
)
def test_odd_configs_are_refused(config: dict[str, Any], told: str) -> None:
    with pytest.raises(ModelError, match=told):
        method(**config)


def test_a_pattern_that_is_not_a_regular_expression() -> None:
    with pytest.raises(ModelError, match=r"has the pattern '\*up' in extra_config"):
        method(extra_config={"*up": {"bits": 8}}).linear(layer("up"))
