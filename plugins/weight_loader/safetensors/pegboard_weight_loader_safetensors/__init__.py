"""Checkpoints in Hugging Face layout: safetensors files, or weights made up from the config alone."""
