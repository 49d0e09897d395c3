"""Mistral 3 with images."""
