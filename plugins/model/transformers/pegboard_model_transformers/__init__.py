"""Decoder-only models through Hugging Face transformers."""
