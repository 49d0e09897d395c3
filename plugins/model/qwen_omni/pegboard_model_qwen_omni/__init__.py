"""Qwen2.5-Omni: language models that read images, audio and videos."""
