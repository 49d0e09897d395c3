"""Specs of this package."""

from pegboard.interfaces.attention import AttentionSpec

FLOATS = frozenset({"float32", "bfloat16", "float16"})

FLEX = AttentionSpec(
    api="1.0",
    implementation="pegboard_attention_flex.backend:FlexAttention",
    options="pegboard_attention_flex.options:FlexOptions",
    probe="pegboard_attention_flex.probe:probe",
    tier="reference",
    supports={
        "dtype": FLOATS,
        "kv_dtype": FLOATS,
        "head_dim": True,
        "window": True,
        "chunk": True,
        "sinks": True,
        "soft_cap": True,
        "part": True,
        "items": True,
        "block_size": True,
    },
)
