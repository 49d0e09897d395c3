"""The values of configs that do not have them, as in transformers, and what model and processor
share."""

SEEN = 2
"""Frames after the last one that sounds which the convolutions see."""
AUDIO_TOKEN = 151646
FLAMINGO_AUDIO_TOKEN = 151669
MAX_SECONDS = 600
"""Of an item of Audio Flamingo 3."""
