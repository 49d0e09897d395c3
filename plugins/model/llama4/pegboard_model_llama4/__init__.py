"""Llama 4: a language model that reads images."""
