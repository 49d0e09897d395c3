"""Specs of this package."""

from pegboard.interfaces.quantization import QuantizationSpec

NONE = QuantizationSpec(
    api="1.0",
    implementation="pegboard_quantization_integer.plain:Plain",
    tier="reference",
    supports={"dtype": {"float32", "bfloat16", "float16"}},
)
