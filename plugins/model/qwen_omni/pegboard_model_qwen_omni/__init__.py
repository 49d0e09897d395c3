"""Qwen2.5-Omni and Qwen3-Omni: language models that read images, audio and videos."""
