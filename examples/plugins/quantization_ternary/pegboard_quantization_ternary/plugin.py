"""The spec of the quantization method `ternary`. It imports nothing heavy."""

from __future__ import annotations

from pegboard.interfaces.quantization import QuantizationSpec

TERNARY = QuantizationSpec(
    api="1.0",
    implementation="pegboard_quantization_ternary.method:TernaryMethod",
    supports={"dtype": {"float32", "bfloat16", "float16"}},
)
