"""Specs of the weight loader, the quantization method and the tokenizer named `gguf`."""

from __future__ import annotations

from pegboard.interfaces.quantization import QuantizationSpec
from pegboard.interfaces.tokenizer import TokenizerSpec
from pegboard.interfaces.weight_loader import WeightLoaderSpec

WEIGHT_LOADER = WeightLoaderSpec(
    api="1.0",
    implementation="pegboard_pack_gguf.loader:GGUFLoader",
    options="pegboard_pack_gguf.options:GGUFFiles",
    file_patterns=("*.gguf",),
    magic=b"GGUF",
    adapters="pegboard_pack_gguf.adapters:read_adapter",
)

QUANTIZATION = QuantizationSpec(
    api="1.0",
    implementation="pegboard_pack_gguf.quantization:GGUFQuantization",
    options="pegboard_pack_gguf.options:GGUFOptions",
    supports={"dtype": frozenset({"float32", "bfloat16", "float16"})},
)

TOKENIZER = TokenizerSpec(
    api="1.0",
    implementation="pegboard_pack_gguf.tokenizer:GGUFTokenizer",
    supports={"payload": frozenset({"gguf"})},
)
