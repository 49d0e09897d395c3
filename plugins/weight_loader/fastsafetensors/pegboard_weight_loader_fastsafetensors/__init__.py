"""Safetensors checkpoints, read by the fastsafetensors library."""
