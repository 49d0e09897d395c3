"""Gemma 3 and PaliGemma: Gemma with a vision tower."""
