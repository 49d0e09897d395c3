"""The specs of this package."""

from dataclasses import replace

from pegboard.interfaces.attention import AttentionSpec
from pegboard.interfaces.collective import CollectiveSpec
from pegboard.interfaces.kernel import KernelSpec
from pegboard.interfaces.spec import BATCH_INVARIANT, AtMost, Multiple


def _compiled(implementation: str, *flags: str) -> KernelSpec:
    return KernelSpec(
        api="1.0",
        implementation=f"pegboard_kernel_cpu.{implementation}",
        probe="pegboard_kernel_cpu.probe:probe",
        platforms=frozenset({"cpu"}),
        tier="tuned",
        supports={"dtype": {"float32"}},
        flags=frozenset(flags),
    )


def _per_token(implementation: str, *flags: str) -> KernelSpec:
    """Its tasks have whole tokens or parts of them, so results do not depend on the batch."""
    return _compiled(implementation, BATCH_INVARIANT, *flags)


def _invariant(implementation: str) -> KernelSpec:
    """Slower than the other ones, so these come first if nothing else is needed."""
    return replace(_per_token(implementation), tier="portable")


def _onednn(implementation: str) -> KernelSpec:
    return KernelSpec(
        api="1.0",
        implementation=f"pegboard_kernel_cpu.{implementation}",
        probe="pegboard_kernel_cpu.probe:probe_onednn",
        platforms=frozenset({"cpu"}),
        supports={"dtype": {"float32"}},
    )


RMS_NORM = _per_token("elementwise:rms_norm")
ADD_RMS_NORM = _per_token("elementwise:add_rms_norm")
LAYER_NORM = _per_token("elementwise:layer_norm")
ADD_LAYER_NORM = _per_token("elementwise:add_layer_norm")
SILU_MUL = _per_token("elementwise:silu_mul")
GELU_TANH_MUL = _per_token("elementwise:gelu_tanh_mul")
HADAMARD = _per_token("elementwise:hadamard")
CLAMPED_SWIGLU = _per_token("experts:clamped_swiglu")
ROUTE = _per_token("experts:route")
SPARSE_MIXER = _per_token("experts:sparse_mixer")
SORT_BY_EXPERT = _per_token("experts:sort_by_expert")
ZERO_EXPERTS = _per_token("experts:zero_experts")
SUM_EXPERTS = _per_token("experts:sum_experts")
CAUSAL_CONV = _per_token("states:causal_conv")
SELECTIVE_SCAN = _per_token("states:selective_scan")
CHUNKED_SCAN = _per_token("states:chunked_scan")
GATED_DELTA_RULE = _per_token("states:gated_delta_rule")
GATED_NORM = _per_token("states:gated_norm")
PREDICT_STREAMS = _per_token("streams:predict_streams")
CORRECT_STREAMS = _per_token("streams:correct_streams")
ADD_TO_STREAMS = _per_token("streams:add_to_streams")
MATCH_MAGNITUDE = _per_token("streams:match_magnitude")
CUT_GATES = _per_token("streams:cut_gates")
ROPE = _per_token("elementwise:rope")
LORA_ADD = _per_token("lora:lora_add")
EXPERT_ADAPTER_ROWS = _per_token("lora:expert_adapter_rows")
SAMPLE_TOKENS = _per_token("sampling:sample_tokens")
FLOAT_WEIGHT = _compiled("float_weight:NativeFloatWeight")
BLOCK_WEIGHT = _compiled("block_weight:NativeBlockWeight")
CODE_WEIGHT = _compiled("code_weight:NativeCodeWeight")
FLOAT_WEIGHT_INVARIANT = _invariant("float_weight:InvariantFloatWeight")
BLOCK_WEIGHT_INVARIANT = _invariant("block_weight:InvariantBlockWeight")
CODE_WEIGHT_INVARIANT = _invariant("code_weight:InvariantCodeWeight")
FLOAT_WEIGHT_ONEDNN = _onednn("onednn_weight:OneDNNFloatWeight")
BLOCK_WEIGHT_ONEDNN = _onednn("onednn_weight:OneDNNBlockWeight")
CODE_WEIGHT_ONEDNN = _onednn("onednn_weight:OneDNNCodeWeight")
REPLAY = _per_token("replay:NativeReplay", "recorder")

ATTENTION = AttentionSpec(
    api="1.0",
    implementation="pegboard_kernel_cpu.attention:NativeAttention",
    probe="pegboard_kernel_cpu.probe:probe",
    platforms=frozenset({"cpu"}),
    tier="tuned",
    supports={
        "dtype": {"float32"},
        "kv_dtype": {"float32", "bfloat16", "float16", "int8", "float8_e4m3fn", "float8_e5m2"},
        "head_dim": frozenset(range(8, 257, 8)),
        "window": True,
        "chunk": True,
        "sinks": True,
        "soft_cap": True,
        "encoder": True,
        "part": True,
        "items": True,
        "block_size": Multiple(16),
    },
    flags=frozenset({"replay", BATCH_INVARIANT}),
)

MLA = AttentionSpec(
    api="1.0",
    implementation="pegboard_kernel_cpu.latent:NativeLatentAttention",
    probe="pegboard_kernel_cpu.probe:probe",
    platforms=frozenset({"cpu"}),
    tier="tuned",
    supports={
        "dtype": {"float32"},
        "latent": {"float32", "bfloat16", "float16", "fp8_ds_mla"},
        "sparse": True,
        "part": True,
        "head_dim": frozenset(range(2, 1025, 2)),
        "block_size": True,
    },
    flags=frozenset({"replay", BATCH_INVARIANT}),
)

SHARED_MEMORY = CollectiveSpec(
    api="1.0",
    implementation="pegboard_kernel_cpu.collective:SharedMemoryCollective",
    probe="pegboard_kernel_cpu.probe:probe",
    platforms=frozenset({"cpu"}),
    tier="tuned",
    supports={"hosts": AtMost(1)},
    flags=frozenset({BATCH_INVARIANT}),
)
