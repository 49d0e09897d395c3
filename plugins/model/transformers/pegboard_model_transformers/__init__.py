"""Decoder-only models by way of Hugging Face transformers."""
