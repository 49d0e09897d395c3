"""Encoders of Whisper in GGUF files, for models that listen: Ultravox, Qwen2-Audio and Voxtral.
Standard library only."""

from __future__ import annotations

from pegboard_pack_gguf.mmproj_parts import (
    AUDIO,
    Parts,
    Projector,
    Shapes,
    Values,
    both_endings,
    keys,
    token_id,
)

EPS = 1e-5
"""Of all norms of the encoder."""
POSITIONS = "a.position_embd.weight"
PER_SECOND = 50
"""Positions of a second."""
MARK = "<|audio|>"
"""Stands for an item of Ultravox. Its language models have no token for it."""


def _positions(parts: Parts) -> int:
    """Return the longest item, in features."""
    shape = parts.shapes.get(POSITIONS, ())
    if len(shape) != 2 or shape[0] % PER_SECOND:
        raise parts.fail(
            f"{POSITIONS} has shape {parts.shapes.get(POSITIONS)}; expected {PER_SECOND} rows for "
            "each second"
        )
    return shape[0]


def _shapes(parts: Parts) -> Shapes:
    width = parts.sizes.width
    return {
        POSITIONS: (_positions(parts), width),
        "a.conv1d.1.weight": (width, parts.metadata.count("num_mel_bins"), 3),
        "a.conv1d.1.bias": (width,),
        "a.conv1d.2.weight": (width, width, 3),
        "a.conv1d.2.bias": (width,),
    }


def _config(parts: Parts, kind: str, name: str) -> Values:
    """Return what the models have. kind: of the model. name: of the architecture."""
    sizes = parts.sizes
    metadata = parts.metadata
    if sizes.eps != EPS:
        raise metadata.fail("attention.layer_norm_epsilon", f"is {sizes.eps}, expected {EPS}")
    return {
        "architectures": [name],
        "model_type": kind,
        "audio_config": {
            "model_type": "whisper",
            "d_model": sizes.width,
            "encoder_layers": sizes.depth,
            "encoder_attention_heads": sizes.heads,
            "encoder_ffn_dim": metadata.count("feed_forward_length"),
            "num_mel_bins": metadata.count("num_mel_bins"),
            "max_source_positions": _positions(parts),
            "activation_function": "gelu",
        },
    }


def _ultravox(parts: Parts) -> Values:
    inner = parts.shapes.get("mm.a.mlp.1.weight", (0,))[0]
    has_mark = MARK in parts.tokens
    return {
        **_config(parts, "ultravox", "UltravoxModel"),
        "hidden_size": inner,
        "stack_factor": parts.metadata.count("projector.stack_factor"),
        "projector_act": "swiglu",
        "projector_ln_mid": True,
        "audio_token_index": token_id(parts, MARK) if has_mark else parts.text["vocab_size"],
    }


def _qwen2_audio(parts: Parts) -> Values:
    config = _config(parts, "qwen2_audio", "Qwen2AudioForConditionalGeneration")
    return {**config, "audio_token_index": token_id(parts, "<|AUDIO|>")}


def _voxtral(parts: Parts) -> Values:
    config = _config(parts, "voxtral", "VoxtralForConditionalGeneration")
    stack = parts.metadata.count("projector.stack_factor")
    inner = config["audio_config"]["encoder_ffn_dim"]
    if stack * parts.sizes.width != inner:
        raise parts.metadata.fail(
            "projector.stack_factor",
            f"is {stack}, expected feed_forward_length / embedding_length, {inner} / "
            f"{parts.sizes.width}",
        )
    return {
        **config,
        "projector_hidden_act": "gelu",
        "audio_token_id": token_id(parts, "[AUDIO]"),
    }


def _extractor(parts: Parts) -> Values:
    return {
        "feature_extractor_type": "WhisperFeatureExtractor",
        "feature_size": parts.metadata.count("num_mel_bins"),
        "chunk_length": _positions(parts) // PER_SECOND,
    }


_LAYERS = "audio_tower.layers"
_LAYER = {
    "ln1": "self_attn_layer_norm",
    "ln2": "final_layer_norm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_out": "self_attn.out_proj",
    "ffn_up": "fc1",
    "ffn_down": "fc2",
}
_TOP = {
    POSITIONS: "audio_tower.embed_positions.weight",
    **both_endings(
        {
            "a.conv1d.1": "audio_tower.conv1",
            "a.conv1d.2": "audio_tower.conv2",
            "a.post_ln": "audio_tower.layer_norm",
        }
    ),
}
_MLP = {
    "mm.a.mlp.1.weight": "multi_modal_projector.linear_1.weight",
    "mm.a.mlp.2.weight": "multi_modal_projector.linear_2.weight",
}
_KEYS = keys("num_mel_bins", place=AUDIO)
_STACKED = _KEYS | keys("projector.stack_factor", place=AUDIO)
ULTRAVOX = Projector(
    place=AUDIO,
    layers=_LAYERS,
    layer=_LAYER,
    top={
        **_TOP,
        **_MLP,
        "mm.a.norm_pre.weight": "multi_modal_projector.ln_pre.weight",
        "mm.a.norm_mid.weight": "multi_modal_projector.ln_mid.weight",
    },
    last="mm.a.mlp.2.weight",
    shapes=_shapes,
    config=_ultravox,
    processor=_extractor,
    keys=_STACKED,
)
QWEN2_AUDIO = Projector(
    place=AUDIO,
    layers=_LAYERS,
    layer=_LAYER,
    top={**_TOP, **both_endings({"mm.a.fc": "multi_modal_projector.linear"})},
    last="mm.a.fc.weight",
    shapes=_shapes,
    config=_qwen2_audio,
    processor=_extractor,
    keys=_KEYS,
)
VOXTRAL = Projector(
    place=AUDIO,
    layers=_LAYERS,
    layer=_LAYER,
    top={**_TOP, **_MLP},
    last="mm.a.mlp.2.weight",
    shapes=_shapes,
    config=_voxtral,
    processor=_extractor,
    keys=_STACKED,
)
