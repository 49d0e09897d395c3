"""The spec of this package."""

from pegboard.interfaces.quantization import QuantizationSpec

COMPRESSED_TENSORS = QuantizationSpec(
    api="1.0",
    implementation="pegboard_quantization_compressed_tensors.method:CompressedTensors",
    supports={"dtype": {"float32", "bfloat16", "float16"}},
)
