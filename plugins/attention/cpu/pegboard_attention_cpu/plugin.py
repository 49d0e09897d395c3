"""Specs of this package."""

from pegboard.interfaces.attention import AttentionSpec

CPU_PAGED = AttentionSpec(
    api="1.0",
    implementation="pegboard_attention_cpu.backend:CPUPagedAttention",
    platforms=frozenset({"cpu"}),
    supports={
        "dtype": {"float32", "bfloat16", "float16"},
        "kv_dtype": {"float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"},
        "latent": {"float32", "bfloat16", "float16", "fp8_ds_mla"},
        "head_dim": True,
        "window": True,
        "chunk": True,
        "sinks": True,
        "soft_cap": True,
        "sparse": True,
        "part": True,
        "items": True,
        "block_size": True,
    },
)
