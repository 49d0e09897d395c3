"""Qwen2-Audio and Audio Flamingo 3."""
