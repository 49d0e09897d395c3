"""Checkpoints of llm-compressor (compressed-tensors)."""
