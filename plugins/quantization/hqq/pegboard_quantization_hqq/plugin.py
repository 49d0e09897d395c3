"""The spec of this package."""

from pegboard.interfaces.quantization import QuantizationSpec

HQQ = QuantizationSpec(
    api="1.0",
    implementation="pegboard_quantization_hqq.format:HQQ",
    supports={"dtype": {"float32", "bfloat16", "float16"}},
)
