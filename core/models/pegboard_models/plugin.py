"""The specs of the ops that models declare."""

from pegboard.interfaces.kernel import KernelSpec


def _op(name: str, module: str = "state_ops") -> KernelSpec:
    return KernelSpec(
        api="1.0",
        implementation=f"pegboard_models.{module}:{name}",
        declares=True,
        tier="reference",
        supports={"dtype": {"float32", "bfloat16", "float16"}},
    )


CAUSAL_CONV = _op("causal_conv")
SELECTIVE_SCAN = _op("selective_scan")
CHUNKED_SCAN = _op("chunked_scan")
GATED_DELTA_RULE = _op("gated_delta_rule")
WKV = _op("wkv")
GATED_NORM = _op("gated_norm")
CLAMPED_SWIGLU = _op("clamped_swiglu", "clamped_swiglu")
SPARSE_MIXER = _op("sparse_mixer", "sparse_mixer")
ZERO_EXPERTS = _op("zero_experts", "zero_experts")
PREDICT_STREAMS = _op("predict_streams", "streams")
CORRECT_STREAMS = _op("correct_streams", "streams")
ADD_TO_STREAMS = _op("add_to_streams", "streams")
MATCH_MAGNITUDE = _op("match_magnitude", "streams")
CUT_GATES = _op("cut_gates", "streams")
