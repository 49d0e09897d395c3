"""Fuyu: a language model that reads patches of images."""
