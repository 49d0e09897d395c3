"""The spec of this package."""

from pegboard.interfaces.quantization import QuantizationSpec

BITSANDBYTES = QuantizationSpec(
    api="1.0",
    implementation="pegboard_quantization_bitsandbytes.format:BitsAndBytes",
    supports={"dtype": {"float32", "bfloat16", "float16"}},
    flags=frozenset({"online"}),
)
