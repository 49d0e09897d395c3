"""Specs of this package."""

from pegboard.interfaces.attention import AttentionSpec

FLOATS = frozenset({"bfloat16", "float16"})

FLASHINFER = AttentionSpec(
    api="1.0",
    implementation="pegboard_attention_flashinfer.backend:FlashInferAttention",
    probe="pegboard_attention_flashinfer.probe:probe",
    suits="pegboard_attention_flashinfer.probe:suits",
    platforms=frozenset({"cuda"}),
    tier="reference",  # behind Triton's, whose decodes are captured whole
    supports={
        "dtype": FLOATS,
        "kv_dtype": FLOATS,
        "head_dim": frozenset({64, 128, 256}),
        "window": True,
        "soft_cap": True,
        "block_size": True,
    },
)
