"""Checkpoints of NVIDIA's Model Optimizer."""
