"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL: language models that read images and videos."""
