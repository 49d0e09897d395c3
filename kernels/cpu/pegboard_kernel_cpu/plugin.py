"""The specs of this package."""

from pegboard.interfaces.attention import AttentionSpec
from pegboard.interfaces.collective import CollectiveSpec
from pegboard.interfaces.kernel import KernelSpec
from pegboard.interfaces.spec import AtMost, Multiple


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


def _onednn(implementation: str) -> KernelSpec:
    return KernelSpec(
        api="1.0",
        implementation=f"pegboard_kernel_cpu.{implementation}",
        probe="pegboard_kernel_cpu.probe:probe_onednn",
        platforms=frozenset({"cpu"}),
        supports={"dtype": {"float32"}},
    )


RMS_NORM = _compiled("elementwise:rms_norm")
ADD_RMS_NORM = _compiled("elementwise:add_rms_norm")
LAYER_NORM = _compiled("elementwise:layer_norm")
ADD_LAYER_NORM = _compiled("elementwise:add_layer_norm")
SILU_MUL = _compiled("elementwise:silu_mul")
GELU_TANH_MUL = _compiled("elementwise:gelu_tanh_mul")
HADAMARD = _compiled("elementwise:hadamard")
CLAMPED_SWIGLU = _compiled("experts:clamped_swiglu")
ROUTE = _compiled("experts:route")
SPARSE_MIXER = _compiled("experts:sparse_mixer")
SORT_BY_EXPERT = _compiled("experts:sort_by_expert")
ZERO_EXPERTS = _compiled("experts:zero_experts")
SUM_EXPERTS = _compiled("experts:sum_experts")
CAUSAL_CONV = _compiled("states:causal_conv")
SELECTIVE_SCAN = _compiled("states:selective_scan")
CHUNKED_SCAN = _compiled("states:chunked_scan")
GATED_DELTA_RULE = _compiled("states:gated_delta_rule")
GATED_NORM = _compiled("states:gated_norm")
PREDICT_STREAMS = _compiled("streams:predict_streams")
CORRECT_STREAMS = _compiled("streams:correct_streams")
ADD_TO_STREAMS = _compiled("streams:add_to_streams")
MATCH_MAGNITUDE = _compiled("streams:match_magnitude")
CUT_GATES = _compiled("streams:cut_gates")
ROPE = _compiled("elementwise:rope")
LORA_ADD = _compiled("lora:lora_add")
EXPERT_ADAPTER_ROWS = _compiled("lora:expert_adapter_rows")
SAMPLE_TOKENS = _compiled("sampling:sample_tokens")
FLOAT_WEIGHT = _compiled("float_weight:NativeFloatWeight")
BLOCK_WEIGHT = _compiled("block_weight:NativeBlockWeight")
CODE_WEIGHT = _compiled("code_weight:NativeCodeWeight")
FLOAT_WEIGHT_ONEDNN = _onednn("onednn_weight:OneDNNFloatWeight")
BLOCK_WEIGHT_ONEDNN = _onednn("onednn_weight:OneDNNBlockWeight")
CODE_WEIGHT_ONEDNN = _onednn("onednn_weight:OneDNNCodeWeight")
REPLAY = _compiled("replay:NativeReplay", "recorder")

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
    flags=frozenset({"replay"}),
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
    flags=frozenset({"replay"}),
)

SHARED_MEMORY = CollectiveSpec(
    api="1.0",
    implementation="pegboard_kernel_cpu.collective:SharedMemoryCollective",
    probe="pegboard_kernel_cpu.probe:probe",
    platforms=frozenset({"cpu"}),
    tier="tuned",
    supports={"hosts": AtMost(1)},
)
