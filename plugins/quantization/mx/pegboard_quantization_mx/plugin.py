"""The specs of this package."""

from pegboard.interfaces.quantization import QuantizationSpec

MXFP4 = QuantizationSpec(
    api="1.0",
    implementation="pegboard_quantization_mx.method:MXFP4",
    supports={"dtype": {"float32", "bfloat16", "float16"}},
)

FP_QUANT = QuantizationSpec(
    api="1.0",
    implementation="pegboard_quantization_mx.fp_quant:FPQuant",
    supports={"dtype": {"float32", "bfloat16", "float16"}},
)
