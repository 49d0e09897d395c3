"""The spec of this package."""

from pegboard.interfaces.quantization import QuantizationSpec

AWQ = QuantizationSpec(
    api="1.0",
    implementation="pegboard_weights.awq_layout:AWQ",
    supports={"dtype": {"float32", "bfloat16", "float16"}},
)
