"""Idefics 3 and SmolVLM: language models that read images."""
