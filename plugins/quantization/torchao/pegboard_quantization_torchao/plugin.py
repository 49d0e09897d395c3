"""The spec of this package."""

from pegboard.interfaces.quantization import QuantizationSpec

TORCHAO = QuantizationSpec(
    api="1.0",
    implementation="pegboard_quantization_torchao.format:TorchAO",
    supports={"dtype": {"float32", "bfloat16", "float16"}},
)
