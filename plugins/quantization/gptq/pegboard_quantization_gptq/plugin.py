"""The specs of this package."""

from pegboard.interfaces.quantization import QuantizationSpec

GPTQ = QuantizationSpec(
    api="1.0",
    implementation="pegboard_quantization_gptq.format:GPTQ",
    supports={"dtype": {"float32", "bfloat16", "float16"}},
)

WNA16 = QuantizationSpec(
    api="1.0",
    implementation="pegboard_quantization_gptq.wna16:wna16",
    supports={"dtype": {"float32", "bfloat16", "float16"}},
    reads=frozenset({"awq", "gptq"}),
)

AUTO_ROUND = QuantizationSpec(
    api="1.0",
    implementation="pegboard_quantization_gptq.auto_round:AutoRound",
    supports={"dtype": {"float32", "bfloat16", "float16"}},
)
