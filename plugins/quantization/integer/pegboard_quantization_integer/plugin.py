"""Specs of this package."""

from pegboard.interfaces.quantization import QuantizationSpec

DTYPES = {"float32", "bfloat16", "float16"}

NONE = QuantizationSpec(
    api="1.0",
    implementation="pegboard_quantization_integer.plain:Plain",
    tier="reference",
    supports={"dtype": DTYPES},
)

RTN = QuantizationSpec(
    api="1.0",
    implementation="pegboard_quantization_integer.online:Rtn",
    options="pegboard_quantization_integer.options:RtnOptions",
    supports={"dtype": DTYPES},
    flags=frozenset({"online"}),
)

TPU_INT8 = QuantizationSpec(
    api="1.0",
    implementation="pegboard_quantization_integer.online:TPUInt8",
    supports={"dtype": DTYPES},
    flags=frozenset({"online"}),
)

EXPERTS_INT8 = QuantizationSpec(
    api="1.0",
    implementation="pegboard_quantization_integer.online:ExpertsInt8",
    supports={"dtype": DTYPES},
    flags=frozenset({"online"}),
)

RTN_INT8 = QuantizationSpec(
    api="1.0",
    implementation="pegboard_quantization_integer.online:Int8",
    supports={"dtype": DTYPES},
    flags=frozenset({"online"}),
)

RTN_INT4 = QuantizationSpec(
    api="1.0",
    implementation="pegboard_quantization_integer.online:Int4",
    supports={"dtype": DTYPES},
    flags=frozenset({"online"}),
)
