"""Qwen2-Audio."""
