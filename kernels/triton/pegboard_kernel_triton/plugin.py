"""The specs of this package."""

from pegboard.interfaces.kernel import KernelSpec


def _compiled(implementation: str) -> KernelSpec:
    return KernelSpec(
        api="1.0",
        implementation=f"pegboard_kernel_triton.{implementation}",
        probe="pegboard_kernel_triton.probe:probe",
        platforms=frozenset({"cuda", "rocm"}),
        supports={"dtype": {"float32", "bfloat16", "float16"}},
    )


RMS_NORM = _compiled("norm:rms_norm")
ADD_RMS_NORM = _compiled("norm:add_rms_norm")
ROPE = _compiled("elementwise:rope")
SILU_MUL = _compiled("elementwise:silu_mul")
GELU_TANH_MUL = _compiled("elementwise:gelu_tanh_mul")
SAMPLE_TOKENS = _compiled("sampling:sample_tokens")
BLOCK_WEIGHT = _compiled("packed_weight:TritonBlockWeight")
CODE_WEIGHT = _compiled("packed_weight:TritonCodeWeight")
FLOAT_WEIGHT = _compiled("float_weight:TritonFloatWeight")
LORA_ADD = _compiled("lora:lora_add")
CAUSAL_CONV = _compiled("states:causal_conv")
SELECTIVE_SCAN = _compiled("states:selective_scan")
CHUNKED_SCAN = _compiled("states:chunked_scan")
GATED_DELTA_RULE = _compiled("states:gated_delta_rule")
GATED_NORM = _compiled("states:gated_norm")
