"""The spec of this package."""

from pegboard.interfaces.quantization import QuantizationSpec

MODELOPT = QuantizationSpec(
    api="1.0",
    implementation="pegboard_quantization_modelopt.method:ModelOpt",
    supports={"dtype": {"float32", "bfloat16", "float16"}},
)
