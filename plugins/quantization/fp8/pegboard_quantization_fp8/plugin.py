"""The specs of this package."""

from pegboard.interfaces.quantization import QuantizationSpec

DTYPES = {"float32", "bfloat16", "float16"}

FP8 = QuantizationSpec(
    api="1.0",
    implementation="pegboard_quantization_fp8.method:FP8",
    supports={"dtype": DTYPES},
    flags=frozenset({"online"}),
)

DEEPSPEED_FP = QuantizationSpec(
    api="1.0",
    implementation="pegboard_quantization_fp8.online:DeepSpeedFP",
    supports={"dtype": DTYPES},
)
