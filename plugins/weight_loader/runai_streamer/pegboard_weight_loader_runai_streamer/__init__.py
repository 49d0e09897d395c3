"""Safetensors checkpoints, streamed by the Run:ai Model Streamer."""
