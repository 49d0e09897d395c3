"""The spec of this package."""

from pegboard.interfaces.quantization import QuantizationSpec

GPTQ = QuantizationSpec(
    api="1.0",
    implementation="pegboard_quantization_gptq.format:GPTQ",
    supports={"dtype": {"float32", "bfloat16", "float16"}},
)
