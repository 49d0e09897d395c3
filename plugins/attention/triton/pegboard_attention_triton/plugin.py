"""Specs of this package."""

from pegboard.interfaces.attention import AttentionSpec
from pegboard.interfaces.spec import BATCH_INVARIANT

FLOATS = frozenset({"float32", "bfloat16", "float16"})

TRITON = AttentionSpec(
    api="1.0",
    implementation="pegboard_attention_triton.backend:TritonAttention",
    probe="pegboard_attention_triton.probe:probe",
    platforms=frozenset({"cuda", "rocm"}),
    supports={
        "dtype": FLOATS,
        "kv_dtype": FLOATS | {"float8_e4m3fn", "float8_e5m2"},
        "head_dim": frozenset(range(8, 257, 8)),
        "window": True,
        "chunk": True,
        "sinks": True,
        "soft_cap": True,
        "part": True,
        "items": True,
        "block_size": True,
    },
    flags=frozenset({"replay", BATCH_INVARIANT}),
)

ENCODER = AttentionSpec(
    api="1.0",
    implementation="pegboard_attention_triton.encoder:TritonEncoderAttention",
    probe="pegboard_attention_triton.probe:probe",
    platforms=frozenset({"cuda", "rocm"}),
    supports={
        "dtype": FLOATS,
        "head_dim": frozenset(range(8, 257, 8)),
        "window": True,
        "encoder": True,
        "distance_bias": True,
        "block_size": True,
    },
    flags=frozenset({"replay"}),
)

MLA = AttentionSpec(
    api="1.0",
    implementation="pegboard_attention_triton.latent_backend:TritonLatentAttention",
    probe="pegboard_attention_triton.probe:probe",
    platforms=frozenset({"cuda", "rocm"}),
    supports={
        "dtype": FLOATS,
        "latent": FLOATS | {"fp8_ds_mla"},
        "sparse": True,
        "head_dim": frozenset(range(8, 577, 8)),
        "part": True,
        "block_size": True,
    },
    flags=frozenset({"replay", BATCH_INVARIANT}),
)
