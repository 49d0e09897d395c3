"""Specs of this package."""

from pegboard.interfaces.attention import AttentionSpec
from pegboard.interfaces.spec import Multiple

FLOATS = frozenset({"bfloat16", "float16"})

FLASH_ATTN = AttentionSpec(
    api="1.0",
    implementation="pegboard_attention_flash_attn.backend:FlashAttention",
    probe="pegboard_attention_flash_attn.probe:probe",
    suits="pegboard_attention_flash_attn.probe:suits",
    platforms=frozenset({"cuda"}),
    tier="reference",  # behind Triton's, whose decodes are captured whole
    supports={
        "dtype": FLOATS,
        "kv_dtype": FLOATS,
        "head_dim": frozenset(range(8, 257, 8)),
        "window": True,
        "soft_cap": True,
        "block_size": Multiple(256),
    },
)
