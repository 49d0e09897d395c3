"""Checkpoints in Hugging Face layout: safetensors files, or random weights made from only the
config."""
