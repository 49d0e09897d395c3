"""The values of configs that do not have them, as in transformers, and what model and processor
share."""

AUDIO = {
    "d_model": 1280,
    "encoder_layers": 32,
    "encoder_attention_heads": 20,
    "encoder_ffn_dim": 5120,
    "num_mel_bins": 128,
    "max_source_positions": 1500,
}
SEEN = 2
"""Frames after the last one that sounds which the convolutions see."""
AUDIO_TOKEN = 151646
FLAMINGO_AUDIO_TOKEN = 151669
MAX_SECONDS = 600
"""Of an item of Audio Flamingo 3."""
