"""The spec of this package."""

from pegboard.interfaces.quantization import QuantizationSpec

QUARK = QuantizationSpec(
    api="1.0",
    implementation="pegboard_quantization_quark.format:Quark",
    supports={"dtype": {"float32", "bfloat16", "float16"}},
)
