"""Phi-4-multimodal: a language model that reads images and hears speech."""
