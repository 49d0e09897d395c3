"""Specs of this package."""

from pegboard.interfaces.attention import AttentionSpec
from pegboard.interfaces.kernel import KernelSpec
from pegboard.interfaces.spec import Multiple


def _kernel(implementation: str) -> KernelSpec:
    return KernelSpec(
        api="1.0",
        implementation=f"pegboard_kernel_cpu.{implementation}",
        probe="pegboard_kernel_cpu.probe:probe",
        platforms=frozenset({"cpu"}),
        tier="tuned",
        supports={"dtype": {"float32"}, "op": True},
    )


RMS_NORM = _kernel("elementwise:rms_norm")
ADD_RMS_NORM = _kernel("elementwise:add_rms_norm")
SILU_MUL = _kernel("elementwise:silu_mul")
GELU_TANH_MUL = _kernel("elementwise:gelu_tanh_mul")
FLOAT_WEIGHT = _kernel("float_weight:NativeFloatWeight")
BLOCK_WEIGHT = _kernel("block_weight:NativeBlockWeight")
SAMPLE_TOKENS = _kernel("sampling:sample_tokens")
PROGRAM = _kernel("recorder:NativeRecorder")

ATTENTION = AttentionSpec(
    api="1.0",
    implementation="pegboard_kernel_cpu.attention:NativeAttention",
    probe="pegboard_kernel_cpu.probe:probe",
    platforms=frozenset({"cpu"}),
    tier="tuned",
    supports={
        "dtype": {"float32"},
        "kv_dtype": {"float32", "bfloat16", "float16", "int8"},
        "head_dim": frozenset(range(8, 257, 8)),
        "kind": {"decoder"},
        "window": True,
        "soft_cap": True,
        "alibi": True,
        "block_size": Multiple(16),
    },
)
