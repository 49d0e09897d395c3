"""Specs of this package."""

from pegboard.interfaces.attention import AttentionSpec

ENCODER = AttentionSpec(
    api="1.0",
    implementation="pegboard_attention_encoder.backend:EncoderAttention",
    platforms=frozenset({"cpu"}),
    supports={
        "dtype": {"float32", "bfloat16", "float16"},
        "head_dim": True,
        "window": True,
        "encoder": True,
        "distance_bias": True,
        "block_size": True,
    },
)
