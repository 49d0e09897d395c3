"""The specs of this package."""

from dataclasses import replace

from pegboard.interfaces.kernel import KernelSpec
from pegboard.interfaces.spec import BATCH_INVARIANT


def _compiled(implementation: str, *flags: str) -> KernelSpec:
    return KernelSpec(
        api="1.0",
        implementation=f"pegboard_kernel_triton.{implementation}",
        probe="pegboard_kernel_triton.probe:probe",
        platforms=frozenset({"cuda", "rocm"}),
        supports={"dtype": {"float32", "bfloat16", "float16"}},
        flags=frozenset(flags),
    )


def _per_row(implementation: str) -> KernelSpec:
    """A program computes whole rows, or numbers of a row that depend on no others, and what it does
    is chosen by the size of a row. So results do not depend on the batch. States are computed token
    by token, and kept between steps in the type that they are computed in."""
    return _compiled(implementation, BATCH_INVARIANT)


def _invariant(implementation: str) -> KernelSpec:
    """Slower than the other ones, so these come first if nothing else is needed."""
    return replace(_per_row(implementation), tier="reference")


RMS_NORM = _per_row("norm:rms_norm")
ADD_RMS_NORM = _per_row("norm:add_rms_norm")
LAYER_NORM = _per_row("norm:layer_norm")
ADD_LAYER_NORM = _per_row("norm:add_layer_norm")
ROPE = _per_row("elementwise:rope")
SILU_MUL = _per_row("elementwise:silu_mul")
GELU_TANH_MUL = _per_row("elementwise:gelu_tanh_mul")
ROUTE = _per_row("mixture:route")
SUM_EXPERTS = _per_row("mixture:sum_experts")
SAMPLE_TOKENS = _per_row("sampling:sample_tokens")
BLOCK_WEIGHT = _compiled("packed_weight:TritonBlockWeight")
CODE_WEIGHT = _compiled("packed_weight:TritonCodeWeight")
FLOAT_WEIGHT = _compiled("float_weight:TritonFloatWeight")
BLOCK_WEIGHT_INVARIANT = _invariant("packed_weight:InvariantBlockWeight")
CODE_WEIGHT_INVARIANT = _invariant("packed_weight:InvariantCodeWeight")
FLOAT_WEIGHT_INVARIANT = _invariant("float_weight:InvariantFloatWeight")
LORA_ADD = _compiled("lora:lora_add")
CAUSAL_CONV = _per_row("states:causal_conv")
SELECTIVE_SCAN = _per_row("states:selective_scan")
CHUNKED_SCAN = _compiled("chunks:chunked_scan")
GATED_DELTA_RULE = _compiled("chunks:gated_delta_rule")
CHUNKED_SCAN_INVARIANT = _invariant("states:chunked_scan")
GATED_DELTA_RULE_INVARIANT = _invariant("states:gated_delta_rule")
GATED_NORM = _per_row("states:gated_norm")
