"""The spec of the attention backend `gather`. It imports nothing heavy. `supports` says what the
backend can compute; core never asks it for anything else."""

from __future__ import annotations

from pegboard.interfaces.attention import AttentionSpec

GATHER = AttentionSpec(
    api="1.0",
    implementation="pegboard_attention_gather.backend:GatherAttention",
    tier="reference",
    supports={
        "dtype": {"float32", "bfloat16", "float16"},
        "kv_dtype": {"float32", "bfloat16", "float16"},
        "head_dim": True,
        "window": True,
        "chunk": True,
        "block_size": True,
    },
)
