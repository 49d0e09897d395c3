"""Qwen2-VL and Qwen2.5-VL: language models that read images."""
