"""BLIP-2: a language model that reads images."""
