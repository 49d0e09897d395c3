"""The values of configs that do not have them, as in transformers."""

AUDIO_TOKEN = 24
